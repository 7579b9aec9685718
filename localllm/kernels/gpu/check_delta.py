"""Gated DeltaNet beside its reference on random inputs, as `check_cases` tries it: outputs, states, snapshots, bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from localllm.kernels import delta_rule
from localllm.kernels.delta_rule import DeltaWeights, gated_norm
from localllm.kernels.gpu import activations, delta
from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.attention_merge import can_code
from localllm.kernels.gpu.check_case import Case, codes_for, differing, error_of, poisoned
from localllm.kernels.gpu.launch import run_all
from localllm.kernels.gpu.recurrence import SegmentTables
from localllm.kernels.layer_state import LayerState, StateRows
from localllm.kernels.sizes import Weights
from localllm.kernels.state_shapes import REPLAYED_ROWS, DeltaShape, StatePlace

DELTA = 2e-5  # of the norm: a card's exponentials and roots, and what the states have kept of those before
_LAYER = 1  # of two
# A prompt, a few tokens behind it, which change nothing, and one that takes them in and has the next of them beside it.
_ENDS, _SNAPSHOT = (40, 43, 44), 17


@dataclass
class _Tokens:
    """A sequence of random tokens, and its states, those of the reference among them."""

    wide: Tensor
    gates: Tensor
    states: Tensor
    own: Tensor
    snapshots: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def random(cls, shape: DeltaShape, device: torch.device) -> _Tokens:
        rows, width = _ENDS[-1], shape.channels + shape.value_features
        states = torch.zeros((2, shape.state_bytes), dtype=torch.uint8, device=device)
        gates = torch.randn((rows, 2 * shape.value_heads), device=device)
        return cls(torch.randn((rows, width), device=device), gates, states, torch.zeros_like(states, device="cpu"))


@dataclass(frozen=True)
class _Part:
    """The tokens [past, end) of a sequence."""

    tokens: _Tokens
    past: int
    end: int
    committed: int

    def expected(self, shape: DeltaShape, weights: DeltaWeights, snapshots: dict[int, Tensor]) -> Tensor:
        own = slice(self.past, self.end)
        wide, gates = self.tokens.wide[own].cpu(), self.tokens.gates[own].cpu()
        raw = torch.cat((wide[:, : shape.channels], gates), dim=1)
        state = LayerState(shape, self.tokens.own[_LAYER])
        mixed = delta_rule.mix(StateRows(state, raw, self.past, self.committed, snapshots), weights)
        return gated_norm(mixed, wide[:, shape.channels :].view(mixed.shape), weights).flatten(1)


def delta_cases(device: torch.device, shape: DeltaShape, matrices: Iterable[Weights] = ()) -> Iterator[Case]:
    """matrices: for which codes are made."""
    heads = f"{shape.value_heads} of {shape.key_dim} and {shape.value_dim}"
    named, weights = f"a delta rule, heads {heads}", _weights(shape)
    on_device = replace(weights, **{x: getattr(weights, x).to(device) for x in ("conv", "a_log", "dt_bias", "norm")})
    one, other = (_Tokens.random(shape, device) for _ in range(2))
    whole = replace(one, states=one.states.clone(), own=one.own.clone())
    at_once = _run(device, shape, on_device, [_Part(whole, 0, _ENDS[-1], _ENDS[-1])])
    snapshots = [torch.zeros((2, shape.snapshot_bytes), dtype=torch.uint8, device=where) for where in (device, "cpu")]
    one.snapshots[_SNAPSHOT] = snapshots[0]
    past, row = 0, 0
    for end in _ENDS:
        committed = end if past == 0 else past
        parts = [_Part(one, past, end, committed)] + [_Part(other, 0, 5, 0)] * (past > 0)
        due = {_SNAPSHOT: snapshots[1][_LAYER]} if past == 0 else {}
        right = torch.cat([part.expected(shape, weights, due if part.tokens is one else {}) for part in parts])
        found = _run(device, shape, on_device, parts)
        yield Case(f"{named}, {len(found)} rows", error_of(found, right), DELTA)
        differ = float((found[: end - past] != at_once[row : row + end - past]).sum())
        yield Case(f"{named}, {len(found)} rows: bits of all at once", differ, 0)
        one.snapshots, past, row = {}, end, end
    states = [LayerState(shape, each[_LAYER]) for each in (one.states.cpu(), one.own)]
    yield Case(f"{named}: states", error_of(states[0].matrices, states[1].matrices), DELTA)
    rows = [state.rows(past - shape.kept_rows, past) for state in states]
    wrong = float((rows[0] != rows[1]).sum()) + (states[0].position != states[1].position)
    yield Case(f"{named}: what is kept", wrong, 0)
    floats = [each[_LAYER].cpu().view(torch.float32) for each in snapshots]
    yield Case(f"{named}: a snapshot", error_of(*floats), DELTA)
    yield from _coded(device, shape, on_device, other, named, matrices)


def _coded(
    device: torch.device,
    shape: DeltaShape,
    weights: DeltaWeights,
    tokens: _Tokens,
    named: str,
    matrices: Iterable[Weights],
) -> Iterator[Case]:
    """Codes for such matrices: those of a launch of their own."""
    rows = 5
    part, features = _Part(tokens, 0, rows, 0), shape.value_features
    floats = _run(device, shape, weights, [part])
    for each in {(each.columns, each.bits): each for each in matrices}.values():
        if not can_code(shape.value_dim, each.columns):
            continue
        right, found = (codes_for(each, rows, features, device) for _ in range(2))
        activations.to_codes(floats, right, features).run()
        _run(device, shape, weights, [part], found)
        yield Case(f"{named}: codes for {each.name}", differing(found, right), 0)


def _run(
    device: torch.device, shape: DeltaShape, weights: DeltaWeights, parts: list[_Part], codes: Codes | None = None
) -> Tensor:
    """By the kernels, fp32 [T, value features]."""
    words, pairs, row = list[tuple[int, ...]](), list[Tensor](), 0
    for index, part in enumerate(parts):
        end, due = row + part.end - part.past, part.tokens.snapshots
        pairs.append(torch.tensor([(at, due[at].data_ptr()) for at in due], device=device))
        at, prepared = part.tokens.states.data_ptr(), (index + 1) * REPLAYED_ROWS + row
        words.append((row, end, part.past, part.committed, at, prepared, pairs[-1].data_ptr(), len(due)))
        row = end
    tables = SegmentTables(torch.tensor(words, device=device), torch.zeros(row, dtype=torch.int32, device=device))
    wide, gates = (
        torch.cat([getattr(part.tokens, name)[part.past : part.end] for part in parts]) for name in ("wide", "gates")
    )
    place = StatePlace(_LAYER * shape.state_bytes, _LAYER * shape.snapshot_bytes)
    out = poisoned(row, shape.value_features, device=device)
    run_all(delta.mix(wide, gates, out if codes is None else codes, tables, weights, shape, place))
    return out


def _weights(shape: DeltaShape) -> DeltaWeights:
    a_log = torch.rand(shape.value_heads).mul(16).log()
    conv = torch.randn(shape.conv_width, shape.channels) * 0.5
    return DeltaWeights(conv, a_log, torch.randn(shape.value_heads), torch.rand(shape.value_dim))
