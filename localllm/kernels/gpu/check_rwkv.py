"""RWKV-7 beside its reference on random inputs, as `check_cases` tries it: norms, shifts, the time mix, its codes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels import rwkv7
from localllm.kernels.gpu import activations, rwkv
from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.attention_merge import can_code
from localllm.kernels.gpu.check_case import EXACT, Case, codes_for, differing, error_of, poisoned
from localllm.kernels.gpu.check_recurrence import RECURRENCE
from localllm.kernels.gpu.launch import run_all
from localllm.kernels.gpu.layer_norm import layer_norm
from localllm.kernels.gpu.recurrence import SegmentTables
from localllm.kernels.gpu.shift import shift
from localllm.kernels.layer_state import LayerState, StateRows
from localllm.kernels.rwkv7 import TimeMixWeights
from localllm.kernels.sizes import Weights
from localllm.kernels.state_shapes import (
    REPLAYED_ROWS,
    RWKV7_KEPT,
    RWKV7_MIXED,
    RWKV7_PROJECTED,
    Rwkv7Shape,
    ShiftShape,
    StatePlace,
    StateShape,
)

_LAYER = 1  # of two
# A prompt, a few tokens behind it, which change nothing, and one that takes them in.
_ENDS, _SNAPSHOT = (40, 43, 44), 17


@dataclass(frozen=True)
class _Tokens:
    """A sequence of random tokens, RWKV7_PROJECTED of each, with the values of the first layer; its states and a
    snapshot, and those of the reference."""

    parts: Mapping[str, Tensor]
    first: Tensor
    states: Tensor
    own: Tensor
    snapshots: tuple[Tensor, Tensor]

    @classmethod
    def random(cls, shape: StateShape, features: int, device: torch.device) -> _Tokens:
        parts = {name: torch.randn((_ENDS[-1], features), device=device) for name in RWKV7_PROJECTED}
        states, snapshot = (
            torch.zeros((2, size), dtype=torch.uint8, device=device)
            for size in (shape.state_bytes, shape.snapshot_bytes)
        )
        first = torch.randn((_ENDS[-1], features), device=device)
        own, others = torch.zeros_like(states, device="cpu"), torch.zeros_like(snapshot, device="cpu")
        return cls(parts, first, states, own, (snapshot, others))

    def tables(self, past: int, end: int, committed: int) -> SegmentTables:
        device, num = self.first.device, int(past == 0)
        pairs = torch.tensor([(_SNAPSHOT, self.snapshots[0].data_ptr())], device=device)
        words = (0, end - past, past, committed, self.states.data_ptr(), REPLAYED_ROWS, pairs.data_ptr(), num)
        positions = torch.zeros(end - past, dtype=torch.int32, device=device)
        return _Tables(torch.tensor([words], device=device), positions, pairs)

    def due(self, past: int) -> dict[int, Tensor]:
        return {_SNAPSHOT: self.snapshots[1][_LAYER]} if past == 0 else {}


@dataclass(frozen=True)
class _Tables(SegmentTables):
    pairs: Tensor  # at which the segments point


def rwkv7_cases(device: torch.device, shape: Rwkv7Shape, matrices: Iterable[Weights] = ()) -> Iterator[Case]:
    """matrices: for which codes are made."""
    yield from _norms(device, shape.features)
    yield from _shifts(device, shape.features)
    named, weights = f"RWKV-7, heads {shape.num_heads} of {shape.head_dim}", _weights(shape)
    for is_first in (True, False):
        tokens, past = _Tokens.random(shape, shape.features, device), 0
        whole = replace(tokens, states=tokens.states.clone(), first=tokens.first.clone())
        at_once = _found(whole, shape, weights, 0, _ENDS[-1], _ENDS[-1], is_first=is_first)
        for end in _ENDS:
            committed = end if past == 0 else past
            right = _expected(tokens, shape, weights, past, end, committed, is_first=is_first)
            found = _found(tokens, shape, weights, past, end, committed, is_first=is_first)
            yield Case(f"{named}, {end - past} rows", error_of(found, right), RECURRENCE)
            differ = float((found != at_once[past:end]).sum())
            yield Case(f"{named}, {end - past} rows: bits of all at once", differ, 0)
            past = end
        states = [LayerState(shape, each[_LAYER]) for each in (tokens.states.cpu(), tokens.own)]
        yield Case(f"{named}: states", error_of(states[0].matrices, states[1].matrices), RECURRENCE)
        rows = [state.rows(past - shape.kept_rows, past) for state in states]
        yield Case(f"{named}: what is kept", error_of(*rows) + (states[0].position != states[1].position), RECURRENCE)
        floats = [each[_LAYER].cpu().view(torch.float32) for each in tokens.snapshots]
        yield Case(f"{named}: a snapshot", error_of(*floats), RECURRENCE)
    for each in {(each.columns, each.bits): each for each in matrices}.values():
        if can_code(shape.head_dim, each.columns):
            codes = [codes_for(each, 5, shape.features, device) for _ in range(2)]
            activations.to_codes(_found(tokens, shape, weights, 0, 5, 5), codes[0], shape.features).run()
            _found(tokens, shape, weights, 0, 5, 5, codes=codes[1])
            yield Case(f"{named}: codes for {each.name}", differing(*codes), 0)


def _norms(device: torch.device, features: int) -> Iterator[Case]:
    x, weight, bias = torch.randn(3, features) + 1, torch.rand(features), torch.randn(features)
    for each in (None, bias):
        right = functional.layer_norm(x.double(), (features,), weight.double(), None if each is None else bias.double())
        there, found = (None if each is None else each.to(device)), poisoned(3, features, device=device)
        layer_norm(x.to(device), found, weight.to(device), there, 1e-5).run()
        yield Case(f"a norm by the mean of {features}", error_of(found, right), EXACT)


def _shifts(device: torch.device, features: int) -> Iterator[Case]:
    """Of a channel mix, which keeps rows, and of as many mixes as a time mix has."""
    shape, past = ShiftShape(features), 0
    tokens, mixes = _Tokens.random(shape, features, device), torch.rand((len(RWKV7_MIXED), features), device=device)
    place = StatePlace(_LAYER * shape.state_bytes, _LAYER * shape.snapshot_bytes)
    for end in _ENDS:
        x, state = tokens.parts["x"][past:end], LayerState(shape, tokens.own[_LAYER])
        right = rwkv7.shifted(x.cpu(), rwkv7.before(state, x.cpu(), past), mixes.cpu())
        for keeps, own in ((False, mixes), (True, mixes[:1])):
            found, tables = poisoned(len(own), *x.shape, device=device), tokens.tables(past, end, past)
            shift(x, own, found, tables, shape, place, keeps=keeps).run()
            yield Case(f"{len(own)} shifts of {end - past} rows", error_of(found, right[: len(own)]), EXACT)
        StateRows(state, x.cpu(), past, past, tokens.due(past)).keep()
        past = end
    rows = [LayerState(shape, each[_LAYER]).rows(past - 16, past) for each in (tokens.states.cpu(), tokens.own)]
    yield Case("shifts: what is kept", float((rows[0] != rows[1]).sum()), 0)
    yield Case("shifts: a snapshot", float((tokens.snapshots[0].cpu() != tokens.snapshots[1]).sum()), 0)


def _weights(shape: Rwkv7Shape) -> TimeMixWeights:
    size = shape.features
    removal_key, rate_key, norm = (torch.rand(size) + 0.5 for _ in range(3))
    bonus, norm_bias = torch.randn(size) * 0.3, torch.randn(size)
    return TimeMixWeights(torch.rand(len(RWKV7_MIXED), size), removal_key, rate_key, bonus, norm, norm_bias, 1e-3)


def _expected(
    tokens: _Tokens, shape: Rwkv7Shape, weights: TimeMixWeights, past: int, end: int, committed: int, *, is_first: bool
) -> Tensor:
    own = {name: x[past:end].cpu() for name, x in tokens.parts.items()}
    if not is_first:
        own["v"] = rwkv7.gated_values(own["v"], own["value_gate"], tokens.first[past:end].cpu())
    raw = torch.cat([own[name] for name in RWKV7_KEPT], dim=1)
    rows = StateRows(LayerState(shape, tokens.own[_LAYER]), raw, past, committed, tokens.due(past))
    return rwkv7.mix_time(rows, own["r"], own["g"], weights)


def _found(
    tokens: _Tokens, shape: Rwkv7Shape, weights: TimeMixWeights, past: int, end: int, committed: int, *,
    is_first: bool = False, codes: Codes | None = None,
) -> Tensor:  # fmt: skip
    """By the kernels, fp32 [T, features]."""
    device = tokens.first.device
    vectors: dict[str, Any] = {name: x.to(device) for name, x in vars(weights).items() if isinstance(x, Tensor)}
    projected = rwkv.Projected(**{name: x[past:end] for name, x in tokens.parts.items()})
    projected = projected._replace(value_gate=None) if is_first else projected
    place = StatePlace(_LAYER * shape.state_bytes, _LAYER * shape.snapshot_bytes)
    out, tables = poisoned(end - past, shape.features, device=device), tokens.tables(past, end, committed)
    into = out if codes is None else codes
    first = tokens.first[past:end]
    run_all(rwkv.mix_time(projected, first, into, tables, replace(weights, **vectors), shape, place))
    return out
