"""How the CPU kernels' work is shared among threads, and what is done where they cannot be compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from localllm.cli import share_cores
from localllm.kernels import cpu_calibrate, cpu_gemv, cpu_jit, cpu_linear
from localllm.kernels.cpu_ir import Kernel
from localllm.kernels.cpu_tape import Tape
from tests.patience import PATIENCE_S

needs_kernels = pytest.mark.skipif(not cpu_linear.is_available(), reason="no CPU kernel runs on this machine")


def test_on_a_cpu_that_has_what_they_need_the_kernels_compile():
    """Other tests are skipped where they do not: here that is a failure."""
    cpu = Path("/proc/cpuinfo")
    has = set(cpu.read_text().split()) if cpu.exists() else set()
    if not has >= {"avx2", "fma", "f16c"} and "asimddp" not in has:
        pytest.skip("no instruction set of this CPU has kernels")
    assert cpu_linear.is_available() and cpu_calibrate.supports(64) and cpu_gemv.supports(1, 64, 64)


@needs_kernels
@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 33, 100])
def test_balanced_work_is_done_once_each_by_any_number_of_threads(threads, count):
    k = Kernel("count", "y | count")
    with k.balanced(k.arg.count) as i:
        place = k.arg.y.at(i * 4)
        place.store(place.load("i32") + 1)
    native = cpu_jit.compile_kernel(k, cpu_jit.best_isa())
    for number in (1, 2, 3, 5):
        threads(number)
        y = torch.zeros(count + 4, dtype=torch.int32)
        Tape([native.step(y=y, count=count)]).run()
        assert y.tolist() == [1] * count + [0] * 4


def test_where_llvm_refuses_the_kernels_torch_multiplies(tmp_path):
    program = (
        "import torch; from localllm.kernels import cpu_jit; from localllm.quant.int4 import Int4\n"
        "def refuse(*_): raise RuntimeError('no such instruction')\n"
        "cpu_jit.machine_code = refuse\n"
        "print(Int4().linear(torch.ones(1, 64), Int4().quantize(torch.ones(48, 64)), 48, None).sum().item())"
    )
    environment = {**os.environ, "LOCALLLM_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (result.stdout, result.stderr) == ("3072.0\n", "")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT": "4000"}),
        ({"GOMP_SPINCOUNT": "9"}, {"GOMP_SPINCOUNT": "9"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_waiting_threads_leave_the_cores_to_other_programs_unless_the_user_has_said_how(environ, expected):
    share_cores(environ)
    assert environ == expected
