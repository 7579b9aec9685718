"""Kernels launched by Triton's own driver and by ours, on a stub of CUDA's (`driver_stub.c`): a program for
`test_ctypes_driver`, which prints as JSON where they differ."""

from __future__ import annotations

import ctypes
import json
import re
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.runtime import driver

STUB = ctypes.CDLL("libcuda.so.1")
TAKEN = (ctypes.c_ubyte * 1024).in_dll(STUB, "taken")
SIZES, COUNT = (
    (kind).in_dll(STUB, name) for kind, name in ((ctypes.c_uint * 64, "sizes"), (ctypes.c_uint, "num_sizes"))
)

torch.cuda.is_available = lambda: True  # type: ignore[method-assign]
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda *_: (8, 6)
torch.cuda.current_stream = lambda *_: SimpleNamespace(cuda_stream=77)

from triton.backends.nvidia.driver import CudaDriver  # noqa: E402

from localllm.kernels.gpu import check_cases  # noqa: E402
from localllm.kernels.gpu.check import launches_of  # noqa: E402
from localllm.kernels.gpu.ctypes_driver import CtypesDriver  # noqa: E402
from localllm.kernels.gpu.launch import KernelLaunch  # noqa: E402
from localllm.kernels.sizes import Glu  # noqa: E402


class Launched:
    """One launch by a driver. compiled: by Triton, for a card of sm_86."""

    def __init__(self, launch: KernelLaunch, compiled: Any, own: Any, **changes: Any) -> None:
        driver.set_active(own)
        metadata = compiled.metadata._replace(**changes)
        ctypes.memset(TAKEN, 0, len(TAKEN))  # of the other driver, of what a function was allowed too
        self.loaded = own.utils.load_binary(compiled.name, compiled.kernel, metadata.shared, 0)
        self.launcher = own.launcher_cls(compiled.src, metadata)
        values = {**launch.arguments, **launch.constants_on(86)}
        grid = [*launch.grid, 1, 1][:3]
        packed = (metadata.num_warps, metadata.num_ctas, metadata.shared)
        arguments = [values.get(name) for name in launch.kernel.arg_names]
        self.call = (*grid, 77, self.loaded[1], packed, None, None, None, *arguments)
        self.launcher(*self.call)
        self.taken = bytes(TAKEN)


def parameters_of(ptx: str) -> list[int]:
    """The bytes of each."""
    head = ptx[ptx.index(".entry") :]
    return [int(bits) // 8 for bits in re.findall(r"\.param \.[a-z]+(\d+)", head[: head.index(")")])]


def error_of(act: Any) -> str:
    try:
        act()
    except RuntimeError as error:
        return str(error)
    return ""


def main() -> None:
    theirs, ours = CudaDriver(), CtypesDriver()
    driver.set_active(theirs)
    few = replace(check_cases.SMALL, groups=(), attention=(), glus=(Glu("silu"),))
    all_kinds = replace(check_cases.SMALL, groups=(64,), row_counts=(1,))
    launches, _ = launches_of(torch.device("cpu"), all_kinds if "all" in sys.argv else few)
    differing, seen, both = list[str](), set[str](), (theirs, ours)
    for launch in launches:
        compiled = launch.kernel.warmup(
            grid=launch.grid, **launch.arguments, **launch.constants_on(86), **launch.options_on(86)
        )
        if compiled.hash in seen:
            continue
        seen.add(compiled.hash)
        sizes = parameters_of(compiled.asm["ptx"])
        SIZES[: len(sizes)], COUNT.value = sizes, len(sizes)
        for changes in ({}, {"launch_pdl": True}, {"shared": 60_000}):
            first, second = (Launched(launch, compiled, own, **changes) for own in both)
            if first.taken != second.taken or first.loaded != second.loaded:
                differing.append(f"{launch.name} {changes}")
    ctypes.c_int.in_dll(STUB, "fails_with").value = 2
    errors = [error_of(lambda each=each: each.launcher(*each.call)) for each in (first, second)]
    ctypes.c_int.in_dll(STUB, "fails_with").value = 0
    has_context = ctypes.c_int.in_dll(STUB, "has_context")
    has_context.value = 0
    second.launcher(*second.call)
    times = []
    for each in (first, second):
        driver.set_active(theirs if each is first else ours)
        started = time.perf_counter()
        for _ in range(2000):
            each.launcher(*each.call)
        times.append((time.perf_counter() - started) / 2000)
    found = {"differing": differing, "kernels": len(seen), "errors": errors, "context": has_context.value}
    print(json.dumps({**found, "triton": triton.__version__, "microseconds": [round(each * 1e6, 2) for each in times]}))


main()
