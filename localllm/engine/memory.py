"""Where a model runs, how much memory is there, and whether it fits with its context: before a byte of it is read."""

from __future__ import annotations

import psutil
import torch

from localllm.config import format_bytes
from localllm.errors import DoesNotFitError, Fix, UsageError
from localllm.models.config import ModelConfig
from localllm.offload.planner.machine_memory import address_space_free_bytes, cgroup_free_bytes

DEFAULT_CTX = 8192  # where nobody asked: long enough for a chat, 1 GiB of KV for an 8B model
HEADROOM = 0.9  # of what is free; the rest is activations, the allocator's slack and the other programs


DTYPES = {"auto": torch.bfloat16, "bf16": torch.bfloat16, "fp32": torch.float32}


def choose_device(name: str) -> torch.device:
    """auto, cpu or cuda. Raises UsageError for CUDA where there is none."""
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"there is no device {name!r}", why="known: auto, cpu, cuda", fix=Fix.flag("--device", "auto"))
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError("CUDA is not available", why=no_cuda(), fix=Fix.flag("--device", "cpu"))
    return torch.device("cuda", torch.cuda.current_device())


def no_cuda() -> str:
    """Why torch computes on no GPU here."""
    built = "is a CPU build" if torch.version.cuda is None else "sees no GPU that its driver can use"
    return f"torch {torch.__version__} {built}"


def choose_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise UsageError(
            f"there is no dtype {name!r}", why=f"known: {', '.join(DTYPES)}", fix=Fix.flag("--dtype", "auto")
        )
    return DTYPES[name]


def available_bytes(device: torch.device) -> int:
    """Free memory of the device; on a CPU the least of the machine's, the control groups' and the address space."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return free
    limits = (int(psutil.virtual_memory().available), cgroup_free_bytes(), address_space_free_bytes())
    return min(limit for limit in limits if limit is not None)


def reachable_bytes(device: torch.device) -> int:
    """Free, or torch's already: what it has on a GPU, used or kept for later, was not taken from this process."""
    reserved = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    return available_bytes(device) + reserved


# What torch raises as any other error: where the host has no room, in oneDNN's words too; where CUDA itself has none on
# a card that others fill: for a kernel that is loaded when it is first called, for a handle of cuBLAS.
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
    """Whether an allocation failed, on the device or on the host."""
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


def require_context(config: ModelConfig, asked: int | None) -> None:
    """Raises UsageError for a context that the model was not made for."""
    longest = config.longest_context
    if asked is not None and not 1 <= asked <= longest:
        raise UsageError(
            f"a context of {asked} tokens is not possible with this model",
            why=f"it was trained for at most {longest}",
            fix=Fix.flag("--ctx", longest),
        )


def use_threads(count: int) -> None:
    """Compute with so many threads of the CPU. Raises UsageError."""
    if count < 1:
        raise UsageError(f"{count} threads cannot compute", why="at least one must", fix=Fix.flag("--threads", "2"))
    torch.set_num_threads(count)
