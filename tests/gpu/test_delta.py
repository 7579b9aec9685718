"""Gated DeltaNet and Kimi Delta Attention by the GPU's kernels, in Triton's interpreter, beside the reference: outputs,
states, snapshots."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from localllm.engine.kernel_check import scope_of
from localllm.kernels.gpu import check, check_delta, delta
from localllm.kernels.gpu.activations import Codes, to_codes
from localllm.kernels.gpu.check_case import Case
from localllm.kernels.gpu.launch import run_all
from localllm.kernels.gpu.recurrence import SegmentTables
from localllm.kernels.sizes import Weights
from localllm.kernels.state_shapes import REPLAYED_ROWS, STEP_ROWS, DeltaShape
from localllm.models.families import load_config
from localllm.quant.recipe import RECIPES
from tests.checkpoints import write_checkpoint
from tests.gpu.wrong_kernels import write_zeros
from tests.test_delta_rule import (
    LAYER,
    PADDING,
    ReferenceLayer,
    Rows,
    Sequence,
    assert_same_state,
    new_snapshot,
    place_of,
    random_weights,
)
from tests.thinning import every_other

SHAPES = [
    DeltaShape(1, 2, 32, 16),
    DeltaShape(2, 4, 16, 16, conv_width=2, is_tiled=True),
    DeltaShape(1, 1, 48, 48, conv_width=3),
    DeltaShape(1, 1, 48, 16, conv_width=2, decays="key"),
    DeltaShape(2, 2, 16, 32, conv_width=3, decays="key"),
]
KIMI = SHAPES[-1]
every_shape = pytest.mark.parametrize("shape", every_other(SHAPES), ids=str)
COUNT = 45


class GpuLayer:
    def __init__(self, shape: DeltaShape, dtype: torch.dtype = torch.float32) -> None:
        self.shape, self.weights, self.dtype = shape, random_weights(shape), dtype

    def run(self, batch: list[Rows], padding: int = 0, nobodys: int = 0, codes: Codes | None = None) -> list[Tensor]:
        """[T, value_features] of each segment. padding: rows, nobodys: segments that are nobody's."""
        shape, T = self.shape, sum(len(one.raw) for one in batch)
        wide = torch.full((T + padding, shape.channels + shape.value_features + PADDING), torch.nan, dtype=self.dtype)
        heads, apart = shape.value_heads, 5 if shape.decays == "key" else 0  # columns between the gates b and a
        gates = torch.full((T + padding, heads + apart + shape.decay_features), torch.nan)
        mixed = torch.full((T + padding, shape.value_features), torch.nan)
        words, snapshots, row, prepared = [], [], 0, 0
        for one in batch:
            end, prepared = row + len(one.raw), prepared + REPLAYED_ROWS
            wide[row:end, : shape.channels] = one.raw[:, : shape.channels]
            wide[row:end, shape.channels : -PADDING] = one.z
            gates[row:end, :heads], gates[row:end, heads + apart :] = one.raw[:, shape.channels :].split(
                (heads, shape.decay_features), dim=1
            )
            due = torch.tensor([(at, one.snapshots[at].data_ptr()) for at in sorted(one.snapshots)])
            snapshots.append(due)
            states = one.states.data_ptr()
            words.append((row, end, one.past, one.committed, states, prepared, due.data_ptr(), len(due)))
            row, prepared = end, prepared + len(one.raw)
        segments = torch.tensor(words + [(0,) * 8] * nobodys)
        positions = torch.tensor([0] * T + [-1] * padding, dtype=torch.int32)
        out, z = mixed if codes is None else codes, wide[:, shape.channels :]
        tables = SegmentTables(segments, positions)
        run_all(delta.mix(wide, gates, z, out, tables, self.weights, shape, place_of(shape)))
        assert mixed[T:].isnan().all()
        return [mixed[begin:end] for begin, end, *_ in words]


def both(shape: DeltaShape) -> tuple[GpuLayer | ReferenceLayer, ...]:
    return GpuLayer(shape), ReferenceLayer(shape, random_weights(shape))


def whole(layer: GpuLayer, end: int = COUNT) -> tuple[Tensor, Tensor]:
    """The first tokens of a sequence at once: outputs, and the states behind them."""
    sequence = Sequence(layer.shape, COUNT)
    return layer.run([sequence.rows(end)])[0], sequence.states


@every_shape
def test_outputs_states_and_snapshots_are_those_of_the_reference(shape: DeltaShape) -> None:
    layers = both(shape)
    sequences = [Sequence(shape, COUNT) for _ in layers]
    taken = [{at: new_snapshot(shape) for at in (7, 20, 22)} for _ in layers]
    for end, committed in ((22, None), (25, 22), (37, 25), (38, 37), (COUNT, None)):
        snapshots = taken if end == 22 else [{}, {}]
        (found,), (expected,) = (
            layer.run([sequence.rows(end, committed, own)])
            for layer, sequence, own in zip(layers, sequences, snapshots, strict=True)
        )
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
        states = [sequence.state for sequence in sequences]
        torch.testing.assert_close(states[0].matrices, states[1].matrices, rtol=1e-5, atol=1e-5)
        assert states[0].position == states[1].position and not sequences[0].states[1 - LAYER].any()
        rows = [state.rows(end - shape.kept_rows, end) for state in states]
        assert torch.equal(*rows)
    for position, found in taken[0].items():
        expected, matrices = taken[1][position], shape.matrix_bytes
        of_states = [each[LAYER, :matrices].view(torch.float32) for each in (found, expected)]
        torch.testing.assert_close(*of_states, rtol=1e-5, atol=1e-5)
        tail = matrices + 4 * (shape.conv_width - 1) * shape.row_floats
        assert torch.equal(found[LAYER, matrices:tail], expected[LAYER, matrices:tail])
        assert not found[1 - LAYER].any()


@every_shape
def test_chunks_replays_and_snapshots_change_no_bit(shape: DeltaShape) -> None:
    layer = GpuLayer(shape)
    expected, states = whole(layer)
    sequence, snapshots = Sequence(shape, COUNT), {at: new_snapshot(shape) for at in (1, 18)}
    parts = layer.run([sequence.rows(18, None, snapshots)])
    for end in (21, 21 + STEP_ROWS, 38, 39):
        layer.run([sequence.drafts(3)])
        parts += layer.run([sequence.rows(end, sequence.past)])
    assert sequence.state.position == 38
    parts += layer.run([sequence.rows(COUNT)])
    assert torch.equal(torch.cat(parts), expected)
    assert_same_state(shape, sequence.states, states)
    for position, snapshot in snapshots.items():
        other = Sequence(shape, COUNT)
        other.past = position
        other.state.read_snapshot(snapshot[LAYER], position)
        assert torch.equal(layer.run([other.rows(COUNT)])[0], expected[position:])
        assert_same_state(shape, other.states, states)


@every_shape
def test_each_segment_of_a_batch_has_the_bits_that_it_has_alone(shape: DeltaShape) -> None:
    """Also beside rows and segments that are nobody's."""
    layer = GpuLayer(shape)

    def batches() -> Iterator[list[Rows]]:
        sequences = [Sequence(shape, COUNT, seed) for seed in range(3)]
        yield [sequence.rows(7 * n + 2) for n, sequence in enumerate(sequences)]
        yield [sequence.rows(sequence.past + n + 1, sequence.past) for n, sequence in enumerate(sequences)]
        taken = {sequences[0].past + 3: new_snapshot(shape)}
        yield [sequences[0].rows(20, None, taken), sequences[2].rows(21, 19)]

    for together, alone in zip(batches(), batches(), strict=True):
        found = layer.run(together, padding=2, nobodys=1)
        for beside, rows, output in zip(together, alone, found, strict=True):
            assert torch.equal(output, layer.run([rows])[0])
            assert torch.equal(beside.states, rows.states)
            assert all(torch.equal(beside.snapshots[at], rows.snapshots[at]) for at in rows.snapshots)


@pytest.mark.parametrize("shape", [SHAPES[0], KIMI], ids=str)
def test_the_gpu_goes_on_from_the_states_of_the_reference(shape: DeltaShape) -> None:
    """And the other way round."""
    layers = both(shape)
    expected, sequence, parts = whole(GpuLayer(shape))[0], Sequence(shape, COUNT), []
    for turn, (end, committed) in enumerate(((17, 17), (20, 17), (24, 20), (25, 24), (43, 43), (45, 43))):
        parts += layers[turn % 2].run([sequence.rows(end, committed)])
    torch.testing.assert_close(torch.cat(parts), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("group", "bits"), [(16, 4), (32, 8)])
def test_codes_are_those_of_a_launch_of_their_own(group: int, bits: int) -> None:
    """Of rows whose projection is in bf16."""
    shape, rows = DeltaShape(1, 2, 16, 32), 3
    layer = GpuLayer(shape, torch.bfloat16)
    right, found = (Codes.empty(rows, shape.value_features, group, torch.device("cpu"), bits) for _ in range(2))
    (floats,) = layer.run([Sequence(shape, COUNT).rows(rows)])
    to_codes(floats, right, shape.value_features).run()
    layer.run([Sequence(shape, COUNT).rows(rows)], codes=found)
    assert all(torch.equal(getattr(found, part), getattr(right, part)) for part in ("q", "scale", "bias"))


@pytest.mark.parametrize("shape", [SHAPES[0], KIMI], ids=str)
def test_what_is_not_a_number_reaches_its_row(shape: DeltaShape) -> None:
    keys = shape.key_heads * shape.key_dim
    layer, columns = GpuLayer(shape), (0, keys, 2 * keys, shape.channels, shape.channels + shape.value_heads)
    for column in (*columns, shape.row_floats - 1):
        sequence = Sequence(shape, COUNT)
        sequence.raw[3, column] = float("nan")
        (found,) = layer.run([sequence.rows(5)])
        assert found[3].isnan().any() and not found[:3].isnan().any()


@pytest.mark.parametrize("shape", [SHAPES[0], KIMI], ids=str)
@pytest.mark.parametrize("gate", [-40.0, -12.0, 0.0, 25.0])
def test_decay_is_exact_where_it_is_nearly_one_or_nothing(gate: float, shape: DeltaShape) -> None:
    layers = both(shape)
    sequences = [Sequence(shape, COUNT) for _ in layers]
    for layer, sequence in zip(layers, sequences, strict=True):
        sequence.raw[:, -shape.decay_features :] = gate
        layer.run([sequence.rows(12)])
    matrices = [sequence.state.matrices for sequence in sequences]
    torch.testing.assert_close(*matrices, rtol=1e-5, atol=1e-6)


def checked(decays: Literal["head", "key"]) -> Iterator[Case]:
    torch.manual_seed(0)
    shape, matrices = DeltaShape(1, 1, 16, 32, decays=decays), (Weights(8, 32), Weights(4, 16))
    yield from check_delta.delta_cases(torch.device("cpu"), shape, matrices)


@pytest.mark.parametrize("decays", ["head", "key"])
def test_the_check_of_a_card_finds_kernels_that_are_wrong(
    decays: Literal["head", "key"], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [case.line() for case in checked(decays) if not case.is_right] == []
    for kernel, result in (("_prepare", "prepared"), ("_take_in", "mixed"), ("_gated_norm", "out")):
        with monkeypatch.context() as patch:
            write_zeros(patch, kernel, result)
            wrong = (case for case in checked(decays) if not case.is_right)
            assert next(wrong) and next(wrong)


@pytest.mark.parametrize(("family", "gates"), [("qwen3_5", [True]), ("kimi_linear", [])])
def test_a_model_has_its_own_states_and_gates_checked(family: str, gates: list[bool], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    config = load_config(tmp_path)
    scope = scope_of(config, RECIPES["int4-g32"], "int8", torch.bfloat16)
    sizes = check.sizes_of(json.loads(scope.arguments[1]))
    assert sizes.deltas == config.state_shapes[:1] and [heads.has_gate for heads in sizes.attention] == gates
