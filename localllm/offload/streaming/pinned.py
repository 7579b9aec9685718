"""The host's memory as a GPU copies from it on its own: pages that stay where they are."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

_PORTABLE, _MAPPED = 1, 2  # cudaHostRegister...: for whatever context, and for kernels that read it themselves


class Pinning:
    """Registers memory with the driver on a thread of its own: at a few GB a second, a model would wait for it.

    What is not registered yet, or cannot be (a limit of the system), is copied all the same, only slower and not beside
    what is computed. Does nothing where the device is not a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pin") if device.type == "cuda" else None
        self._registered: dict[int, Future[bool]] = {}  # by address: whether it was

    def add(self, memory: Tensor) -> None:
        """Begin to register memory of the host, which shares its pages with nothing else."""
        if self._thread is not None:
            self._registered[memory.data_ptr()] = self._thread.submit(self._register, memory.data_ptr(), memory.nbytes)

    def remove(self, memory: Tensor) -> None:
        """Unregister memory, before it is freed and when nothing is copied from it any more. The driver would copy from
        the pages that it has registered, whatever lies at this address by then."""
        if (registered := self._registered.pop(memory.data_ptr(), None)) is not None:
            self._let_go(memory.data_ptr(), registered)

    def wait(self) -> int:
        """Wait until all is registered that can be; return in how many runs of memory that is."""
        return sum(registered.result() for registered in self._registered.values())

    def close(self) -> None:
        """Unregister everything."""
        for address, registered in self._registered.items():
            self._let_go(address, registered)
        self._registered.clear()
        if self._thread is not None:
            self._thread.shutdown()

    def _register(self, address: int, num_bytes: int) -> bool:
        with torch.cuda.device(self._device):  # a thread begins on the first card, and would make a context there
            return int(_driver().cudaHostRegister(address, num_bytes, _PORTABLE | _MAPPED)) == 0

    def _let_go(self, address: int, registered: Future[bool]) -> None:
        """Unregister memory, or give its registration up where that has not begun."""
        if not registered.cancel() and registered.result():
            _driver().cudaHostUnregister(address)


def _driver() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
