"""Log-probabilities of an answer's tokens, as OpenAI and Ollama tell them."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import TypedDict

from localllm.engine.events import TokenLogprob
from localllm.text.tokenizer import Tokenizer


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


def content_logprobs(logprobs: Sequence[TokenLogprob], tokenizer: Tokenizer, most: int) -> list[ContentLogprob]:
    """Of tokens of an answer, each with so many of the likeliest there."""
    return [
        {**_logprob(each, tokenizer), "top_logprobs": [_logprob(top, tokenizer) for top in each.top[:most]]}
        for each in logprobs
    ]


def _logprob(each: TokenLogprob, tokenizer: Tokenizer) -> TopLogprob:
    return {
        "token": each.token,
        "logprob": max(each.logprob, -9999.0),
        "bytes": list(tokenizer.token_bytes(each.token_id)),
    }
