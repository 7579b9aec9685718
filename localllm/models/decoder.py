"""The one decoder of all families: embed, a run of blocks, a final norm, the head.

A block is `x + body(norm(x))` around an attention or an MLP body. It is the unit of placement, of execution, of
streaming and of skipping; the decoder knows nothing of where a block's bytes rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.layers.attention import Attention
from localllm.layers.batch import Batch
from localllm.layers.embedding import Embedding
from localllm.layers.linear import Linear
from localllm.layers.mlp import MLP
from localllm.layers.norm import RMSNorm
from localllm.layers.rotary import Rotary
from localllm.models.config import ModelConfig


@dataclass(frozen=True)
class Block:
    """x + norm_out(body(norm_in(x))); a family has one of the two norms, or both."""

    name: str  # "layers.3.attention", "layers.3.mlp"
    body: Attention | MLP
    norm_in: RMSNorm | None
    norm_out: RMSNorm | None

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        y = self.body(x if self.norm_in is None else self.norm_in(x), batch)
        return x + (y if self.norm_out is None else self.norm_out(y))


@dataclass(frozen=True)
class Decoder:
    config: ModelConfig
    embed: Embedding
    blocks: tuple[Block, ...]
    final_norm: RMSNorm
    head: Linear
    rotaries: tuple[Rotary, ...]
    dtype: torch.dtype
    device: torch.device

    def logits(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [R, hidden] -> fp32 [R, V]."""
        return self.capped(self.head(self.final_norm(hidden_states)).float())

    def capped(self, logits: Tensor) -> Tensor:
        """Logits as the family bounds them."""
        cap = self.config.final_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def hidden_states(self, batch: Batch, on_block: Callable[[Block, Tensor], None] | None = None) -> Tensor:
        """Run the batch's tokens through every block; [T, hidden].

        `on_block` sees each block's output, and may raise to give the forward up: no cache has advanced by then.
        """
        x = self.embed(batch.token_ids)  # [T, hidden]
        for block in self.blocks:
            x = block(x, batch)
            if on_block is not None:
                on_block(block, x)
        return x

    def forward(self, batch: Batch) -> Tensor:
        """fp32 logits [R, V] of the batch's `logit_rows`."""
        return self.logits(self.hidden_states(batch)[batch.logit_rows])
