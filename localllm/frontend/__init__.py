"""What every front end shares: which model, an engine for it, a conversation and its keeping, words for what happens.

Knows engines, settings and the history. Knows no terminal and no protocol. Imports no torch.
"""
