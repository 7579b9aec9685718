"""torch's device guard that does nothing, compiled and registered for CUDA: see guard.cpp."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("guard.cpp")


def compiler() -> str | None:
    """Return the C++ compiler of this machine, if it has one."""
    return next(
        (found for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++") if (found := _which(name))), None
    )


def _which(name: str) -> str | None:
    return shutil.which(name) if name else None


@cache
def register_guard(folder: Path) -> None:
    """Compile the guard, where `folder` does not have it, and load it, once a process. It stays until the process ends,
    and changes nothing for tensors of the CPU. Raises RuntimeError with what the compiler says."""
    assert torch.version.cuda is None, "a build for CUDA has a guard"
    told = (SOURCE.read_text(), torch.__version__, str(torch.compiled_with_cxx11_abi()))
    library = folder / f"guard-{hashlib.blake2b(repr(told).encode(), digest_size=8).hexdigest()}.so"
    if not library.exists():
        _compile(library)
    ctypes.CDLL(str(library))


def _compile(library: Path) -> None:
    """Several workers may do so at once: each puts a whole file in its place."""
    home, part = Path(torch.__file__).parent, library.with_suffix(f".{os.getpid()}")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    flags = ["-shared", "-fPIC", "-O0", "-w", "-std=c++20", abi, "-I", str(home / "include")]
    command = [str(compiler()), *flags, str(SOURCE), "-o", str(part), "-L", str(home / "lib"), "-lc10"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} says: {done.stderr[-2000:]}")
    part.replace(library)
