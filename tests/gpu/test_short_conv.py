"""Short convolutions by the GPU's kernel, in Triton's interpreter, beside the reference."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from localllm.engine.kernel_check import scope_of
from localllm.kernels.gpu import check, check_short_conv, short_conv
from localllm.kernels.gpu.activations import Codes, to_codes
from localllm.kernels.gpu.check_case import Case
from localllm.kernels.gpu.launch import KernelLaunch
from localllm.kernels.gpu.recurrence import SegmentTables
from localllm.kernels.sizes import Weights
from localllm.kernels.state_shapes import ConvShape
from localllm.models.families import load_config
from localllm.quant.recipe import RECIPES
from tests.checkpoints import write_checkpoint
from tests.test_short_conv import (
    LAYER,
    ReferenceLayer,
    Rows,
    Sequence,
    new_snapshot,
    place_of,
    random_weights,
    random_wide,
)

SHAPES = [ConvShape(16, 3), ConvShape(96, 7), ConvShape(48, 2)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
COUNT = 60  # more than are kept


class GpuLayer:
    def __init__(self, shape: ConvShape, dtype: torch.dtype = torch.float32) -> None:
        self.shape, self.weights, self.dtype = shape, random_weights(shape), dtype

    def run(self, batch: list[Rows], padding: int = 0, nobodys: int = 0, codes: Codes | None = None) -> list[Tensor]:
        """[T, channels] of each segment. padding: rows, nobodys: segments that are nobody's."""
        shape, T = self.shape, sum(len(one.wide) for one in batch)
        wide = torch.full((T + padding, 3 * shape.channels + 5), torch.nan, dtype=self.dtype)
        out, words, snapshots, row = torch.full((T + padding, shape.channels), torch.nan), [], [], 0
        for one in batch:
            end = row + len(one.wide)
            wide[row:end, :-5] = one.wide
            due = torch.tensor([(at, each.data_ptr()) for at, each in sorted(one.snapshots.items())])
            snapshots.append(due)
            words.append((row, end, one.past, one.committed, one.states.data_ptr(), 0, due.data_ptr(), len(due)))
            row = end
        positions = torch.tensor([0] * T + [-1] * padding, dtype=torch.int32)
        tables = SegmentTables(torch.tensor(words + [(0,) * 8] * nobodys), positions)
        into = out if codes is None else codes
        short_conv.convolve(wide, into, tables, self.weights, shape, place_of(shape)).run()
        assert out[T:].isnan().all()
        return [out[begin:end] for begin, end, *_ in words]


@every_shape
def test_outputs_states_and_snapshots_are_those_of_the_reference(shape: ConvShape) -> None:
    layers = GpuLayer(shape), ReferenceLayer(shape)
    sequences = [Sequence(shape, COUNT) for _ in layers]
    taken = [{at: new_snapshot(shape) for at in (1, 40, 43)} for _ in layers]
    for end in (42, 44, 45, COUNT):
        (found,), (expected,) = (
            layer.run([sequence.rows(end, {at: each for at, each in own.items() if at <= end})])
            for layer, sequence, own in zip(layers, sequences, taken, strict=True)
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        rows = [sequence.state.rows(end - shape.kept_rows, end) for sequence in sequences]
        assert torch.equal(*rows) and not sequences[0].states[1 - LAYER].any()
    for position, found in taken[0].items():
        assert torch.equal(found, taken[1][position]) and not found[1 - LAYER].any()


@every_shape
def test_chunks_drafts_and_snapshots_change_no_bit(shape: ConvShape) -> None:
    layer = GpuLayer(shape)
    (whole,) = layer.run([Sequence(shape, COUNT).rows(COUNT)])
    sequence, snapshots = Sequence(shape, COUNT), {at: new_snapshot(shape) for at in (2, 21)}
    parts = layer.run([sequence.rows(18, {2: snapshots[2]})])
    for end in (22, 23, 24):
        layer.run([sequence.drafts(5)])
        parts += layer.run([sequence.rows(end, {at: each for at, each in snapshots.items() if at <= sequence.past})])
    parts += layer.run([sequence.rows(COUNT)])
    assert torch.equal(torch.cat(parts), whole)
    for position, snapshot in snapshots.items():
        other = Sequence(shape, COUNT)
        other.past = position
        other.state.read_snapshot(snapshot[LAYER], position)
        assert torch.equal(layer.run([other.rows(COUNT)])[0], whole[position:])


def test_each_segment_of_a_batch_has_the_bits_that_it_has_alone() -> None:
    """Also beside rows and segments that are nobody's, and where one is short of a run."""
    shape = SHAPES[1]
    layer = GpuLayer(shape)

    def batches() -> Iterator[list[Rows]]:
        sequences = [Sequence(shape, COUNT, seed) for seed in range(3)]
        yield [sequence.rows(20 * n + 3) for n, sequence in enumerate(sequences)]
        yield [sequence.rows(sequence.past + n + 1) for n, sequence in enumerate(sequences)]
        yield [sequences[0].rows(50, {6: new_snapshot(shape)}), sequences[2].rows(48)]

    for together, alone in zip(batches(), batches(), strict=True):
        found = layer.run(together, padding=2, nobodys=1)
        for beside, rows, output in zip(together, alone, found, strict=True):
            assert torch.equal(output, layer.run([rows])[0])
            assert torch.equal(beside.states, rows.states)
            assert all(torch.equal(beside.snapshots[at], rows.snapshots[at]) for at in rows.snapshots)


@pytest.mark.parametrize(("group", "bits"), [(16, 4), (32, 8)])
def test_codes_are_those_of_a_launch_of_their_own(group: int, bits: int) -> None:
    """Of rows whose projection is in bf16."""
    shape, rows = ConvShape(96, 3), 3
    layer = GpuLayer(shape, torch.bfloat16)
    right, found = (Codes.empty(rows, shape.channels, group, torch.device("cpu"), bits) for _ in range(2))
    (floats,) = layer.run([Sequence(shape, COUNT).rows(rows)])
    to_codes(floats, right, shape.channels).run()
    layer.run([Sequence(shape, COUNT).rows(rows)], codes=found)
    assert all(torch.equal(getattr(found, part), getattr(right, part)) for part in ("q", "scale", "bias"))


def test_what_is_not_a_number_reaches_the_rows_that_see_it() -> None:
    shape = SHAPES[0]
    wide = random_wide(shape, 8)
    wide[3, 5] = float("nan")
    sequence = Sequence(shape, COUNT)
    (found,) = GpuLayer(shape).run([Rows(sequence.states, wide, 0, 8)])
    assert found.isnan().any(1).tolist() == [False] * 3 + [True] * 3 + [False] * 2


def checked() -> list[Case]:
    torch.manual_seed(0)
    matrices = (Weights(8, 32), Weights(4, 16))
    return list(check_short_conv.short_conv_cases(torch.device("cpu"), ConvShape(96, 4), matrices))


def test_the_check_of_a_card_finds_a_kernel_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [case.line() for case in checked() if not case.is_right] == []
    run = KernelLaunch.run
    monkeypatch.setattr(KernelLaunch, "run", lambda launch: launch.name == "_short_conv" or run(launch))
    assert sum(not case.is_right for case in checked()) > 5


def test_a_model_has_its_own_convolutions_checked(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "lfm2")
    config = load_config(tmp_path)
    scope = scope_of(config, RECIPES["int4-g32"], "int8", torch.bfloat16)
    sizes = check.sizes_of(json.loads(scope.arguments[1]))
    assert sizes.convs == config.state_shapes[:1] and sizes.deltas == ()
