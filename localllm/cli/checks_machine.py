"""The machine without its cards: CPU, memory and what limits it, disks. Knows nothing of models but their sizes."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from localllm.chat.plan_text import when_measured
from localllm.cli.findings import Finding, fail, ok, warn
from localllm.config import format_bytes, format_figure
from localllm.offload.planner.machine_memory import ROOT, SELF_CGROUP, memory_limits
from localllm.present import nearest
from localllm.repairs import raise_cgroup_limit

_VECTOR_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16")
_NO_CACHE_FIX = "export HF_HUB_CACHE=/a/folder/of/yours"
_GIB = 1 << 30
_RAM_WANTED_BYTES = 4 * _GIB
_DISK_WANTED_BYTES = 20 * _GIB
_PACKED_WANTED_BYTES = 5 * _GIB  # int4 of 7 billion parameters takes 4.1

# int4 of 7 billion parameters is 4.1 GB: streamed whole, a token takes 6 seconds at this rate. SATA ends at 0.55, NVMe
# begins at twice that.
_STREAM_GBS = 0.7
_SPEED_BYTES = 64 << 20
_SPEED_SECONDS = 0.3
_NO_ROOM_FIX = "export LOCALLLM_CACHE=/a/folder/of/yours"


def check_cpu() -> Finding:
    flags: set[str] = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("flags", "Features")):
                flags.update(line.partition(":")[2].split())
                break
    affinity = getattr(os, "sched_getaffinity", None)
    num_cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    known = [flag for flag in _VECTOR_FLAGS if flag in flags]
    detail = f"{num_cpus} CPUs; {' '.join(known) or 'no vector extension that is known here'}"
    if platform.machine() in ("x86_64", "AMD64") and "avx2" not in flags and flags:
        return warn(f"{detail}: decoding will be slow", "localllm list --all")
    return ok(detail)


def check_memory(root: Path = ROOT, self_cgroup: Path = SELF_CGROUP) -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    detail = f"{format_bytes(memory.available)} free of {format_bytes(memory.total)}"
    limits = [limit for limit in memory_limits(root, self_cgroup) if limit.limit_bytes < memory.total]
    tightest = min(limits, key=lambda limit: limit.free_bytes, default=None)
    if tightest is not None:
        limit, free = format_bytes(tightest.limit_bytes), format_bytes(tightest.free_bytes)
        detail += f"; the control group may use {limit}, {free} of it free ({tightest.file})"
        if tightest.free_bytes < _RAM_WANTED_BYTES <= memory.available:
            return warn(f"{detail}: enough for the smallest models only", raise_cgroup_limit(tightest.file))
    if memory.available < _RAM_WANTED_BYTES:
        return warn(f"{detail}: enough for the smallest models only", "localllm list --all")
    return ok(detail)


def check_address_space(limits_bytes: tuple[int | None, int | None] | None = None) -> Finding:
    """RLIMIT_AS, soft and hard. CUDA reserves as many addresses as there are bytes in all memories together."""
    soft, hard = limits_bytes or process_limits("RLIMIT_AS")
    if soft is None:
        return ok("unlimited")
    detail = f"limited to {format_bytes(soft)} (RLIMIT_AS): buffers and CUDA's reservations count, used or not"
    return warn(detail, "ulimit -v unlimited" if hard is None else "sudo prlimit --pid $$ --as=unlimited")


def check_huge_pages(setting: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> Finding:
    """Weights ask for pages of 2 MiB: with them 2 cores read at 29 GB/s, without at 26."""
    try:
        text = setting.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ok("this system has no such setting")
    chosen = text.partition("[")[2].partition("]")[0] or text.strip()
    if chosen == "never":
        return warn(
            "never: weights lie in pages of 4 KiB, a tenth slower to read", f"echo madvise | sudo tee {setting}"
        )
    return ok(chosen)


def check_cache() -> Finding:
    from localllm.hub import HubSettings

    folder = HubSettings.from_environment().cache_dir
    refused = _refusal_to_write(folder)
    return fail(refused, _NO_CACHE_FIX) if refused else ok(f"{folder} can be written")


def check_disk() -> Finding:
    from localllm.hub import HubSettings

    folder = HubSettings.from_environment().cache_dir
    if refused := _refusal_to_write(folder):
        return warn(f"no model can be kept: {refused}", _NO_CACHE_FIX)
    usage = shutil.disk_usage(nearest(folder))
    detail = f"{format_bytes(usage.free)} free of {format_bytes(usage.total)} under {folder}"
    if usage.free < _DISK_WANTED_BYTES:
        return warn(f"{detail}: too little for the larger models", "localllm list")
    return ok(detail)


def check_packed() -> Finding:
    """Check that weights can be packed, and tell how much space packed ones take."""
    from localllm.hub.packed import packed_root, packed_sources

    folder = packed_root()
    refused = _refusal_to_write(folder)
    if refused:
        return fail(refused, _NO_ROOM_FIX)
    taken = sum(model.size_bytes for source in packed_sources() for model in source.models)
    free = shutil.disk_usage(nearest(folder)).free
    detail = f"{format_bytes(taken)} of packed weights in {folder}, {format_bytes(free)} free there"
    if free < _PACKED_WANTED_BYTES:
        return warn(f"{detail}: too little for a model of 7 billion parameters", _NO_ROOM_FIX)
    return ok(detail)


def check_disk_speed(measure: Callable[[Path], tuple[float, str] | None] | None = None) -> Finding:
    """Check the speed of the disk from which weights are streamed. measure: GB/s and how they were measured."""
    from localllm.hub.packed import packed_root

    measured = (measure or disk_speed)(packed_root())
    if measured is None:
        return ok("not measured: no room or no leave for a file of 64 MiB")
    gbs, method = measured
    detail = f"{gbs:.2f} GB/s ({method})"
    if gbs < _STREAM_GBS:
        return warn(
            f"{detail}: a model that must be streamed will crawl, {4.1 / gbs:.0f} s a token at 7 billion parameters",
            "export LOCALLLM_CACHE=/a/folder/on/a/faster/disk",
        )
    return ok(detail)


def check_rates(measuring: Callable[[str], None] | None = None) -> Finding:
    """Tell which rates plans are predicted from. measuring: is told of a new measurement."""
    from localllm.engine.card import measure_again
    from localllm.offload.planner.profile import kept_profile

    profile = kept_profile() if measuring is None else measure_again(measuring)
    rates = {"memory": profile.dram_read_gbs, "disk": profile.disk_read_gbs}
    rates |= {name: found.matrix_gbs for name, found in profile.formats.items()}
    if profile.device is not None:
        rates |= {"GPU": profile.device.device_copy_gbs, "link": profile.device.h2d_gbs}
        rates |= {f"{name} on the GPU": found.matrix_gbs for name, found in profile.device.formats.items()}
    detail = ", ".join(f"{name} {format_figure(gbs)} GB/s" for name, gbs in rates.items() if gbs is not None)
    if profile.measured_at_s is not None:
        detail += f"; measured {when_measured(profile.measured_at_s, profile.busy)}"
    if profile.impossible:
        detail += f": what cannot be is that of {', '.join(profile.impossible)}"
    if profile.doubtful:
        return warn(detail, "localllm doctor --measure")
    return ok(detail or "nothing is measured yet; the first plan that needs it does")


def disk_speed(folder: Path) -> tuple[float, str] | None:
    """The best of what fits into a fraction of a second; None where no file can be written there."""
    from localllm.offload.planner.disk_speed import disk_file

    with disk_file(folder, _SPEED_BYTES) as file:
        if file is None:
            return None
        best, until = file.read_gbs(), time.perf_counter() + _SPEED_SECONDS
        while time.perf_counter() < until:
            best = max(best, file.read_gbs())
        return best, file.method


def _refusal_to_write(folder: Path) -> str:
    """Why no file can be made in it, or in what exists above it; "" where one can."""
    existing = nearest(folder)
    try:
        with tempfile.TemporaryFile(dir=existing):
            return ""
    except OSError as error:
        return f"{existing} cannot be written: {error.strerror}"


def process_limits(name: str) -> tuple[int | None, int | None]:
    """Return the soft and the hard limit, "RLIMIT_AS" say; None for none."""
    try:
        import resource
    except ImportError:  # Windows
        return None, None
    soft, hard = resource.getrlimit(getattr(resource, name))
    return (None if soft == resource.RLIM_INFINITY else soft), (None if hard == resource.RLIM_INFINITY else hard)
