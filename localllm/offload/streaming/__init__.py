"""What moves bytes: rings in memory and on a GPU, readers of files, mapped and pinned memory. Knows no model."""
