"""Attention over KV pages as steps of a tape: the tables that its kernels read, and the room that they write into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.kernels import cpu_attention, cpu_choice, cpu_latent, cpu_latent_int8, cpu_sketch
from localllm.kernels.cpu_amx import has_amx
from localllm.kernels.cpu_attention import MERGE_WORDS, ROW_COUNTS, TASK_WORDS, part_floats
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_linear import Step, float_bits
from localllm.kernels.cpu_rope import TOKEN_BYTES
from localllm.kernels.cpu_sketch import SCRATCH_BYTES
from localllm.kernels.kv_page import LatentLayout, PageLayout
from localllm.kernels.page_choice import FIXED_PAGES
from localllm.kernels.sizes import CHOICE_WORDS, SKETCH_WORDS, TOKEN_WORDS

NO_WINDOW = 1 << 40
Words = Sequence[tuple[int, ...]]
Layouts = tuple[PageLayout, PageLayout | None]  # of dense pages, and of coded ones


@dataclass(frozen=True)
class ChosenPages:
    """What tokens need that choose the pages they attend to. choices: see CHOICE_WORDS; sequences: see SKETCH_WORDS;
    threads: that choose, at most."""

    choices: Words
    sequences: Words
    threads: int

    @property
    def table_pages(self) -> int:
        """Pages in the tables of a key head, all together."""
        return sum(pages + FIXED_PAGES for sketches, _, pages, _ in self.choices if sketches)

    @property
    def most_pages(self) -> int:
        """Pages that the longest sequence may have."""
        return max(room for _, room, _, _ in self.choices)


@dataclass(frozen=True)
class AttentionTables:
    """The rows that attend together. rows: of a task, at most; tokens: of each group of layers, see `cpu_rope`;
    tasks, merges: see `cpu_attention`; chosen: where tokens choose their pages."""

    rows: int
    tokens: Sequence[Words]
    tasks: Words
    merges: Words
    num_parts: int
    chosen: ChosenPages | None = None

    @property
    def is_split(self) -> bool:
        return bool(self.merges)


class ChoiceRoom:
    """Fixed places for the choice of pages, which a tape points at: for as much as is wanted, and so many tokens."""

    def __init__(self, wanted: ChosenPages, tokens: int, kv_heads: int) -> None:
        self._kv_heads, self._threads, self._most_pages = kv_heads, wanted.threads, wanted.most_pages
        self._choices = torch.zeros(tokens, len(CHOICE_WORDS), dtype=torch.int64)
        self._sequences = torch.zeros(len(wanted.sequences), len(SKETCH_WORDS), dtype=torch.int64)
        self._tables = torch.zeros(wanted.table_pages * kv_heads, dtype=torch.int64)
        self._scratch = torch.zeros(wanted.threads, self._most_pages * SCRATCH_BYTES, dtype=torch.uint8)
        self._shape = torch.zeros(2, dtype=torch.int64)  # tokens, sequences
        self._num_chosen = 0
        self.tokens = torch.zeros(kv_heads, tokens, len(TOKEN_WORDS), dtype=torch.int64)

    def holds(self, chosen: ChosenPages) -> bool:
        return (
            len(chosen.choices) <= len(self._choices)
            and len(chosen.sequences) <= len(self._sequences)
            and chosen.table_pages * self._kv_heads <= len(self._tables)
            and chosen.most_pages <= self._most_pages
            and chosen.threads <= self._threads
        )

    def place(self, chosen: ChosenPages) -> None:
        self._choices[: len(chosen.choices)] = torch.tensor(chosen.choices)
        self._sequences[: len(chosen.sequences)] = torch.tensor(chosen.sequences)
        self._shape[:] = torch.tensor((len(chosen.choices), len(chosen.sequences)))
        self._num_chosen = chosen.table_pages * self._kv_heads

    @property
    def chosen(self) -> Tensor:
        """Return the addresses in the tables of the tokens that were placed, int64 [n]."""
        return self._tables[: self._num_chosen]

    @property
    def token_stride(self) -> int:
        """Bytes from one key head's tokens to the next one's."""
        return self.tokens.shape[1] * TOKEN_BYTES

    def steps(self, isa: Isa, layouts: Layouts, place: AttentionPlace) -> Iterator[Step]:
        """Return the step that makes sketches, and the one that chooses by them."""
        dense, coded = layouts
        shared: dict[str, Tensor | int]
        shared = {"sequences": self._sequences, "shape": self._shape, "kv_heads": self._kv_heads, "layer": place.layer}
        yield cpu_sketch.sketch(isa, coded or dense).step(**shared)
        yield cpu_choice.choose(isa, dense.head_dim, is_rotated=coded is not None).step(
            q=place.q,
            tokens=place.tokens,
            choices=self._choices,
            chosen=self.tokens,
            tables=self._tables,
            scratch=self._scratch,
            group=place.num_heads // self._kv_heads,
            stride=place.stride,
            chosen_stride=self.token_stride,
            scratch_stride=self._most_pages * SCRATCH_BYTES,
            **shared,
        )


class AttentionRoom:
    """Fixed places for so many tasks, merges and parts, which a tape points at."""

    def __init__(
        self, tasks: int, merges: int, parts: int, kv_heads: int, value_dim: int, choice: ChoiceRoom | None = None
    ) -> None:
        """choice: where some tokens choose their pages."""
        self._choice = choice
        self._tasks = torch.zeros(tasks, len(TASK_WORDS), dtype=torch.int64)
        self._merges = torch.zeros(merges, len(MERGE_WORDS), dtype=torch.int64)
        self._parts = torch.zeros(kv_heads * parts, part_floats(value_dim))
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
            and (tables.chosen is None or (self._choice is not None and self._choice.holds(tables.chosen)))
        )

    @property
    def chosen(self) -> Tensor:
        """Return the addresses of the pages that tokens have chosen, int64 [n]."""
        assert self._choice is not None, "tokens choose"
        return self._choice.chosen

    def place(self, tables: AttentionTables) -> None:
        self._tasks[: len(tables.tasks)] = torch.tensor(tables.tasks)
        if tables.merges:
            self._merges[: len(tables.merges)] = torch.tensor(tables.merges)
        if tables.chosen is not None:
            assert self._choice is not None
            self._choice.place(tables.chosen)
        self._counts[:] = torch.tensor([[len(tables.tasks), tables.num_parts], [len(tables.merges), tables.num_parts]])

    def steps(self, isa: Isa, layouts: Layouts, place: AttentionPlace, *, rows: int, is_split: bool) -> Iterator[Step]:
        """Return the step that attends, and the one that joins parts where rows are shared out over tasks."""
        dense, coded = layouts
        group = place.num_heads // dense.num_kv_heads
        has_sinks = place.sinks is not None
        has_softcap = place.softcap is not None
        tokens, token_stride = place.tokens, 0
        if self._choice is not None:
            yield from self._choice.steps(isa, layouts, place)
            tokens, token_stride = self._choice.tokens, self._choice.token_stride
        kernel = cpu_attention.attention(isa, dense, coded, rows, has_softcap=has_softcap, has_sinks=has_sinks)
        shared: dict[str, Tensor | int]
        shared = {"out": place.out, "parts": self._parts, "kv_heads": dense.num_kv_heads, "group": group}
        shared["sinks"] = 0 if place.sinks is None else place.sinks
        yield kernel.step(
            q=place.q,
            tasks=self._tasks,
            tokens=tokens,
            token_stride=token_stride,
            shape=self._counts[0],
            stride=place.stride,
            layer=place.layer,
            window=place.window or NO_WINDOW,
            softcap=float_bits(place.softcap or 0.0),
            **shared,
        )
        if is_split:
            combine = cpu_attention.combine(isa, dense.head_dim, is_rotated=coded is not None, has_sinks=has_sinks)
            yield combine.step(merges=self._merges, shape=self._counts[1], **shared)

    def latent_steps(
        self, isa: Isa, layouts: Layouts, place: LatentPlace, scale: float, *, rows: int, is_split: bool
    ) -> Iterator[Step]:
        """Return the steps that attend to latents, as `steps` does to keys and values. scale: of the queries."""
        own, coded = latent_layouts(layouts)
        shared: dict[str, Tensor | int] = {"out": place.out, "parts": self._parts, "group": place.num_heads}
        if coded is not None and isa.multiplies_whole_bytes:
            kernel = cpu_latent_int8.attention(isa, own, coded, rows, has_amx=isa.can_have_amx and has_amx())
        else:
            kernel = cpu_latent.attention(isa, own, coded, rows)
        yield kernel.step(
            absorbed=place.absorbed,
            turning=place.turning,
            tasks=self._tasks,
            tokens=place.tokens,
            shape=self._counts[0],
            stride=place.stride,
            layer=place.layer,
            window=place.window or NO_WINDOW,
            scale=float_bits(scale),
            **shared,
        )
        if is_split:
            combine = cpu_attention.combine(isa, own.latent_dim, is_rotated=coded is not None)
            yield combine.step(merges=self._merges, shape=self._counts[1], sinks=0, kv_heads=1, **shared)


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


@dataclass(frozen=True)
class LatentPlace:
    """One layer's latent attention, all fp32. absorbed [T, heads * latent_dim]; turning, of each token all heads'
    features that meet the shared key, `stride` floats behind those of the last one; latents, likewise
    `latent_stride`; out as absorbed. tokens, layer, window: as in `AttentionPlace`."""

    absorbed: Tensor
    num_heads: int
    turning: Tensor
    stride: int
    latents: Tensor
    latent_stride: int
    out: Tensor
    tokens: Tensor
    layer: int
    window: int | None = None

    def step(
        self,
        isa: Isa,
        layouts: Layouts,
        shape: Tensor,
        rotation: tuple[Tensor, Tensor] | None = None,
        norm: tuple[Tensor, float] | None = None,
    ) -> Step:
        """Return the step that writes latents into their pages. shape: int64 [1], the tokens. rotation, norm: cosines
        and sines, weight and eps, where those were not applied before."""
        own, coded = latent_layouts(layouts)
        cos, sin = (0, 0) if rotation is None else rotation
        rotary_dim = 0 if rotation is None else rotation[0].shape[-1]
        return cpu_latent.place(isa, own, coded, rotary_dim, has_norm=norm is not None).step(
            turning=self.turning,
            latents=self.latents,
            norm=0 if norm is None else norm[0],
            cos=cos,
            sin=sin,
            tokens=self.tokens,
            shape=shape,
            stride=self.stride,
            latent_stride=self.latent_stride,
            heads=self.num_heads,
            layer=self.layer,
            eps=float_bits(0.0 if norm is None else norm[1]),
        )


def is_choice(step: Step) -> bool:
    """Return whether a step chooses pages."""
    return "chosen" in step[0].pointers


def latent_layouts(layouts: Layouts) -> tuple[LatentLayout, LatentLayout | None]:
    own, coded = layouts
    assert isinstance(own, LatentLayout) and (coded is None or isinstance(coded, LatentLayout))
    return own, coded


def row_counts_of(layout: PageLayout) -> tuple[int, ...]:
    """Return the rows that a task may have."""
    return cpu_latent.ROWS if isinstance(layout, LatentLayout) else ROW_COUNTS
