"""Mamba 2 by the GPU's kernels, in Triton's interpreter, beside the reference: outputs, states, snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from localllm.kernels.gpu import check_mamba2, mamba2
from localllm.kernels.gpu.check_case import Case
from localllm.kernels.gpu.launch import run_all
from localllm.kernels.gpu.recurrence import SegmentTables
from localllm.kernels.mamba2_rule import Mamba2Weights
from localllm.kernels.state_shapes import REPLAYED_ROWS, STEP_ROWS, Mamba2Shape, StatePlace
from tests.gpu.wrong_kernels import write_zeros
from tests.test_mamba2_rule import (
    LAYER,
    PADDING,
    VARIANTS,
    ReferenceLayer,
    Rows,
    Sequence,
    new_snapshot,
    random_weights,
)
from tests.thinning import every_other

SHAPES = [Mamba2Shape(2, 16, 1, 32), Mamba2Shape(4, 16, 2, 16, conv_width=2), Mamba2Shape(1, 48, 1, 48, conv_width=3)]
every_shape = pytest.mark.parametrize("shape", every_other(SHAPES), ids=str)
COUNT = 45


class GpuLayer:
    def __init__(
        self, shape: Mamba2Shape, dtype: torch.dtype = torch.float32, weights: Mamba2Weights | None = None
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self.weights = random_weights(shape) if weights is None else weights

    def run(self, batch: list[Rows], padding: int = 0, nobodys: int = 0) -> list[Tensor]:
        """[T, features] of each segment. padding: rows, nobodys: segments that are nobody's."""
        shape, T = self.shape, sum(len(one.raw) for one in batch)
        wide = torch.full((T + padding, shape.features + shape.channels + PADDING), torch.nan, dtype=self.dtype)
        steps, out = (torch.full((T + padding, n), torch.nan) for n in (shape.num_heads, shape.features))
        words, snapshots, row, prepared = [], [], 0, 0
        for one in batch:
            end, prepared = row + len(one.raw), prepared + REPLAYED_ROWS
            wide[row:end, : shape.features] = one.z
            wide[row:end, shape.features : -PADDING] = one.raw[:, : shape.channels]
            steps[row:end] = one.raw[:, shape.channels :]
            due = torch.tensor([(at, one.snapshots[at].data_ptr()) for at in sorted(one.snapshots)])
            snapshots.append(due)
            states = one.states.data_ptr()
            words.append((row, end, one.past, one.committed, states, prepared, due.data_ptr(), len(due)))
            row, prepared = end, prepared + len(one.raw)
        segments = torch.tensor(words + [(0,) * 8] * nobodys)
        positions = torch.tensor([0] * T + [-1] * padding, dtype=torch.int32)
        place = StatePlace(LAYER * shape.state_bytes, LAYER * shape.snapshot_bytes)
        run_all(mamba2.mix(wide, steps, out, SegmentTables(segments, positions), self.weights, shape, place))
        assert out[T:].isnan().all()
        return [out[begin:end] for begin, end, *_ in words]


@every_shape
def test_outputs_states_and_snapshots_are_those_of_the_reference(shape: Mamba2Shape) -> None:
    layers = GpuLayer(shape), ReferenceLayer(shape, random_weights(shape))
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
        assert torch.equal(*(state.rows(end - shape.kept_rows, end) for state in states))
    for position, found in taken[0].items():
        expected, matrices = taken[1][position], shape.matrix_bytes
        of_states = [each[LAYER, :matrices].view(torch.float32) for each in (found, expected)]
        torch.testing.assert_close(*of_states, rtol=1e-5, atol=1e-5)
        tail = matrices + 4 * (shape.conv_width - 1) * shape.row_floats
        assert torch.equal(found[LAYER, matrices:tail], expected[LAYER, matrices:tail])


@every_shape
def test_chunks_replays_and_snapshots_change_no_bit(shape: Mamba2Shape) -> None:
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
def test_each_segment_of_a_batch_has_the_bits_that_it_has_alone(shape: Mamba2Shape) -> None:
    """Also beside rows and segments that are nobody's."""
    layer = GpuLayer(shape)

    def batches() -> Iterator[list[Rows]]:
        sequences = [Sequence(shape, COUNT, seed) for seed in range(3)]
        yield [sequence.rows(7 * n + 2) for n, sequence in enumerate(sequences)]
        yield [sequence.rows(sequence.past + n + 1, sequence.past) for n, sequence in enumerate(sequences)]

    for together, alone in zip(batches(), batches(), strict=True):
        found = layer.run(together, padding=2, nobodys=1)
        for beside, rows, output in zip(together, alone, found, strict=True):
            assert torch.equal(output, layer.run([rows])[0])
            assert torch.equal(beside.states, rows.states)


@pytest.mark.parametrize("variant", VARIANTS)
def test_kernels_know_what_families_differ_in(variant: str) -> None:
    shape = SHAPES[1]
    weights = replace(random_weights(shape), **VARIANTS[variant])
    (found,) = GpuLayer(shape, weights=weights).run([Sequence(shape, COUNT).rows(20)])
    (expected,) = ReferenceLayer(shape, weights).run([Sequence(shape, COUNT).rows(20)])
    torch.testing.assert_close(found, expected, rtol=5e-5, atol=5e-5)


def test_what_is_not_a_number_reaches_its_row() -> None:
    shape = SHAPES[0]
    layer = GpuLayer(shape)
    for column in (0, shape.features, shape.channels - 1, shape.channels):
        sequence = Sequence(shape, COUNT)
        sequence.raw[3, column] = float("nan")
        (found,) = layer.run([sequence.rows(5)])
        assert found[3].isnan().any() and not found[:3].isnan().any()


def checked() -> Iterator[Case]:
    torch.manual_seed(0)
    yield from check_mamba2.mamba_cases(torch.device("cpu"), Mamba2Shape(2, 16, 1, 16))


def test_the_check_of_a_card_finds_kernels_that_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [case.line() for case in checked() if not case.is_right] == []
    for kernel, result in (("_prepare_mamba", "prepared"), ("_take_in_mamba", "mixed"), ("_group_norm", "out")):
        with monkeypatch.context() as patch:
            write_zeros(patch, kernel, result)
            wrong = (case for case in checked() if not case.is_right)
            assert next(wrong) and next(wrong)
