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
import triton
from torch import Tensor
from triton import AsyncCompileMode

_MOST_THREADS = 16  # of what compiles: a third of it is Python, which takes turns


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on tensors of the host: TRITON_INTERPRET=1."""
    return bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True)
class KernelLaunch:
    """kernel: a `triton.jit` function; arguments: its tensors and numbers, by name, None for what there is none of;
    constants: its constexprs."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Tensor | int | float | None]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

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
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        self.kernel.warmup(grid=self.grid, **self.arguments, **self.constants, **options)

    def _run(self) -> None:
        call = self.kernel[self.grid]
        if not is_interpreted():
            _choose_driver()
            call(**self.arguments, **self.constants, num_warps=self.num_warps, num_stages=self.num_stages)
            return
        with numpy.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the interpreter's numpy, of a NaN, which a card computes
            call(**self.arguments, **self.constants)


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
