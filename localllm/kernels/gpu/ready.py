"""Whether a GPU computes by our kernels: what they need of it, and a check of each against the reference, made once.

The check is a process of its own, for a kernel that goes wrong takes the card's context with it. What it found is kept
for this card, driver, torch, Triton, and these very kernels, by the ways in which they were tried: those of one model,
or all.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch

from localllm.config import user_directories
from localllm.kernels.child import run_within

LEAST_CAPABILITY = (7, 5)  # of which Triton makes code
_BF16_CAPABILITY = (8, 0)  # below, bf16 is emulated, and Triton multiplies without tensor cores
WRONG = "WRONG:"  # begins what the check says of a kernel
UNCOMPARED = "not compared:"
PROGRESS, COMPARED = "so far:", "compared"  # begin and end a line of how far it is
# By the device: what failed in this process is not tried again in it. Products ask here too, without a model at hand.
_failures: dict[str, str] = {}
_RETRY_S = 3600.0  # a check that failed in another way is not repeated at every start
_FOR_EVER = 1e18  # forgotten
# For which the check may say nothing before it is given up. A variant takes a tenth of a second to ten seconds to
# compile, on a machine that may be busy; as many as there are threads are under way. A case takes a moment.
_SILENT_S = 300.0

_CHECKING = "checking the kernels on this graphics card, once"

Tell = Callable[[str], object]


class Ways(TypedDict):
    """How a model uses the kernels. groups: of its INT4 matrices, None for INT8, or the fields of `Weights` for codes
    that mean anything else; attention: by the fields of `check.Heads`; glus: of its MLPs, by those of `Glu`; routers:
    of its mixtures, by those of `RouterConfig`; expert_biases: whether their experts have any; deltas: of its layers of
    Gated DeltaNet and its like, by those of `DeltaShape`; convs: of its short convolutions, by those of `ConvShape`;
    mambas: of its layers of Mamba 2, by those of `Mamba2Shape`; rwkv7s: of its time mixes, by those of `Rwkv7Shape`;
    latents: of its latent attention, by those of `check_latent.LatentHeads`."""

    groups: list[int | dict[str, Any] | None]
    attention: list[dict[str, Any]]
    glus: list[dict[str, Any]]
    routers: NotRequired[list[dict[str, Any]]]
    expert_biases: NotRequired[list[bool]]
    deltas: NotRequired[list[dict[str, Any]]]
    convs: NotRequired[list[dict[str, Any]]]
    mambas: NotRequired[list[dict[str, Any]]]
    rwkv7s: NotRequired[list[dict[str, Any]]]
    latents: NotRequired[list[dict[str, Any]]]


@dataclass(frozen=True)
class CheckScope:
    """What a check tries. arguments: of `check`; everything without any."""

    arguments: tuple[str, ...] = ()

    @classmethod
    def of(cls, ways: Ways) -> CheckScope:
        return cls(("--ways", json.dumps(ways, sort_keys=True)))


ALL, BRIEF = CheckScope(), CheckScope(("--brief",))
_FAULT = CheckScope(("fault",))  # of no check


@cache
def why_not(device: torch.device) -> str:
    """Return why torch's operators must do, "" where our kernels are right. Takes up to a minute where there was no
    check of any kind yet, see `check_once`; 2 ms else."""
    if reason := missing(device) or _failures.get(str(device), ""):
        return reason
    found = _kept(_key(device))
    return next(filter(None, found.values()), "") if found else check(device, BRIEF)


def give_up(device: torch.device, reason: str) -> None:
    """They failed here: torch's operators compute in this process from now on, also for a model that is placed anew."""
    _failures[str(device)] = reason
    why_not.cache_clear()


def check_once(device: torch.device, tell: Tell, scope: CheckScope | None = None) -> None:
    """Check what was not checked in this scope; without one, not in any. tell: hears, before and while that takes its
    minute, how far it is, and may raise."""
    if missing(device) or str(device) in _failures:
        return
    found = _kept(_key(device))
    is_known = scope in found or any(found.values()) if scope is not None else bool(found)
    if not is_known:
        tell(_CHECKING)
        check(device, scope or BRIEF, lambda text: tell(f"{_CHECKING}: {text}"))


def fault(device: torch.device) -> str:
    """Return which fault of the card ended them, in whichever process; "" for none. Another driver, torch, Triton, or
    other kernels, are tried anew."""
    return _kept(_key(device)).get(_FAULT, "")


def keep_fault(device: torch.device, reason: str) -> None:
    """They ended in a fault of the card: torch's operators compute from the next process on."""
    _keep(_key(device), {_FAULT: (reason, _FOR_EVER)})


def missing(device: torch.device) -> str:
    """Return what the kernels need of a machine and it lacks."""
    if device.type != "cuda":
        return "they are made for NVIDIA's GPUs"
    if torch.version.hip is not None:
        return f"they are made for NVIDIA's GPUs, and this one is AMD's (ROCm {torch.version.hip})"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        return f"this GPU is of compute capability {capability[0]}.{capability[1]}, they need {least}"
    if not _triton():
        return "triton is not installed"
    return ""


@cache
def lacks_bf16(device: torch.device) -> bool:
    """Return whether this is an NVIDIA GPU that computes in fp32 and fp16 only."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) < _BF16_CAPABILITY


def lacks_for_triton() -> str:
    """Return what Triton needs to compile its own launcher, and this machine has not; `ctypes_driver` launches then."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "a C compiler"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # Debian's; as triton has it
    has_headers = (Path(sysconfig.get_paths(scheme)["include"]) / "Python.h").exists()
    return "" if has_headers else "Python's headers"


def check(device: torch.device, scope: CheckScope = ALL, tell: Tell = lambda _text: None) -> str:
    """Run a fresh check, and keep its result for later starts; return "" where all is right. tell: as `check_once`."""
    try:
        found = _checked(device, scope, tell)
    except TimeoutError as error:  # not kept: Triton keeps what it has compiled, so that the next try is faster
        found = f"they were compiled for too long: nothing came within {error}"
    else:
        key, is_final = _key(device), not found or found.startswith(WRONG)
        # What else went wrong may be another time's: too little memory, say.
        if "out of memory" not in found:
            _keep(key, {scope: (found, _FOR_EVER if is_final else time.time() + _RETRY_S)})
        if scope == ALL and not found:  # whatever else was found before is tried anew
            failed = [each for each, reason in _kept(key).items() if reason and each != _FAULT]
            _keep(key, dict.fromkeys(failed, ("", 0.0)))
    if found:
        _failures[str(device)] = found
    why_not.cache_clear()
    return found


def _checked(device: torch.device, scope: CheckScope, tell: Tell) -> str:
    """Raises TimeoutError while they are compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "localllm.kernels.gpu.check", str(device), *scope.arguments]

    reached = ""

    def hear(line: str) -> None:
        nonlocal reached
        if line.startswith(PROGRESS):
            tell(reached := line.removeprefix(PROGRESS).strip())

    try:
        child = run_within(command, environment, cpu_s=math.inf, wait_s=_SILENT_S, hear=hear)
    except TimeoutError as error:
        if not reached.endswith(COMPARED):
            raise
        return f"a kernel did not come to its end: {reached}, then nothing for {error}"
    if child.returncode == 0:
        return ""
    lines = [line.strip() for line in (child.stdout + child.stderr).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(PROGRESS)]
    lines += [line for line in lines if line.startswith(UNCOMPARED)][-1:]
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


def _kept(key: str) -> dict[CheckScope, str]:
    """Return what was found, in each scope, on a machine of this key."""
    found: dict[CheckScope, str] = {}
    for name, kept in _read().items():
        of, *arguments = name.split(" ", 2)
        with suppress(ValueError, TypeError, KeyError):
            if of == key and time.time() < float(kept["until"]):
                found[CheckScope(tuple(filter(None, arguments)))] = str(kept["found"])
    return found


def _read() -> dict[str, Any]:
    with suppress(OSError, ValueError, TypeError):
        return dict(json.loads(kept_file().read_text(encoding="utf-8")))
    return {}


def _keep(key: str, found: Mapping[CheckScope, tuple[str, float]]) -> None:
    """found: what was found in each scope, and until when that holds, in seconds since the epoch. A cache that cannot
    be written is done without."""
    entries = {
        f"{key} {' '.join(scope.arguments)}": {"found": reason, "until": until}
        for scope, (reason, until) in found.items()
    }
    whole = kept_file().with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        kept_file().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        whole.write_text(json.dumps({**_read(), **entries}, indent=1), encoding="utf-8")
        whole.replace(kept_file())
