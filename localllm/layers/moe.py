"""A mixture of experts: each token is computed by the few that a router chooses for it, and perhaps by a shared one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from localllm.kernels.reference import route
from localllm.layers.batch import Batch
from localllm.layers.config import MoEConfig
from localllm.layers.linear import Linear
from localllm.layers.mlp import MLP


class ExpertBank(Protocol):
    """The experts of one block, wherever they rest."""

    @property
    def record_bytes(self) -> int:
        """Bytes of one expert."""

    def __getitem__(self, index: int) -> MLP:
        """Return one of them, to be computed with at once."""


@dataclass(eq=False)
class MoE:
    """router [num_experts, hidden] and shared_gate [1, hidden] are in fp32, as is correction [num_experts]."""

    config: MoEConfig
    router: Linear
    experts: ExpertBank
    correction: Tensor | None = None
    shared: MLP | None = None
    shared_gate: Linear | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices that every token is multiplied by, but those that choose."""
        return () if self.shared is None else self.shared.linears

    @property
    def device(self) -> torch.device:
        return self.router.device

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, hidden] -> [T, hidden]; a row depends on itself alone, however many rows are beside it."""
        wide = x.float()
        chosen, weights = route(self.router(wide), self.correction, self.config.router)  # [T, top_k] each
        total = torch.zeros_like(wide)
        for expert in torch.unique(chosen).tolist():
            rows, slots = (chosen == expert).nonzero(as_tuple=True)
            y = self.experts[expert](x[rows], batch)
            total.index_add_(0, rows, y.float() * weights[rows, slots, None])
        if self.shared is not None:
            share = 1.0 if self.shared_gate is None else self.shared_gate(wide).sigmoid()  # [T, 1]
            total += self.shared(x, batch).float() * share
        return total.to(x.dtype)
