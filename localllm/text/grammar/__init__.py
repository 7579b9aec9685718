"""What an answer has to look like: from a `Grammar` of a request to the tokens that may follow each other.

- schema.py: which JSON Schemas are taken, and what is refused of them by name; keywords.py: what they are made of;
  pattern.py, formats.py, references.py, closed.py, ending.py: their patterns, formats, references, which objects hold
  what they name alone, and whether an answer can end
- gbnf.py: llama.cpp's grammars, read; lexemes.py: written for the library
- definition.py: any kind of grammar as the library (llguidance) has it, tried out in a process of its own, trial.py
- vocabulary.py: a model's tokens as the library has them
- compiled.py: what was compiled, for the next request
- constraint.py: one answer on its way; worker.py: the thread that finds out what may follow while the model computes
"""
