"""Mamba 2's rule: the reference beside transformers' own, the CPU kernels beside it, and what a state must do."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated, mamba2_selective_state_update

from localllm.kernels import cpu_isa
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_mamba2 import Mamba2Room
from localllm.kernels.cpu_states import PlacedStates, StateTables
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.layer_state import LayerState, StateRows
from localllm.kernels.mamba2_rule import Mamba2Weights, gated_norm, mix
from localllm.kernels.state_shapes import Mamba2Shape, StatePlace

SHAPES = [Mamba2Shape(4, 16, 2, 32), Mamba2Shape(3, 10, 1, 12, conv_width=3), Mamba2Shape(6, 24, 3, 16, conv_width=2)]
NATIVE_SHAPES = [
    Mamba2Shape(4, 16, 2, 32),
    Mamba2Shape(3, 48, 1, 16, conv_width=3),
    Mamba2Shape(8, 64, 1, 128),
    Mamba2Shape(6, 32, 3, 48, conv_width=2),
]
HOST_ISAS = cpu_isa.host_isas()
native = pytest.mark.skipif(not HOST_ISAS, reason="no CPU kernel runs on this machine")
LAYER = 1  # of two: the other one's state stays as it is
PADDING = 5  # floats behind the rows that a projection writes


def random_weights(shape: Mamba2Shape, seed: int = 0) -> Mamba2Weights:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=generator)  # noqa: E731
    return Mamba2Weights(
        conv=draw(shape.conv_width, shape.channels) * 0.5,
        conv_bias=draw(shape.channels) * 0.3,
        a_log=torch.rand(shape.num_heads, generator=generator).mul(16).log(),
        dt_bias=draw(shape.num_heads),
        d=draw(shape.num_heads),
        norm=draw(shape.features),
    )


def random_rows(shape: Mamba2Shape, count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, shape.row_floats, generator=torch.Generator().manual_seed(seed))


def theirs(shape: Mamba2Shape, weights: Mamba2Weights, raw: Tensor) -> Tensor:
    """transformers' convolution and recurrence, token by token. Returns [T, features]."""
    channels, taps, heads = shape.channels, shape.conv_width, shape.num_heads
    padded = functional.pad(raw[:, :channels].T[None], (taps - 1, 0))
    bias = weights.conv_bias
    convolved = functional.silu(functional.conv1d(padded, weights.conv.T[:, None], bias, groups=channels))[0].T
    groups = shape.num_groups * shape.state_size
    x, b, c = convolved.split((shape.features, groups, groups), dim=-1)
    state, parts = torch.zeros(1, heads, shape.head_dim, shape.state_size), []
    over_features = lambda values: values[:, None].expand(-1, shape.head_dim)  # noqa: E731
    for i in range(len(raw)):
        parts.append(
            mamba2_selective_state_update(
                state,
                x[i].view(1, heads, shape.head_dim),
                over_features(raw[i, channels:])[None],
                over_features(-weights.a_log.exp())[:, :, None].expand(-1, -1, shape.state_size),
                b[i].view(1, shape.num_groups, -1),
                c[i].view(1, shape.num_groups, -1),
                over_features(weights.d),
                dt_bias=over_features(weights.dt_bias),
                dt_softplus=True,
            )
        )
    return torch.cat(parts).flatten(1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_equals_transformers(shape: Mamba2Shape) -> None:
    weights, raw = random_weights(shape), random_rows(shape, 90)
    state = LayerState(shape, torch.zeros(shape.state_bytes, dtype=torch.uint8))
    found = mix(StateRows(state, raw, 0, 90), weights).flatten(1)
    torch.testing.assert_close(found, theirs(shape, weights, raw), rtol=1e-4, atol=1e-4)
    z = torch.randn(90, shape.features, generator=torch.Generator().manual_seed(5))
    norm = MambaRMSNormGated(shape.features, shape.features // shape.num_groups, weights.eps)
    norm.weight.data = weights.norm
    torch.testing.assert_close(gated_norm(found, z, weights, shape.num_groups), norm(found, z), rtol=1e-5, atol=1e-5)


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

    def __init__(self, shape: Mamba2Shape, weights: Mamba2Weights, isa: Isa) -> None:
        self.shape, stride = shape, shape.features + shape.channels + PADDING
        self.wide, self.steps = torch.zeros(300, stride), torch.zeros(300, shape.num_heads)
        self.mixed, self.num_rows = torch.zeros(300, shape.features), torch.zeros(1, dtype=torch.int64)
        self.tables = StateTables(300, 6)
        place = StatePlace(LAYER * shape.state_bytes, LAYER * shape.snapshot_bytes)
        places = {"wide": self.wide, "steps": self.steps, "mixed": self.mixed, "num_rows": self.num_rows}
        self.tape = Tape(Mamba2Room(shape, self.tables).steps(isa, weights, place, stride=stride, **places))

    def run(self, batch: list[Rows]) -> list[Tensor]:
        """[T, features] of each segment."""
        segments, row, shape = [], 0, self.shape
        for one in batch:
            end = row + len(one.raw)
            self.wide[row:end, : shape.features] = one.z
            self.wide[row:end, shape.features : -PADDING] = one.raw[:, : shape.channels]
            self.steps[row:end] = one.raw[:, shape.channels :]
            snapshots = tuple((position, snapshot.data_ptr()) for position, snapshot in one.snapshots.items())
            segments.append(PlacedStates(row, end, one.past, one.committed, one.states.data_ptr(), snapshots))
            row = end
        self.tables.place(segments)
        self.num_rows[0] = row
        self.mixed.fill_(float("nan"))
        self.tape.run()
        return [self.mixed[segment.begin : segment.end].clone() for segment in segments]


class ReferenceLayer:
    def __init__(self, shape: Mamba2Shape, weights: Mamba2Weights) -> None:
        self.shape, self.weights = shape, weights

    def run(self, batch: list[Rows]) -> list[Tensor]:
        found = []
        for one in batch:
            snapshots = {position: snapshot[LAYER] for position, snapshot in one.snapshots.items()}
            state = LayerState(self.shape, one.states[LAYER])
            mixed = mix(StateRows(state, one.raw, one.past, one.committed, snapshots), self.weights)
            found.append(gated_norm(mixed.flatten(1), one.z, self.weights, self.shape.num_groups))
        return found


@cache
def native_layer(shape: Mamba2Shape, isa: Isa) -> NativeLayer:
    return NativeLayer(shape, random_weights(shape), isa)


class Sequence:
    """A sequence's tokens and its states; each call takes in the tokens up to `end`."""

    def __init__(self, shape: Mamba2Shape, count: int = 140, seed: int = 1) -> None:
        self.shape, self.raw, self.past = shape, random_rows(shape, count, seed), 0
        self.z = torch.randn(count, shape.features, generator=torch.Generator().manual_seed(seed + 100))
        self.states = torch.zeros(2, shape.state_bytes, dtype=torch.uint8)

    @property
    def state(self) -> LayerState[Mamba2Shape]:
        return LayerState(self.shape, self.states[LAYER])

    def rows(self, end: int, committed: int | None = None, snapshots: dict[int, Tensor] | None = None) -> Rows:
        own, past, self.past = slice(self.past, end), self.past, end
        committed = end if committed is None else committed
        return Rows(self.states, self.raw[own], self.z[own], past, committed, snapshots or {})

    def drafts(self, count: int) -> Rows:
        """Tokens of which none is accepted."""
        raw = random_rows(self.shape, count, seed=9)
        return Rows(self.states, raw, torch.ones(count, self.shape.features), self.past, self.past)


def new_snapshot(shape: Mamba2Shape) -> Tensor:
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


@native
@pytest.mark.parametrize("isa", HOST_ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("shape", NATIVE_SHAPES, ids=str)
def test_the_kernels_compute_what_the_reference_does(shape: Mamba2Shape, isa: Isa) -> None:
    sequences = [Sequence(shape) for _ in range(2)]
    snapshots = [{64: new_snapshot(shape), 99: new_snapshot(shape)} for _ in sequences]
    both = native_layer(shape, isa), ReferenceLayer(shape, random_weights(shape))
    for end, committed in [(100, None), (103, 100), (119, 103), (120, 119), (140, None)]:
        pairs = zip(both, sequences, snapshots, strict=True)
        taken = [layer.run([one.rows(end, committed, due if end == 100 else {})]) for layer, one, due in pairs]
        torch.testing.assert_close(*(each[0] for each in taken), rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(*(one.state.matrices for one in sequences), rtol=1e-5, atol=1e-6)
    for position in (64, 99):
        found = [taken[position][LAYER, : shape.matrix_bytes].view(torch.float32) for taken in snapshots]
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
        tails = [taken[position][LAYER, shape.matrix_bytes :] for taken in snapshots]
        assert torch.equal(*tails)


VARIANTS = {
    "without a norm": {"norm": None, "norm_is_gated": False},
    "norm before the gate": {"norm_is_gated": False},
}


@native
@pytest.mark.parametrize("variant", VARIANTS)
def test_kernels_know_what_families_differ_in(variant: str) -> None:
    shape = NATIVE_SHAPES[0]
    weights = replace(random_weights(shape), **VARIANTS[variant])
    (found,) = NativeLayer(shape, weights, HOST_ISAS[0]).run([Sequence(shape).rows(70)])
    (expected,) = ReferenceLayer(shape, weights).run([Sequence(shape).rows(70)])
    (usual,) = ReferenceLayer(shape, random_weights(shape)).run([Sequence(shape).rows(70)])
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    assert not torch.allclose(found, usual, atol=1e-3)


def looped(weights: Mamba2Weights, one: Sequence) -> tuple[Tensor, Tensor]:
    """All tokens of a sequence in fp64, one after the other, each head by itself; a step is bounded behind its
    softplus. Returns what comes out, [T, features], and the states, [heads, state_size, head_dim]."""
    shape, raw, z = one.shape, one.raw.double(), one.z.double()
    taps, groups = shape.conv_width, shape.num_groups
    a_log, bias, d = (values.tolist() for values in (weights.a_log, weights.dt_bias, weights.d))
    seen = functional.pad(raw[:, : shape.channels], (0, 0, taps - 1, 0))
    states, out = torch.zeros(shape.num_heads, shape.state_size, shape.head_dim, dtype=torch.float64), []
    for t in range(len(raw)):
        row = functional.silu((seen[t : t + taps] * weights.conv).sum(0) + weights.conv_bias)
        x, b, c = row.split([shape.features, *[groups * shape.state_size] * 2])
        for head in range(shape.num_heads):
            own = slice(head * shape.head_dim, (head + 1) * shape.head_dim)
            group = head // (shape.num_heads // groups)
            part = slice(group * shape.state_size, (group + 1) * shape.state_size)
            step = math.log1p(math.exp(raw[t, shape.channels + head].item() + bias[head]))
            step = min(max(step, weights.least_step), weights.most_step)
            states[head] *= math.exp(-math.exp(a_log[head]) * step)
            states[head] += torch.outer(b[part], step * x[own])
            out.append(c[part] @ states[head] + d[head] * x[own])
    gated = torch.cat(out).view(len(raw), groups, -1) * functional.silu(z).view(len(raw), groups, -1)
    means = gated.square().mean(-1, keepdim=True)
    return (gated / (means + weights.eps).sqrt()).flatten(1) * weights.norm, states


BOUNDS = {"on both sides": (0.5, 1.2), "from below": (0.9, math.inf), "from above": (0.0, 0.4), "one": (0.7, 0.7)}
LAYERS = {"operators": ReferenceLayer} | {
    isa.name: lambda shape, weights, isa=isa: NativeLayer(shape, weights, isa) for isa in HOST_ISAS
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_bounded_steps_are_those_of_a_plain_loop_in_a_prompt_and_one_by_one(make, bounds) -> None:
    for shape in NATIVE_SHAPES[:2]:
        weights = replace(random_weights(shape), least_step=bounds[0], most_step=bounds[1])
        one, layer = Sequence(shape, 40), make(shape, weights)
        expected, states = looped(weights, one)
        steps = functional.softplus(one.raw[:, shape.channels :] + weights.dt_bias)
        assert (steps < bounds[0]).any() or (steps > bounds[1]).any()
        found = [layer.run([one.rows(end)])[0] for end in (23, *range(24, 41))]
        torch.testing.assert_close(torch.cat(found).double(), expected, rtol=2e-5, atol=2e-5)
        lanes = one.state.matrices.view(shape.num_heads, -1, shape.state_size, shape.lanes)
        torch.testing.assert_close(lanes.transpose(1, 2).flatten(2).double(), states, rtol=1e-5, atol=1e-5)


@native
@pytest.mark.parametrize("shape", NATIVE_SHAPES, ids=str)
def test_each_segment_of_a_batch_has_the_bits_that_it_has_alone_on_any_threads(shape: Mamba2Shape) -> None:
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
