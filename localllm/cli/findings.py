"""The result of one check of `doctor`, and the commands that put a machine right, for this system and this card."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from localllm.kernels.page_locked import is_wsl

if TYPE_CHECKING:
    from localllm.offload.planner.nvml import Gpu


@dataclass(frozen=True)
class Finding:
    """detail: what was seen, with its numbers. fix: one command to paste, where something is to be done.

    status: warn where it works, but less well than it could; fail where it does not work.
    """

    status: Literal["ok", "warn", "fail"]
    detail: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert bool(self.fix) == (self.status != "ok")


def examined(check: Callable[[], Finding]) -> Finding:
    """Return what a check finds. Never raises: an error of the check is a finding."""
    try:
        return check()
    except Exception as error:
        return warn(f"could not be examined: {type(error).__name__}: {error}", "localllm help failure")


def ok(detail: str) -> Finding:
    return Finding("ok", detail)


def warn(detail: str, fix: str) -> Finding:
    return Finding("warn", detail, fix)


def fail(detail: str, fix: str) -> Finding:
    return Finding("fail", detail, fix)


def sm_name(capability: tuple[int, int] | None) -> str:
    """(8, 6) -> "sm_86"."""
    return "of an unknown generation" if capability is None else f"sm_{capability[0]}{capability[1]}"


# Commands

TRITON = "pip install --force-reinstall 'triton>=3.6,<3.8'"
_TORCH = "pip install --force-reinstall 'torch>=2.11,<2.14'"
_WHEELS = "--index-url https://download.pytorch.org/whl"
_DRIVERS_PAGE = "xdg-open https://www.nvidia.com/drivers"

_INSTALL = {
    "apt-get": "sudo apt-get install -y",
    "dnf": "sudo dnf install -y",
    "zypper": "sudo zypper install -y",
    "pacman": "sudo pacman -S",
}
_DRIVER = {"apt-get": "nvidia-driver", "dnf": "akmod-nvidia", "pacman": "nvidia-open"}


def install_torch(card: Gpu | None = None) -> str:
    """The build that this card and its driver run.

    CUDA 13 needs a driver of its own number and knows no card below sm_75; CUDA 12.6 knows those, and none above sm_90;
    CUDA 12.8, which was built for torch 2.11 last, knows these.
    """
    if card is None:
        return _TORCH
    capability, driver_cuda = card.compute_capability or (8, 0), card.driver_cuda or (13, 0)
    if driver_cuda < (12, 0):
        return install_driver()
    if capability < (7, 5) or (driver_cuda < (13, 0) and capability <= (9, 0)):
        return f"{_TORCH} {_WHEELS}/cu126"
    if driver_cuda < (13, 0):
        return f"pip install --force-reinstall 'torch==2.11.*' {_WHEELS}/cu128"
    return f"{_TORCH} {_WHEELS}/cu130"


def install_driver(root: Path = Path("/")) -> str:
    """Under WSL the driver is Windows' own."""
    if is_wsl(root):
        return _DRIVERS_PAGE
    if shutil.which("ubuntu-drivers"):
        return "sudo ubuntu-drivers install"
    return _install(_DRIVER) or _DRIVERS_PAGE


def install_compiler() -> str:
    return _install(dict.fromkeys(_INSTALL, "gcc")) or "export CC=/the/path/of/a/C/compiler"


def install_python_headers() -> str:
    major, minor = sys.version_info[:2]
    packages = {
        "apt-get": f"python{major}.{minor}-dev",
        "dnf": f"python{major}.{minor}-devel",
        "zypper": f"python{major}{minor}-devel",
        "pacman": "python",
    }
    return _install(packages) or "python3 -m sysconfig"


def raise_cgroup_limit(file: Path) -> str:
    """A container sees its limit, and is given another one from outside."""
    if is_container():
        return f"docker update --memory 16g --memory-swap 16g {platform.node()}"
    return f"echo {-1 if file.name == 'memory.limit_in_bytes' else 'max'} | sudo tee {file}"


def is_container(root: Path = Path("/")) -> bool:
    return any((root / mark).exists() for mark in (".dockerenv", "run/.containerenv"))


def _install(packages: dict[str, str]) -> str:
    """With the package manager that this system has; "" where it has none that is known."""
    return next((f"{_INSTALL[tool]} {package}" for tool, package in packages.items() if shutil.which(tool)), "")
