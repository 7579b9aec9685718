"""`localllm doctor`: what of this machine is ready, and one command for what is not.

A check looks at one thing and never raises: whatever it meets is its answer. What a check needs it imports itself: the
command's flags are known to every start of the program.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from localllm.cli.front import front_of
from localllm.cli.output import SCHEMA_VERSION, Output, format_bytes
from localllm.config import load_settings, user_directories
from localllm.errors import LocalLLMError

Status = Literal["ok", "warn", "fail"]

_GIB = 1 << 30
_RAM_WANTED_BYTES = 4 * _GIB
_DISK_WANTED_BYTES = 20 * _GIB
_PACKED_WANTED_BYTES = 5 * _GIB  # int4 of 7 billion parameters takes 4.1


@dataclass(frozen=True)
class Finding:
    """One line of the report. `fix` is a command to paste, empty where nothing is to be done."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def doctor_command(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object: schema_version, checks, ok.")] = False,
) -> None:
    """Check this machine: torch, GPU, memory, disk, settings."""
    output = front_of(context).output
    findings = []
    for check in checks(output):
        finding = _guarded(check)
        findings.append(finding)
        if not as_json:
            _print(output, finding)
    healthy = all(finding.status != "fail" for finding in findings)
    if as_json:
        rows = [asdict(finding) for finding in findings]
        output.json({"schema_version": SCHEMA_VERSION, "ok": healthy, "checks": rows}, indent=2)
    if not healthy:
        raise typer.Exit(1)


def checks(output: Output) -> list[Callable[[], Finding]]:
    """Every check, in the order of the report."""
    return [
        check_python,
        check_torch,
        check_gpu,
        lambda: _check_package("triton", "GPU kernels", "pip install 'triton>=3.6,<3.8'"),
        lambda: _check_package("bitsandbytes", "NF4 weights", "pip install bitsandbytes"),
        lambda: _check_package("llvmlite", "CPU kernels", "pip install llvmlite"),
        check_cpu,
        check_memory,
        check_cache,
        check_disk,
        check_packed,
        check_settings,
        check_token,
        check_network,
        lambda: _check_terminal(output),
    ]


def check_python() -> Finding:
    import platform

    return Finding("python", "ok", f"{platform.python_version()} ({platform.system()} {platform.machine()})")


def check_torch() -> Finding:
    fix = "pip install --force-reinstall 'torch>=2.11,<2.14'"
    try:
        import torch
    except Exception as error:  # a broken build raises whatever its libraries raise
        return Finding("torch", "fail", f"cannot be imported: {error}", fix)
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2] if part.isdigit())
    if not (2, 11) <= release < (2, 14):
        return Finding("torch", "warn", f"{torch.__version__} ({build}) is not one that is tested (2.11 to 2.13)", fix)
    return Finding("torch", "ok", f"{torch.__version__} ({build}), {torch.get_num_threads()} threads")


def check_gpu() -> Finding:
    """Says whether the card, its driver and torch's build go together."""
    cards = _nvidia_cards()
    try:
        import torch
    except Exception:
        return Finding("gpu", "warn", f"torch is missing; {cards or 'no NVIDIA driver'}")
    if torch.cuda.is_available():
        found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        names = ", ".join(
            f"{card.name} ({format_bytes(card.total_memory)}, sm_{card.major}{card.minor})" for card in found
        )
        return Finding("gpu", "ok", names)
    if not cards:
        return Finding("gpu", "ok", "none; models run on the CPU")
    if torch.version.cuda is None:
        fix = "pip install --force-reinstall 'torch>=2.11,<2.14'"
        return Finding("gpu", "fail", f"{cards}, but this torch is a CPU build", fix)
    return Finding("gpu", "fail", f"{cards}, but torch (CUDA {torch.version.cuda}) cannot use it", "nvidia-smi")


def check_cpu() -> Finding:
    import platform

    flags = _cpu_flags()
    known = [
        flag for flag in ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16") if flag in flags
    ]
    detail = f"{_usable_cpus()} CPUs; {' '.join(known) or 'no vector extension that is known here'}"
    if platform.machine() in ("x86_64", "AMD64") and "avx2" not in flags and flags:
        return Finding("cpu", "warn", f"{detail}: decoding will be slow")
    return Finding("cpu", "ok", detail)


def check_memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    limit = _cgroup_limit_bytes()
    detail = f"{format_bytes(memory.available)} free of {format_bytes(memory.total)}"
    if limit is not None and limit < memory.total:
        detail += f"; this process may use {format_bytes(limit)} (cgroup)"
    free = min(memory.available, limit or memory.available)
    if free < _RAM_WANTED_BYTES:
        return Finding("memory", "warn", f"{detail}: enough for the smallest models only", "localllm list --all")
    return Finding("memory", "ok", detail)


def check_cache() -> Finding:
    import tempfile

    from localllm.hub import HubSettings

    folder = HubSettings.from_environment().cache_dir
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return Finding("cache", "ok", f"{folder} can be written")
    except OSError as error:
        fix = "export HF_HUB_CACHE=/a/folder/of/yours"
        return Finding("cache", "fail", f"{existing} cannot be written: {error.strerror}", fix)


def check_disk() -> Finding:
    import shutil

    from localllm.hub import HubSettings

    folder = HubSettings.from_environment().cache_dir
    usage = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists()))
    detail = f"{format_bytes(usage.free)} free of {format_bytes(usage.total)} under {folder}"
    if usage.free < _DISK_WANTED_BYTES:
        return Finding("disk", "warn", f"{detail}: too little for the larger models", "localllm list")
    return Finding("disk", "ok", detail)


def check_packed() -> Finding:
    """Whether weights can be packed, and what the packed ones take."""
    import shutil
    import tempfile

    from localllm.hub.packed import packed_root, packed_sources

    folder = packed_root()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    fix = "export LOCALLLM_CACHE=/a/folder/of/yours"
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return Finding("packed", "fail", f"{existing} cannot be written: {error.strerror}", fix)
    taken = sum(model.size_bytes for source in packed_sources() for model in source.models)
    usage = shutil.disk_usage(existing)
    detail = f"{format_bytes(taken)} of packed weights in {folder}, {format_bytes(usage.free)} free there"
    if usage.free < _PACKED_WANTED_BYTES:
        return Finding("packed", "warn", f"{detail}: too little for a model of 7 billion parameters", fix)
    return Finding("packed", "ok", detail)


def check_settings() -> Finding:
    file = user_directories().config / "config.toml"
    from localllm.registry import load_registry

    try:
        load_settings()
        load_registry()
    except LocalLLMError as error:
        return Finding("settings", "fail", f"{error.what}: {error.why}", error.fix)
    return Finding("settings", "ok", f"{file}{'' if file.is_file() else ' (none: defaults)'}")


def check_token() -> Finding:
    """Whether there is a token; never what it is."""
    from huggingface_hub import get_token

    return Finding("token", "ok", "set" if get_token() else "none: open models only")


def check_network() -> Finding:
    switches = [name for name in ("LOCALLLM_OFFLINE", "HF_HUB_OFFLINE") if os.environ.get(name)]
    proxies = [name for name in ("HTTPS_PROXY", "https_proxy", "HF_ENDPOINT") if os.environ.get(name)]
    if switches:
        return Finding(
            "network", "warn", f"{', '.join(switches)} is set: nothing can be pulled", f"unset {' '.join(switches)}"
        )
    return Finding("network", "ok", f"used by `pull` only{', through ' + ', '.join(proxies) if proxies else ''}")


def _check_package(name: str, purpose: str, fix: str) -> Finding:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return Finding(name, "ok", f"{version(name)} ({purpose})")
    except PackageNotFoundError:
        return Finding(name, "warn", f"not installed ({purpose})", fix)


def _check_terminal(output: Output) -> Finding:
    streams = [name for name, is_one in _streams(output) if is_one]
    colours = "colours" if output.coloured else "no colours"
    term = os.environ.get("TERM", "unset")
    where = f"{' and '.join(streams)} on a terminal" if streams else "no terminal"
    return Finding("terminal", "ok", f"{where}, TERM={term}, {colours}")


def _streams(output: Output) -> list[tuple[str, bool]]:
    return [("stdout", output.stdout_is_terminal), ("stderr", output.stderr_is_terminal)]


def _guarded(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # the doctor must not fall ill of what it examines
        name = getattr(check, "__name__", "check").removeprefix("check_")
        return Finding(name, "warn", f"could not be examined: {type(error).__name__}: {error}")


def _print(output: Output, finding: Finding) -> None:
    output.line(f"{finding.status:<4}  {finding.name:<12}  {finding.detail}")
    if finding.fix:
        output.line(f"      {'':<12}  fix: {finding.fix}")


def _nvidia_cards() -> str:
    """What the driver says without torch: "" where there is no driver."""
    import shutil
    import subprocess

    program = shutil.which("nvidia-smi")
    if program:
        query = [program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
            return "; ".join(answer.stdout.strip().splitlines())
    version = Path("/proc/driver/nvidia/version")
    return version.read_text().splitlines()[0] if version.is_file() else ""


def _cpu_flags() -> set[str]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return set(line.partition(":")[2].split())
    return set()


def _usable_cpus() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _cgroup_limit_bytes() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            return int(Path(path).read_text())
    return None
