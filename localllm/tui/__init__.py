"""The full-screen chat. A thread holds the conversation and posts messages; only their handlers touch widgets.

Knows terminals and `chat`. Imports no torch.
"""
