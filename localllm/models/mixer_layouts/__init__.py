"""The tensors of each kind of mixer, one file a kind: their names in a checkpoint, and how they fuse. No torch."""
