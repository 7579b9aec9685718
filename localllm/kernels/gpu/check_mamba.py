"""Mamba 2 beside its reference on random inputs, as `check_cases` tries it: outputs, states, a snapshot, bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from localllm.kernels import mamba_rule
from localllm.kernels.gpu import mamba
from localllm.kernels.gpu.check_case import Case, error_of, poisoned
from localllm.kernels.gpu.check_delta import DELTA
from localllm.kernels.gpu.launch import run_all
from localllm.kernels.gpu.recurrence import SegmentTables
from localllm.kernels.layer_state import LayerState, StateRows
from localllm.kernels.mamba_rule import Mamba2Weights
from localllm.kernels.state_shapes import REPLAYED_ROWS, Mamba2Shape, StatePlace

_LAYER = 1  # of two
# A prompt, a few tokens behind it, which change nothing, and one that takes them in and has the next of them beside it.
_ENDS, _SNAPSHOT = (40, 43, 44), 17


def mamba_cases(device: torch.device, shape: Mamba2Shape) -> Iterator[Case]:
    heads = f"{shape.num_heads} of {shape.head_dim} and {shape.state_size}"
    named, weights, rows = f"Mamba 2, heads {heads}", _weights(shape), _ENDS[-1]
    wide = torch.randn((rows, shape.features + shape.channels), device=device)
    steps = torch.randn((rows, shape.num_heads), device=device)
    at_once = _run(shape, weights, wide, steps, _states(shape, device), (0, rows), rows)
    states, own = _states(shape, device), _states(shape, torch.device("cpu"))
    snapshots = [torch.zeros((2, shape.snapshot_bytes), dtype=torch.uint8, device=where) for where in (device, "cpu")]
    past = 0
    for end in _ENDS:
        committed = end if past == 0 else past
        due = snapshots[0] if past == 0 else None
        found = _run(shape, weights, wide, steps, states, (past, end), committed, due)
        raw = torch.cat((wide[past:end, shape.features :], steps[past:end]), dim=1).cpu()
        taken = {_SNAPSHOT: snapshots[1][_LAYER]} if past == 0 else {}
        right = mamba_rule.mix(StateRows(LayerState(shape, own[_LAYER]), raw, past, committed, taken), weights)
        z = wide[past:end, : shape.features].cpu()
        right = mamba_rule.gated_norm(right.flatten(1), z, weights, shape.num_groups)
        yield Case(f"{named}, {len(found)} rows", error_of(found, right), DELTA)
        yield Case(f"{named}, {len(found)} rows: bits of all at once", float((found != at_once[past:end]).sum()), 0)
        past = end
    both = [LayerState(shape, each[_LAYER]) for each in (states.cpu(), own)]
    yield Case(f"{named}: states", error_of(both[0].matrices, both[1].matrices), DELTA)
    kept = [state.rows(past - shape.kept_rows, past) for state in both]
    wrong = float((kept[0] != kept[1]).sum()) + (both[0].position != both[1].position)
    yield Case(f"{named}: what is kept", wrong, 0)
    floats = [each[_LAYER].cpu().view(torch.float32) for each in snapshots]
    yield Case(f"{named}: a snapshot", error_of(*floats), DELTA)


def _states(shape: Mamba2Shape, device: torch.device) -> Tensor:
    return torch.zeros((2, shape.state_bytes), dtype=torch.uint8, device=device)


def _run(
    shape: Mamba2Shape,
    weights: Mamba2Weights,
    wide: Tensor,
    steps: Tensor,
    states: Tensor,
    tokens: tuple[int, int],
    committed: int,
    snapshot: Tensor | None = None,
) -> Tensor:
    """By the kernels, fp32 [T, features] of these tokens."""
    (past, end), device = tokens, wide.device
    due = [] if snapshot is None else [(_SNAPSHOT, snapshot.data_ptr())]
    pairs = torch.tensor(due, device=device)
    words = (0, end - past, past, committed, states.data_ptr(), REPLAYED_ROWS, pairs.data_ptr(), len(due))
    positions = torch.zeros(end - past, dtype=torch.int32, device=device)
    tables = SegmentTables(torch.tensor([words], device=device), positions)
    vectors = ("conv", "conv_bias", "a_log", "dt_bias", "d", "norm")
    there = replace(weights, **{name: getattr(weights, name).to(device) for name in vectors})
    place = StatePlace(_LAYER * shape.state_bytes, _LAYER * shape.snapshot_bytes)
    out = poisoned(end - past, shape.features, device=device)
    run_all(mamba.mix(wide[past:end], steps[past:end], out, tables, there, shape, place))
    return out


def _weights(shape: Mamba2Shape) -> Mamba2Weights:
    heads = shape.num_heads
    return Mamba2Weights(
        conv=torch.randn(shape.conv_width, shape.channels) * 0.5,
        conv_bias=torch.randn(shape.channels) * 0.3,
        a_log=torch.rand(heads).mul(16).log(),
        dt_bias=torch.randn(heads),
        d=torch.randn(heads),
        norm=torch.rand(shape.features),
    )
