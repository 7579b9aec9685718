"""Tokens that a GPU samples before the host has seen the ones before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from localllm.cache.paged_kv import PagedKV
from localllm.engine.sampler import PlainDraw
from localllm.layers.batch import Batch
from localllm.layers.rotary import Rotary
from localllm.layers.segment import Segment

if TYPE_CHECKING:
    from localllm.models.gpu_program import Drawn, GpuProgram


@dataclass
class Ahead:
    """A step of one token for each of these sequences. Whoever does not want it forgets it: no sequence has
    advanced."""

    kvs: Sequence[PagedKV]
    lengths: Sequence[int]  # tokens that the sequences hold before it
    draws: Sequence[PlainDraw]
    drawn: Drawn
    last_ids: Sequence[int] | None  # each sequence's last token, once the host knows it

    @classmethod
    def begun(
        cls,
        step: GpuProgram,
        rotaries: tuple[Rotary, ...],
        kvs: Sequence[PagedKV],
        draws: Sequence[PlainDraw],
        last: Sequence[int] | Drawn,
    ) -> Ahead:
        """Begin the step. last: each sequence's last token, or where it is sampled. Raises as `PagedKV.prepare`."""
        lengths = [kv.length for kv in kvs]
        for kv in kvs:
            kv.prepare(kv.length + 1)
        last_ids = last if isinstance(last, Sequence) else None
        batch = Batch(
            token_ids=torch.tensor(last_ids or [0] * len(kvs)),
            positions=torch.tensor(lengths),
            segments=tuple(Segment(i, i + 1, kv, kv.length, kv.length + 1) for i, kv in enumerate(kvs)),
            logit_rows=torch.arange(len(kvs)),
            rotaries=rotaries,
        )
        previous = None if isinstance(last, Sequence) else last.on_device
        at_next = [draw.at(length + 1) for draw, length in zip(draws, lengths, strict=True)]
        return cls(kvs, lengths, draws, step.draw(batch, at_next, previous), last_ids)

    def is_of(self, kvs: Sequence[PagedKV], last_ids: Sequence[int], draws: Sequence[PlainDraw]) -> bool:
        """Return whether it is the step that follows these tokens."""
        return (
            len(kvs) == len(self.kvs)
            and all(
                own is kv and length == kv.length for own, length, kv in zip(self.kvs, self.lengths, kvs, strict=True)
            )
            and list(draws) == list(self.draws)
            and list(last_ids) == list(self.last_ids or ())
        )
