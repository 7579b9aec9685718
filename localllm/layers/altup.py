"""AltUp (arXiv:2301.13310): several hidden states a token, of which each layer computes one and corrects the others.

Gemma 3n's, with LAuReL (arXiv:2411.07501), a small matrix beside attention. Between two blocks a decoder has the state
that is computed, the first; all of them are carried with the batch, [T, states, hidden].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.layers.adapted import adapted
from localllm.layers.batch import Batch, moved
from localllm.layers.linear import Linear
from localllm.layers.norm import Norm
from localllm.layers.per_layer import PerLayerGate

STATES = "AltUp's states"  # that a batch carries
_LEAST_SQUARE = 1e-5  # of a state that is brought to the length of another

Body = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class StateMixer:
    """What the states have to do with each other, by the one that is computed. coefficients [n, n] or [n * n, n]."""

    router: Linear
    norm: Norm
    coefficients: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.router, self.coefficients

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, hidden] -> fp32 [T, n] or [T, n * n]."""
        routed = adapted(self.router, self.norm(x).float() / x.shape[1], batch)
        return adapted(self.coefficients, torch.tanh(routed), batch)


@dataclass(eq=False)
class AltUpStart:
    """The first block of a layer: all states are predicted, and attention and LAuReL read the first.

    projections: of the embedding to the other states, in the model's first layer alone.
    """

    mixer: StateMixer
    laurel: tuple[Linear, Linear, Norm]
    projections: Sequence[Linear] = ()

    @property
    def linears(self) -> tuple[Linear, ...]:
        return *self.mixer.linears, *self.laurel[:2], *self.projections

    def __call__(self, x: Tensor, batch: Batch, norm_in: Norm, body: Body) -> Tensor:
        """x [T, hidden] -> [T, hidden]. body: with the norm behind it."""
        if self.projections:
            states = torch.stack([x, *(_as_long_as(x, adapted(each, x, batch)) for each in self.projections)], dim=1)
        else:
            states = moved(batch.carried[STATES], x.device)
        count = states.shape[1]
        shares = self.mixer(x, batch).view(-1, count, count).to(x.dtype)
        batch.carried[STATES] = states = states + shares @ states
        active = states[:, 0]
        normed = norm_in(active)
        left, right, norm = self.laurel
        return (active + body(normed) + normed + norm(adapted(right, adapted(left, normed, batch), batch))) * math.sqrt(
            0.5
        )


@dataclass(eq=False)
class AltUpEnd:
    """The last block of a layer: all states are corrected by what the first has become, and the others take the layer's
    embeddings in.

    scale: fp32 [hidden], of the first state where its gate reads it; None: 1.
    projections: of the other states back, in the model's last layer alone, which ends with their mean.
    """

    mixer: StateMixer
    gate: PerLayerGate
    scale: Tensor | None = None
    projections: Sequence[Linear] = ()

    @property
    def linears(self) -> tuple[Linear, ...]:
        return *self.mixer.linears, *self.gate.linears, *self.projections

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, hidden]: behind the feed-forward -> [T, hidden]."""
        states = moved(batch.carried[STATES], x.device)
        shares = (self.mixer(x, batch) + 1.0).to(x.dtype)
        states = states + (x - states[:, 0]).unsqueeze(1) * shares.unsqueeze(2)
        first = states[:, 0]
        scaled = first if self.scale is None else (first.float() * self.scale).to(x.dtype)
        states[:, 1:] += self.gate(scaled, batch).unsqueeze(1)
        batch.carried[STATES] = states
        if not self.projections:
            return first
        others = [
            _as_long_as(first, adapted(each, states[:, i], batch)) for i, each in enumerate(self.projections, start=1)
        ]
        return torch.stack([first, *others]).mean(0)


def _as_long_as(x: Tensor, y: Tensor) -> Tensor:
    """y [T, hidden], each row as long as x's."""
    wanted, found = (each.float().square().mean(-1, keepdim=True) for each in (x, y))
    return (y.float() * wanted.sqrt() / found.clamp(min=_LEAST_SQUARE).sqrt()).to(x.dtype)
