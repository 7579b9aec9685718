"""Kernels that write nothing but zeros, so that a test sees what finds them."""

from __future__ import annotations

import pytest
from torch import Tensor

from localllm.kernels.gpu.launch import KernelLaunch


def write_zeros(patch: pytest.MonkeyPatch, kernel: str, result: str) -> None:
    """Have every launch of a kernel leave zeros in its argument `result`. One that is not launched would leave
    addresses of nothing to the next."""
    run = KernelLaunch.run

    def run_wrongly(launch: KernelLaunch) -> None:
        run(launch)
        if launch.name == kernel:
            written = launch.arguments[result]
            assert isinstance(written, Tensor)
            written.zero_()

    patch.setattr(KernelLaunch, "run", run_wrongly)
