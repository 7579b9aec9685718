"""The host's memory as a GPU copies from it on its own: pages that stay where they are."""

from __future__ import annotations

import ctypes
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from localllm.offload.streaming.host_buffer import host_buffer
from localllm.repairs import is_wsl

_PORTABLE, _MAPPED = 1, 2  # cudaHostRegister...: for whatever context, and for kernels that read it themselves
_IS_READ_AT_ITS_ADDRESS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
# Windows gives Linux 0.5 to 1 GiB in all, of which tables of forwards and the driver take some.
_MOST_UNDER_WSL = 512 << 20
_SPARE_BYTES = 8 << 20  # tables of forwards and drawn tokens are locked while a model is used: 0.1 to 2 MiB


class _Registered(NamedTuple):
    """done: whether it was, once that is known."""

    num_bytes: int
    done: Future[bool]


class Pinning:
    """Registers memory with the driver on a thread of its own: at a few GB a second, a model would wait for it.

    What is not registered yet, or cannot be, is copied all the same, only slower and not beside what is computed. At
    the first refusal it ends, and leaves some to others. Does nothing where the device is not a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pin") if device.type == "cuda" else None
        self._registered: dict[int, _Registered] = {}  # by address, in the order of their coming
        self._most_bytes = _MOST_UNDER_WSL if is_wsl() else 1 << 62
        self._aside_bytes = 0
        self._spare: Tensor | None = None  # registered first, as long as nothing is refused
        self._is_refused = False

    def set_aside(self, num_bytes: int) -> None:
        """Keep room for memory that is added later; what was added before gives way, the last first. Nothing may be
        copied meanwhile."""
        self._aside_bytes = num_bytes
        while self._registered and not self._has_room(0):
            self._let_go(*self._registered.popitem())

    def add(self, memory: Tensor, *, is_set_aside: bool = False) -> None:
        """Begin to register memory of the host, which shares its pages with nothing else. is_set_aside: room was kept
        for it."""
        if is_set_aside:
            self._aside_bytes = 0
        if self._thread is not None and self._has_room(memory.nbytes):
            done = self._thread.submit(self._register, memory.data_ptr(), memory.nbytes)
            self._registered[memory.data_ptr()] = _Registered(memory.nbytes, done)

    def remove(self, memory: Tensor) -> None:
        """Unregister memory, before it is freed and when nothing is copied from it any more. The driver would copy from
        the pages that it has registered, whatever lies at this address by then."""
        if (registered := self._registered.pop(memory.data_ptr(), None)) is not None:
            self._let_go(memory.data_ptr(), registered)

    def wait(self) -> int:
        """Wait until all is registered that can be; return in how many runs of memory that is."""
        return sum(registered.done.result() for registered in self._registered.values())

    def is_readable(self, memory: Tensor) -> bool:
        """Return whether kernels may read memory at its address, once that is known."""
        registered = self._registered.get(memory.data_ptr())
        return registered is not None and is_read_at_its_address(self._device.index or 0) and registered.done.result()

    def close(self) -> None:
        """Unregister everything."""
        while self._registered:
            self._let_go(*self._registered.popitem())
        if self._thread is not None:
            self._thread.shutdown()
            self._give_spare()

    def _has_room(self, num_bytes: int) -> bool:
        held_bytes = sum(registered.num_bytes for registered in self._registered.values())
        return held_bytes + self._aside_bytes + num_bytes <= self._most_bytes

    def _register(self, address: int, num_bytes: int) -> bool:
        if self._is_refused:
            return False
        with torch.cuda.device(self._device):  # a thread begins on the first card, and would make a context there
            if self._spare is None and _is_locked((spare := host_buffer(_SPARE_BYTES)).data_ptr(), _SPARE_BYTES):
                self._spare = spare
            is_done = self._spare is not None and _is_locked(address, num_bytes)
            if not is_done:
                self._is_refused = True
                self._give_spare()
        return is_done

    def _give_spare(self) -> None:
        if self._spare is not None:
            _driver().cudaHostUnregister(self._spare.data_ptr())
            self._spare = None

    def _let_go(self, address: int, registered: _Registered) -> None:
        """Unregister memory, or give its registration up where that has not begun."""
        if not registered.done.cancel() and registered.done.result():
            _driver().cudaHostUnregister(address)


@cache
def is_read_at_its_address(card: int) -> bool:
    """Return whether kernels find registered memory at the address that it has on the host, as they do on most systems.
    False where no driver of NVIDIA's says so."""
    found = ctypes.c_int()
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute
    except OSError:
        return False
    return ask(ctypes.byref(found), _IS_READ_AT_ITS_ADDRESS, card) == 0 and bool(found.value)


def _is_locked(address: int, num_bytes: int) -> bool:
    return int(_driver().cudaHostRegister(address, num_bytes, _PORTABLE | _MAPPED)) == 0


def _driver() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
