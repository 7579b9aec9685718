"""What a head that drafts reads: the embedding of a token, and what the model made of the one before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.layers.linear import Embedding, Linear
from localllm.layers.norm import Norm


@dataclass(eq=False, kw_only=True)
class DraftInputs(Embedding):
    """joined_proj(norm(embedding), norm(hidden state)), by the embedding of the model that it drafts for.

    The hidden states, behind the final norm, are handed over before a forward; its batches take them in order.
    """

    norm_embedding: Norm
    norm_hidden: Norm
    joined_proj: Linear
    states: Tensor | None = None  # [T, hidden]: of the tokens before those of the next batches

    @property
    def device(self) -> torch.device:
        return self.joined_proj.device

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int64 -> [T, hidden]."""
        count, states = len(token_ids), self.states
        assert states is not None and count <= len(states), "each token has the hidden state of the one before it"
        self.states = states[count:]
        embedded = super().__call__(token_ids.to(self.matrix.device)).to(self.device)
        before = states[:count].to(device=self.device, dtype=embedded.dtype)
        return self.joined_proj(torch.cat((self.norm_embedding(embedded), self.norm_hidden(before)), dim=-1))
