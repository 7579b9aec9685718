"""Hold an answer to a `Grammar` of a request, from its source to the tokens that may follow each other.

- grammar.py has the form that a request asks for
- schema.py checks JSON Schemas, with keywords.py, pattern.py, formats.py, references.py, closed_objects.py, numbers.py
  and termination.py
- gbnf.py reads llama.cpp's grammars; lexemes.py writes them for the library
- definition.py makes of any kind of grammar what the library (llguidance) takes, and has compile_check.py compile it in
  a process of its own
- vocabulary.py gives the library a model's tokens
- compiled.py caches compiled grammars for the next request
- constraint.py follows one answer
"""
