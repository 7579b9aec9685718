"""One launch of a Triton kernel, as a value: to be run, or compiled for a card that is not here."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import triton
from torch import Tensor


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
        call = self.kernel[self.grid]
        if not is_interpreted():
            call(**self.arguments, **self.constants, num_warps=self.num_warps, num_stages=self.num_stages)
            return
        with numpy.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the interpreter's numpy, of a NaN, which a card computes
            call(**self.arguments, **self.constants)


def run_all(launches: Sequence[KernelLaunch]) -> None:
    for launch in launches:
        launch.run()
