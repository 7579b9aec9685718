"""Where a model runs, how much memory is there, and whether it fits with its context: before a byte of it is read."""

from __future__ import annotations

import torch

from localllm.config import format_bytes
from localllm.engine.device import device_name, dtype_name
from localllm.errors import DoesNotFitError, Fix, UsageError
from localllm.offload.planner.machine_memory import HEADROOM as HEADROOM
from localllm.offload.planner.machine_memory import free_bytes
from localllm.quant.layouts import DTYPE_NAMES, torch_dtype


def choose_device(name: str) -> torch.device:
    """Return the device that auto, cpu or cuda means. Raises UsageError for CUDA where there is none."""
    return torch.device(device_name(name))


def choose_dtype(name: str) -> torch.dtype:
    """Return the type that auto, bf16 or fp32 means. Raises UsageError."""
    return torch_dtype(DTYPE_NAMES[dtype_name(name)])


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
