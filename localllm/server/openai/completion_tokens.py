"""The tokens of a text that goes on, as /v1/completions tells them: how likely each was, and where it begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy

from typing_extensions import TypedDict

from localllm.engine.events import TokenLogprob
from localllm.server.answering import Piece
from localllm.text.detokenizer import Detokenizer
from localllm.text.tokenizer import Tokenizer

_LEAST = -9999.0  # JSON has no infinity


class CompletionLogprobs(TypedDict):
    """Of the first token of a prompt, in front of which there is nothing, null. text_offset: in characters of the
    choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChoiceTeller:
    """Of one choice, in the order of its tokens. echo: of the prompt, what its text begins with."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: str | tuple[int, ...],
        prompt_ids: Sequence[int],
        *,
        echoes: bool,
        tells: bool,
    ) -> None:
        """prompt: as it was asked. tells: whether there are log-probabilities."""
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        written = prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special=False)
        self.echo = written if echoes else ""
        self.tells = tells
        self._detokenizer = Detokenizer(tokenizer, tokenizer.special_ids)  # nothing of a prompt is left out
        is_given = isinstance(prompt, tuple) or prompt.startswith(tokenizer.bos_token or "")
        has_bos = tokenizer.adds_bos and prompt_ids[0] == tokenizer.bos_token_id
        self._num_silent = int(has_bos and not is_given)  # tokens in front of the text that was asked
        self._offset = 0
        self._prompt_offsets = list(map(self._begun, prompt_ids[self._num_silent :])) if tells else []
        self._offset = len(self.echo)

    def copy(self) -> ChoiceTeller:
        """Of another choice behind the same prompt, of which nothing of the answer has been told."""
        other = copy(self)
        other._detokenizer = self._detokenizer.copy()
        return other

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._prompt_ids)

    def prompt(self, logprobs: Sequence[TokenLogprob | None]) -> CompletionLogprobs | None:
        """None where nothing is to be told of it."""
        if not logprobs or not self.tells:
            return None
        offsets = [0] * self._num_silent + [min(offset, len(self.echo)) for offset in self._prompt_offsets]
        first: CompletionLogprobs = {
            "tokens": [self._tokenizer.token_text(self._prompt_ids[0])],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": offsets[:1],
        }
        return joined(first, _told([each for each in logprobs if each is not None], offsets[1:]))

    def answer(self, logprobs: Sequence[TokenLogprob]) -> CompletionLogprobs | None:
        """What is new of it."""
        return _told(logprobs, [self._begun(each.token_id, is_said=True) for each in logprobs]) if self.tells else None

    def _begun(self, token_id: int, *, is_said: bool = False) -> int:
        """Where it begins. is_said: by the model, of whose special tokens nothing is written."""
        begin = self._offset
        if not (is_said and token_id in self._tokenizer.special_ids):
            self._offset += len(self._detokenizer.push(token_id))
        return begin


def logprobs_of(piece: Piece) -> list[TokenLogprob]:
    """With that of the token by which the model has ended."""
    end = None if piece.finished is None else piece.finished.end_logprob
    return piece.logprobs if end is None else [*piece.logprobs, end]


def joined(first: CompletionLogprobs | None, then: CompletionLogprobs | None) -> CompletionLogprobs | None:
    if first is None or then is None:
        return then if first is None else first
    return {name: first[name] + then[name] for name in first}  # type: ignore[return-value,literal-required]


def _told(logprobs: Iterable[TokenLogprob], offsets: Sequence[int]) -> CompletionLogprobs:
    told = list(logprobs)
    return {
        "tokens": [each.token for each in told],
        "token_logprobs": [max(each.logprob, _LEAST) for each in told],
        "top_logprobs": [_likeliest(each) for each in told],
        "text_offset": list(offsets),
    }


def _likeliest(of: TokenLogprob) -> dict[str, float]:
    """By their texts, of which two may be the same: the likelier one counts. The token itself is among them."""
    found: dict[str, float] = {}
    for each in (*of.top, of):
        found.setdefault(each.token, max(each.logprob, _LEAST))
    return found
