"""Self-speculative decoding: tokens are guessed cheaply, and one pass of the model says how many of them it would have
drawn itself. Which guesses are made changes how fast an answer comes, and never a token of it.

A drafter guesses (`ngram`, `skip`, `draft_model`: one file each); `controller` decides who guesses and how
many, by what guesses were worth and what steps took; `speculation` puts both into the engine's loop.
"""
