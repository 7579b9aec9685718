"""This machine in a line: cores, memory, cards."""

from __future__ import annotations

import os

from localllm.config import format_bytes


def machine_line() -> str:
    """Return what a model can use here. Asking the system and the driver takes tens of milliseconds."""
    import psutil

    from localllm.offload.planner.nvml import gpus

    memory = psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parts = [f"{cores} core{'' if cores == 1 else 's'}"]
    parts.append(f"{format_bytes(memory.available)} of {format_bytes(memory.total)} memory free")
    for gpu in gpus():
        free = "" if gpu.free_bytes is None else f", {format_bytes(gpu.free_bytes)} free"
        parts.append(f"{gpu.name or 'a GPU'}{free}")
    return "; ".join(parts) if len(parts) > 2 else "; ".join([*parts, "no NVIDIA GPU"])
