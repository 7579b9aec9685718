"""What an answer has to look like: from a `Grammar` of a request to the tokens that may follow each other.

- schema.py: which JSON Schemas are taken, and what is refused of them by name; pattern.py: of their patterns
- definition.py: any kind of grammar as the library (llguidance) has it, tried out in a process of its own, trial.py
- vocabulary.py: a model's tokens as the library has them
- compiled.py: what was compiled, for the next request
- constraint.py: one answer on its way; worker.py: the thread that finds out what may follow while the model computes
"""
