"""LLVM IR compiled for this very CPU at run time: native kernels with no compiler on the user's machine.

Owns compilation and the thread team. The team is torch's own OpenMP pool, entered through `GOMP_parallel`: a second
pool would fight it for the cores, and a Python thread pool costs 20-50 us a dispatch where this one costs 2-5.
"""

from __future__ import annotations

import ctypes
import platform
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

OPENMP_SYMBOLS = frozenset({"GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"})
_CALL = re.compile(r"\b(?:movabsq\s+\$|callq?\s+|jmp\s+|bl\s+|b\s+)([A-Za-z_]\w*)")


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
            return ctypes.CDLL(line.split(maxsplit=5)[-1])
    raise KernelUnavailableError("torch was built without libgomp")


def target_machine(cpu: str = "", features: str = "") -> Any:
    """An LLVM target machine: for this very CPU, or for a named one. A new one for every compilation: its engine
    takes it over and frees it.

    Raises KernelUnavailableError where llvmlite is missing, or this CPU has no fused multiply-add.
    """
    try:
        from llvmlite import binding as llvm
    except ImportError as error:
        raise KernelUnavailableError("llvmlite is not installed") from error
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    if not cpu:
        host = llvm.get_host_cpu_features()
        if platform.machine().lower() in ("x86_64", "amd64") and not (host.get("fma") and host.get("avx2")):
            raise KernelUnavailableError("this CPU has no AVX2 and FMA")
        cpu, features = llvm.get_host_cpu_name(), host.flatten()
    return llvm.Target.from_default_triple().create_target_machine(cpu=cpu, features=features, opt=3)


def optimised(source: str, machine: Any) -> Any:
    """An LLVM module from IR, run through LLVM's -O3. Raises RuntimeError for IR that is not well-formed."""
    from llvmlite import binding as llvm

    module = llvm.parse_assembly(source)
    module.verify()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    return module


def called_symbols(module: Any, machine: Any) -> set[str]:
    """The functions that the machine code calls. LLVM makes a call of what a CPU has no instruction for; MCJIT leaves
    one that nothing resolves at address zero, and says nothing."""
    return set(_CALL.findall(machine.emit_assembly(module)))


def compile_ir(source: str, name: str, *argument_types: type) -> Callable[..., None]:
    """The function `name` of an LLVM IR module, callable with ctypes values; the GIL is released while it runs.

    Raises KernelUnavailableError where llvmlite or the OpenMP runtime is missing, or the IR does not compile.
    """
    machine = target_machine()
    from llvmlite import binding as llvm

    _resolve_openmp()
    try:
        module = optimised(source, machine)
        own = {function.name for function in module.functions if not function.is_declaration}
        unknown = called_symbols(module, machine) - OPENMP_SYMBOLS - own
        if unknown:
            raise KernelUnavailableError(f"the kernel would call {', '.join(sorted(unknown))}")
        engine = llvm.create_mcjit_compiler(module, machine)
        engine.finalize_object()
    except RuntimeError as error:
        raise KernelUnavailableError(f"LLVM refused the kernel: {error}") from error
    function = ctypes.CFUNCTYPE(None, *argument_types)(engine.get_function_address(name))
    function.engine = engine  # type: ignore[attr-defined]  # the code lives as long as its engine
    return function


@cache
def _resolve_openmp() -> None:
    from llvmlite import binding as llvm

    for symbol in OPENMP_SYMBOLS:
        address = ctypes.cast(getattr(_openmp(), symbol), ctypes.c_void_p).value
        llvm.add_symbol(symbol, address)
