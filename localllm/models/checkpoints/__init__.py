"""The readers of checkpoints, one a file format: named tensors, as dense rows or as codes with their scales."""
