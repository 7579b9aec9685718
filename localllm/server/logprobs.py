"""Log-probabilities of tokens, as OpenAI and Ollama have them, in chats and in texts that go on."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

from typing_extensions import TypedDict

from localllm.engine.events import TokenLogprob
from localllm.server.tools.deltas import Delta
from localllm.text.detokenizer import Detokenizer
from localllm.text.tokenizer import Tokenizer

_LEAST = -9999.0  # JSON has no infinity


# One reply may have a million of these: dicts take half the memory of models.
class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class CompletionLogprobs(TypedDict):
    """Values are null for the first token of a prompt, which has nothing in front. text_offset: in characters of the
    choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def content_logprobs(logprobs: Sequence[TokenLogprob], tokenizer: Tokenizer, most: int) -> list[ContentLogprob]:
    """most: how many of the likeliest tokens each has."""
    return [
        {**_top_logprob(each, tokenizer), "top_logprobs": [_top_logprob(top, tokenizer) for top in each.top[:most]]}
        for each in logprobs
    ]


def _top_logprob(each: TokenLogprob, tokenizer: Tokenizer) -> TopLogprob:
    data = tokenizer.token_bytes(each.token_id)
    return {"token": each.token, "logprob": max(each.logprob, _LEAST), "bytes": list(data)}


class CompletionTokens:
    """Follows the tokens of one choice of a text completion. echo: the prompt that its text begins with."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: str | tuple[int, ...],
        prompt_ids: Sequence[int],
        *,
        echoes: bool,
        has_logprobs: bool,
    ) -> None:
        """prompt: as the client sent it."""
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        written = prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special=False)
        self.echo = written if echoes else ""
        self.has_logprobs = has_logprobs
        self._detokenizer = Detokenizer(tokenizer, tokenizer.special_ids)  # nothing of a prompt is left out
        is_given = isinstance(prompt, tuple) or prompt.startswith(tokenizer.bos_token or "")
        has_bos = tokenizer.adds_bos and prompt_ids[0] == tokenizer.bos_token_id
        self._num_silent = int(has_bos and not is_given)  # tokens in front of the client's text
        self._offset = 0
        self._prompt_offsets = list(map(self._advance, prompt_ids[self._num_silent :])) if has_logprobs else []
        self._offset = len(self.echo)

    def copy(self) -> CompletionTokens:
        """Return one for another choice behind the same prompt."""
        other = copy(self)
        other._detokenizer = self._detokenizer.copy()
        return other

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._prompt_ids)

    def of_prompt(self, logprobs: Sequence[TokenLogprob | None]) -> CompletionLogprobs | None:
        """Return those of the prompt's tokens; None where there are none."""
        if not logprobs or not self.has_logprobs:
            return None
        offsets = [0] * self._num_silent + [min(offset, len(self.echo)) for offset in self._prompt_offsets]
        first: CompletionLogprobs = {
            "tokens": [self._tokenizer.token_text(self._prompt_ids[0])],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": offsets[:1],
        }
        return joined_logprobs(
            first, _completion_logprobs([each for each in logprobs if each is not None], offsets[1:])
        )

    def of_answer(self, delta: Delta) -> CompletionLogprobs | None:
        """Return those of the answer's next tokens; None where none are wanted."""
        found = all_logprobs(delta)
        offsets = [self._advance(each.token_id, is_said=True) for each in found] if self.has_logprobs else []
        return _completion_logprobs(found, offsets) if self.has_logprobs else None

    def _advance(self, token_id: int, *, is_said: bool = False) -> int:
        """Return where the token begins. is_said: by the model, whose special tokens are not written."""
        begin = self._offset
        if not (is_said and token_id in self._tokenizer.special_ids):
            self._offset += len(self._detokenizer.push(token_id))
        return begin


def all_logprobs(delta: Delta) -> list[TokenLogprob]:
    """Return those of the delta's tokens and of the token that ended the answer."""
    end = None if delta.finished is None else delta.finished.end_logprob
    return delta.logprobs if end is None else [*delta.logprobs, end]


def joined_logprobs(first: CompletionLogprobs | None, then: CompletionLogprobs | None) -> CompletionLogprobs | None:
    if first is None or then is None:
        return then if first is None else first
    joined: dict[str, Any] = {name: first[name] + then[name] for name in first}  # type: ignore[literal-required]
    return joined  # type: ignore[return-value]


def _completion_logprobs(logprobs: Sequence[TokenLogprob], offsets: Sequence[int]) -> CompletionLogprobs:
    return {
        "tokens": [each.token for each in logprobs],
        "token_logprobs": [max(each.logprob, _LEAST) for each in logprobs],
        "top_logprobs": [_likeliest(each) for each in logprobs],
        "text_offset": list(offsets),
    }


def _likeliest(of: TokenLogprob) -> dict[str, float]:
    """Return the likeliest tokens and the token itself by their texts; of two with one text, the likelier counts."""
    found: dict[str, float] = {}
    for each in (*of.top, of):
        found.setdefault(each.token, max(each.logprob, _LEAST))
    return found
