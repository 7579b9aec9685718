"""Triton kernels, one operation a file, and what says how each is launched."""
