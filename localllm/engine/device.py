"""Where a model is computed and in which type, by their names. Imports torch only where there may be a GPU for it."""

from __future__ import annotations

import ctypes
import importlib
import sys
from typing import TYPE_CHECKING

from localllm.errors import Fix, UsageError
from localllm.offload.planner.profile import torch_build

if TYPE_CHECKING:
    import torch

DTYPES = {"auto": "bf16", "bf16": "bf16", "fp32": "fp32"}


def has_cuda() -> bool:
    """Return whether torch computes on a GPU here."""
    if "torch" not in sys.modules:
        if torch_build()[1] is None:
            return False
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:  # no driver
            return False
    return bool(importlib.import_module("torch").cuda.is_available())


def no_cuda() -> str:
    """Return why torch computes on no GPU here."""
    version, cuda = torch_build()
    return f"torch {version} {'is a CPU build' if cuda is None else 'sees no GPU that its driver can use'}"


def device_name(name: str) -> str:
    """Return the device that auto, cpu or cuda means, as torch names it. Raises UsageError for CUDA where there is
    none."""
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"there is no device {name!r}", why="known: auto, cpu, cuda", fix=Fix.flag("--device", "auto"))
    if name == "cpu" or (name == "auto" and not has_cuda()):
        return "cpu"
    if not has_cuda():
        raise UsageError("CUDA is not available", why=no_cuda(), fix=Fix.flag("--device", "cpu"))
    return f"cuda:{importlib.import_module('torch').cuda.current_device()}"


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
