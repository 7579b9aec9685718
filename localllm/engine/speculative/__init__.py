"""Speculative decoding: tokens are drafted cheaply, and one pass of the model accepts those that it would have sampled
itself. Which tokens are drafted changes how fast an answer comes, and never a token of it.

A drafter proposes (`ngram`, `drafter`); `controller` decides who drafts and how many tokens,
by what drafts were worth and what steps took; `speculator` puts both into the engine's loop.
"""
