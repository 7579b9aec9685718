"""A short convolution beside its reference on random inputs, as `check_cases` tries it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localllm.kernels import short_conv
from localllm.kernels.gpu import activations
from localllm.kernels.gpu import short_conv as gpu_short_conv
from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.attention_merge import can_code
from localllm.kernels.gpu.check_case import Case, codes_for, differing, error_of, poisoned
from localllm.kernels.gpu.recurrence import SegmentTables
from localllm.kernels.layer_state import LayerState, StateRows
from localllm.kernels.short_conv import ConvWeights
from localllm.kernels.sizes import Weights
from localllm.kernels.state_shapes import ConvShape, StatePlace

CONV = 2e-6  # of the norm: sums of a few products
_LAYER = 1  # of two
# A prompt, a few tokens behind it, and one that leaves some of those out; a snapshot in each of the first two.
_PARTS, _SNAPSHOTS = ((0, 40), (40, 43), (41, 42)), (17, 42)


@dataclass(frozen=True)
class _Tokens:
    """A sequence of random tokens, its states and snapshots, and those of the reference."""

    wide: Tensor
    states: Tensor
    own: Tensor
    snapshots: tuple[dict[int, Tensor], dict[int, Tensor]]

    @classmethod
    def random(cls, shape: ConvShape, device: torch.device) -> _Tokens:
        states = torch.zeros((2, shape.state_bytes), dtype=torch.uint8, device=device)
        at_each = [
            {at: torch.zeros((2, shape.snapshot_bytes), dtype=torch.uint8, device=where) for at in _SNAPSHOTS}
            for where in (device, torch.device("cpu"))
        ]
        wide = torch.randn((_PARTS[0][1] + 3, 3 * shape.channels), device=device)
        return cls(wide, states, torch.zeros_like(states, device="cpu"), (at_each[0], at_each[1]))


def short_conv_cases(device: torch.device, shape: ConvShape, matrices: Iterable[Weights] = ()) -> Iterator[Case]:
    """matrices: for which codes are made."""
    named, tokens = f"a convolution of {shape.conv_width} tokens", _Tokens.random(shape, device)
    taps, bias = torch.randn(shape.conv_width, shape.channels), torch.randn(shape.channels)
    for weights in (ConvWeights(taps, bias), ConvWeights(taps)):
        one = replace(tokens, states=torch.zeros_like(tokens.states), own=torch.zeros_like(tokens.own))
        for past, end in _PARTS:
            right, found = _expected(one, shape, weights, past, end), _run(one, shape, weights, past, end)
            yield Case(f"{named}, {end - past} rows", error_of(found, right), CONV)
        end = _PARTS[-1][1]
        rows = [LayerState(shape, each[_LAYER]).rows(end - 16, end) for each in (one.states.cpu(), one.own)]
        yield Case(f"{named}: what is kept", error_of(*rows), CONV)
        for at in _SNAPSHOTS:
            floats = [each[at][_LAYER].cpu().view(torch.float32) for each in one.snapshots]
            yield Case(f"{named}: a snapshot", error_of(*floats), CONV)
    for each in {(each.columns, each.bits): each for each in matrices}.values():
        if not can_code(gpu_short_conv.block_of(shape), each.columns) or shape.channels % each.columns:
            continue
        codes = [codes_for(each, 5, shape.channels, device) for _ in range(2)]
        activations.to_codes(_run(tokens, shape, weights, 0, 5), codes[0], shape.channels).run()
        _run(tokens, shape, weights, 0, 5, codes[1])
        yield Case(f"{named}: codes for {each.name}", differing(*codes), 0)


def _expected(tokens: _Tokens, shape: ConvShape, weights: ConvWeights, past: int, end: int) -> Tensor:
    front, behind, value = tokens.wide[past:end].cpu().chunk(3, dim=1)
    snapshots = {at: each[_LAYER] for at, each in tokens.snapshots[1].items() if at <= end}
    rows = StateRows(LayerState(shape, tokens.own[_LAYER]), front * value, past, end, snapshots)
    return behind * short_conv.convolve(rows, weights)


def _run(
    tokens: _Tokens, shape: ConvShape, weights: ConvWeights, past: int, end: int, codes: Codes | None = None
) -> Tensor:
    """By the kernel, fp32 [T, channels]."""
    device, count = tokens.wide.device, end - past
    due = [(at, each.data_ptr()) for at, each in tokens.snapshots[0].items() if at <= end]
    pairs = torch.tensor(due or [(0, 0)], device=device)
    words = (0, count, past, end, tokens.states.data_ptr(), 0, pairs.data_ptr(), len(due))
    tables = SegmentTables(torch.tensor([words], device=device), torch.zeros(count, dtype=torch.int32, device=device))
    on_device = ConvWeights(weights.taps.to(device), None if weights.bias is None else weights.bias.to(device))
    place = StatePlace(_LAYER * shape.state_bytes, _LAYER * shape.snapshot_bytes)
    out = poisoned(count, shape.channels, device=device)
    wide, into = tokens.wide[past:end], out if codes is None else codes
    gpu_short_conv.convolve(wide, into, tables, on_device, shape, place).run()
    return out
