"""The host's memory as the simulated card sees it: what is page-locked, and how much of it the driver allows."""

from __future__ import annotations

import ctypes
import weakref
from collections import Counter

import torch
from torch import Tensor


def span(tensor: Tensor) -> tuple[int, int]:
    """Return the address of a tensor and the bytes from its first to its last element."""
    if not tensor.numel():
        return tensor.data_ptr(), 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


class _Buffer(bytearray):
    """A bytearray that may be referred to weakly."""


class HostMemory:
    """limit_bytes: that the driver locks at most, of what is registered and of what torch keeps; None for any."""

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self.registered: dict[int, int] = {}  # bytes by address
        self._allocated: dict[int, int] = {}
        self._kept: Counter[int] = Counter()  # what torch keeps of freed blocks for later, by their size

    @property
    def locked_bytes(self) -> int:
        kept = sum(size * count for size, count in self._kept.items())
        return kept + sum(self.registered.values()) + sum(map(_power_of_two, self._allocated.values()))

    def is_locked(self, tensor: Tensor) -> bool:
        return self.holds(*span(tensor))

    def holds(self, address: int, num_bytes: int) -> bool:
        """Return whether so many bytes are page-locked from there on."""
        return any(
            begin <= address and address + num_bytes <= begin + size
            for ranges in (self.registered, self._allocated)
            for begin, size in list(ranges.items())  # a thread of its own may add some
        )

    def bytes_at(self, address: int, num_bytes: int) -> Tensor:
        """Return that memory."""
        assert self.holds(address, num_bytes)
        return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)

    def register(self, address: int, num_bytes: int) -> bool:
        """Return whether the driver takes it."""
        if not self._allows(num_bytes):
            return False
        self.registered[address] = num_bytes
        return True

    def locked_copy(self, content: Tensor) -> Tensor | None:
        """Return a copy in page-locked memory, None where the driver refuses it."""
        num_bytes = max(1, content.nbytes)
        size = _power_of_two(num_bytes)
        if self._kept[size]:
            self._kept[size] -= 1
        elif not self._allows(size):
            return None
        buffer = _Buffer(num_bytes + 64)
        memory = torch.frombuffer(buffer, dtype=torch.uint8)
        begin = -memory.data_ptr() % 64
        memory = memory[begin : begin + content.nbytes]
        self._allocated[memory.data_ptr()] = num_bytes
        weakref.finalize(buffer, self._freed, memory.data_ptr(), size)
        copy = memory.view(content.dtype).view(content.shape)
        return copy.copy_(content)

    def give_back(self) -> None:
        """Give the driver what torch keeps."""
        self._kept.clear()

    def _freed(self, address: int, size: int) -> None:
        del self._allocated[address]
        self._kept[size] += 1

    def _allows(self, num_bytes: int) -> bool:
        return self.limit_bytes is None or self.locked_bytes + num_bytes <= self.limit_bytes


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
