"""Calls of tools: how a model family writes them, their grammar, their parser. Knows no dialect of HTTP."""
