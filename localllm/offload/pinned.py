"""The host's memory as a GPU copies from it on its own: pages that stay where they are."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

_PORTABLE = 1  # cudaHostRegisterPortable: for whatever context


class Pinning:
    """Registers memory with the driver beside everything else: at a few GB a second, a model would wait for it.

    What is not registered yet, or cannot be (a limit of the system), is copied all the same, only slower and not beside
    what is computed. Does nothing where the device is no GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pin") if device.type == "cuda" else None
        self._registered: dict[int, Future[bool]] = {}  # by address: whether it was

    def add(self, memory: Tensor) -> None:
        """memory: on the host, in pages that are nobody else's."""
        if self._thread is not None:
            self._registered[memory.data_ptr()] = self._thread.submit(_register, memory.data_ptr(), memory.nbytes)

    def remove(self, memory: Tensor) -> None:
        """Before it is given back."""
        registered = self._registered.pop(memory.data_ptr(), None)
        if registered is not None and registered.result():
            _driver().cudaHostUnregister(memory.data_ptr())

    def wait(self) -> int:
        """Until all is registered that can be. Returns in how many runs of memory that is."""
        return sum(registered.result() for registered in self._registered.values())

    def close(self) -> None:
        """All is let go."""
        for address, registered in self._registered.items():
            if registered.result():
                _driver().cudaHostUnregister(address)
        self._registered.clear()
        if self._thread is not None:
            self._thread.shutdown()


def _register(address: int, num_bytes: int) -> bool:
    return int(_driver().cudaHostRegister(address, num_bytes, _PORTABLE)) == 0


def _driver() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
