"""Facts about each card from NVML, the library of NVIDIA's driver: sizes, free memory, link, versions.

NVML makes no CUDA context and needs no torch. It numbers cards as on the bus; CUDA may number them differently, and the
uuid is common to both.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True)
class Gpu:
    """One card as it is now. A field is None if the card or its driver does not report it.

    total_bytes: the memory on the card; what the driver keeps for itself is neither free nor used by others.
    own_bytes: used by this process; None also in WSL, and if its process id is another one outside its container.
    used_by_others_bytes: used by other programs and the display.
    pcie_..._max: of the card in this slot. An idle card lets its link sleep at a lower generation.
    """

    index: int
    name: str | None
    uuid: str | None
    total_bytes: int | None
    free_bytes: int | None
    own_bytes: int | None
    used_by_others_bytes: int | None
    compute_capability: tuple[int, int] | None
    driver_version: str | None
    driver_cuda: tuple[int, int] | None
    pcie_generation: int | None
    pcie_generation_max: int | None
    pcie_width: int | None
    pcie_width_max: int | None
    drives_display: bool | None


def gpus() -> tuple[Gpu, ...]:
    """Return every card that answers; () without a driver, or if NVML refuses."""
    found, _ = _read()
    return found


def gpu_of(uuid: str) -> Gpu | None:
    """uuid: as CUDA writes it, without NVML's prefix. None where no such card answers."""
    return next((gpu for gpu in gpus() if gpu.uuid is not None and uuid in gpu.uuid), None)


def refusal() -> str:
    """Return why NVML gives no information on any card, in its own words; "" if it does."""
    found, reason = _read()
    return "" if found else reason


def sm_name(capability: tuple[int, int] | None) -> str:
    """(8, 6) -> "sm_86"."""
    return "of an unknown generation" if capability is None else f"sm_{capability[0]}{capability[1]}"


def _read() -> tuple[tuple[Gpu, ...], str]:
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            handles = [_told(pynvml.nvmlDeviceGetHandleByIndex, index) for index in range(pynvml.nvmlDeviceGetCount())]
            found = [_gpu(pynvml, index, handle) for index, handle in enumerate(handles) if handle is not None]
            return tuple(found), "no card answers"
        finally:
            pynvml.nvmlShutdown()
    except Exception as error:  # no package, no library, a library of another version than the kernel's module
        return (), str(error)


def _gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    version = _told(nvml.nvmlSystemGetCudaDriverVersion_v2)
    memory = _told(nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
    if memory is None:  # a driver before 510, which counts its own share as used
        memory = _told(nvml.nvmlDeviceGetMemoryInfo, handle)
    display = _told(nvml.nvmlDeviceGetDisplayActive, handle)
    own_bytes = _own_bytes(nvml, handle)
    return Gpu(
        index=index,
        name=_told(nvml.nvmlDeviceGetName, handle),
        uuid=_told(nvml.nvmlDeviceGetUUID, handle),
        total_bytes=None if memory is None else int(memory.total),
        free_bytes=None if memory is None else int(memory.free),
        own_bytes=own_bytes,
        used_by_others_bytes=None if memory is None else max(0, int(memory.used) - (own_bytes or 0)),
        compute_capability=_told(nvml.nvmlDeviceGetCudaComputeCapability, handle),
        driver_version=_told(nvml.nvmlSystemGetDriverVersion),
        driver_cuda=None if version is None else (version // 1000, version % 1000 // 10),
        pcie_generation=_told(nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        pcie_generation_max=_told(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        pcie_width=_told(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        pcie_width_max=_told(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        drives_display=None if display is None else bool(display),
    )


def _own_bytes(nvml: Any, handle: Any) -> int | None:
    lists = (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses)
    processes = [process for ask in lists for process in _told(ask, handle) or ()]
    used = [process.usedGpuMemory for process in processes if process.pid == os.getpid()]
    return max((num_bytes for num_bytes in used if num_bytes is not None), default=None)


def _told(ask: Callable[..., _T], *arguments: Any) -> _T | None:
    """Return the answer or None: each card leaves some questions open, and a lost card all of them."""
    try:
        return ask(*arguments)
    except Exception:  # NVMLError, and what the package raises where the driver's library lacks a function
        return None
