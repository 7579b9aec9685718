"""Mamba's rule: the reference beside transformers' own, the CPU kernels beside it, and what a state must do."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.mamba.modeling_mamba import mamba_selective_scan

from localllm.kernels import cpu_isa
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_scan import ScanRoom
from localllm.kernels.cpu_states import PlacedStates, StateTables
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.layer_state import LayerState, StateRows
from localllm.kernels.selective_scan import ScanWeights, convolved, scan
from localllm.kernels.state_shapes import MambaShape, StatePlace

SHAPES = [MambaShape(64, 16, 4), MambaShape(42, 10, 3, conv_width=3), MambaShape(48, 5, 7, conv_width=2)]
NATIVE_SHAPES = [MambaShape(64, 16, 16), MambaShape(240, 32, 48, conv_width=3), MambaShape(80, 16, 160, conv_width=2)]
HOST_ISAS = cpu_isa.host_isas()
native = pytest.mark.skipif(not HOST_ISAS, reason="no CPU kernel runs on this machine")
LAYER = 1  # of two: the other one's state stays as it is
PADDING = 5  # floats behind the rows that a projection writes


def random_weights(shape: MambaShape, seed: int = 0) -> ScanWeights:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=generator)  # noqa: E731
    return ScanWeights(
        conv=draw(shape.conv_width, shape.features) * 0.5,
        conv_bias=draw(shape.features) * 0.3,
        dt_bias=draw(shape.features) - 2.0,
        d=draw(shape.features),
        rates=-torch.rand(shape.state_size, shape.features, generator=generator).mul(16),
    )


@dataclass
class Rows:
    """Some tokens of one sequence: what the projections make of them, and what is to be done with them."""

    states: Tensor  # uint8 [2, state_bytes]
    raw: Tensor  # x, steps, B, C, z
    past: int
    committed: int
    snapshots: dict[int, Tensor] = field(default_factory=dict)  # uint8 [2, snapshot_bytes]


def parts_of(shape: MambaShape, raw: Tensor) -> list[Tensor]:
    sizes = [shape.features, shape.features, shape.state_size, shape.state_size, shape.features]
    return list(torch.split(raw, sizes, dim=1))


def random_rows(shape: MambaShape, count: int, seed: int = 1) -> Tensor:
    floats = 3 * shape.features + 2 * shape.state_size
    return torch.randn(count, floats, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_equals_transformers(shape: MambaShape) -> None:
    weights, raw = random_weights(shape), random_rows(shape, 90)
    x, steps, b, c, z = parts_of(shape, raw)
    state = torch.zeros(2, shape.state_bytes, dtype=torch.uint8)
    (found,) = ReferenceLayer(shape, weights).run([Rows(state, raw, 0, 90)])
    padded = functional.pad(x.T[None], (shape.conv_width - 1, 0))
    conv = functional.conv1d(padded, weights.conv.T[:, None], weights.conv_bias, groups=shape.features)
    given = functional.silu(conv), steps.T[None], weights.rates.T, b.T[None], c.T[None], weights.d, z.T[None]
    expected = mamba_selective_scan(*given, delta_bias=weights.dt_bias, delta_softplus=True)[0].T
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


class NativeLayer:
    """The recorded steps of a layer, which compute one batch after the other."""

    def __init__(self, shape: MambaShape, weights: ScanWeights, isa: Isa) -> None:
        self.shape, self.stride = shape, 2 * shape.features + PADDING
        self.wide, self.mixed = torch.zeros(300, self.stride), torch.zeros(300, shape.features)
        self.tables = StateTables(300, 6)
        self.room = ScanRoom(shape, self.tables)
        place = StatePlace(LAYER * shape.state_bytes, LAYER * shape.snapshot_bytes)
        self.first = Tape([self.room.convolution(isa, weights, place, self.wide, self.stride)])
        self.rest = Tape(self.room.scan(isa, weights, place, self.wide, self.stride, self.mixed))

    def run(self, batch: list[Rows]) -> list[Tensor]:
        """[T, features] of each segment."""
        segments, row, shape = [], 0, self.shape
        self.mixed.fill_(float("nan"))
        for one in batch:
            end = row + len(one.raw)
            x, steps, b, c, z = parts_of(shape, one.raw)
            self.wide[row:end, :-PADDING] = torch.cat((x, z), dim=1)
            self.room.steps[row:end], self.room.low[row:end, : 2 * shape.state_size] = steps, torch.cat((b, c), dim=1)
            snapshots = tuple((position, snapshot.data_ptr()) for position, snapshot in one.snapshots.items())
            segments.append(PlacedStates(row, end, one.past, one.committed, one.states.data_ptr(), snapshots))
            row = end
        self.tables.place(segments)
        self.first.run()
        self.rest.run()
        return [self.mixed[segment.begin : segment.end].clone() for segment in segments]


class ReferenceLayer:
    def __init__(self, shape: MambaShape, weights: ScanWeights) -> None:
        self.shape, self.weights = shape, weights

    def run(self, batch: list[Rows]) -> list[Tensor]:
        found = []
        for one in batch:
            snapshots = {position: snapshot[LAYER] for position, snapshot in one.snapshots.items()}
            x, steps, b, c, z = parts_of(self.shape, one.raw)
            raw, state = torch.cat((x, steps, b), dim=1), LayerState(self.shape, one.states[LAYER])
            y = scan(StateRows(state, raw, one.past, one.committed, snapshots), c, self.weights)
            found.append(y * functional.silu(z))
        return found


@cache
def native_layer(shape: MambaShape, isa: Isa) -> NativeLayer:
    return NativeLayer(shape, random_weights(shape), isa)


class Sequence:
    """A sequence's tokens and its states; each call takes in the tokens up to `end`."""

    def __init__(self, shape: MambaShape, count: int = 140, seed: int = 1) -> None:
        self.shape, self.raw, self.past = shape, random_rows(shape, count, seed), 0
        self.states = torch.zeros(2, shape.state_bytes, dtype=torch.uint8)

    @property
    def state(self) -> LayerState[MambaShape]:
        return LayerState(self.shape, self.states[LAYER])

    def rows(self, end: int, committed: int | None = None, snapshots: dict[int, Tensor] | None = None) -> Rows:
        own, past, self.past = self.raw[self.past : end], self.past, end
        return Rows(self.states, own, past, end if committed is None else committed, snapshots or {})

    def drafts(self, count: int) -> Rows:
        """Tokens of which none is accepted."""
        return Rows(self.states, random_rows(self.shape, count, seed=9), self.past, self.past)


def new_snapshot(shape: MambaShape) -> Tensor:
    return torch.zeros(2, shape.snapshot_bytes, dtype=torch.uint8)


def layers() -> list[pytest.param]:
    found = [pytest.param(lambda shape: ReferenceLayer(shape, random_weights(shape)), SHAPES, id="reference")]
    kernels = [(lambda shape, isa=isa: native_layer(shape, isa), isa) for isa in HOST_ISAS]
    return found + [pytest.param(make, NATIVE_SHAPES, id=isa.name) for make, isa in kernels]


@pytest.mark.parametrize(("make", "shapes"), layers())
def test_chunks_replays_and_snapshots_change_no_bit(make, shapes) -> None:
    for shape in shapes:
        layer, one = make(shape), Sequence(shape)
        (expected,) = layer.run([one.rows(140)])
        sequence, snapshots = Sequence(shape), {position: new_snapshot(shape) for position in (1, 64, 100)}
        parts = layer.run([sequence.rows(100, None, snapshots)])
        for end in (103, 119, 120, 121):  # what is not committed is computed again
            layer.run([sequence.drafts(10)])
            parts += layer.run([sequence.rows(end, sequence.past)])
        assert sequence.state.position == 120
        parts += layer.run([sequence.rows(140)])
        assert torch.equal(torch.cat(parts), expected)
        assert torch.equal(sequence.state.matrices, one.state.matrices) and not sequence.states[1 - LAYER].any()
        for position, snapshot in snapshots.items():
            other = Sequence(shape)
            other.past = position
            other.state.read_snapshot(snapshot[LAYER], position)
            assert torch.equal(layer.run([other.rows(140)])[0], expected[position:])
            assert torch.equal(other.state.matrices, one.state.matrices)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_the_steps_are_made_of_is_convolved_to_the_same_bits_in_chunks(shape: MambaShape) -> None:
    weights, sequence = random_weights(shape), Sequence(shape)
    layer, x = ReferenceLayer(shape, weights), sequence.raw[:, : shape.features]
    expected, parts = convolved(StateRows(Sequence(shape).state, x, 0, 140), weights), []
    for end in (1, 3, 90, 91, 140):
        past = sequence.past
        parts.append(convolved(StateRows(sequence.state, x[past:end], past, end), weights))
        layer.run([sequence.rows(end)])
    assert torch.equal(torch.cat(parts), expected)


@native
@pytest.mark.parametrize("isa", HOST_ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("shape", NATIVE_SHAPES, ids=str)
def test_the_kernels_compute_what_the_reference_does(shape: MambaShape, isa: Isa) -> None:
    sequences = [Sequence(shape) for _ in range(2)]
    snapshots = [{64: new_snapshot(shape), 99: new_snapshot(shape)} for _ in sequences]
    layer, weights = native_layer(shape, isa), random_weights(shape)
    both = layer, ReferenceLayer(shape, weights)
    for end, committed in [(100, None), (103, 100), (119, 103), (120, 119), (140, None)]:
        past, x = sequences[0].past, sequences[0].raw[sequences[0].past : end, : shape.features]
        expected = convolved(StateRows(sequences[1].state, x, past, end), weights)
        pairs = zip(both, sequences, snapshots, strict=True)
        taken = [layer.run([one.rows(end, committed, due if end == 100 else {})]) for layer, one, due in pairs]
        torch.testing.assert_close(layer.room.x[: end - past], expected, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(*(each[0] for each in taken), rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(*(one.state.matrices for one in sequences), rtol=1e-5, atol=1e-6)
    for position in (64, 99):
        found = [taken[position][LAYER, : shape.matrix_bytes].view(torch.float32) for taken in snapshots]
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
        tails = [taken[position][LAYER, shape.matrix_bytes :] for taken in snapshots]
        assert torch.equal(*tails)


@native
@pytest.mark.parametrize("shape", NATIVE_SHAPES, ids=str)
def test_each_segment_of_a_batch_has_the_bits_that_it_has_alone_on_any_threads(shape: MambaShape) -> None:
    layer, threads = native_layer(shape, HOST_ISAS[-1]), torch.get_num_threads()

    def batches() -> list[list[Rows]]:
        sequences = [Sequence(shape, 60, seed) for seed in range(4)]
        first = [sequence.rows(9 * n + 2) for n, sequence in enumerate(sequences)]
        return [first, [sequence.rows(sequence.past + n + 1, sequence.past) for n, sequence in enumerate(sequences)]]

    try:
        torch.set_num_threads(3)
        together = [layer.run(batch) for batch in batches()]
    finally:
        torch.set_num_threads(threads)
    alone = [[layer.run([rows])[0] for rows in batch] for batch in batches()]
    for found, expected in zip(together, alone, strict=True):
        assert all(map(torch.equal, found, expected))
    for isa in HOST_ISAS:
        assert torch.equal(native_layer(shape, isa).run(batches()[0])[2], together[0][2])
