"""RWKV-7 by the GPU's kernels, in Triton's interpreter, beside the reference: outputs, states, snapshots."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from localllm.engine.kernel_check import scope_of
from localllm.kernels.gpu import check, check_rwkv, rwkv
from localllm.kernels.gpu.activations import Codes, to_codes
from localllm.kernels.gpu.check_case import Case
from localllm.kernels.gpu.launch import run_all
from localllm.kernels.gpu.layer_norm import layer_norm
from localllm.kernels.gpu.recurrence import SegmentTables
from localllm.kernels.gpu.shift import shift
from localllm.kernels.layer_state import LayerState, StateRows
from localllm.kernels.rwkv7 import before, shifted
from localllm.kernels.sizes import Weights
from localllm.kernels.state_shapes import (
    REPLAYED_ROWS,
    RWKV7_PROJECTED,
    STEP_ROWS,
    Rwkv7Shape,
    ShiftShape,
    StatePlace,
    StateShape,
)
from localllm.models.families import load_config
from localllm.quant.recipe import RECIPES
from tests.checkpoints import write_checkpoint
from tests.gpu.wrong_kernels import write_zeros
from tests.test_rwkv7 import LAYER, ReferenceLayer, Rows, Sequence, columns, new_snapshot, random_weights
from tests.thinning import every_other

SHAPES = [Rwkv7Shape(2, 16), Rwkv7Shape(1, 64), Rwkv7Shape(1, 48)]
every_shape = pytest.mark.parametrize("shape", every_other(SHAPES), ids=str)
COUNT = 45


def place_of(shape: StateShape) -> StatePlace:
    return StatePlace(LAYER * shape.state_bytes, LAYER * shape.snapshot_bytes)


class GpuLayer:
    def __init__(self, shape: Rwkv7Shape, *, is_first: bool = False) -> None:
        self.shape, self.is_first, self.weights = shape, is_first, random_weights(shape)

    def run(self, batch: list[Rows], padding: int = 0, nobodys: int = 0, codes: Codes | None = None) -> list[Tensor]:
        """[T, features] of each segment. padding: rows, nobodys: segments that are nobody's."""
        shape, T = self.shape, sum(len(one.raw) for one in batch)
        whole = torch.full((T + padding, len(RWKV7_PROJECTED) * shape.features), torch.nan)
        first, out = (torch.full((T + padding, shape.features), torch.nan) for _ in range(2))
        words, snapshots, row = [], [], 0
        for index, one in enumerate(batch):
            end = row + len(one.raw)
            whole[row:end] = one.raw
            if not self.is_first:
                first[row:end] = one.first
            due = torch.tensor([(at, one.snapshots[at].data_ptr()) for at in sorted(one.snapshots)])
            snapshots.append(due)
            made, states = (index + 1) * REPLAYED_ROWS + row, one.states.data_ptr()
            words.append((row, end, one.past, one.committed, states, made, due.data_ptr(), len(due)))
            row = end
        parts = {name: columns(shape, whole, name).contiguous() for name in RWKV7_PROJECTED}
        projected = rwkv.Projected(**parts)
        projected = projected._replace(value_gate=None) if self.is_first else projected
        positions = torch.tensor([0] * T + [-1] * padding, dtype=torch.int32)
        tables = SegmentTables(torch.tensor(words + [(0,) * 8] * nobodys), positions)
        into = out if codes is None else codes
        run_all(rwkv.mix_time(projected, first, into, tables, self.weights, shape, place_of(shape)))
        assert out[T:].isnan().all() and (not self.is_first or torch.equal(first[:T], projected.v[:T]))
        return [out[begin:end] for begin, end, *_ in words]


@every_shape
@pytest.mark.parametrize("is_first", every_other([False, True]))
def test_outputs_states_and_snapshots_are_those_of_the_reference(shape: Rwkv7Shape, is_first: bool) -> None:
    layers = GpuLayer(shape, is_first=is_first), ReferenceLayer(shape, is_first=is_first)
    sequences = [Sequence(shape, COUNT) for _ in layers]
    taken = [{at: new_snapshot(shape) for at in (7, 20, 22)} for _ in layers]
    for end, committed in ((22, None), (25, 22), (37, 25), (38, 37), (COUNT, None)):
        snapshots = taken if end == 22 else [{}, {}]
        (found,), (expected,) = (
            layer.run([sequence.rows(end, committed, own)])
            for layer, sequence, own in zip(layers, sequences, snapshots, strict=True)
        )
        torch.testing.assert_close(found, expected, rtol=5e-5, atol=5e-5)
        states = [sequence.state for sequence in sequences]
        torch.testing.assert_close(states[0].matrices, states[1].matrices, rtol=1e-5, atol=1e-5)
        assert states[0].position == states[1].position and not sequences[0].states[1 - LAYER].any()
        rows = [state.rows(end - shape.kept_rows, end) for state in states]
        torch.testing.assert_close(*rows, rtol=1e-6, atol=1e-6)
    for position, found in taken[0].items():
        expected, matrices = taken[1][position], shape.matrix_bytes
        end = matrices + 4 * shape.row_floats
        for part in (slice(0, matrices), slice(matrices, end)):
            floats = [each[LAYER, part].view(torch.float32) for each in (found, expected)]
            torch.testing.assert_close(*floats, rtol=1e-5, atol=1e-5)
        assert not found[1 - LAYER].any()


@every_shape
def test_chunks_replays_and_snapshots_change_no_bit(shape: Rwkv7Shape) -> None:
    layer, one = GpuLayer(shape), Sequence(shape, COUNT)
    (expected,) = layer.run([one.rows(COUNT)])
    sequence, snapshots = Sequence(shape, COUNT), {at: new_snapshot(shape) for at in (1, 18)}
    parts = layer.run([sequence.rows(18, None, snapshots)])
    for end in (21, 21 + STEP_ROWS, 38, 39):
        layer.run([sequence.drafts(3)])
        parts += layer.run([sequence.rows(end, sequence.past)])
    assert sequence.state.position == 38
    parts += layer.run([sequence.rows(COUNT)])
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(sequence.state.matrices, one.state.matrices)
    for position, snapshot in snapshots.items():
        other = Sequence(shape, COUNT)
        other.past = position
        other.state.read_snapshot(snapshot[LAYER], position)
        assert torch.equal(layer.run([other.rows(COUNT)])[0], expected[position:])


@every_shape
def test_each_segment_of_a_batch_has_the_bits_that_it_has_alone(shape: Rwkv7Shape) -> None:
    """Also beside rows and segments that are nobody's."""
    layer = GpuLayer(shape)

    def batches() -> Iterator[list[Rows]]:
        sequences = [Sequence(shape, COUNT, seed) for seed in range(3)]
        yield [sequence.rows(7 * n + 2) for n, sequence in enumerate(sequences)]
        yield [sequence.rows(sequence.past + n + 1, sequence.past) for n, sequence in enumerate(sequences)]
        taken = {sequences[0].past + 3: new_snapshot(shape)}
        yield [sequences[0].rows(20, None, taken), sequences[2].rows(34, 33)]

    for together, alone in zip(batches(), batches(), strict=True):
        found = layer.run(together, padding=2, nobodys=1)
        for beside, rows, output in zip(together, alone, found, strict=True):
            assert torch.equal(output, layer.run([rows])[0])
            assert torch.equal(beside.states, rows.states)
            assert all(torch.equal(beside.snapshots[at], rows.snapshots[at]) for at in rows.snapshots)


@pytest.mark.parametrize(("group", "bits"), [(16, 4), (32, 8)])
def test_codes_are_those_of_a_launch_of_their_own(group: int, bits: int) -> None:
    shape, rows = Rwkv7Shape(2, 32), 3
    right, found = (Codes.empty(rows, shape.features, group, torch.device("cpu"), bits) for _ in range(2))
    (floats,) = GpuLayer(shape).run([Sequence(shape, COUNT).rows(rows)])
    to_codes(floats, right, shape.features).run()
    GpuLayer(shape).run([Sequence(shape, COUNT).rows(rows)], codes=found)
    assert all(torch.equal(getattr(found, part), getattr(right, part)) for part in ("q", "scale", "bias"))


@pytest.mark.parametrize("name", ["k", "v", "w", "a", "r", "g", "value_gate"])
def test_what_is_not_a_number_reaches_its_row(name: str) -> None:
    shape = SHAPES[0]
    sequence = Sequence(shape, COUNT)
    columns(shape, sequence.raw, name)[3, 5] = float("nan")
    (found,) = GpuLayer(shape).run([sequence.rows(5)])
    assert found[3].isnan().any() and not found[:3].isnan().any()


def shift_rows(
    x: Tensor, mixes: Tensor, shape: StateShape, states: Tensor, past: int, due: dict[int, Tensor], *, keeps: bool
) -> Tensor:
    pairs = torch.tensor([(at, each.data_ptr()) for at, each in sorted(due.items())])
    words = (0, len(x), past, past, states.data_ptr(), 0, pairs.data_ptr(), len(due))
    tables = SegmentTables(torch.tensor([words, (0,) * 8]), torch.zeros(len(x), dtype=torch.int32))
    y = torch.full((len(mixes), *x.shape), torch.nan)
    shift(x, mixes, y, tables, shape, place_of(shape), keeps=keeps).run()
    return y


@pytest.mark.parametrize("features", [48, 160])
def test_a_channel_mix_sees_the_token_before_whatever_was_rejected_and_keeps_rows(features: int) -> None:
    shape = ShiftShape(features)
    x, mixes = torch.randn(100, features), torch.rand(1, features)
    expected = x + mixes * (torch.cat((torch.zeros(1, features), x[:-1])) - x)
    states = [torch.zeros(2, shape.state_bytes, dtype=torch.uint8) for _ in range(2)]
    taken = [{at: torch.zeros(2, shape.snapshot_bytes, dtype=torch.uint8) for at in (64, 86)} for _ in range(2)]
    for begin, end in ((0, 84), (84, 89), (89, 90), (90, 99), (99, 100)):
        state, own = LayerState(shape, states[1][LAYER]), x[begin:end]
        wrong = torch.randn(5, features)
        shift_rows(wrong, mixes, shape, states[0], begin, {}, keeps=True)
        due = [{at: each for at, each in some.items() if at <= end} for some in taken]
        (found,) = shift_rows(own, mixes, shape, states[0], begin, due[0], keeps=True)
        torch.testing.assert_close(found, expected[begin:end], rtol=1e-6, atol=1e-6)
        StateRows(state, own, begin, begin, {at: each[LAYER] for at, each in due[1].items()}).keep()
    assert all(torch.equal(taken[0][at], taken[1][at]) for at in taken[0])
    assert torch.equal(*(LayerState(shape, each[LAYER]).rows(84, 100) for each in states)) and not states[0][0].any()


def test_a_time_mix_has_six_shifts_and_keeps_no_row_by_them() -> None:
    """Each of the bits that it has in any chunks."""
    shape = SHAPES[0]
    sequence, mixes = Sequence(shape, COUNT), torch.rand(6, shape.features)
    GpuLayer(shape).run([sequence.rows(20)])
    states, x = sequence.states.clone(), columns(shape, sequence.raw, "x")[20:].contiguous()
    found = shift_rows(x, mixes, shape, states, 20, {}, keeps=False)
    expected = shifted(x, before(sequence.state, x, 20), mixes)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(states, sequence.states)
    parts = []
    for begin, end in ((20, 23), (23, COUNT)):
        sequence.past = begin
        parts.append(shift_rows(x[begin - 20 : end - 20], mixes, shape, sequence.states, begin, {}, keeps=False))
        GpuLayer(shape).run([sequence.rows(end)])
    assert torch.equal(torch.cat(parts, dim=1), found)


@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norms_are_those_of_torch(has_bias: bool) -> None:
    x, weight, bias = torch.randn(5, 48) + 3, torch.randn(48), torch.randn(48) if has_bias else None
    expected = functional.layer_norm(x, (48,), weight, bias, eps=1e-5)
    layer_norm(x, x, weight, bias, 1e-5).run()
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-5)


def checked() -> Iterator[Case]:
    torch.manual_seed(0)
    yield from check_rwkv.rwkv7_cases(torch.device("cpu"), Rwkv7Shape(2, 16), (Weights(4, 16),))


@pytest.mark.parametrize(
    "written", ["_layer_norm y", "_shift y", "_prepare_rwkv made", "_take_in_rwkv mixed", "_norm_heads out"]
)
def test_the_check_of_a_card_finds_kernels_that_are_wrong(written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_zeros(monkeypatch, *written.split())
    assert any(not case.is_right for case in checked())


def test_the_check_of_a_card_takes_kernels_that_are_right() -> None:
    assert [case.line() for case in checked() if not case.is_right] == []


def test_a_model_has_its_own_time_mixes_checked(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "rwkv7", layers=1)
    config = load_config(tmp_path)
    scope = scope_of(config, RECIPES["int4-g32"], "int8", torch.bfloat16)
    sizes = check.sizes_of(json.loads(scope.arguments[1]))
    assert sizes.rwkv7s == config.state_shapes[:1] and sizes.deltas == () and check.BRIEF.rwkv7s == ()
