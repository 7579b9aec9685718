"""Keys and values of one sequence in one run of memory a layer, reserved for its whole length when it starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class ContiguousKV:
    """The KV cache of one sequence: keys and values [layers, KH, capacity, D], on each device those of its layers.

    `write` puts the tokens of a forward behind the `length` held so far; `advance` makes them part of the sequence once
    every layer has written, so that a forward that fails or is cancelled half-way leaves the cache as it was.
    """

    def __init__(
        self,
        *,
        devices: Sequence[torch.device],
        num_kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
    ) -> None:
        """devices: where each layer's keys and values rest."""
        self._shape, self._dtype = (num_kv_heads, capacity, head_dim), dtype
        self.capacity = capacity
        self.length = 0
        self._layers = _Layers.reserved(devices, self._shape, dtype)

    @property
    def keys(self) -> Tensor:
        return self._layers.only[0]

    @property
    def values(self) -> Tensor:
        return self._layers.only[1]

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self._layers.stores.values())

    def move(self, devices: Sequence[torch.device]) -> None:
        """Let each layer's rest there from now on. Where there is no memory, raises what torch does and stays."""
        if tuple(devices) == self._layers.devices:
            return
        moved = _Layers.reserved(devices, self._shape, self._dtype)
        for layer in range(len(devices)):
            moved[layer][:, :, : self.length] = self._layers[layer][:, :, : self.length]
        self._layers = moved

    def write(self, layer: int, past: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [T, KH, D] of the tokens behind the first `past`. Returns all so far, each [KH, past + T, D], on the
        device of k, whichever one they rest on."""
        end = past + k.shape[0]
        assert self.length <= past and end <= self.capacity, "the scheduler admits no token beyond what was reserved"
        keys, values = self._layers[layer]
        keys[:, past:end] = k.transpose(0, 1)
        values[:, past:end] = v.transpose(0, 1)
        return keys[:, :end].to(k.device), values[:, :end].to(k.device)

    def advance(self, num_tokens: int) -> None:
        self.length += num_tokens

    def trim(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        assert 0 <= length <= self.length
        self.length = length


@dataclass(frozen=True)
class _Layers:
    """Keys and values of every layer. stores: those of a device together, [2, its layers, KH, capacity, D]."""

    devices: tuple[torch.device, ...]
    stores: dict[torch.device, Tensor]

    @classmethod
    def reserved(cls, devices: Sequence[torch.device], shape: tuple[int, int, int], dtype: torch.dtype) -> _Layers:
        counts = Counter(devices)
        stores = {where: torch.empty((2, count, *shape), dtype=dtype, device=where) for where, count in counts.items()}
        return cls(tuple(devices), stores)

    @property
    def only(self) -> Tensor:
        """Where all layers are on one device."""
        (store,) = self.stores.values()
        return store

    def __getitem__(self, layer: int) -> Tensor:
        """[2, KH, capacity, D]."""
        device = self.devices[layer]
        return self.stores[device][:, self.devices[:layer].count(device)]


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize
