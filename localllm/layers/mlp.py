"""The gated feed-forward body: down(activation(gate(x)) * up(x)), with gate and up as one matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from localllm.layers.batch import Batch, moved
from localllm.layers.linear import Linear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


@dataclass(eq=False)
class MLP:
    gate_up_proj: Linear
    down_proj: Linear
    activation_name: str

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.gate_up_proj, self.down_proj

    @property
    def device(self) -> torch.device:
        return self.gate_up_proj.device

    def __call__(self, x: Tensor, _batch: Batch) -> Tensor:
        """x [T, hidden] -> [T, hidden]; the rows do not see each other, so the batch does not matter."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)  # [T, intermediate] each
        # In place: a prompt's temporaries are fresh pages every time, and faulting them in costs more than the product.
        return self.down_proj(ACTIVATIONS[self.activation_name](gate).mul_(up))


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
        taken = moved(x, self.there.device)  # before `here` is begun: its end would be waited for
        return self.here(x, batch) + moved(self.there(taken, batch), x.device)
