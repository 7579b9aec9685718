"""A mixture of experts: each token is computed by the few that a router chooses for it, and perhaps by a shared one."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from localllm.kernels import reference
from localllm.layers.adapted import add_adapters
from localllm.layers.batch import Batch
from localllm.layers.config import MoEConfig
from localllm.layers.linear import Linear
from localllm.layers.mlp import MLP
from localllm.layers.norm import RMSNorm


class ExpertBank(Protocol):
    """The experts of one block, wherever they rest."""

    @property
    def record_bytes(self) -> int:
        """Bytes of one expert."""

    def held(self, experts: Sequence[int]) -> Generator[list[tuple[int, MLP]], None, None]:
        """Yield these experts with their numbers in groups, in whatever order they are there. A group can be computed
        with until the next one is asked for. Raises LocalLLMError for one that cannot be brought."""


@dataclass(frozen=True)
class MoENorms:
    """Norms of what goes into each part of a mixture, and of what comes out of the experts and of the shared one."""

    router: RMSNorm
    experts_in: RMSNorm
    experts_out: RMSNorm
    shared_in: RMSNorm
    shared_out: RMSNorm


@dataclass(eq=False)
class MoE:
    """router [num_experts, hidden] and shared_gate [1, hidden] are in fp32, as are correction and expert_scales
    [num_experts]."""

    config: MoEConfig
    router: Linear
    experts: ExpertBank
    correction: Tensor | None = None
    shared: MLP | None = None
    shared_gate: Linear | None = None
    expert_scales: Tensor | None = None
    norms: MoENorms | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices that every token is multiplied by, but those that choose."""
        return () if self.shared is None else self.shared.linears

    @property
    def device(self) -> torch.device:
        return self.router.device

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, hidden] -> [T, hidden]; a row depends on itself alone, however many rows are beside it."""
        wide, router, norms = x.float(), self.config.router, self.norms
        # In fp64: sums and exponentials of fp32 depend in their last digits on how many rows there are, and with those
        # the choice of experts.
        logits = _product(wide if norms is None else norms.router(wide), self.router, batch)
        chosen, shares = reference.route(logits, self.correction, router)  # [T, top_k] each
        weights = shares.float() if self.expert_scales is None else shares.float() * self.expert_scales[chosen]
        inward = x if norms is None else norms.experts_in(x)
        parts = torch.empty((*chosen.shape, x.shape[1]), device=x.device)  # [T, top_k, hidden]
        with closing(self.experts.held(torch.unique(chosen).tolist())) as groups:
            for expert, mlp in itertools.chain.from_iterable(groups):
                rows, slots = (chosen == expert).nonzero(as_tuple=True)
                parts[rows, slots] = mlp(inward[rows], batch, rows).float()
        total = torch.zeros_like(wide)
        for slot in range(router.top_k):  # one after the other: in this order whatever came first
            total += parts[:, slot] * weights[:, slot, None]
        if norms is not None and self.shared is not None:
            return norms.experts_out(total.to(x.dtype)) + norms.shared_out(self.shared(norms.shared_in(x), batch))
        if self.shared is not None:
            share = (
                1.0 if self.shared_gate is None else _product(wide, self.shared_gate, batch).sigmoid().float()
            )  # [T, 1]
            total += self.shared(x, batch).float() * share
        return total.to(x.dtype)


def _product(x: Tensor, linear: Linear, batch: Batch) -> Tensor:
    """x [T, K] -> fp64 [T, N]."""
    y = reference.linear(x.double(), linear.tensors["weight"], linear.bias)
    add_adapters(linear.name, x, y, batch)
    return y
