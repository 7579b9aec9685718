"""What a check launches is compiled before it, on threads, for a card that is not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import REPOSITORY

pytest.importorskip("triton")
from localllm.kernels.gpu import launch

PROGRAM = """
import json, torch, triton
import triton.language as tl
from dataclasses import replace
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from localllm.kernels.gpu import check_cases
from localllm.kernels.gpu.check import launches_of
from localllm.kernels.gpu.launch import KernelLaunch, compile_all

class Driver:  # of a card that compiles, and runs nothing
    def get_current_device(self): return 0
    def get_current_stream(self, _device): return 0
    def get_current_target(self): return GPUTarget("cuda", 86, 32)

@triton.jit
def wrong(x, SIZE: tl.constexpr, OVERLAPS: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), 0.0)

driver.set_active(Driver())
sizes = replace(check_cases.SMALL, groups=(), attention=(), glus=(check_cases.GLUS[0],))
launches, cases = launches_of(torch.device("cpu"), sizes)
told = []
launches.append(KernelLaunch(wrong, (1,), {"x": torch.empty(4)}, {"SIZE": 3}))
failed = compile_all(launches, lambda done, total: told.append((done, total)))
again = []
compile_all(launches[:-1], lambda done, total: again.append(done))
print(json.dumps([[launch.name for launch in launches], cases, told, failed, again]))
"""


def test_what_a_check_launches_is_compiled_first_and_what_cannot_be_is_named(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(REPOSITORY), "TRITON_CACHE_DIR": str(tmp_path)}
    script = tmp_path / "program.py"
    script.write_text(PROGRAM, encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names, num_cases, told, failed, again = json.loads(done.stdout)
    total = told[-1][1]
    assert told == [[step, total] for step in range(1, total + 1)] and len(set(names)) < total <= len(names)
    assert num_cases > 10 and {"_to_codes", "_to_floats", "_embed", "_winner"} < set(names)
    assert list(failed) == ["wrong"] and "CompilationError" in failed["wrong"]
    assert again == []  # nothing is compiled twice


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (6, 6), (64, 16)])
def test_as_many_are_compiled_at_once_as_there_are_cores(cores: int, threads: int, monkeypatch: Any) -> None:
    asked: list[int] = []

    def pool(count: int) -> ThreadPoolExecutor:
        asked.append(count)
        return ThreadPoolExecutor(count)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(cores)), raising=False)
    monkeypatch.setattr(launch, "ThreadPoolExecutor", pool)
    assert launch.compile_all([], pytest.fail) == {} and asked == [threads]


class Kernel:
    """Keeps what it is launched with."""

    def __init__(self) -> None:
        self.taken: list[dict] = []

    def __getitem__(self, _grid):
        return lambda **arguments: self.taken.append(arguments)

    def warmup(self, **arguments) -> None:
        self.taken.append(arguments)


@pytest.mark.parametrize(
    ("arch", "version", "overlaps"),
    [(120, 12080, True), (90, 12040, True), (90, 12020, False), (89, 13000, False)],
)
def test_kernels_overlap_where_card_and_driver_know_it_and_wait_then(arch, version, overlaps, monkeypatch):
    chosen: list[bool] = []
    card = SimpleNamespace(
        get_current_device=lambda: 0 if chosen else pytest.fail("no driver was chosen"),
        get_current_target=lambda: SimpleNamespace(arch=arch),
    )
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=card))
    monkeypatch.setattr(launch, "_driver_version", lambda: version)
    monkeypatch.setattr(launch, "_choose_driver", lambda: chosen.append(True))
    monkeypatch.setattr(launch, "is_interpreted", lambda: False)
    launch._capability.cache_clear()
    kernel = Kernel()
    variant = launch.KernelLaunch(kernel, (1,), {"x": None}, {"SIZE": 3})
    variant.run()
    variant.compile()
    launch._capability.cache_clear()
    taken, compiled = kernel.taken
    assert len(chosen) == 2  # before either, as Triton's own driver may want a compiler
    assert compiled == {**taken, "grid": (1,)}
    assert (taken["OVERLAPS"], taken["launch_pdl"]) == (overlaps, overlaps) and taken["SIZE"] == 3
