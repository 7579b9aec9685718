"""GGUF files: their header, and what it says of the model and of its tokenizer in the terms of Hugging Face's files.

Holds no weights, and imports neither torch nor numpy.
"""
