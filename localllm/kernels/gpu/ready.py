"""Whether a GPU computes by our kernels: what they need of it, and a check of each against the reference, made once.

The check is a process of its own, for a kernel that goes wrong takes the card's context with it. What it found is kept
for this card, driver, torch, Triton, and these very kernels.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import sysconfig
import time
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from localllm.config import user_directories
from localllm.kernels.child import run_within

LEAST_CAPABILITY = (8, 0)  # below, bf16 is emulated, and Triton has no tensor cores
WRONG = "WRONG:"  # begins what the check says of a kernel
# By the device: what failed in this process is not tried again in it. Products ask here too, without a model at hand.
_failures: dict[str, str] = {}
_RETRY_S = 3600.0  # a check that did not get to its end is not repeated at every start
_FOR_EVER = 1e18  # forgotten
# Two hundred variants take a tenth of a second to half a second of the processor each. What hangs without using it is
# given up as well, before an engine that does not move on while it loads is ended, which is after 600 s.
_CPU_S = 300.0
_WAIT_S = 540.0


@cache
def why_not(device: torch.device) -> str:
    """Return why torch's operators must do, "" where our kernels are right. Takes up to a minute once, then 2 ms."""
    if reason := missing(device) or _failures.get(str(device), "") or fault(device):
        return reason
    found = _kept(_key(device))
    return check(device) if found is None else found


def give_up(device: torch.device, reason: str) -> None:
    """They failed here: torch's operators compute in this process from now on, also for a model that is placed anew."""
    _failures[str(device)] = reason
    why_not.cache_clear()


def fault(device: torch.device) -> str:
    """Return which fault of the card ended them, in whichever process; "" for none. Another driver, torch, Triton, or
    other kernels, are tried anew."""
    return _kept(f"{_key(device)} fault") or ""


def keep_fault(device: torch.device, reason: str) -> None:
    """They ended in a fault of the card: torch's operators compute from the next process on."""
    _keep(f"{_key(device)} fault", reason, _FOR_EVER)


def is_known(device: torch.device) -> bool:
    """Return whether `why_not` answers at once."""
    return bool(missing(device)) or _kept(_key(device)) is not None


def missing(device: torch.device) -> str:
    """Return what the kernels need of a machine and it lacks."""
    if device.type != "cuda":
        return "they are made for NVIDIA GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        return f"this GPU is of compute capability {capability[0]}.{capability[1]}, they need {least}"
    if not _triton():
        return "triton is not installed"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "triton finds no C compiler: install gcc"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # Debian's; as triton has it
    if not (Path(sysconfig.get_paths(scheme)["include"]) / "Python.h").exists():
        return "triton finds no Python.h: install Python's headers, python3-dev or python3-devel"
    return ""


def check(device: torch.device) -> str:
    """Run a fresh check, and keep its result for later starts; return "" where all is right."""
    found = _checked(device)
    is_final = not found or found.startswith(WRONG)
    if is_final or "out of memory" not in found:  # what else went wrong may be another time's
        _keep(_key(device), found, _FOR_EVER if is_final else time.time() + _RETRY_S)
    return found


def _checked(device: torch.device) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "localllm.kernels.gpu.check", str(device)]
    try:
        child = run_within(command, environment, cpu_s=_CPU_S, wait_s=_WAIT_S)
    except TimeoutError as error:
        return f"their check gave no answer within {error}"
    if child.returncode == 0:
        return ""
    lines = [line.strip() for line in (child.stdout + child.stderr).splitlines() if line.strip()]
    lines += [line for line in lines if line.startswith(WRONG)][-1:]
    return lines[-1] if lines else f"their check ended with exit code {child.returncode}"


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def _key(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    driver = torch._C._cuda_getDriverVersion() if hasattr(torch._C, "_cuda_getDriverVersion") else 0
    told = (properties.name, properties.major, properties.minor, driver, torch.__version__, _triton(), _source())
    return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()


@cache
def _source() -> str:
    """Return the kernels' source as it is on the disk, with the layouts and the tables that they are made by."""
    content, folder = hashlib.blake2b(digest_size=16), Path(__file__).parent
    for path in sorted((*folder.parent.glob("*.py"), *folder.glob("*.py"), *folder.glob("*.json"))):
        content.update(path.read_bytes())
    return content.hexdigest()


def kept_file() -> Path:
    """Return the file of what was found on this machine's cards."""
    return user_directories().cache / "gpu_kernels.json"


def _kept(key: str) -> str | None:
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        kept = json.loads(kept_file().read_text(encoding="utf-8"))[key]
        found, until = str(kept["found"]), float(kept["until"])
        return found if time.time() < until else None
    return None


def _keep(key: str, found: str, until: float) -> None:
    """until: seconds since the epoch. A cache that cannot be written is done without."""
    kept: dict[str, object] = {}
    with suppress(OSError, ValueError, TypeError):
        kept = dict(json.loads(kept_file().read_text(encoding="utf-8")))
    whole = kept_file().with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        kept_file().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        whole.write_text(json.dumps({**kept, key: {"found": found, "until": until}}, indent=1), encoding="utf-8")
        whole.replace(kept_file())
