"""LLVM IR compiled for this very CPU at run time: native kernels with no compiler on the user's machine.

Owns compilation and the thread team. The team is torch's own OpenMP pool, entered through `GOMP_parallel`: a second
pool would fight it for the cores, and a Python thread pool costs 20-50 us a dispatch where this one costs 2-5.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch


class KernelUnavailableError(RuntimeError):
    """This machine cannot compile or run the kernel; the caller takes the torch path."""


@cache
def _openmp() -> ctypes.CDLL:
    """The OpenMP runtime that torch has already loaded."""
    if platform.system() != "Linux":
        raise KernelUnavailableError("torch's OpenMP runtime has a GOMP interface on Linux only")
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*")):
        return ctypes.CDLL(str(path))
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    for line in maps.splitlines():
        if "libgomp" in line:
            return ctypes.CDLL(line.split()[-1])
    raise KernelUnavailableError("torch was built without libgomp")


def _target_machine() -> Any:
    """A new one for every compilation: the execution engine takes it over and frees it."""
    try:
        from llvmlite import binding as llvm
    except ImportError as error:
        raise KernelUnavailableError("llvmlite is not installed") from error
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for symbol in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"):
        address = ctypes.cast(getattr(_openmp(), symbol), ctypes.c_void_p).value
        llvm.add_symbol(symbol, address)
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )


def compile_ir(source: str, name: str, *argument_types: type) -> Callable[..., None]:
    """The function `name` of an LLVM IR module, callable with ctypes values; the GIL is released while it runs.

    Raises KernelUnavailableError where llvmlite or the OpenMP runtime is missing, or the IR does not compile.
    """
    machine = _target_machine()
    from llvmlite import binding as llvm

    try:
        module = llvm.parse_assembly(source)
        module.verify()
        options = llvm.create_pipeline_tuning_options(speed_level=3)
        builder = llvm.create_pass_builder(machine, options)
        builder.getModulePassManager().run(module, builder)
        engine = llvm.create_mcjit_compiler(module, machine)
        engine.finalize_object()
    except RuntimeError as error:
        raise KernelUnavailableError(f"LLVM refused the kernel: {error}") from error
    function = ctypes.CFUNCTYPE(None, *argument_types)(engine.get_function_address(name))
    function.engine = engine  # type: ignore[attr-defined]  # the code lives as long as its engine
    return function
