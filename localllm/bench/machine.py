"""What this machine is, and how much memory this process has had at once."""

from __future__ import annotations

import contextlib
import platform
import sys
from pathlib import Path

import psutil
import torch

_CLEAR_REFS, _STATUS, _CPU_INFO = Path("/proc/self/clear_refs"), Path("/proc/self/status"), Path("/proc/cpuinfo")


def machine(device: torch.device | None = None) -> dict[str, object]:
    """Plain values, for a result's JSON. threads: torch's, of the calling thread."""
    return {
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": torch.cuda.get_device_name(device) if device is not None and device.type == "cuda" else None,
        "system": platform.system(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in _CPU_INFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


class PeakMemory:
    """The most memory that this process held since this was made; since it began, where there is no Linux to ask."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with contextlib.suppress(OSError):
            _CLEAR_REFS.write_text("5", encoding="ascii")  # sets VmHWM to what is held now
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def rss_bytes(self) -> int:
        with contextlib.suppress(OSError):
            for line in _STATUS.read_text(encoding="ascii").splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return _peak_rss_bytes()

    def vram_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None


def _peak_rss_bytes() -> int:
    """Since the process began."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    from resource import RUSAGE_SELF, getrusage

    peak = getrusage(RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
