"""One launch of a Triton kernel, as a value: to be run, compiled before it is, or compiled for a card that is not
here."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import AsyncCompileMode
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

_MOST_THREADS = 16  # of what compiles: a third of it is Python, which takes turns
# From this compute capability on, a kernel may be launched before the one before it has ended; in a graph, if the
# driver is of CUDA 12.4 or newer.
_OVERLAPPING, _LEAST_DRIVER = 90, 12040


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on tensors of the host: TRITON_INTERPRET=1."""
    return bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True)
class KernelLaunch:
    """kernel: a `triton.jit` function that calls `after_previous` first; arguments: its tensors and numbers, by name,
    None for what there is none of; constants: its constexprs."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Tensor | int | float | None]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    def constants_on(self, capability: int) -> dict[str, Any]:
        """Return the constexprs for sm_{capability}; 0 is the interpreter."""
        return {**self.constants, "OVERLAPS": capability >= _OVERLAPPING}

    def options_on(self, capability: int) -> dict[str, Any]:
        """Return Triton's options for sm_{capability}."""
        overlaps = capability >= _OVERLAPPING
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "launch_pdl": overlaps}

    def run(self) -> None:
        record = _record.get()
        if record is None:
            self._run()
            return
        if record.runs:
            self._run()
        record.launches.append(self)

    def compile(self) -> None:
        """Compile it for the current device, where that has not been done."""
        _choose_driver()
        card = _capability(driver.active.get_current_device())
        self.kernel.warmup(grid=self.grid, **self.arguments, **self.constants_on(card), **self.options_on(card))

    def _run(self) -> None:
        call = self.kernel[self.grid]
        if not is_interpreted():
            _choose_driver()
            card = _capability(driver.active.get_current_device())
            call(**self.arguments, **self.constants_on(card), **self.options_on(card))
            return
        with numpy.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the interpreter's numpy, of a NaN, which a card computes
            call(**self.arguments, **self.constants_on(0))


@triton.jit
def after_previous(OVERLAPS: tl.constexpr):
    """Wait until what was launched before is done and can be read, and let what is launched next come meanwhile, as far
    as there is room ("programmatic dependent launch"). Nothing that another kernel writes may be read before, and
    nothing may be written. Each kernel waits, so that all that were launched before are done, not only the last."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()


@cache
def _capability(_device: int) -> int:
    """Return 86 for 8.6, of the device that is the current one. With an old driver kernels do not overlap."""
    capability = int(driver.active.get_current_target().arch)
    return capability if capability < _OVERLAPPING or _driver_version() >= _LEAST_DRIVER else _OVERLAPPING - 1


def _driver_version() -> int:
    return int(torch._C._cuda_getDriverVersion())  # type: ignore[attr-defined]  # in builds for CUDA


@cache
def _choose_driver() -> None:
    """Once, before anything is launched."""
    from localllm.kernels.gpu.ctypes_driver import choose_driver

    choose_driver()


def run_all(launches: Sequence[KernelLaunch]) -> None:
    for launch in launches:
        launch.run()


@dataclass(frozen=True)
class _Record:
    runs: bool
    launches: list[KernelLaunch] = field(default_factory=list)


_record: ContextVar[_Record | None] = ContextVar("record", default=None)


@contextmanager
def recorded(*, runs: bool) -> Iterator[list[KernelLaunch]]:
    """Give the list of what this thread launches inside. runs: it is launched, too, and is in the list once that has
    succeeded."""
    record = _Record(runs)
    before = _record.set(record)
    try:
        yield record.launches
    finally:
        _record.reset(before)


def compile_all(launches: Sequence[KernelLaunch], progress: Callable[[int, int], None]) -> dict[str, str]:
    """Compile for the current device, on threads: half of a compilation is not Python. Return what was said of a
    variant that cannot be compiled, by its kernel's name.

    progress: is called with how many variants are done, and all; what it raises ends the rest.
    """
    names: dict[Future[Any], str] = {}
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(min(_MOST_THREADS, usable)) as pool, AsyncCompileMode(pool, ignore_errors=True) as mode:
        for launch in launches:
            launch.compile()  # a variant that is under way or done already makes no future
            names.update(dict.fromkeys(mode.raw_futures[len(names) :], launch.name))
        for done, _ in enumerate(as_completed(names), 1):
            progress(done, len(names))
    errors = ((name, future.exception()) for future, name in names.items())
    return {name: f"{type(error).__name__}: {first_line(error)}" for name, error in errors if error is not None}


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says that is not empty, "" where there is none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
