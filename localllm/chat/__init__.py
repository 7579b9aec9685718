"""Conversations as every front end has them: their messages, what is saved of them, and the words for what happens.

Knows engines, settings and the history. Knows no terminal and no protocol. Imports no torch.
"""
