"""Where a model is computed and in which type, by their names. Imports torch only where there may be a GPU for it."""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.errors import Fix, UsageError
from localllm.offload.planner.nvml import gpus, sm_name
from localllm.offload.planner.profile import torch_build
from localllm.present import is_there

if TYPE_CHECKING:
    import torch

LEAST_CAPABILITY = (5, 0)  # of which any torch that can be installed has code
_ROCM = "ROCm"
DTYPES = {"auto": "bf16", "bf16": "bf16", "fp32": "fp32"}


@dataclass(frozen=True)
class NoGpu:
    """Why torch computes on no GPU here. card: the name of one that is here all the same; "" where there is none, or
    someone has hidden it."""

    why: str
    card: str = ""
    fixes: tuple[Fix, ...] = (Fix.flag("--device", "cpu"),)


def has_cuda() -> bool:
    """Return whether torch has code for a GPU here, without making a context on it."""
    return no_gpu(tries=False) is None


def device_name(name: str) -> str:
    """Return the device that auto, cpu or cuda means, as torch names it. Raises UsageError for CUDA where there is
    none that torch can use."""
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"there is no device {name!r}", why="known: auto, cpu, cuda", fix=Fix.flag("--device", "auto"))
    if name == "cpu":
        return "cpu"
    if (refusal := no_gpu()) is None:
        return f"cuda:{importlib.import_module('torch').cuda.current_device()}"
    if name == "auto":
        return "cpu"
    raise UsageError("CUDA is not available", why=refusal.why, fix=refusal.fixes)


def idle_gpu(name: str) -> str:
    """Return the line that says why a GPU is here and the CPU computes, where nobody has asked for that; "" where there
    is nothing to say. name: of the device, as it was asked for."""
    refusal = no_gpu() if name == "auto" else None
    if refusal is None or not refusal.card:
        return ""
    return f"the CPU computes, though {refusal.card} is here: {refusal.why}; see localllm doctor"


def has_code(architectures: Sequence[str], capability: tuple[int, int]) -> bool:
    """Return whether a build of torch has code for such a card. architectures: of the build, as `sm_86`, or as
    `compute_86` for code that the driver translates."""
    return any(_runs(code, capability) for code in architectures)


def _runs(code: str, capability: tuple[int, int]) -> bool:
    """Machine code runs on its own generation from its own number on; other code is translated for every later one."""
    kind, _, digits = code.partition("_")
    if digits.isdigit():
        made_for = divmod(int(digits), 10)
        return made_for <= capability and (kind == "compute" or made_for[0] == capability[0])
    exact = digits.rstrip("af")  # "90a": for this very card
    return exact.isdigit() and divmod(int(exact), 10) == capability


def no_gpu(*, tries: bool = True) -> NoGpu | None:
    """Return None where torch computes on a GPU. tries: an operator is run on it, for which CUDA makes a context."""
    version, built_for = torch_build()
    if built_for is None:
        return _unseen(f"torch {version} is a CPU build")
    if "torch" not in sys.modules and not _has_driver(built_for):
        return _unseen(f"torch {version} finds no driver of a GPU")
    torch = importlib.import_module("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of several lines, of what is told here in one
        if not torch.cuda.is_available():
            return _unseen(f"torch {version} sees no GPU that its driver can use")
        return _unusable(torch, version, built_for, tries=tries)


def _has_driver(built_for: str) -> bool:
    if built_for.startswith(_ROCM):
        return is_there(Path("/dev/kfd"))
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _unseen(why: str) -> NoGpu:
    """torch sees no card, but the driver may know one."""
    cards = () if "CUDA_VISIBLE_DEVICES" in os.environ else gpus()  # hidden by someone who knows
    if not cards:
        version, _ = torch_build()
        is_apples = sys.platform == "darwin" and platform.machine() == "arm64"
        other = "Apple's GPU" if is_apples else "Intel's GPU" if version.endswith("+xpu") else ""
        return NoGpu("localllm computes on GPUs of NVIDIA and AMD only" if other else why, other)
    from localllm.repairs import install_torch

    install = Fix.advice(install_torch(cards[0].compute_capability, cards[0].driver_cuda))
    return NoGpu(why, cards[0].name or "an NVIDIA GPU", (install, *NoGpu.fixes))


def _unusable(torch: Any, version: str, built_for: str, *, tries: bool) -> NoGpu | None:
    index = torch.cuda.current_device()
    card, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    # AMD's are named otherwise, and of some that are not named the code of others runs.
    architectures = [] if built_for.startswith(_ROCM) else torch.cuda.get_arch_list()
    if architectures and not has_code(architectures, capability):
        from localllm.repairs import install_torch

        why = f"it is {sm_name(capability)}, and torch {version} has code for {', '.join(architectures)} only"
        install = (Fix.advice(install_torch(capability)),) if capability >= LEAST_CAPABILITY else ()
        return NoGpu(why, card, (*install, *NoGpu.fixes))
    try:
        if tries:
            torch.ones(1, device=f"cuda:{index}").add_(1).item()
    except Exception as error:  # of another kind by its cause: no code after all, a card that is busy or lost
        said = str(error).strip().splitlines() or [type(error).__name__]
        if "out of memory" in said[0]:  # a full card is one that can be used: who needs the memory tells what to do
            return None
        return NoGpu(f"cuda:{index} refuses: {said[0]}", card, (Fix.advice("nvidia-smi"), *NoGpu.fixes))
    return None


def has_card(device: str | torch.device) -> bool:
    """Return whether the device has memory of its own, beside the host's."""
    return str(device) != "cpu"


def dtype_name(name: str) -> str:
    """Return the type of activations that auto, bf16 or fp32 means. Raises UsageError."""
    if name not in DTYPES:
        raise UsageError(
            f"there is no dtype {name!r}", why=f"known: {', '.join(DTYPES)}", fix=Fix.flag("--dtype", "auto")
        )
    return DTYPES[name]
