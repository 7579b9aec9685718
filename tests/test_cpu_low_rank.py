"""The compiled kernels of adapters against plain torch, on every instruction set that this machine runs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localllm.kernels import cpu_isa, cpu_linear, cpu_quantize, reference
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_linear import Activations
from localllm.kernels.cpu_low_rank_room import AdaptedRows, LowRankRoom
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.low_rank_record import LowRank, LowRankRecord

HOST_ISAS = cpu_isa.host_isas()
pytestmark = pytest.mark.skipif(not cpu_linear.is_available(), reason="no CPU kernel runs on this machine")
every_isa = pytest.mark.parametrize("isa", HOST_ISAS, ids=[isa.name for isa in HOST_ISAS])
SITE, OTHER = "layers.0.attention.qkv_proj", "layers.0.attention.o_proj"


@dataclass(frozen=True)
class Use:
    """Rows [begin, end) of a batch, and the adapters that they have, by number, with a factor each."""

    begin: int
    end: int
    adapters: Sequence[tuple[int, float]]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pairs(columns: int, rows: Sequence[tuple[int, int, int]], seed: int) -> list[LowRank]:
    """rows: the first, how many, and the rank."""
    return [
        LowRank(random(rank, columns, seed=seed + i), random(count, rank, seed=seed - i - 1), first)
        for i, (first, count, rank) in enumerate(rows)
    ]


def rounded(matrix: Tensor) -> Tensor:
    """Each row in 8 bits."""
    scale = matrix.abs().amax(1, keepdim=True) / 127
    return (matrix / torch.where(scale > 0, scale, 1.0)).round() * scale


def added(isa: Isa, x: Tensor, group: int, y: Tensor, uses: Sequence[Use], adapters: Sequence[list[LowRank]]) -> Tensor:
    """y [T, N] with what the kernels add."""
    rows, columns = x.shape
    room = Activations(rows, columns, group)
    block_rows = room.resize(rows, isa)
    records = [
        {SITE if own else OTHER: LowRankRecord.of(own or [LowRank(x[:1], x[:1, :1])], y.shape[1])} for own in adapters
    ]
    tables = LowRankRoom(isa, [OTHER, SITE])
    tables.place(
        [
            AdaptedRows(use.begin, use.end - use.begin, [(records[n], scale) for n, scale in use.adapters])
            for use in uses
        ]
    )
    out = torch.cat((y, torch.full((1, y.shape[1]), 7.0)))
    first = room.quantize(cpu_quantize.quantize(isa, group, "plain"), x.contiguous(), group, columns)
    Tape([first, *tables.steps(SITE, room, block_rows, group, columns, out, y.shape[1])]).run()
    assert (out[-1] == 7.0).all(), "nothing is written behind the rows"
    return out[:-1]


def expected(x: Tensor, group: int, y: Tensor, uses: Sequence[Use], adapters: Sequence[list[LowRank]]) -> Tensor:
    codes, scale = reference.int8_activations(x, group)
    taken, total = (codes * scale.unsqueeze(-1)).view(x.shape).double(), y.double()
    for use in uses:
        own = slice(use.begin, use.end)
        for number, factor in use.adapters:
            for part in adapters[number]:
                change = taken[own] @ rounded(part.a).double().T @ rounded(part.b).double().T
                total[own, part.first_row : part.first_row + len(part.b)] += factor * change
    return total.float()


@every_isa
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_each_row_gets_what_its_own_adapters_make_of_it(isa: Isa, data: st.DataObject) -> None:
    rows, tiles = data.draw(st.integers(1, 21)), data.draw(st.integers(1, 20))
    group = data.draw(st.sampled_from((32, 64, 128)))
    columns, width = group * data.draw(st.integers(1, 4)), 16 * tiles
    adapters = []
    for number in range(data.draw(st.integers(1, 3))):
        borders = sorted(data.draw(st.sets(st.integers(0, width), min_size=2, max_size=4)))
        spans = list(itertools.pairwise(borders))[:: data.draw(st.integers(1, 2))]
        parts = [(begin, end - begin, data.draw(st.integers(1, 40))) for begin, end in spans]
        adapters.append(pairs(columns, parts if data.draw(st.booleans()) or not number else [], seed=number))
    cuts = sorted(data.draw(st.sets(st.integers(0, rows), min_size=2, max_size=5)))
    factor = st.sampled_from((1.0, -0.5, 0.0, 2.0))
    chosen = st.lists(st.tuples(st.integers(0, len(adapters) - 1), factor), min_size=1, max_size=3)
    uses = [Use(begin, end, data.draw(chosen)) for begin, end in itertools.pairwise(cuts)]
    x, y = random(rows, columns, seed=5), random(rows, width, seed=6)
    found = added(isa, x, group, y, uses, adapters)
    torch.testing.assert_close(found, expected(x, group, y, uses, adapters), rtol=1e-4, atol=1e-2)


@every_isa
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(isa: Isa) -> None:
    adapters = [pairs(128, [(0, 48, 24), (48, 16, 3)], seed=1), pairs(128, [(16, 32, 64)], seed=2)]
    x, y = random(19, 128, seed=3), random(19, 64, seed=4)
    uses = [Use(0, 6, [(0, 1.0)]), Use(6, 7, [(1, 2.0), (0, 0.5)]), Use(9, 19, [(1, 1.0)])]
    together = added(isa, x, 64, y, uses, adapters)
    for use in uses:
        for row in range(use.begin, use.end):
            alone = added(isa, x[row : row + 1], 64, y[row : row + 1], [Use(0, 1, use.adapters)], adapters)
            assert torch.equal(alone[0], together[row])
    assert torch.equal(together[7:9], y[7:9]), "rows without adapters are as they were"


def test_a_record_of_zeros_adds_nothing() -> None:
    zeros = [LowRank(torch.zeros(4, 64), torch.zeros(32, 4))]
    y = random(3, 32, seed=1)
    assert torch.equal(added(HOST_ISAS[0], random(3, 64, seed=2), 64, y, [Use(0, 3, [(0, 1.0)])], [zeros]), y)
