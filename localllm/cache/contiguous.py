"""Keys and values of one sequence in one run of memory a layer, reserved for its whole length when it starts."""

from __future__ import annotations

import torch
from torch import Tensor


class ContiguousKV:
    """The KV cache of one sequence: keys and values [layers, KH, capacity, D].

    `write` puts the tokens of a forward behind the `length` held so far; `advance` makes them part of the sequence once
    every layer has written, so that a forward that fails or is cancelled half-way leaves the cache as it was.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_kv_heads, capacity, head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.capacity = capacity
        self.length = 0

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def write(self, layer: int, past: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [T, KH, D] of the tokens behind the first `past`. Returns all so far, each [KH, past + T, D]."""
        end = past + k.shape[0]
        assert self.length <= past and end <= self.capacity, "the scheduler admits no token beyond what was reserved"
        keys, values = self.keys[layer], self.values[layer]
        keys[:, past:end] = k.transpose(0, 1)
        values[:, past:end] = v.transpose(0, 1)
        return keys[:, :end], values[:, :end]

    def advance(self, num_tokens: int) -> None:
        self.length += num_tokens

    def trim(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        assert 0 <= length <= self.length
        self.length = length


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize
