"""Attention over KV pages as steps of a tape: the tables that its kernels read, and the room that they write into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.kernels import cpu_attention
from localllm.kernels.cpu_attention import MERGE_WORDS, TASK_WORDS, part_floats
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_linear import Step, float_bits
from localllm.kernels.kv_page import PageLayout

NO_WINDOW = 1 << 40
Words = Sequence[tuple[int, ...]]
Layouts = tuple[PageLayout, PageLayout | None]  # of dense pages, and of coded ones


@dataclass(frozen=True)
class AttentionTables:
    """The rows that attend together. rows: of a task, at most; tokens: of each group of layers, see `cpu_rope`;
    tasks, merges: see `cpu_attention`."""

    rows: int
    tokens: Sequence[Words]
    tasks: Words
    merges: Words
    num_parts: int

    @property
    def is_split(self) -> bool:
        return bool(self.merges)


class AttentionRoom:
    """Fixed places for so many tasks, merges and parts, which a tape points at."""

    def __init__(self, tasks: int, merges: int, parts: int, kv_heads: int, head_dim: int) -> None:
        self._tasks = torch.zeros(tasks, len(TASK_WORDS), dtype=torch.int64)
        self._merges = torch.zeros(merges, len(MERGE_WORDS), dtype=torch.int64)
        self._parts = torch.zeros(kv_heads * parts, part_floats(head_dim))
        self._num_parts = parts
        self._counts = torch.zeros(2, 2, dtype=torch.int64)  # tasks, merges; parts beside each

    @property
    def tasks(self) -> int:
        """It has room for."""
        return len(self._tasks)

    def holds(self, tables: AttentionTables) -> bool:
        return (
            len(tables.tasks) <= len(self._tasks)
            and len(tables.merges) <= len(self._merges)
            and tables.num_parts <= self._num_parts
        )

    def place(self, tables: AttentionTables) -> None:
        self._tasks[: len(tables.tasks)] = torch.tensor(tables.tasks)
        if tables.merges:
            self._merges[: len(tables.merges)] = torch.tensor(tables.merges)
        self._counts[:] = torch.tensor([[len(tables.tasks), tables.num_parts], [len(tables.merges), tables.num_parts]])

    def steps(self, isa: Isa, layouts: Layouts, place: AttentionPlace, *, rows: int, is_split: bool) -> Iterator[Step]:
        """Return the step that attends, and the one that joins parts where rows are shared out over tasks."""
        dense, coded = layouts
        group = place.num_heads // dense.num_kv_heads
        has_sinks = place.sinks is not None
        has_softcap = place.softcap is not None
        kernel = cpu_attention.attention(isa, dense, coded, rows, has_softcap=has_softcap, has_sinks=has_sinks)
        shared: dict[str, Tensor | int]
        shared = {"out": place.out, "parts": self._parts, "kv_heads": dense.num_kv_heads, "group": group}
        shared["sinks"] = 0 if place.sinks is None else place.sinks
        yield kernel.step(
            q=place.q,
            tasks=self._tasks,
            tokens=place.tokens,
            shape=self._counts[0],
            stride=place.stride,
            layer=place.layer,
            window=place.window or NO_WINDOW,
            softcap=float_bits(place.softcap or 0.0),
            **shared,
        )
        if not is_split:
            return
        combine = cpu_attention.combine(isa, dense.head_dim, is_rotated=coded is not None, has_sinks=has_sinks)
        yield combine.step(merges=self._merges, shape=self._counts[1], **shared)


@dataclass(frozen=True)
class AttentionPlace:
    """One layer's attention: q fp32 [T, stride] rotated and scaled; out fp32 [T, H * D]; tokens: see `cpu_rope`; layer:
    its number among those whose parts a page holds; sinks: fp32 [H]."""

    q: Tensor
    stride: int
    out: Tensor
    tokens: Tensor
    layer: int
    num_heads: int
    window: int | None
    softcap: float | None
    sinks: Tensor | None = None
