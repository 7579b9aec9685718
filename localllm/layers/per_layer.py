"""Embeddings that a token has for each layer: made once a forward, and gated behind each layer's feed-forward.

Gemma 3n's and 4's; see `layers.config.PerLayerConfig`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from localllm.kernels.reference import ACTIVATIONS
from localllm.layers.adapted import adapted
from localllm.layers.batch import Batch, moved
from localllm.layers.linear import Linear
from localllm.layers.norm import Norm, RMSNorm

ROWS, INPUTS = "per-layer rows", "per-layer inputs"  # that a batch carries
_HALF_POWER = math.sqrt(0.5)  # of the sum of two that are alike


@dataclass(eq=False)
class PerLayerInputs:
    """Makes the inputs of all layers: (norm(projection(embedding)) + looked-up rows) / sqrt(2)."""

    projection: Linear
    norm: RMSNorm

    def prepare(self, x: Tensor, batch: Batch) -> None:
        """x [T, hidden]: the embedded tokens. The batch carries their rows, [T, layers * features], and afterwards the
        inputs, [T, layers, features]."""
        rows = moved(batch.carried[ROWS], x.device).view(len(x), -1, len(self.norm.weight))
        projected = self.norm(adapted(self.projection, x, batch).view(rows.shape))
        batch.carried[INPUTS] = (projected + rows) * _HALF_POWER


@dataclass(eq=False)
class PerLayerGate:
    """norm(back(activation(gate(x)) * inputs of the layer))."""

    layer: int
    activation: str
    gate: Linear
    back: Linear
    norm: Norm

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.gate, self.back

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        inputs = moved(self.inputs(batch), x.device)
        gated = ACTIVATIONS[self.activation](adapted(self.gate, x, batch)) * inputs
        return self.norm(adapted(self.back, gated, batch))

    def inputs(self, batch: Batch) -> Tensor:
        """Return the layer's, [T, features]; the looked-up rows alone where a draft leaves the first block out."""
        if INPUTS not in batch.carried:
            batch.carried[INPUTS] = looked_up_alone(batch, self.gate.out_features)
        inputs: Tensor = batch.carried[INPUTS][:, self.layer]
        return inputs


def looked_up_alone(batch: Batch, features: int) -> Tensor:
    """Return the inputs of all layers as far as they are looked up, [T, layers, features]."""
    rows: Tensor = batch.carried[ROWS]
    return rows.view(len(batch), -1, features) * _HALF_POWER
