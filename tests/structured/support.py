"""Answers that are drawn without a model, and what is asked of one."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from localllm import Engine, Request, SamplingParams
from localllm.text.grammar.constraint import Constraint
from localllm.text.grammar.definition import defined
from localllm.text.grammar.grammar import Grammar
from localllm.text.tokenizer import Tokenizer

BYTES = LLTokenizer("byte")
PROMPT = "Once upon a time there was an owl."
_MOST_TOKENS = 300
_CLOSING = ('"', "]", "}", '",', '"]', '"}')


def json_schema(schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


def accepts(constraint: Constraint, tokenizer: Tokenizer, text: str) -> bool:
    return constraint.is_met(tokenizer.encode(text))


def takes(grammar: Grammar, text: str) -> bool:
    """Whether an answer may be that text, whatever tokens it is made of."""
    matcher, said = LLMatcher(BYTES, defined(grammar), log_level=0), list(text.encode())
    is_begun = matcher.validate_tokens(said) == len(said)
    return is_begun and matcher.consume_tokens(said) and matcher.is_accepting()


def allowed(constraint: Constraint, said: Sequence[int], size: int) -> Tensor:
    """bool [V]: which tokens may follow."""
    return constraint.held(torch.zeros(size), said) == 0


def drawn(constraint: Constraint, tokenizer: Tokenizer, seed: int, size: int = 4096) -> str | None:
    """A text by chance, with a liking for its end; None where it did not come."""
    choose, said = random.Random(seed), list[int]()
    closing = {tokenizer.token_id(text) for text in _CLOSING}
    while len(said) < _MOST_TOKENS and not constraint.has_ended(said):
        possible = allowed(constraint, said, size).nonzero().squeeze(1).tolist()
        likely = [each for each in possible if each == tokenizer.eos_token_id or each in closing]
        token_id = choose.choice(likely if likely and choose.random() < 0.4 else possible)
        if token_id == tokenizer.eos_token_id:
            break
        said.append(token_id)
    return tokenizer.decode(said) if constraint.is_met(said) else None


def wish(engine: Engine, grammar: Grammar | None, prompt: str = PROMPT, **sampling: Any) -> Request:
    params = SamplingParams(**{"max_tokens": 40, "seed": 0, "temperature": 1.0, **sampling})
    return Request(tuple(engine.encode(prompt)), params, grammar=grammar)
