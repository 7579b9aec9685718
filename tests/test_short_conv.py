"""Short convolutions: the reference beside transformers' own, the CPU's kernel beside it, and what a state must do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels import cpu_isa, cpu_jit, cpu_short_conv
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_short_conv import ConvRoom
from localllm.kernels.cpu_states import PlacedStates, StateTables
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.layer_state import LayerState, StateRows
from localllm.kernels.short_conv import ConvWeights, convolve
from localllm.kernels.state_shapes import ConvShape, StatePlace
from tests.test_delta_rule import CPUS

SHAPES = [ConvShape(16), ConvShape(48, 2), ConvShape(144, 7), ConvShape(80, 4)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
HOST_ISAS = cpu_isa.host_isas()
native = pytest.mark.skipif(not HOST_ISAS, reason="no CPU kernel runs on this machine")
LAYER = 1  # of two: the other one's state stays as it is
COUNT = 140


def random_weights(shape: ConvShape, *, has_bias: bool = True) -> ConvWeights:
    generator = torch.Generator().manual_seed(shape.conv_width)
    taps = torch.randn(shape.conv_width, shape.channels, generator=generator)
    return ConvWeights(taps, torch.randn(shape.channels, generator=generator) if has_bias else None)


def random_wide(shape: ConvShape, count: int, seed: int = 1) -> Tensor:
    """[T, 3 * channels]: B, C, x."""
    return torch.randn(count, 3 * shape.channels, generator=torch.Generator().manual_seed(seed))


def place_of(shape: ConvShape) -> StatePlace:
    return StatePlace(LAYER * shape.state_bytes, LAYER * shape.snapshot_bytes)


def new_snapshot(shape: ConvShape) -> Tensor:
    """Of two layers."""
    snapshot = torch.zeros(2, shape.snapshot_bytes, dtype=torch.uint8)
    snapshot[LAYER] = 255
    return snapshot


@dataclass
class Rows:
    """Some tokens of one sequence: what the projection makes of them, and what is to be done with them."""

    states: Tensor  # uint8 [2, state_bytes]
    wide: Tensor
    past: int
    committed: int
    snapshots: dict[int, Tensor] = field(default_factory=dict)  # uint8 [2, snapshot_bytes]


class ReferenceLayer:
    def __init__(self, shape: ConvShape, *, has_bias: bool = True) -> None:
        self.shape, self.weights = shape, random_weights(shape, has_bias=has_bias)

    def run(self, batch: list[Rows]) -> list[Tensor]:
        found = []
        for one in batch:
            front, behind, value = one.wide.chunk(3, dim=-1)
            snapshots = {position: snapshot[LAYER] for position, snapshot in one.snapshots.items()}
            state = LayerState(self.shape, one.states[LAYER])
            rows = StateRows(state, front * value, one.past, one.committed, snapshots)
            found.append(behind * convolve(rows, self.weights))
        return found


class NativeLayer:
    """The recorded step of a layer, which computes one batch after the other."""

    def __init__(self, shape: ConvShape, isa: Isa, *, has_bias: bool = True) -> None:
        rows, self.shape = 300, shape
        self.wide, self.mixed = torch.zeros(rows, 3 * shape.channels + 5), torch.zeros(rows, shape.channels)
        self.tables = StateTables(rows, 6)
        weights, stride = random_weights(shape, has_bias=has_bias), self.wide.shape[1]
        room, places = ConvRoom(shape, self.tables), {"wide": self.wide, "mixed": self.mixed}
        self.tape = Tape(room.steps(isa, weights, place_of(shape), stride=stride, **places))

    def run(self, batch: list[Rows]) -> list[Tensor]:
        segments, row = [], 0
        self.wide.fill_(float("nan"))
        self.mixed.fill_(float("nan"))
        for one in batch:
            end = row + len(one.wide)
            self.wide[row:end, : 3 * self.shape.channels] = one.wide
            snapshots = tuple((position, snapshot.data_ptr()) for position, snapshot in one.snapshots.items())
            segments.append(PlacedStates(row, end, one.past, one.committed, one.states.data_ptr(), snapshots))
            row = end
        assert self.tables.holds(segments)
        self.tables.place(segments)
        self.tape.run()
        return [self.mixed[segment.begin : segment.end].clone() for segment in segments]


Layer = ReferenceLayer | NativeLayer


@cache
def native_layer(shape: ConvShape, isa: Isa) -> NativeLayer:
    return NativeLayer(shape, isa)


def layers(shape: ConvShape) -> list[Layer]:
    return [ReferenceLayer(shape), *(native_layer(shape, isa) for isa in HOST_ISAS)]


class Sequence:
    """A sequence's tokens and its states; each call takes in the tokens up to `end`."""

    def __init__(self, shape: ConvShape, count: int = COUNT, seed: int = 1) -> None:
        self.shape, self.wide = shape, random_wide(shape, count, seed)
        self.states, self.past = torch.zeros(2, shape.state_bytes, dtype=torch.uint8), 0

    @property
    def state(self) -> LayerState[ConvShape]:
        return LayerState(self.shape, self.states[LAYER])

    def rows(self, end: int, snapshots: dict[int, Tensor] | None = None) -> Rows:
        rows = Rows(self.states, self.wide[self.past : end], self.past, end, snapshots or {})
        self.past = end
        return rows

    def drafts(self, count: int) -> Rows:
        """Tokens of which none is accepted."""
        return Rows(self.states, random_wide(self.shape, count, seed=9), self.past, self.past)


def theirs(shape: ConvShape, wide: Tensor, weights: ConvWeights) -> Tensor:
    """As Lfm2ShortConv computes it, in fp64."""
    front, behind, value = wide.double().T[None].chunk(3, dim=-2)
    bias = None if weights.bias is None else weights.bias.double()
    padding, channels = shape.conv_width - 1, shape.channels
    out = functional.conv1d(front * value, weights.taps.T[:, None].double(), bias, padding=padding, groups=channels)
    return (behind * out[..., : len(wide)])[0].T


@pytest.mark.parametrize("has_bias", [True, False])
@every_shape
def test_outputs_are_those_of_transformers(shape: ConvShape, has_bias: bool) -> None:
    expected = theirs(shape, random_wide(shape, COUNT), random_weights(shape, has_bias=has_bias))
    natives = [NativeLayer(shape, isa, has_bias=has_bias) for isa in HOST_ISAS]
    for layer in (ReferenceLayer(shape, has_bias=has_bias), *natives):
        (found,) = layer.run([Sequence(shape).rows(COUNT)])
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@native
@every_shape
def test_the_kernel_has_the_references_bits_and_both_go_on_from_each_others_states(shape: ConvShape) -> None:
    expected, states = ReferenceLayer(shape), Sequence(shape)
    (whole,) = expected.run([states.rows(COUNT)])
    for first in range(2):
        sequence, parts = Sequence(shape), []
        for turn, end in enumerate((1, 2, 40, 44, 60, 61, 95, 96, COUNT)):
            parts += layers(shape)[(first + turn) % 2].run([sequence.rows(end)])
        assert torch.equal(torch.cat(parts), whole)
        rows = [each.state.rows(COUNT - shape.kept_rows, COUNT) for each in (sequence, states)]
        assert torch.equal(*rows) and not sequence.states[1 - LAYER].any()


@every_shape
def test_chunks_drafts_and_snapshots_change_no_bit(shape: ConvShape) -> None:
    """A border that drafts were on both sides of has its snapshot in the next step, an older one in both."""
    for layer in layers(shape):
        (whole,) = layer.run([Sequence(shape).rows(COUNT)])
        sequence, snapshots = Sequence(shape), {at: new_snapshot(shape) for at in (1, 64, 100, 101, 117)}
        parts = layer.run([sequence.rows(100, {at: snapshots[at] for at in (1, 64, 100)})])
        for end in (103, 119, 120, 121):
            layer.run([sequence.drafts(16)])
            due = {at: each for at, each in snapshots.items() if 64 < at <= sequence.past}
            parts += layer.run([sequence.rows(end, due)])
        parts += layer.run([sequence.rows(COUNT)])
        assert torch.equal(torch.cat(parts), whole)
        for position, snapshot in snapshots.items():
            other = Sequence(shape)
            other.past = position
            other.state.read_snapshot(snapshot[LAYER], position)
            assert torch.equal(layer.run([other.rows(COUNT)])[0], whole[position:])
            assert not snapshot[1 - LAYER].any()


@native
@every_shape
def test_each_segment_of_a_batch_has_the_bits_that_it_has_alone(shape: ConvShape) -> None:
    layer = native_layer(shape, HOST_ISAS[0])

    def batches() -> Iterator[list[Rows]]:
        sequences = [Sequence(shape, 60, seed) for seed in range(4)]
        yield [sequence.rows(9 * n + 2) for n, sequence in enumerate(sequences)]
        yield [sequence.rows(sequence.past + n + 1) for n, sequence in enumerate(sequences)]
        taken = {sequences[0].past + 3: new_snapshot(shape)}
        yield [sequences[0].rows(20, taken), sequences[3].rows(34), sequences[1].rows(15)]

    for together, alone in zip(batches(), batches(), strict=True):
        for beside, rows, output in zip(together, alone, layer.run(together), strict=True):
            assert torch.equal(output, layer.run([rows])[0])
            assert torch.equal(beside.states, rows.states)
            assert all(torch.equal(beside.snapshots[at], rows.snapshots[at]) for at in rows.snapshots)
    assert layer.run([]) == []


@native
def test_the_number_of_threads_changes_no_bit() -> None:
    shape, threads, found = SHAPES[2], torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 11):
            torch.set_num_threads(count)
            sequence = Sequence(shape)
            found.append((native_layer(shape, HOST_ISAS[0]).run([sequence.rows(COUNT)])[0], sequence.states))
    finally:
        torch.set_num_threads(threads)
    for outputs, states in found[1:]:
        assert torch.equal(outputs, found[0][0]) and torch.equal(states, found[0][1])


@native
def test_on_every_cpu_the_kernel_calls_nothing() -> None:
    from llvmlite import binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    for isa in (replace(isa, cpu=CPUS[isa.name]) for isa in cpu_isa.ISAS):
        ir = cpu_short_conv.short_conv_source(SHAPES[1], has_bias=True).source()
        try:
            code = cpu_jit.machine_code(ir, isa)
        except RuntimeError as error:  # this llvmlite was built without the Arm target
            assert isa.machine == "aarch64" and "target" in str(error)
            continue
        assert cpu_jit.undefined_symbols(code, ir) == set()
