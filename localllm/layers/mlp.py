"""The feed-forward body: down(activation(gate(x)) * up(x)), with gate and up as one matrix, or without a gate."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels.reference import ACTIVATIONS
from localllm.layers.adapted import adapted, add_adapters
from localllm.layers.batch import Batch, moved
from localllm.layers.config import MLPConfig
from localllm.layers.linear import Linear


@dataclass(eq=False)
class MLP:
    """gate_up_proj: rows of the gate, then those of up; up alone where there is no gate. coefficients: fp32 [4] of an
    xIELU, which learns some."""

    gate_up_proj: Linear
    down_proj: Linear
    config: MLPConfig
    coefficients: Tensor | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.gate_up_proj, self.down_proj

    @property
    def device(self) -> torch.device:
        return self.gate_up_proj.device

    def __call__(self, x: Tensor, batch: Batch, rows: Tensor | None = None) -> Tensor:
        """x [T, hidden] -> [T, hidden]. rows: of the batch, ascending, where x is not all of it."""
        wide = adapted(self.gate_up_proj, x, batch, rows)
        return adapted(self.down_proj, self.between(wide), batch, rows)

    def between(self, wide: Tensor) -> Tensor:
        """Return what the last matrix is given, of what the first one has made; that may be written over."""
        if not self.config.has_gate:
            return self._activated(wide)
        gate, up = wide.chunk(2, dim=-1)  # [T, intermediate] each
        if self.config.sparsity:
            gate = _sparse(gate, self.config.sparsity)
        # In place: a prompt's temporaries are fresh pages every time, and faulting them in costs more than the product.
        if self.config.limit is not None:
            gate, up = gate.clamp_(max=self.config.limit), up.clamp_(-self.config.limit, self.config.limit)
        if self.config.up_offset:
            up.add_(self.config.up_offset)
        return self._activated(gate).mul_(up)

    def _activated(self, x: Tensor) -> Tensor:
        if self.coefficients is None:
            return ACTIVATIONS[self.config.activation](x)
        return _xielu(x, *self.coefficients.float())


def _sparse(gate: Tensor, sparsity: float) -> Tensor:
    """gate [T, N] less what this share of it would be below if it were normally distributed, and no less than zero
    (Gemma 3n's statistical top-k)."""
    cutoff = gate.mean(-1, keepdim=True) + gate.std(-1, keepdim=True, unbiased=False) * NormalDist().inv_cdf(sparsity)
    return functional.relu(gate - cutoff)


def _xielu(x: Tensor, positive: Tensor, negative: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """xIELU (arXiv:2411.13010). positive, negative: learnt, before their softplus; eps: the largest negative number
    whose exponential is taken."""
    alpha_p, alpha_n = functional.softplus(positive), beta + functional.softplus(negative)
    wide = x.float()
    below = (torch.expm1(torch.minimum(wide, eps)) - wide) * alpha_n
    return (torch.where(wide > 0, alpha_p * wide.square(), below) + beta * wide).to(x.dtype)


@dataclass(eq=False)
class SplitMLP:
    """An MLP of which some of the intermediate features are computed on one device and the others on another, at the
    same time: their outputs add up to that of the whole."""

    here: MLP  # on the device of input and output
    there: MLP

    @property
    def linears(self) -> tuple[Linear, ...]:
        return *self.here.linears, *self.there.linears

    @property
    def device(self) -> torch.device:
        return self.here.device

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        if batch.adapted_segments:
            return self._adapted(x, batch)
        taken = moved(x, self.there.device)  # before `here` is begun: its end would be waited for
        return self.here(x, batch) + moved(self.there(taken, batch), x.device)

    def _adapted(self, x: Tensor, batch: Batch) -> Tensor:
        """Adapters are of the whole: what they make is cut as the features are."""
        here, there = self.here, self.there
        features, rest = here.down_proj.in_features, there.down_proj.in_features
        wide, beside = here.gate_up_proj(x), there.gate_up_proj(moved(x, there.device))
        change = x.new_zeros(len(x), here.gate_up_proj.out_features + there.gate_up_proj.out_features)
        add_adapters(here.gate_up_proj.name, x, change, batch)
        own, others = torch.split(change.view(len(x), -1, features + rest), [features, rest], dim=-1)
        inside = here.between(wide + own.flatten(1))
        outside = there.between(beside + moved(others.flatten(1), there.device))
        y = here.down_proj(inside) + moved(there.down_proj(outside), x.device)
        add_adapters(here.down_proj.name, torch.cat((inside, moved(outside, x.device)), dim=-1), y, batch)
        return y
