"""Engines as front ends use them: on a thread, in a process, over a socket; which model, and how it is placed.

Knows settings, models on this disk and engines. Knows no conversation, no terminal and no HTTP. Imports no torch.
"""
