"""Where a model runs, how much memory is there, and whether it fits with its context: before a byte of it is read."""

from __future__ import annotations

from collections.abc import Callable

import torch

from localllm.config import format_bytes
from localllm.engine.device import device_name, dtype_name
from localllm.errors import DoesNotFitError, Fix, UsageError
from localllm.offload.measurements.device_rates import gpu
from localllm.offload.planner.machine_memory import HEADROOM as HEADROOM
from localllm.offload.planner.machine_memory import free_bytes
from localllm.quant.layouts import DTYPE_NAMES, torch_dtype

_MUCH_BYTES = 256 << 20  # another program that came or went; less is what a desktop's windows take and give back


def choose_device(name: str) -> torch.device:
    """Return the device that auto, cpu or cuda means. Raises UsageError for CUDA where there is none."""
    return torch.device(device_name(name))


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the type that auto, bf16 or fp32 means there. Raises UsageError."""
    return torch_dtype(DTYPE_NAMES[dtype_name(name, str(device))])


def available_bytes(device: torch.device) -> int:
    """Return the free bytes of the device; of a CPU, the least of the machine's, the control groups' and the address
    space's."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return free
    return free_bytes()


def reachable_bytes(device: torch.device) -> int:
    """Return the bytes that are free or torch's already: what it has on a GPU, used or kept for later, belongs to this
    process."""
    reserved = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    return available_bytes(device) + reserved


def others_bytes(device: torch.device) -> int | None:
    """Return the bytes of a GPU that other programs and the display use; None where its driver does not tell."""
    card = gpu(device)
    return None if card is None or card.own_bytes is None else card.used_by_others_bytes


class OtherPrograms:
    """Whether other programs have taken much of a device's memory, or given much back, since the last look.

    A driver's own part grows too: by kernels that are loaded at their first use, and by graphs. Where it does not tell
    whose a change is, one during an answer is taken for this process's own, unless it is large.
    """

    def __init__(self, device: torch.device, graph_bytes: Callable[[], int]) -> None:
        """graph_bytes: that this process's graphs have of it."""
        self._device, self._graph_bytes = device, graph_bytes
        self._others_bytes = others_bytes(device)
        self.forget_growth()

    def forget_growth(self) -> None:
        """Take for this process's own what has changed while it made itself ready."""
        self._free_bytes = self._reachable_bytes()

    def forget_little(self) -> None:
        """As `forget_growth`, at the end of an answer."""
        if self._others_bytes is None and not self._is_much(free_bytes := self._reachable_bytes()):
            self._free_bytes = free_bytes

    def have_changed(self) -> bool:
        if not self._is_much(self._reachable_bytes()):
            return False
        others = others_bytes(self._device)
        if others is None or self._others_bytes is None or abs(others - self._others_bytes) >= _MUCH_BYTES:
            return True
        self.forget_growth()
        return False

    def _reachable_bytes(self) -> int:
        return reachable_bytes(self._device) + self._graph_bytes()

    def _is_much(self, free_bytes: int) -> bool:
        return abs(free_bytes - self._free_bytes) >= _MUCH_BYTES


# Words of errors that torch raises as plain RuntimeErrors. The first are of the host, oneDNN's among them; the others
# are of CUDA itself on a full card: for a kernel that is loaded at its first call, or for a handle of cuBLAS.
_HOST_SIGNS = (
    "can't allocate memory",
    "can't start new thread",
    "could not create a primitive",
    "could not execute a primitive",
)
_DEVICE_SIGNS = (
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on the device or on the host."""
    return isinstance(error, MemoryError) or is_device_out_of_memory(error) or _says(error, _HOST_SIGNS)


def is_device_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or _says(error, _DEVICE_SIGNS)


def _says(error: BaseException, signs: tuple[str, ...]) -> bool:
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def out_of_memory(device: torch.device, error: BaseException) -> DoesNotFitError:
    free, said = format_bytes(available_bytes(device), 2), str(error).splitlines()
    return DoesNotFitError(
        "the memory ran out",
        why=f"{free} are free on {device}; {said[0] if said else ''}",
        fix="close other programs, or ask for a shorter context with --ctx",
    )


def use_threads(count: int) -> None:
    """Let torch compute with so many threads of the CPU. Raises UsageError."""
    if count < 1:
        raise UsageError(f"{count} threads cannot compute", why="at least one must", fix=Fix.flag("--threads", "2"))
    torch.set_num_threads(count)
