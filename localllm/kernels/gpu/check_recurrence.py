"""A layer with a matrix a head beside its reference on random inputs: outputs, states, a snapshot, bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.check_case import Case, error_of, poisoned
from localllm.kernels.gpu.launch import KernelLaunch, run_all
from localllm.kernels.gpu.recurrence import SegmentTables
from localllm.kernels.layer_state import LayerState, StateRows
from localllm.kernels.state_shapes import REPLAYED_ROWS, ConvolvedShape, StatePlace

RECURRENCE = 2e-5  # of the norm: a card's exponentials and roots, and what the states have kept of those before
_LAYER = 1  # of two
# A prompt, a few tokens behind it, which change nothing, and one that takes them in and has the next of them beside it.
_ENDS, _SNAPSHOT = (40, 43, 44), 17

S = TypeVar("S", bound=ConvolvedShape)


@dataclass
class SequenceTokens:
    """A sequence of random tokens, and its states, those of the reference among them."""

    wide: Tensor
    gates: Tensor
    states: Tensor
    own: Tensor
    snapshots: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def random(cls, shape: ConvolvedShape, device: torch.device) -> SequenceTokens:
        wide = torch.randn((_ENDS[-1], shape.channels + features_of(shape)), device=device)
        gates = torch.randn((len(wide), shape.row_floats - shape.channels), device=device)
        states = torch.zeros((2, shape.state_bytes), dtype=torch.uint8, device=device)
        return cls(wide, gates, states, torch.zeros_like(states, device="cpu"))


@dataclass(frozen=True)
class TokenRun:
    """The tokens [past, end) of a sequence."""

    tokens: SequenceTokens
    past: int
    end: int
    committed: int


@dataclass(frozen=True)
class CheckedLayer(Generic[S]):
    """launches: of wide [M, features], gates, what they write, and where the tables and the states
    are. expected: the same by the reference, of the rows of wide and of a part, without what goes into the layer.
    channels: where in wide that begins."""

    shape: S
    launches: Callable[[Tensor, Tensor, Tensor | Codes, SegmentTables, StatePlace], list[KernelLaunch]]
    expected: Callable[[StateRows[S], Tensor], Tensor]
    channels: int = 0

    def right(self, part: TokenRun, snapshots: Mapping[int, Tensor]) -> Tensor:
        """By the reference, fp32 [T, features]."""
        wide, gates = (x[part.past : part.end].cpu() for x in (part.tokens.wide, part.tokens.gates))
        raw = torch.cat((wide[:, self.channels : self.channels + self.shape.channels], gates), dim=1)
        state = LayerState(self.shape, part.tokens.own[_LAYER])
        return self.expected(StateRows(state, raw, part.past, part.committed, snapshots), wide)

    def found(self, parts: Sequence[TokenRun], codes: Codes | None = None) -> Tensor:
        """By the kernels, fp32 [T, features]."""
        device, words, pairs, row = parts[0].tokens.wide.device, list[tuple[int, ...]](), list[Tensor](), 0
        for index, part in enumerate(parts):
            end, due = row + part.end - part.past, part.tokens.snapshots
            pairs.append(torch.tensor([(at, due[at].data_ptr()) for at in due], device=device))
            at, prepared = part.tokens.states.data_ptr(), (index + 1) * REPLAYED_ROWS + row
            words.append((row, end, part.past, part.committed, at, prepared, pairs[-1].data_ptr(), len(due)))
            row = end
        positions = torch.zeros(row, dtype=torch.int32, device=device)
        wide, gates = (
            torch.cat([getattr(part.tokens, x)[part.past : part.end] for part in parts]) for x in ("wide", "gates")
        )
        place = StatePlace(_LAYER * self.shape.state_bytes, _LAYER * self.shape.snapshot_bytes)
        out = poisoned(row, features_of(self.shape), device=device)
        tables = SegmentTables(torch.tensor(words, device=device), positions)
        run_all(self.launches(wide, gates, out if codes is None else codes, tables, place))
        return out


def features_of(shape: ConvolvedShape) -> int:
    """Return how many features come out of a layer."""
    return shape.heads * shape.matrix_dims[1]


def recurrence_cases(layer: CheckedLayer[S], named: str, device: torch.device) -> Iterator[Case]:
    shape = layer.shape
    one, other = (SequenceTokens.random(shape, device) for _ in range(2))
    whole = replace(one, states=one.states.clone(), own=one.own.clone())
    at_once = layer.found([TokenRun(whole, 0, _ENDS[-1], _ENDS[-1])])
    snapshots = [torch.zeros((2, shape.snapshot_bytes), dtype=torch.uint8, device=where) for where in (device, "cpu")]
    one.snapshots[_SNAPSHOT] = snapshots[0]
    past = 0
    for end in _ENDS:
        committed = end if past == 0 else past
        parts = [TokenRun(one, past, end, committed)] + [TokenRun(other, 0, 5, 0)] * (past > 0)
        due = {_SNAPSHOT: snapshots[1][_LAYER]} if past == 0 else {}
        right = torch.cat([layer.right(part, due if part.tokens is one else {}) for part in parts])
        found = layer.found(parts)
        yield Case(f"{named}, {len(found)} rows", error_of(found, right), RECURRENCE)
        differ = float((found[: end - past] != at_once[past:end]).sum())
        yield Case(f"{named}, {len(found)} rows: bits of all at once", differ, 0)
        one.snapshots, past = {}, end
    states = [LayerState(shape, each[_LAYER]) for each in (one.states.cpu(), one.own)]
    yield Case(f"{named}: states", error_of(states[0].matrices, states[1].matrices), RECURRENCE)
    rows = [state.rows(past - shape.kept_rows, past) for state in states]
    wrong = float((rows[0] != rows[1]).sum()) + (states[0].position != states[1].position)
    yield Case(f"{named}: what is kept", wrong, 0)
    floats = [each[_LAYER].cpu().view(torch.float32) for each in snapshots]
    yield Case(f"{named}: a snapshot", error_of(*floats), RECURRENCE)
