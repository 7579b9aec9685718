"""The gated delta rule: the reference beside transformers' own, the CPU kernels beside it, and what a state must do."""

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
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from localllm.kernels import cpu_delta, cpu_isa, cpu_jit
from localllm.kernels.cpu_delta import DeltaRoom, Strided
from localllm.kernels.cpu_ir import F32V, Kernel
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_states import PlacedStates, StateTables
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.delta_rule import DeltaWeights, gated_norm, mix
from localllm.kernels.layer_state import LayerState, StateRows
from localllm.kernels.state_shapes import STEP_ROWS, DeltaShape, StatePlace

SHAPES = [
    DeltaShape(2, 4, 32, 16),
    DeltaShape(1, 3, 16, 32, is_tiled=True),
    DeltaShape(3, 3, 8, 24, conv_width=3),
    DeltaShape(2, 2, 24, 10, conv_width=2),
    DeltaShape(2, 4, 24, 10, decays="key"),
    DeltaShape(3, 3, 16, 32, conv_width=3, decays="key"),
]


def random_weights(shape: DeltaShape, seed: int = 0) -> DeltaWeights:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=generator)  # noqa: E731
    return DeltaWeights(
        conv=draw(shape.conv_width, shape.channels) * 0.5,
        a_log=torch.rand(shape.value_heads, generator=generator).mul(16).log(),
        dt_bias=draw(shape.decay_features),
        norm=draw(shape.value_dim),
        gate="silu" if shape.decays == "head" else "sigmoid",
    )


def random_rows(shape: DeltaShape, count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, shape.row_floats, generator=torch.Generator().manual_seed(seed))


def place_of(shape: DeltaShape) -> StatePlace:
    return StatePlace(LAYER * shape.state_bytes, LAYER * shape.snapshot_bytes)


def new_state(shape: DeltaShape) -> LayerState[DeltaShape]:
    return LayerState(shape, torch.zeros(shape.state_bytes, dtype=torch.uint8))


def theirs(shape: DeltaShape, weights: DeltaWeights, raw: Tensor) -> Tensor:
    """transformers' convolution, gates and recurrence. Returns [T, value_heads, value_dim]."""
    channels, taps, heads = shape.channels, shape.conv_width, shape.value_heads
    padded = functional.pad(raw[:, :channels].T[None], (taps - 1, 0))
    convolved = functional.silu(functional.conv1d(padded, weights.conv.T[:, None], groups=channels))[0].T
    keys = shape.key_heads * shape.key_dim
    q, k, v = convolved.split((keys, keys, shape.value_features), dim=-1)
    q, k = (x.view(1, -1, shape.key_heads, shape.key_dim) for x in (q, k))
    own = [h % shape.key_heads if shape.is_tiled else h * shape.key_heads // heads for h in range(heads)]
    steps = functional.softplus(raw[:, channels + heads :] + weights.dt_bias).view(len(raw), heads, -1)
    g = -weights.a_log.exp()[:, None] * steps
    by_key = shape.decays == "key"
    rule = recurrent_kimi_delta_attention if by_key else torch_recurrent_gated_delta_rule
    out, _ = rule(
        q[:, :, own],
        k[:, :, own],
        v.reshape(1, -1, heads, shape.value_dim),
        g=(g if by_key else g[..., 0])[None],
        beta=raw[None, :, channels : channels + heads].sigmoid(),
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=True,
    )
    return out[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_equals_transformers(shape: DeltaShape) -> None:
    weights, raw = random_weights(shape), random_rows(shape, 150)
    found = mix(StateRows(new_state(shape), raw, 0, 150), weights)
    torch.testing.assert_close(found, theirs(shape, weights, raw), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_replays_and_snapshots_change_no_bit(shape: DeltaShape) -> None:
    weights, raw = random_weights(shape), random_rows(shape, 140)
    whole = mix(StateRows(new_state(shape), raw, 0, 140), weights)
    state, snapshot = new_state(shape), torch.empty(shape.snapshot_bytes, dtype=torch.uint8)
    parts = [mix(StateRows(state, raw[:100], 0, 100, {64: snapshot}), weights)]
    for begin, end in ((100, 103), (103, 119), (119, 120), (120, 121)):  # what is not committed is computed again
        wrong = random_rows(shape, 10, seed=9)  # drafts that are rejected
        mix(StateRows(state, wrong, begin, begin), weights)
        parts.append(mix(StateRows(state, raw[begin:end], begin, begin), weights))
    assert state.position == 120
    parts.append(mix(StateRows(state, raw[121:], 121, 140), weights))
    assert torch.equal(torch.cat(parts), whole)
    other = new_state(shape)
    other.read_snapshot(snapshot, 64)
    assert torch.equal(mix(StateRows(other, raw[64:], 64, 140), weights), whole[64:])
    assert torch.equal(other.matrices, state.matrices)


NATIVE_SHAPES = [
    DeltaShape(2, 4, 32, 16),
    DeltaShape(1, 3, 16, 32, is_tiled=True),
    DeltaShape(2, 4, 128, 128),
    DeltaShape(2, 2, 16, 48, conv_width=3),
    DeltaShape(3, 6, 48, 64, conv_width=2, is_tiled=True),
    DeltaShape(3, 3, 32, 16, decays="key"),
    DeltaShape(2, 2, 48, 64, conv_width=2, decays="key"),
]
HOST_ISAS = cpu_isa.host_isas()
native = pytest.mark.skipif(not HOST_ISAS, reason="no CPU kernel runs on this machine")
every_isa = pytest.mark.parametrize("isa", HOST_ISAS, ids=lambda isa: isa.name)
every_native_shape = pytest.mark.parametrize("shape", NATIVE_SHAPES, ids=str)
LAYER = 1  # of two: the other one's state stays as it is
PADDING = 5  # floats behind the rows that a projection writes


@dataclass
class Rows:
    """Some tokens of one sequence: what the projection makes of them, and what is to be done with them."""

    states: Tensor  # uint8 [2, state_bytes]
    raw: Tensor
    z: Tensor
    past: int
    committed: int
    snapshots: dict[int, Tensor] = field(default_factory=dict)  # uint8 [2, snapshot_bytes]


class NativeLayer:
    """The recorded steps of a layer, which compute one batch after the other."""

    def __init__(self, shape: DeltaShape, weights: DeltaWeights, isa: Isa, rows: int = 300, segments: int = 6) -> None:
        self.shape, stride = shape, shape.channels + shape.value_features + PADDING
        self.wide, self.gates = torch.zeros(rows, stride), torch.zeros(rows, shape.row_floats - shape.channels)
        self.mixed = torch.zeros(rows, shape.value_features)
        self.tables = StateTables(rows, segments)
        room, wide, gates = DeltaRoom(shape, self.tables), Strided(self.wide.view(-1), stride), self.gates
        rows = Strided(gates.view(-1), gates.shape[1])
        places = {"gates": rows, "decays": rows.behind(shape.value_heads), "z": wide.behind(shape.channels)}
        self.tape = Tape(room.steps(isa, weights, place_of(shape), wide, mixed=self.mixed, **places))

    def run(self, batch: list[Rows]) -> list[Tensor]:
        """[T, value_features] of each segment."""
        segments, row, channels = [], 0, self.shape.channels
        for one in batch:
            end = row + len(one.raw)
            self.wide[row:end, :channels] = one.raw[:, :channels]
            self.wide[row:end, channels:-PADDING] = one.z
            self.gates[row:end] = one.raw[:, channels:]
            snapshots = tuple((position, snapshot.data_ptr()) for position, snapshot in one.snapshots.items())
            segments.append(PlacedStates(row, end, one.past, one.committed, one.states.data_ptr(), snapshots))
            row = end
        assert self.tables.holds(segments)
        self.tables.place(segments)
        self.mixed.fill_(float("nan"))
        self.tape.run()
        return [self.mixed[segment.begin : segment.end].clone() for segment in segments]


class ReferenceLayer:
    def __init__(self, shape: DeltaShape, weights: DeltaWeights) -> None:
        self.shape, self.weights = shape, weights

    def run(self, batch: list[Rows]) -> list[Tensor]:
        found = []
        for one in batch:
            snapshots = {position: snapshot[LAYER] for position, snapshot in one.snapshots.items()}
            state = LayerState(self.shape, one.states[LAYER])
            mixed = mix(StateRows(state, one.raw, one.past, one.committed, snapshots), self.weights)
            found.append(gated_norm(mixed, one.z.view(mixed.shape), self.weights).flatten(1))
        return found


@cache
def native_layer(shape: DeltaShape, isa: Isa) -> NativeLayer:
    return NativeLayer(shape, random_weights(shape), isa)


def random_z(shape: DeltaShape, count: int, seed: int = 2) -> Tensor:
    return torch.randn(count, shape.value_features, generator=torch.Generator().manual_seed(seed))


def new_states(shape: DeltaShape) -> Tensor:
    return torch.zeros(2, shape.state_bytes, dtype=torch.uint8)


class Sequence:
    """A sequence's tokens and its states; each call takes in the tokens up to `end`."""

    def __init__(self, shape: DeltaShape, count: int = 140, seed: int = 1) -> None:
        self.shape, self.raw, self.z = shape, random_rows(shape, count, seed), random_z(shape, count, seed + 100)
        self.states, self.past = new_states(shape), 0

    @property
    def state(self) -> LayerState[DeltaShape]:
        return LayerState(self.shape, self.states[LAYER])

    def rows(self, end: int, committed: int | None = None, snapshots: dict[int, Tensor] | None = None) -> Rows:
        own = slice(self.past, end)
        committed = end if committed is None else committed
        rows = Rows(self.states, self.raw[own], self.z[own], self.past, committed, snapshots or {})
        self.past = end
        return rows

    def drafts(self, count: int, committed: int | None = None, seed: int = 9) -> Rows:
        """Tokens of which none is accepted."""
        raw, z = random_rows(self.shape, count, seed), random_z(self.shape, count, seed)
        return Rows(self.states, raw, z, self.past, self.past if committed is None else committed)


def whole(layer: NativeLayer, end: int = 140) -> tuple[Tensor, Tensor]:
    """The first tokens of a sequence at once: outputs, and the states behind them."""
    sequence = Sequence(layer.shape)
    return layer.run([sequence.rows(end)])[0], sequence.states


def assert_same_state(shape: DeltaShape, found: Tensor, expected: Tensor) -> None:
    """The same matrices and position, and the same rows before it, to the bit."""
    states = [LayerState(shape, states[LAYER]) for states in (found, expected)]
    assert torch.equal(states[0].matrices, states[1].matrices) and states[0].position == states[1].position
    end = states[0].position
    tails = [state.rows(end - shape.conv_width + 1, end) for state in states]
    assert torch.equal(*tails) and not found[1 - LAYER].any()


@native
@every_isa
@every_native_shape
def test_the_kernels_compute_what_the_reference_does(shape: DeltaShape, isa: Isa) -> None:
    layer, sequence = native_layer(shape, isa), Sequence(shape)
    reference = Sequence(shape)
    snapshots = [{64: new_snapshot(shape), 99: new_snapshot(shape)} for _ in range(2)]
    steps = [(100, None), (103, 100), (119, 103), (120, 119), (140, None)]
    for number, (end, committed) in enumerate(steps):
        taken = snapshots if number == 0 else [{}, {}]
        (found,) = layer.run([sequence.rows(end, committed, taken[0])])
        (expected,) = ReferenceLayer(shape, random_weights(shape)).run([reference.rows(end, committed, taken[1])])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sequence.state.matrices, reference.state.matrices, rtol=1e-5, atol=1e-6)
        assert sequence.state.position == reference.state.position
    matrices = shape.matrix_bytes
    for position in (64, 99):
        found, expected = (taken[position] for taken in snapshots)
        of_states = [taken[LAYER, :matrices].view(torch.float32) for taken in (found, expected)]
        torch.testing.assert_close(*of_states, rtol=1e-5, atol=1e-6)
        assert torch.equal(found[LAYER, matrices:], expected[LAYER, matrices:]) and not found[1 - LAYER].any()


@native
@every_isa
def test_every_instruction_set_gives_the_same_bits(isa: Isa) -> None:
    for shape in NATIVE_SHAPES:
        assert torch.equal(whole(native_layer(shape, isa))[0], whole(native_layer(shape, HOST_ISAS[0]))[0])


@native
@every_native_shape
def test_in_the_kernels_too_chunks_replays_and_snapshots_change_no_bit(shape: DeltaShape) -> None:
    layer = native_layer(shape, HOST_ISAS[0])
    expected, states = whole(layer)
    sequence, snapshots = Sequence(shape), {position: new_snapshot(shape) for position in (1, 64, 100)}
    parts = layer.run([sequence.rows(100, None, snapshots)])
    for end in (103, 119, 120, 121):
        layer.run([sequence.drafts(10)])
        parts += layer.run([sequence.rows(end, sequence.past)])
    assert sequence.state.position == 120
    parts += layer.run([sequence.rows(140)])
    assert torch.equal(torch.cat(parts), expected)
    assert_same_state(shape, sequence.states, states)
    for position, snapshot in snapshots.items():
        other = Sequence(shape)
        other.past = position
        other.state.read_snapshot(snapshot[LAYER], position)
        assert torch.equal(layer.run([other.rows(140)])[0], expected[position:])
        assert_same_state(shape, other.states, states)


@native
@every_native_shape
def test_each_segment_of_a_batch_has_the_bits_that_it_has_alone(shape: DeltaShape) -> None:
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
@pytest.mark.parametrize("shape", NATIVE_SHAPES[1:3], ids=str)
def test_the_number_of_threads_changes_no_bit(shape: DeltaShape) -> None:
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
@every_native_shape
def test_kernels_and_reference_go_on_from_each_others_states(shape: DeltaShape) -> None:
    layers = native_layer(shape, HOST_ISAS[0]), ReferenceLayer(shape, random_weights(shape))
    expected = layers[1].run([Sequence(shape).rows(140)])[0]
    for turn in range(2):
        sequence, parts = Sequence(shape), []
        for end in (40, 44, 52, 53, 54, 90, 94, 95):
            layer = layers[turn % 2]
            turn += 1
            committed = end if end in (40, 90) else sequence.past
            layer.run([sequence.drafts(4)])
            parts += layer.run([sequence.rows(end, committed)])
        torch.testing.assert_close(torch.cat(parts), expected[:95], rtol=1e-5, atol=1e-5)


@native
@settings(max_examples=40)
@given(st.data())
def test_however_tokens_come_their_bits_are_the_same(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([NATIVE_SHAPES[n] for n in (0, 1, 3, 4)]))
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
        states = whole(layer, position)[1]
        assert torch.equal(snapshot[LAYER, : shape.matrix_bytes], states[LAYER, : shape.matrix_bytes])


@native
def test_what_is_not_a_number_reaches_its_row() -> None:
    shape = NATIVE_SHAPES[0]
    layer, (clean, _) = native_layer(shape, HOST_ISAS[0]), whole(native_layer(shape, HOST_ISAS[0]), 40)
    columns = {"query": 0, "key": 64, "value": 128, "b": shape.channels, "a": shape.channels + shape.value_heads}
    for column in columns.values():
        sequence = Sequence(shape)
        sequence.raw[20, column] = float("nan")
        (found,) = layer.run([sequence.rows(40)])
        assert found[20].isnan().any() and torch.equal(found[:20], clean[:20])
    sequence = Sequence(shape)
    sequence.z[20, 3] = float("nan")
    (found,) = layer.run([sequence.rows(40)])
    assert found[20, 3].isnan() and found.isnan().sum() == 1


@native
def test_softplus_is_right_for_small_and_large_numbers() -> None:
    k = Kernel("softplus", "x y | count")
    with k.range(k.i64(0), k.arg.count, 16) as i:
        k.arg.y.at(i * 4).store(cpu_delta.softplus(k, k.arg.x.at(i * 4).load(F32V)))
    x = torch.cat((torch.linspace(-80, 80, 32000), torch.tensor([float("inf"), float("nan"), -1e30, 0.0] * 8)))
    y = torch.empty_like(x)
    Tape([cpu_jit.compile_kernel(k, HOST_ISAS[0]).step(x=x, y=y, count=len(x))]).run()
    expected = functional.softplus(x.double(), threshold=1e9).float()
    torch.testing.assert_close(y, expected, rtol=6e-7, atol=0, equal_nan=True)


@native
def test_a_room_says_what_it_has_no_room_for() -> None:
    room = StateTables(rows=8, segments=2, snapshots=1)
    one = PlacedStates(0, 4, 0, 4, 0)
    assert room.holds([]) and room.holds([one, replace(one, begin=4, end=8, snapshots=((1, 0),))])
    assert not room.holds([one, replace(one, begin=4, end=9)])
    assert not room.holds([one, one, one])
    assert not room.holds([replace(one, snapshots=((1, 0), (2, 0)))])
    assert [shape.fills_vectors for shape in SHAPES] == [True, True, False, False, False, True]


CPUS = {"avx2": "haswell", "avx-vnni": "alderlake", "avx512-vnni": "cascadelake", "neon-dot": "neoverse-n1"}


@native
@pytest.mark.parametrize("shape", NATIVE_SHAPES[1:3], ids=str)
def test_on_every_cpu_the_kernels_call_nothing(shape: DeltaShape) -> None:
    from llvmlite import binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    for isa in (replace(isa, cpu=CPUS[isa.name]) for isa in cpu_isa.ISAS):
        for kernel in (cpu_delta.prepare_source(shape), cpu_delta.delta_source(isa, shape)):
            ir = kernel.source()
            try:
                code = cpu_jit.machine_code(ir, isa)
            except RuntimeError as error:  # this llvmlite was built without the Arm target
                assert isa.machine == "aarch64" and "target" in str(error)
                continue
            assert cpu_jit.undefined_symbols(code, ir) == set()


def new_snapshot(shape: DeltaShape) -> Tensor:
    """Of two layers, as `NativeLayer` writes it."""
    snapshot = torch.zeros(2, shape.snapshot_bytes, dtype=torch.uint8)
    snapshot[LAYER] = 255
    return snapshot
