"""Hold an answer to a `Grammar` of a request, from its source to the tokens that may follow each other.

- grammar.py has the form that a request asks for
- schema.py checks JSON Schemas, with schema_parts.py and termination.py
- schema_rewrites.py prepares them for the library (llguidance)
- gbnf.py reads llama.cpp's grammars, and writes them as the library has grammars
- definition.py makes of any kind of grammar what the library takes, and has compile_check.py compile it in a process of
  its own
- compiled.py gives the library a model's tokens, and caches compiled grammars for the next request
- constraint.py follows one answer
"""
