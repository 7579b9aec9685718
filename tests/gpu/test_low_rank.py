"""What adapters add to the rows of a batch, in Triton's interpreter, beside the sums in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.kernels.gpu.launch import recorded
from localllm.layers.batch import Batch
from localllm.layers.gpu_low_rank import AdapterTables, RowAdapters
from localllm.layers.low_rank import EMBED, Adapter, AppliedAdapter, LowRank
from localllm.layers.segment import Segment
from tests.thinning import every_other

TOLERANCE = 1e-6  # of the norm
HOST = torch.device("cpu")
SITES = ("first", "second")


def adapter(N: int, K: int, ranks: Sequence[tuple[int, int, int]], dtype: torch.dtype, seed: int) -> Adapter:
    """One that changes the second site. ranks: of each part, with its first row and its rows."""
    made = torch.Generator().manual_seed(seed)
    parts = tuple(
        LowRank(
            (torch.randn(rank, K, generator=made) * K**-0.5).to(dtype),
            torch.randn(min(rows, N - first), rank, generator=made).to(dtype),
            first,
        )
        for rank, first, rows in ranks
    )
    return Adapter(f"adapter {seed}", bytes([seed]), {"second": parts}, {})


def batch(*segments: tuple[int, Sequence[AppliedAdapter]]) -> Batch:
    """Of so many rows each, with these adapters."""
    found, begin = list[Segment](), 0
    for rows, adapters in segments:
        kv: Any = SimpleNamespace(adapters=adapters)
        found.append(Segment(begin, begin + rows, kv, 0, rows))
        begin += rows
    return Batch(torch.arange(begin), torch.arange(begin), tuple(found), torch.arange(begin), ())


def tables(dtype: torch.dtype) -> AdapterTables:
    return AdapterTables(dict.fromkeys(SITES, dtype), HOST)


def rows_of(made: Batch, dtype: torch.dtype) -> RowAdapters:
    found = tables(dtype).rows_of(made)
    assert found is not None
    return found


def added(made: Batch, x: Tensor, N: int) -> Tensor:
    """fp64 [M, N]"""
    y = torch.zeros(len(x), N, dtype=torch.float64)
    for segment in made.adapted_segments:
        own = slice(segment.begin, segment.end)
        for each in segment.kv.adapters:
            for part in each.adapter.parts["second"]:
                rows = slice(part.first_row, part.first_row + len(part.b))
                y[own, rows] += each.scale * (x[own].double() @ part.a.double().T @ part.b.double().T)
    return y


@pytest.mark.parametrize(
    ("N", "K", "dtype", "out"),
    every_other(
        [
            (300, 600, torch.bfloat16, torch.float32),
            (48, 1100, torch.float16, torch.float32),
            (33, 7, torch.float32, torch.float32),
            (130, 1024, torch.float32, torch.bfloat16),
            (300, 2048, torch.bfloat16, torch.bfloat16),
        ]
    ),
)
def test_rows_with_other_adapters_have_what_each_adds(N: int, K: int, dtype: torch.dtype, out: torch.dtype) -> None:
    """Of any ranks and parts, in their order; nothing is written beside them, nor where a row has none."""
    few = adapter(N, K, [(1, 0, 16), (17, N // 2, 200)], dtype, 1)
    many = adapter(N, K, [(40, 0, N)], dtype, 2)
    made = batch((1, [AppliedAdapter(few, 0.5)]), (2, []), (2, [AppliedAdapter(many, -2.0), AppliedAdapter(few, 1.5)]))
    around, x = torch.randn(5, N + 9).to(out), torch.randn(5, K)
    before = around.clone()
    rows_of(made, dtype).add("second", x, around[:, :N])
    expected = before[:, :N].double() + added(made, x, N)
    tolerance = TOLERANCE if out is torch.float32 else 0.02  # the interpreter rounds bf16 towards zero
    assert (around[:, :N].double() - expected).norm() < tolerance * expected.norm()
    assert torch.equal(around[:, N:], before[:, N:]) and torch.equal(around[1:3], before[1:3])


@pytest.mark.parametrize("rank", every_other([256, 1, 3, 16, 64, 100]))
def test_a_row_has_the_bits_that_it_has_alone(rank: int) -> None:
    N, K = 140, 1030
    one, other = (adapter(N, K, [(r, 0, N)], torch.bfloat16, seed) for seed, r in ((1, rank), (2, 200)))
    own = [AppliedAdapter(one, 0.7), AppliedAdapter(other, 1.0)]
    x, y = torch.randn(6, K), torch.randn(6, N)
    alone = y[4:5].clone()
    rows_of(batch((1, own)), torch.bfloat16).add("second", x[4:5], alone)
    made = batch((3, [AppliedAdapter(other, 2.0)] * 3), (1, []), (2, own))
    rows_of(made, torch.bfloat16).add("second", x, y)
    assert torch.equal(y[4:5], alone)


def test_an_adapter_is_placed_once_and_changes_only_its_sites() -> None:
    found, own = tables(torch.float32), adapter(20, 30, [(2, 0, 20)], torch.bfloat16, 1)
    rows = found.rows_of(batch((2, [AppliedAdapter(own, 1.0)])))
    assert rows is not None and rows.changes("second") and not rows.changes("first")
    again = found.rows_of(batch((1, [AppliedAdapter(own, 0.3)])))
    assert again is not None and again.placed[own] is rows.placed[own]
    assert own.parts["second"][0].a.dtype is torch.float32, "it has no second copy"
    assert found.rows_of(batch((2, []))) is None


def test_what_operators_move_stays_where_kernels_read_it() -> None:
    own, x, y = adapter(20, 30, [(2, 0, 20)], torch.float32, 1), torch.randn(1, 30), torch.zeros(1, 20)
    found, made = tables(torch.float32), batch((1, [AppliedAdapter(own, 1.0)]))
    expected = added(made, x, 20)
    assert found.rows_of(made) is not None
    own.parts["second"] = ()
    rows = found.rows_of(made)
    assert rows is not None
    rows.add("second", x, y)
    assert (y.double() - expected).norm() < TOLERANCE * expected.norm()


def test_tokens_have_what_adapters_add_to_their_embeddings() -> None:
    V, hidden = 50, 40
    parts = (LowRank(torch.randn(3, V), torch.randn(hidden, 3)),)
    own = AppliedAdapter(Adapter("of the embedding", b"", {EMBED: parts}, {}), 0.5)
    made, x = batch((2, []), (3, [own])), torch.randn(5, hidden)
    rows, ids = AdapterTables({EMBED: torch.float32}, HOST).rows_of(made), torch.tensor([1, 2, 3, 3, 49])
    assert rows is not None
    expected = x.clone()
    expected[2:] += 2 * 0.5 * parts[0].a[:, ids[2:]].T @ parts[0].b.T
    with recorded(runs=True) as launches:
        rows.add_to_embedding(made, ids, 2.0, x)
    torch.testing.assert_close(x, expected)
    assert [launch.name for launch in launches] == ["_expand"]
