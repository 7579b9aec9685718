"""A forward over real KV pages, as the GPU's kernels are told of it, and attention over those pages in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.cache.kv_format import KVFormat
from localllm.cache.kv_pages import KVPages
from localllm.cache.pages import HOST
from localllm.kernels import kv_page, reference
from localllm.kernels.gpu.attention import AttentionHistory, tasks_of
from localllm.kernels.gpu.rope import TokenTables
from localllm.kernels.kv_page import PAGE_TOKENS, PageLayout
from localllm.kernels.paged_attention import write
from localllm.kernels.sizes import KVShape
from tests.kv_support import LAYERS, filled

LAYER = 1
NAN = float("nan")


@dataclass
class Forward:
    """Segments of `counts` new tokens behind `pasts`: their pages, of which nothing else is written, and the tables.
    padding: rows behind them that are nobody's. latent_dim: of pages of latents."""

    kv_format: KVFormat
    KH: int
    D: int
    pasts: Sequence[int]
    counts: Sequence[int]
    window: int | None = None
    dtype: torch.dtype = torch.float32
    padding: int = 0
    latent_dim: int = 0

    def __post_init__(self) -> None:
        pages = KVPages(
            self.kv_format,
            windows=[self.window] * LAYERS,
            devices=[HOST] * LAYERS,
            shapes=[KVShape(self.KH, self.D, self.latent_dim)] * LAYERS,
            dtype=self.dtype,
        )
        sizes = zip(self.pasts, self.counts, strict=True)
        self.stores = [filled(pages, past, count, seed) for seed, (past, count) in enumerate(sizes)]

    @property
    def layouts(self) -> tuple[PageLayout, PageLayout | None]:
        return self.stores[0].layouts

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Segment and slot of each row."""
        sizes = zip(self.pasts, self.counts, strict=True)
        return [(i, slot) for i, (past, count) in enumerate(sizes) for slot in range(past, past + count)]

    @property
    def num_rows(self) -> int:
        return sum(self.counts) + self.padding

    def tokens(self) -> TokenTables:
        """A padding row's addresses lead nowhere."""
        own = [self.own_part(*row, 0).data_ptr() for row in self.rows]
        strides = [self.own_part(*row, 1).data_ptr() - first for row, first in zip(self.rows, own, strict=True)]
        is_coded = self.layouts[1] is not None
        coded = [
            self._address(i, slot // PAGE_TOKENS) if is_coded and slot >= PAGE_TOKENS else 0 for i, slot in self.rows
        ]
        no = [-1] * self.padding
        return TokenTables(
            positions=torch.tensor([slot for _, slot in self.rows] + no, dtype=torch.int32),
            own=torch.tensor(own + no),
            own_stride=torch.tensor(strides + no),
            coded=torch.tensor(coded + no),
        )

    def _address(self, segment: int, number: int) -> int:
        """0 where a window has left the page."""
        page = self.stores[segment].tables[0][number]
        return 0 if page is None else page.layer(0).data_ptr()

    def history(self, tokens: int, *, empty_tasks: int = 0) -> AttentionHistory:
        """tokens: of a task at most."""
        firsts = [sum(self.counts[:i]) for i in range(len(self.counts))]
        sizes = enumerate(zip(firsts, self.pasts, self.counts, strict=True))
        tasks = [task for i, (first, past, count) in sizes for task in tasks_of(i, first, past, count, tokens)]
        tasks += [(0, 0, 0, 0)] * empty_tasks
        tables = [
            torch.tensor([self._address(i, number) for number in range(len(store.tables[0]))])
            for i, store in enumerate(self.stores)
        ]
        return AttentionHistory(
            tasks=torch.tensor(tasks, dtype=torch.int32),
            tables=torch.nn.utils.rnn.pad_sequence(tables, batch_first=True).contiguous(),
        )

    def own_part(self, segment: int, slot: int, layer: int = LAYER) -> Tensor:
        """Of the page as the token there reads it: uint8 [layer_bytes]."""
        return self.stores[segment]._own(0, slot // PAGE_TOKENS).layer(layer)

    def table_page(self, segment: int, number: int) -> Tensor:
        page = self.stores[segment].tables[0][number]
        assert page is not None
        return page.layer(LAYER)

    def seen_by(self, segment: int, slot: int) -> tuple[Tensor, Tensor]:
        """The keys and values [KH, slots, D] that a query there may see, as it reads them."""
        dense, coded = self.layouts
        number = slot // PAGE_TOKENS
        first = 0 if self.window is None else max(0, slot - self.window + 1)
        keys, values = [], []
        for page in range(first // PAGE_TOKENS, number + 1):
            is_coded = coded is not None and 0 < page < number
            part = self.own_part(segment, slot) if page == number else self.table_page(segment, page)
            k, v = kv_page.load(coded if is_coded and coded else dense, part.unsqueeze(0))
            keys.append(k.double())
            values.append(v.double())
        begin = first // PAGE_TOKENS * PAGE_TOKENS
        kept = slice(first - begin, slot + 1 - begin)
        return torch.cat(keys, 1)[:, kept], torch.cat(values, 1)[:, kept]

    def expected(self, q: Tensor, *, scale: float, softcap: float | None = None, sinks: Tensor | None = None) -> Tensor:
        """q [M, H, D], turned as the pages are. sinks [H]. Returns fp64 [M, H * features of a value]; zeros
        of padding."""
        M, H, D = q.shape
        features = self.layouts[0].value_dim
        mixed = torch.zeros(M, H, features, dtype=torch.float64)
        for row, (segment, slot) in enumerate(self.rows):
            keys, values = self.seen_by(segment, slot)
            grouped = q[row].double().view(self.KH, -1, D)
            scores = grouped @ keys.mT * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            shares = reference.softmax(scores.unsqueeze(2), sinks).squeeze(2)  # [KH, G, slots]
            mixed[row] = (shares @ values).view(H, features)
        if self.layouts[1] is not None:
            mixed = kv_page.rotated(mixed).double()
        return mixed.view(M, H * features)


def write_new(forward: Forward, k: Tensor, v: Tensor) -> None:
    """k, v [M, KH, D] of the new tokens, by torch's operators: not turned yet."""
    for segment, (past, count) in enumerate(zip(forward.pasts, forward.counts, strict=True)):
        first = sum(forward.counts[:segment])
        rows = slice(first, first + count)
        write(forward.stores[segment].layer(LAYER, past, count), past, k[rows], v[rows])
