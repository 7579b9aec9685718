"""The time mix of RWKV-7: chunks, replays and snapshots of the reference, and the CPU kernel beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from localllm.kernels import cpu_isa, cpu_jit, cpu_rwkv
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_layer_norm import layer_norm, layer_norm_source
from localllm.kernels.cpu_linear import float_bits
from localllm.kernels.cpu_rwkv import TimeMixPlaces, time_mix_step
from localllm.kernels.cpu_shift import shift, shift_source
from localllm.kernels.cpu_states import PlacedStates, StateTables
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.layer_state import LayerState, StateRows
from localllm.kernels.rwkv7 import TimeMixWeights, before, gated_values, mix_time
from localllm.kernels.state_shapes import RWKV7_KEPT, RWKV7_PROJECTED, STEP_ROWS, Rwkv7Shape, ShiftShape, StatePlace
from localllm.models.families import parse_config

SHAPES = [Rwkv7Shape(4, 16), Rwkv7Shape(2, 64), Rwkv7Shape(3, 24)]
NATIVE_SHAPES = [Rwkv7Shape(4, 16), Rwkv7Shape(3, 64), Rwkv7Shape(2, 48), Rwkv7Shape(1, 128)]
HOST_ISAS = cpu_isa.host_isas()
native = pytest.mark.skipif(not HOST_ISAS, reason="no CPU kernel runs on this machine")
every_isa = pytest.mark.parametrize("isa", HOST_ISAS, ids=lambda isa: isa.name)
every_native_shape = pytest.mark.parametrize("shape", NATIVE_SHAPES, ids=str)
LAYER = 1  # of two: the other one's state stays as it is
PADDING = 5  # floats behind the rows that products write


def random_weights(shape: Rwkv7Shape, seed: int = 0) -> TimeMixWeights:
    generator, size = torch.Generator().manual_seed(seed), shape.features
    draw = lambda: torch.randn(size, generator=generator)  # noqa: E731
    removal_key, rate_key, norm = (1 + 0.3 * draw() for _ in range(3))
    bonus, eps = draw() * 0.3, 1e-5 * shape.head_dim
    return TimeMixWeights(torch.rand(6, size), removal_key, rate_key, bonus, norm, draw(), eps)


def random_rows(shape: Rwkv7Shape, count: int, seed: int = 1) -> Tensor:
    """RWKV7_PROJECTED of each token."""
    size = len(RWKV7_PROJECTED) * shape.features
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


def new_state(shape: Rwkv7Shape) -> LayerState[Rwkv7Shape]:
    return LayerState(shape, torch.zeros(shape.state_bytes, dtype=torch.uint8))


def new_snapshot(shape: Rwkv7Shape) -> Tensor:
    """Of two layers, as a kernel writes it."""
    snapshot = torch.zeros(2, shape.snapshot_bytes, dtype=torch.uint8)
    snapshot[LAYER] = 255
    return snapshot


def kept(shape: Rwkv7Shape, rows: Tensor) -> Tensor:
    return rows[:, : shape.row_floats]


def columns(shape: Rwkv7Shape, rows: Tensor, name: str) -> Tensor:
    begin = RWKV7_PROJECTED.index(name) * shape.features
    return rows[:, begin : begin + shape.features]


def mixed(shape: Rwkv7Shape, rows: StateRows[Rwkv7Shape], whole: Tensor, weights: TimeMixWeights) -> Tensor:
    return mix_time(rows, columns(shape, whole, "r"), columns(shape, whole, "g"), weights)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_replays_and_snapshots_change_no_bit(shape: Rwkv7Shape) -> None:
    weights, raw = random_weights(shape), random_rows(shape, 140)

    def run(state: LayerState[Rwkv7Shape], begin: int, end: int, committed: int, taken: dict[int, Tensor]) -> Tensor:
        own = raw[begin:end]
        return mixed(shape, StateRows(state, kept(shape, own), begin, committed, taken), own, weights)

    whole = run(new_state(shape), 0, 140, 140, {})
    state, snapshot = new_state(shape), torch.empty(shape.snapshot_bytes, dtype=torch.uint8)
    parts = [run(state, 0, 100, 100, {64: snapshot})]
    for begin, end in ((100, 103), (103, 119), (119, 120), (120, 121)):  # what is not committed is computed again
        wrong = random_rows(shape, 10, seed=9)  # drafts that are rejected
        mixed(shape, StateRows(state, kept(shape, wrong), begin, begin), wrong, weights)
        parts.append(run(state, begin, end, begin, {}))
    assert state.position == 120
    parts.append(run(state, 121, 140, 140, {}))
    assert torch.equal(torch.cat(parts), whole)
    other = new_state(shape)
    other.read_snapshot(snapshot, 64)
    assert torch.equal(run(other, 64, 140, 140, {}), whole[64:])
    assert torch.equal(other.matrices, state.matrices)


def test_a_channel_mix_sees_the_token_before_it_whatever_was_rejected() -> None:
    shape = ShiftShape(24)
    x = torch.randn(100, 24)
    state = LayerState(shape, torch.zeros(shape.state_bytes, dtype=torch.uint8))
    snapshot = torch.empty(shape.snapshot_bytes, dtype=torch.uint8)
    expected = torch.cat((torch.zeros(1, 24), x[:-1]))
    for begin, end in ((0, 70), (70, 75), (75, 76), (76, 92), (92, 100)):
        StateRows(state, torch.randn(16, 24), begin, begin).keep()
        assert torch.equal(before(state, x[begin:end], begin), expected[begin:end])
        committed = end if end - begin > STEP_ROWS else begin
        StateRows(state, x[begin:end], begin, committed, {64: snapshot} if begin == 0 else {}).keep()
    state.read_snapshot(snapshot, 64)
    assert torch.equal(before(state, x[64:], 64), expected[64:])


@dataclass
class Rows:
    """Some tokens of one sequence, and what is to be done with them."""

    states: Tensor  # uint8 [2, state_bytes]
    raw: Tensor
    first: Tensor
    past: int
    committed: int
    snapshots: dict[int, Tensor] = field(default_factory=dict)  # uint8 [2, snapshot_bytes]


class NativeLayer:
    """The recorded step of a layer, which computes one batch after the other."""

    def __init__(self, shape: Rwkv7Shape, isa: Isa, *, is_first: bool, rows: int = 300, segments: int = 6) -> None:
        self.shape, stride = shape, len(RWKV7_PROJECTED) * shape.features + PADDING
        self.wide, self.first = torch.zeros(rows, stride), torch.zeros(rows, shape.features)
        self.mixed = torch.zeros(rows, shape.features)
        self.tables = StateTables(rows, segments)
        place = StatePlace(LAYER * shape.state_bytes, LAYER * shape.snapshot_bytes)
        places = TimeMixPlaces(self.wide, stride, self.first, self.mixed)
        weights = random_weights(shape)
        step = time_mix_step(isa, shape, weights, self.tables, place, places, is_first=is_first)
        self.tape = Tape([step])

    def run(self, batch: list[Rows]) -> list[Tensor]:
        """[T, features] of each segment."""
        segments, row = [], 0
        for one in batch:
            end = row + len(one.raw)
            self.wide[row:end, :-PADDING], self.first[row:end] = one.raw, one.first
            snapshots = tuple((position, snapshot.data_ptr()) for position, snapshot in one.snapshots.items())
            segments.append(PlacedStates(row, end, one.past, one.committed, one.states.data_ptr(), snapshots))
            row = end
        assert self.tables.holds(segments)
        self.tables.place(segments)
        self.mixed.fill_(float("nan"))
        self.tape.run()
        return [self.mixed[segment.begin : segment.end].clone() for segment in segments]


class ReferenceLayer:
    def __init__(self, shape: Rwkv7Shape, *, is_first: bool) -> None:
        self.shape, self.weights, self.is_first = shape, random_weights(shape), is_first

    def run(self, batch: list[Rows]) -> list[Tensor]:
        found = []
        for one in batch:
            raw, v = one.raw.clone(), columns(self.shape, one.raw, "v")
            if not self.is_first:
                columns(self.shape, raw, "v")[:] = gated_values(v, columns(self.shape, raw, "value_gate"), one.first)
            snapshots = {position: snapshot[LAYER] for position, snapshot in one.snapshots.items()}
            state = LayerState(self.shape, one.states[LAYER])
            rows = StateRows(state, kept(self.shape, raw), one.past, one.committed, snapshots)
            found.append(mixed(self.shape, rows, raw, self.weights))
        return found


@cache
def native_layer(shape: Rwkv7Shape, isa: Isa, *, is_first: bool = False) -> NativeLayer:
    return NativeLayer(shape, isa, is_first=is_first)


class Sequence:
    """A sequence's tokens and its states; each call takes in the tokens up to `end`."""

    def __init__(self, shape: Rwkv7Shape, count: int = 140, seed: int = 1) -> None:
        self.shape, self.raw = shape, random_rows(shape, count, seed)
        self.first = torch.randn(count, shape.features, generator=torch.Generator().manual_seed(seed + 100))
        self.states, self.past = torch.zeros(2, shape.state_bytes, dtype=torch.uint8), 0

    @property
    def state(self) -> LayerState[Rwkv7Shape]:
        return LayerState(self.shape, self.states[LAYER])

    def rows(self, end: int, committed: int | None = None, snapshots: dict[int, Tensor] | None = None) -> Rows:
        own = slice(self.past, end)
        committed = end if committed is None else committed
        rows = Rows(self.states, self.raw[own], self.first[own], self.past, committed, snapshots or {})
        self.past = end
        return rows

    def drafts(self, count: int, committed: int | None = None) -> Rows:
        """Tokens of which none is accepted."""
        raw = random_rows(self.shape, count, 9)
        committed = self.past if committed is None else committed
        return Rows(self.states, raw, raw[:, : self.shape.features], self.past, committed)


def whole(layer: NativeLayer, end: int = 140) -> tuple[Tensor, Tensor]:
    """The first tokens of a sequence at once: outputs, and the states behind them."""
    sequence = Sequence(layer.shape)
    return layer.run([sequence.rows(end)])[0], sequence.states


def assert_same_state(shape: Rwkv7Shape, found: Tensor, expected: Tensor) -> None:
    """The same matrices and position, and the same row before it, to the bit."""
    states = [LayerState(shape, states[LAYER]) for states in (found, expected)]
    assert torch.equal(states[0].matrices, states[1].matrices) and states[0].position == states[1].position
    end = states[0].position
    assert torch.equal(*(state.rows(end - 1, end) for state in states)) and not found[1 - LAYER].any()


@native
@every_isa
@every_native_shape
@pytest.mark.parametrize("is_first", [False, True])
def test_the_kernel_computes_what_the_reference_does(shape: Rwkv7Shape, isa: Isa, is_first: bool) -> None:
    layer, sequence = native_layer(shape, isa, is_first=is_first), Sequence(shape)
    peer, reference = ReferenceLayer(shape, is_first=is_first), Sequence(shape)
    snapshots = [{64: new_snapshot(shape), 99: new_snapshot(shape)} for _ in range(2)]
    steps = [(100, None), (103, 100), (119, 103), (120, 119), (140, None)]
    for number, (end, committed) in enumerate(steps):
        taken = snapshots if number == 0 else [{}, {}]
        past = sequence.past
        (found,) = layer.run([sequence.rows(end, committed, taken[0])])
        (expected,) = peer.run([reference.rows(end, committed, taken[1])])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(sequence.state.matrices, reference.state.matrices, rtol=1e-4, atol=1e-5)
        assert sequence.state.position == reference.state.position
        if is_first:
            assert torch.equal(layer.first[: end - past], columns(shape, sequence.raw[past:end], "v"))
    matrices = shape.matrix_bytes
    for position in (64, 99):
        found, expected = (taken[position] for taken in snapshots)
        of_states = [taken[LAYER, :matrices].view(torch.float32) for taken in (found, expected)]
        torch.testing.assert_close(*of_states, rtol=1e-4, atol=1e-5)
        tails = [taken[LAYER, matrices : matrices + 4 * shape.row_floats] for taken in (found, expected)]
        torch.testing.assert_close(*(tail.view(torch.float32) for tail in tails), rtol=1e-6, atol=1e-6)
        assert not found[1 - LAYER].any()


@native
def test_a_later_batch_of_a_forward_leaves_a_snapshot_as_it_is() -> None:
    shape = NATIVE_SHAPES[0]
    for layer in (native_layer(shape, HOST_ISAS[0]), ReferenceLayer(shape, is_first=False)):
        sequence, snapshot = Sequence(shape), new_snapshot(shape)
        layer.run([sequence.rows(90, snapshots={64: snapshot})])
        taken = snapshot.clone()
        layer.run([sequence.rows(130, snapshots={64: snapshot})])
        assert torch.equal(snapshot, taken)


@native
@every_isa
def test_every_instruction_set_gives_the_same_bits(isa: Isa) -> None:
    for shape in NATIVE_SHAPES:
        assert torch.equal(whole(native_layer(shape, isa))[0], whole(native_layer(shape, HOST_ISAS[0]))[0])


@native
@every_native_shape
def test_each_segment_of_a_batch_has_the_bits_that_it_has_alone(shape: Rwkv7Shape) -> None:
    layer = native_layer(shape, HOST_ISAS[0])

    def batches() -> Iterator[list[tuple[int, Rows]]]:
        sequences = [Sequence(shape, 60, seed) for seed in range(4)]
        yield [(n, sequence.rows(9 * n + 2)) for n, sequence in enumerate(sequences)]
        yield [(n, sequence.rows(sequence.past + n + 1, sequence.past)) for n, sequence in enumerate(sequences)]
        taken = {sequences[0].past + 3: new_snapshot(shape)}
        yield [(0, sequences[0].rows(20, None, taken)), (3, sequences[3].rows(34, 33)), (1, sequences[1].rows(15, 13))]

    for together, alone in zip(batches(), batches(), strict=True):
        found = layer.run([rows for _, rows in together])
        for (_, beside), (_, rows), output in zip(together, alone, found, strict=True):
            assert torch.equal(output, layer.run([rows])[0])
            assert torch.equal(beside.states, rows.states)
            assert all(torch.equal(beside.snapshots[position], rows.snapshots[position]) for position in rows.snapshots)
    assert layer.run([]) == []


@native
@pytest.mark.parametrize("shape", NATIVE_SHAPES[:2], ids=str)
def test_the_number_of_threads_changes_no_bit(shape: Rwkv7Shape) -> None:
    layer, threads, found = native_layer(shape, HOST_ISAS[0]), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(whole(layer))
    finally:
        torch.set_num_threads(threads)
    for outputs, states in found[1:]:
        assert torch.equal(outputs, found[0][0]) and torch.equal(states, found[0][1])


@native
@settings(max_examples=40)
@given(st.data())
def test_however_tokens_come_their_bits_are_the_same(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from(NATIVE_SHAPES[:3]))
    layer = native_layer(shape, HOST_ISAS[0])
    expected, _ = whole(layer)
    sequence, accepted, taken = Sequence(shape), 0, {}
    while sequence.past < 140:
        past = sequence.past
        if data.draw(st.booleans()):
            end = data.draw(st.integers(past + 1, 140))
            wanted = data.draw(st.sets(st.integers(past + 1, end), max_size=3))
            snapshots = {position: new_snapshot(shape) for position in wanted}
            taken |= snapshots
            rows, accepted = sequence.rows(end, None, snapshots), end
        else:
            if data.draw(st.booleans()):
                layer.run([sequence.drafts(data.draw(st.integers(1, STEP_ROWS - past + accepted)), accepted)])
            end = data.draw(st.integers(past + 1, min(140, accepted + STEP_ROWS)))
            rows = sequence.rows(end, accepted)
            if end == accepted + STEP_ROWS or data.draw(st.booleans()):
                accepted = end  # else the next rows are of the same forward
        assert torch.equal(layer.run([rows])[0], expected[past:end])
    for position, snapshot in taken.items():
        other, states = Sequence(shape), whole(layer, position)[1]
        other.past = position
        other.state.read_snapshot(snapshot[LAYER], position)
        assert_same_state(shape, other.states, states)


@native
def test_what_is_not_a_number_reaches_its_row() -> None:
    shape = NATIVE_SHAPES[0]
    layer, (clean, _) = native_layer(shape, HOST_ISAS[0]), whole(native_layer(shape, HOST_ISAS[0]), 40)
    for name in (*RWKV7_KEPT[1:], "r", "g", "value_gate"):
        sequence = Sequence(shape)
        columns(shape, sequence.raw, name)[20, 3] = float("nan")
        (found,) = layer.run([sequence.rows(40)])
        assert found[20].isnan().any() and torch.equal(found[:20], clean[:20])


CPUS = {"avx2": "haswell", "avx-vnni": "alderlake", "avx512-vnni": "cascadelake", "neon-dot": "neoverse-n1"}


@native
def test_on_every_cpu_the_kernels_call_nothing() -> None:
    from llvmlite import binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    for isa in (replace(isa, cpu=CPUS[isa.name]) for isa in cpu_isa.ISAS):
        kernels = (
            cpu_rwkv.time_mix_source(NATIVE_SHAPES[1], is_first=False),
            shift_source(NATIVE_SHAPES[1], 192, 6, keeps=False),
            shift_source(ShiftShape(192), 192, 1, keeps=True),
            layer_norm_source(has_bias=True),
        )
        for ir in (kernel.source() for kernel in kernels):
            try:
                code = cpu_jit.machine_code(ir, isa)
            except RuntimeError as error:  # this llvmlite was built without the Arm target
                assert isa.machine == "aarch64" and "target" in str(error)
                continue
            assert cpu_jit.undefined_symbols(code, ir) == set()


@native
@every_isa
@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norms_are_those_of_torch(isa: Isa, has_bias: bool) -> None:
    x, weight, bias = torch.randn(5, 48) + 3, torch.randn(48), torch.randn(48)
    y, shape = torch.full((5, 48), float("nan")), torch.tensor([5])
    native = layer_norm(isa, has_bias=has_bias)
    Tape([native.step(x=x, weight=weight, bias=bias, y=y, shape=shape, features=48, eps=float_bits(1e-5))]).run()
    expected = functional.layer_norm(x, (48,), weight, bias if has_bias else None, eps=1e-5)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


@native
@every_isa
def test_a_shift_reads_the_token_before_and_keeps_what_a_channel_mix_does(isa: Isa) -> None:
    shape, rows = ShiftShape(48), 100
    x, mixes, y = torch.randn(rows, 48), torch.rand(1, 48), torch.zeros(rows, 48)
    tables = StateTables(rows, 1)
    place = StatePlace(LAYER * shape.state_bytes, LAYER * shape.snapshot_bytes)
    states = [torch.zeros(2, shape.state_bytes, dtype=torch.uint8) for _ in range(2)]
    snapshots = [torch.zeros(2, shape.snapshot_bytes, dtype=torch.uint8) for _ in range(2)]
    expected = x + mixes * (torch.cat((torch.zeros(1, 48), x[:-1])) - x)
    for begin, end in ((0, 84), (84, 89), (89, 90), (90, 99), (99, 100)):
        committed = end if end - begin > STEP_ROWS else begin
        source, due = x[begin:end].contiguous(), ((64, snapshots[0].data_ptr()),)
        tables.place([PlacedStates(0, end - begin, begin, committed, states[0].data_ptr(), due)])
        words = {"plane": 0, "stride": 0, "state": place.state, "snapshot": place.snapshot, **tables.words}
        Tape([shift(isa, shape, 48, 1, keeps=True).step(x=source, mixes=mixes, y=y, kept=0, **words)]).run()
        torch.testing.assert_close(y[: end - begin], expected[begin:end], rtol=1e-6, atol=1e-6)
        state = LayerState(shape, states[1][LAYER])
        StateRows(state, source, begin, committed, {64: snapshots[1][LAYER]}).keep()
    assert torch.equal(snapshots[0], snapshots[1])
    assert torch.equal(*(LayerState(shape, each[LAYER]).rows(84, 100) for each in states)) and not states[0][0].any()


def test_a_text_ends_at_id_0_whatever_else_the_file_names() -> None:
    sizes = {"model_type": "rwkv7", "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    for named, expected in (({}, (2, 0)), ({"eos_token_id": 0}, (0,)), ({"eos_token_id": [261, 0]}, (261, 0))):
        assert parse_config(sizes | named, "config.json").eos_token_ids == expected
