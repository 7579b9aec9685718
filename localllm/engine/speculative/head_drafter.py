"""Drafts by the head that a checkpoint brings for it (multi-token prediction, arXiv:2412.19437): one layer that reads
what the model made of a token, and the token behind it, and guesses the next one. It guesses further by reading what it
made itself."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.cache.paged_kv import PagedKV
from localllm.engine.residency import Residency
from localllm.engine.runner import ModelRunner
from localllm.engine.sequence import Sequence as Running
from localllm.engine.speculative.drafter import NO_DRAFT, Confidence, Draft, Drafter, draft_tokens
from localllm.engine.speculative.head_shape import HEAD_CTX, MOST_STATES
from localllm.engine.step_types import Chunk
from localllm.layers.draft_inputs import DraftInputs
from localllm.models.decoder import Decoder
from localllm.models.layout import HEAD
from localllm.settings import MOST_DRAFT_TOKENS

_CHUNK_TOKENS = 512


class HeardStates:
    """The hidden states of a sequence that the head has not read yet. begin, end: the positions of their tokens."""

    def __init__(self) -> None:
        self.begin = self.end = 0
        self._parts: list[Tensor] = []

    def take(self, begin: int, states: Tensor) -> None:
        """Take those of a forward, [T, hidden]. What was there of the same positions is computed anew."""
        if not self.begin <= begin <= self.end:  # some were not heard: of a prefix that was found
            self.begin = self.end = begin
            self._parts = []
        while self.end > begin:
            last = self._parts.pop()
            self.end -= len(last)
            if self.end < begin:
                self._parts.append(last[: begin - self.end])
                self.end = begin
        self._parts.append(states.clone())
        self.end += len(states)
        if self.end - self.begin > 2 * MOST_STATES:
            self.give(self.end - MOST_STATES)

    def give(self, end: int) -> Tensor:
        """Return those before this position, and keep the others."""
        joined, count = self._joined(), end - self.begin
        self.begin, self._parts = end, [joined[count:]]
        return joined[:count]

    def _joined(self) -> Tensor:
        return torch.cat(self._parts) if self._parts else torch.empty(0, 0)


@dataclass(frozen=True)
class _Reading:
    """What the head keeps of a sequence. first: the token of the sequence that stands first in it."""

    first: int
    kv: PagedKV

    @property
    def end(self) -> int:
        """The first token that the head has not read."""
        return self.first + self.kv.length

    def has_room(self, length: int) -> bool:
        """Return whether it can read a sequence of so many tokens, and draft behind it."""
        return length + MOST_DRAFT_TOKENS - self.first <= self.kv.capacity or self.kv.capacity < HEAD_CTX


class _Head:
    """A head beside the model that it drafts for, as that is placed."""

    def __init__(self, model: Decoder, head: Decoder) -> None:
        assert isinstance(head.embed, DraftInputs)
        self.runner, self._inputs = ModelRunner(head), head.embed
        self._norm, self._own_norm = model.final_norm, head.final_norm
        # What the next pass reads of each sequence.
        self._next: weakref.WeakKeyDictionary[PagedKV, Tensor] = weakref.WeakKeyDictionary()
        self.runner.on_states = self._made

    def read_next(self, kv: PagedKV, states: Tensor) -> None:
        """Let the next pass of a sequence read what the model made, [T, hidden] in front of its final norm."""
        self._next[kv] = self._norm(states)

    def before(self, chunks: Sequence[Chunk]) -> None:
        self._inputs.states = torch.cat([self._next.pop(chunk.kv) for chunk in chunks])

    def _made(self, chunks: Sequence[Chunk], states: Tensor) -> None:
        ends = itertools.accumulate(chunk.num_tokens for chunk in chunks)
        for chunk, end in zip(chunks, ends, strict=True):
            self._next[chunk.kv] = self._own_norm(states[end - 1 : end])


class HeadDrafter(Drafter):
    name = "mtp"

    def __init__(
        self,
        residency: Residency,
        head_of: Callable[[Decoder], Decoder],
        new_kv: Callable[[int], PagedKV],
        sequences: int = 1,
    ) -> None:
        """residency: of the model that it drafts for.
        head_of: makes the head for that model as it is placed.
        new_kv: makes the head's cache of a sequence of so many tokens.
        sequences: for how many there is room at once.
        """
        self._residency, self._head_of, self._new_kv, self._sequences = residency, head_of, new_kv, sequences
        self._heard: weakref.WeakKeyDictionary[PagedKV, HeardStates] = weakref.WeakKeyDictionary()
        self._readings: dict[int, _Reading] = {}  # by request
        self._confidence = Confidence()
        self._placed: tuple[weakref.ref[Decoder], _Head] | None = None
        residency.watch_states(self._hear)

    def _hear(self, chunks: Sequence[Chunk], states: Tensor) -> None:
        begin = 0
        for kv, first, last in [(chunk.kv, *run) for chunk in chunks for run in chunk.runs]:
            own = states[begin : begin + last - first]
            if kv in self._heard or len(self._heard) < self._sequences:
                self._heard.setdefault(kv, HeardStates()).take(first, own)
            begin += last - first

    @property
    def _head(self) -> _Head:
        model = self._residency.model
        if self._placed is None or self._placed[0]() is not model:
            self._placed = weakref.ref(model), _Head(model, self._head_of(model))
        return self._placed[1]

    @property
    def is_ready(self) -> bool:
        """Not where each draft would read the model's head from the disk."""
        return HEAD not in self._residency.model.stream.names

    def num_unread(self, sequences: Sequence[Running]) -> int:
        """Return how many tokens of the whole model take as long: the head is one layer."""
        heard = [self._heard[kv] for each in sequences if (kv := each.kv) is not None and kv in self._heard]
        return sum(each.end - each.begin for each in heard) // self._residency.config.num_layers

    def read(self, sequences: Sequence[Running], is_cancelled: Callable[[], bool]) -> None:
        """Read all but the last tokens, in parts."""
        head = self._head
        for sequence in sequences:
            found = self._reading(sequence)
            while found is not None and len(sequence.token_ids) - found[1].end > _CHUNK_TOKENS:
                heard, reading = found
                head.read_next(reading.kv, heard.give(heard.begin + _CHUNK_TOKENS))
                chunk = Chunk(sequence.token_ids[reading.first :], reading.kv, _CHUNK_TOKENS)
                head.before([chunk])
                head.runner.forward([chunk], cancelled=is_cancelled)

    def propose(
        self, sequences: Sequence[Running], limits: Sequence[int], least: float, is_cancelled: Callable[[], bool]
    ) -> list[Draft]:
        drafts, head = [NO_DRAFT] * len(sequences), self._head
        asked: list[int] = []
        readings: list[_Reading] = []
        for index, sequence in enumerate(sequences):
            if limits[index] > 0 and (found := self._reading(sequence)) is not None:
                heard, reading = found
                head.read_next(reading.kv, heard.give(len(sequence.token_ids) - 1))
                asked.append(index)
                readings.append(reading)
        own = [sequences[index] for index in asked]
        found_drafts = draft_tokens(
            head.runner,
            own,
            [reading.kv for reading in readings],
            [limits[index] for index in asked],
            self._confidence,
            least,
            is_cancelled=is_cancelled,
            firsts=[reading.first for reading in readings],
            before=head.before,
        )
        for index, sequence, reading, draft in zip(asked, own, readings, found_drafts, strict=True):
            reading.kv.advance(len(sequence.token_ids) - reading.end)
            drafts[index] = Draft(tuple(token for token, _ in draft), self.name)
        return drafts

    def _reading(self, sequence: Running) -> tuple[HeardStates, _Reading] | None:
        """Return what there is to read of a sequence, and what was read: anew where something between was not heard.
        None where there is no room, or nothing is known of its last token."""
        heard = None if sequence.kv is None else self._heard.get(sequence.kv)
        if heard is None or heard.end < len(sequence.token_ids) - 1 or heard.begin >= len(sequence.token_ids) - 1:
            return None
        reading = self._readings.get(sequence.request_id)
        if reading is not None and (reading.end != heard.begin + 1 or not reading.has_room(len(sequence.token_ids))):
            self._readings.pop(sequence.request_id).kv.close()
            reading = None
        if reading is None:
            if len(self._readings) >= self._sequences:
                return None
            first = heard.begin + 1  # behind a token of which the model's state is known
            kv = self._new_kv(min(sequence.max_length - first, HEAD_CTX))
            reading = self._readings[sequence.request_id] = _Reading(first, kv)
        return heard, reading

    def forget(self, sequence: Running) -> None:
        self._confidence.forget(sequence)
        if (reading := self._readings.pop(sequence.request_id, None)) is not None:
            reading.kv.close()

    def close(self) -> None:
        self._residency.watch_states(None)
        for reading in self._readings.values():
            reading.kv.close()
        self._readings.clear()
