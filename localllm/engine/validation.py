"""Checks of prompts and requests, for any engine, wherever it is. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from localllm import hub
from localllm.engine.request import Request, require_ids
from localllm.errors import Fix, ModelChangedError, UsageError
from localllm.hub.gguf_files import place_of
from localllm.models.architecture import ModelConfig
from localllm.text.chat_template import ChatInput, ChatTemplate, encode_chat
from localllm.text.eviction import overflow_error
from localllm.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer, template: Callable[[], ChatTemplate]) -> list[int]:
    """Return the ids of a prompt: a text, with the BOS token where the model wants one; ids; or chat messages."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, special=True, bos=True)
    if not is_chat(prompt):
        return [item for item in prompt if isinstance(item, int)]
    messages = [item for item in prompt if not isinstance(item, int)]
    return encode_chat(template(), tokenizer, ChatInput(messages))


def is_chat(prompt: Prompt) -> bool:
    """Return whether a prompt is chat messages: the answer is then a turn of its own."""
    return not isinstance(prompt, str) and not all(isinstance(item, int) for item in prompt)


def require_unchanged(directory: Path, contents: str) -> None:
    """Raise ModelChangedError where a folder's files are not those that it had when the first of them was read.

    contents: of the folder then; "": nobody looked.
    """
    if contents and hub.contents(directory) != contents:
        why = "they are not what the model was loaded from"
        what = f"the files of {place_of(directory)} have changed"
        raise ModelChangedError(what, why=why, fix="ask again: it is loaded anew")


def require_same(asked: str, loaded: str) -> None:
    """Raise ModelChangedError where a request was made for other files than the engine was loaded from."""
    if asked and loaded != asked:
        why = "it was written anew, and is loaded anew now"
        raise ModelChangedError("the model has changed since the question was asked", why=why, fix="ask again")


def require_fit(request: Request, ctx: int, config: ModelConfig, fixes_for: Callable[[int], list[Fix]]) -> None:
    """Raise ContextOverflowError or UsageError for a request that cannot run in a context of so many tokens.

    fixes_for: the flags with which a longer context fits.
    """
    num_tokens = len(request.prompt_ids)
    if num_tokens == 0:
        raise UsageError("the prompt is empty", why="a model continues a text, and there is none")
    require_ids((*request.prompt_ids, *request.sampling.logit_bias), config.vocab_size)
    longest = config.longest_context
    if num_tokens >= (longest if request.grows else ctx) + (request.pooling is not None):
        fixes = fixes_for(min(longest, num_tokens + 512)) if num_tokens < longest else []
        raise overflow_error(num_tokens, ctx, longest, fixes)
