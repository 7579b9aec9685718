"""The commands that put a machine right, for this system and this card."""

from __future__ import annotations

import platform
import shutil
import sys
from pathlib import Path

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


def install_torch(capability: tuple[int, int] | None = None, driver_cuda: tuple[int, int] | None = None) -> str:
    """The build that a card of this capability and its driver run. None: not known, so that the newest will do.

    CUDA 13 needs a driver of its own number and knows no card below sm_75; CUDA 12.6 knows those, and none above sm_90;
    CUDA 12.8, which was built for torch 2.11 last, knows these.
    """
    if capability is None and driver_cuda is None:
        return _TORCH
    capability, driver_cuda = capability or (8, 0), driver_cuda or (13, 0)
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


def is_wsl(root: Path = Path("/")) -> bool:
    """Return whether this is Linux under Windows. root: of the file system."""
    try:
        return "microsoft" in (root / "proc/sys/kernel/osrelease").read_text(encoding="utf-8").lower()
    except (OSError, UnicodeDecodeError):
        return False


def _install(packages: dict[str, str]) -> str:
    """With the package manager that this system has; "" where it has none that is known."""
    return next((f"{_INSTALL[tool]} {package}" for tool, package in packages.items() if shutil.which(tool)), "")
