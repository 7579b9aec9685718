"""A description of this machine, and the peak memory of this process."""

from __future__ import annotations

import contextlib
import platform
import sys
from pathlib import Path

import psutil
import torch

_CLEAR_REFS, _STATUS, _CPU_INFO = Path("/proc/self/clear_refs"), Path("/proc/self/status"), Path("/proc/cpuinfo")


def machine(device: torch.device | None = None) -> dict[str, object]:
    """Plain values for a result's JSON. threads: torch's, of the calling thread."""
    return {
        "cpu": _field(_CPU_INFO, "model name") or platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": torch.cuda.get_device_name(device) if device is not None and device.type == "cuda" else None,
        "system": platform.system(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


class PeakMemory:
    """The most memory that this process held since this was made; since it began, where the system is not Linux."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with contextlib.suppress(OSError):
            _CLEAR_REFS.write_text("5", encoding="ascii")  # sets VmHWM to what is held now
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def rss_bytes(self) -> int:
        if peak := _field(_STATUS, "VmHWM"):
            return int(peak.split()[0]) * 1024
        if sys.platform == "win32":
            return int(psutil.Process().memory_info().peak_wset)
        from resource import RUSAGE_SELF, getrusage

        return getrusage(RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def vram_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None


def _field(file: Path, name: str) -> str:
    """The value of the first line "name: value" of a file of Linux; "" where there is none."""
    with contextlib.suppress(OSError):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith(name):
                return line.split(":", 1)[1].strip()
    return ""
