"""Kernels are launched without a C compiler as Triton's own driver launches them, on a stub of CUDA's driver."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.test_gpu_gates import OLDER

triton = pytest.importorskip("triton")
COMPILER = shutil.which("gcc") or shutil.which("clang")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="Triton's own driver needs a C compiler")
PLANTED = """
from localllm.kernels.gpu import ctypes_driver
ctypes_driver._SLOTS["fp32"] = "d"
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a library that is taken for CUDA's driver."""
    folder = tmp_path_factory.mktemp("driver")
    include = Path(triton.__file__).parent / "backends/nvidia/include"
    assert COMPILER is not None
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-I", include, "tests/driver_stub.c", "-o", folder / "libcuda.so.1"],
        cwd=REPOSITORY,
        check=True,
    )
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Triton has compiled, for several tests."""
    return tmp_path_factory.mktemp("cache")


def run(stub: Path, cache: Path, *arguments: str, older: Path | None = None) -> dict:
    path = os.pathsep.join([*([str(older)] if older else []), str(REPOSITORY)])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache)}
    environment |= {"LD_LIBRARY_PATH": str(stub), "TRITON_LIBCUDA_PATH": str(stub)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


has_older = pytest.mark.skipif(not OLDER.exists(), reason=f"{OLDER} is absent")


@pytest.mark.parametrize(
    ("kinds", "least", "older"),
    [
        ("few", 10, None),
        pytest.param("few", 10, OLDER, marks=[pytest.mark.slow, has_older]),
        pytest.param("all", 30, None, marks=pytest.mark.slow),
        pytest.param("all", 30, OLDER, marks=[pytest.mark.slow, has_older]),
    ],
)
def test_each_kernel_is_given_what_tritons_own_driver_gives_it(kinds, least, older, stub, cache):
    """Grid, block, shared memory, attributes, and each parameter as its PTX has it: to the byte."""
    found = run(stub, cache, "-m", "tests.driver_program", kinds, older=older)
    assert found["differing"] == [] and found["kernels"] >= least
    assert found["triton"].startswith("3.6." if older else "3.7.")
    assert found["errors"] == ["Triton Error [CUDA]: out of memory"] * 2
    assert found["context"] == 1  # was made for a thread that had none


def test_a_parameter_of_another_size_would_be_found(stub, cache, tmp_path):
    script = tmp_path / "planted.py"
    script.write_text(f"{PLANTED}\nimport tests.driver_program\n", encoding="utf-8")
    assert run(stub, cache, str(script))["differing"] != []


def launcher(kind: str = "i32", utils: Any = None, **differs: Any) -> Any:
    """Of a kernel with one argument of this type."""
    from localllm.kernels.gpu.ctypes_driver import _Launcher

    usual = {"global_scratch_size": 0, "profile_scratch_size": 0, "launch_cooperative_grid": False, "num_ctas": 1}
    usual |= {"launch_pdl": False, "num_warps": 4, "shared": 0, "name": "kernel"}
    return _Launcher(
        utils or SimpleNamespace(), SimpleNamespace(signature={"x": kind}), SimpleNamespace(**usual | differs)
    )


@pytest.mark.parametrize(
    "needs",
    [
        {"global_scratch_size": 8},
        {"profile_scratch_size": 8},
        {"launch_cooperative_grid": True},
        {"num_ctas": 2},
        {"kind": "tensordesc<fp16[64, 64]>"},
    ],
    ids=lambda needs: next(iter(needs)),
)
def test_a_kernel_that_needs_more_than_is_here_is_refused(needs):
    launcher()
    with pytest.raises(NotImplementedError, match="kernel can be launched with a C compiler only"):
        launcher(**needs)


def test_threads_that_launch_one_kernel_take_turns():
    """The arguments of all are packed at one place."""
    turns: list[bool] = []
    utils = SimpleNamespace(launch=lambda *_: turns.append(launch._lock.locked()) or 0, require=lambda _status: None)
    launch = launcher(utils=utils)
    launch(1, 1, 1, 0, 0, None, None, None, None, 5)
    assert turns == [True] and not launch._lock.locked()


# Each choice is made in a fork of one process: an import of torch and Triton takes 1.5 s.
CHOSEN = """
import json, os, torch
from triton.runtime import driver
torch.cuda.is_available = lambda: True
from localllm.kernels.gpu.ctypes_driver import choose_driver
found = {}
for compiler, differs in {"works": {}, "fails": {"CC": "false"}, "absent": {"PATH": os.getcwd() + "/nowhere"}}.items():
    ours, its = os.pipe()
    if not os.fork():
        os.environ.update(differs, TRITON_CACHE_DIR=os.path.join(os.environ["TRITON_CACHE_DIR"], compiler))
        choose_driver()
        os.write(its, type(driver.active).__name__.encode())
        os._exit(0)
    os.close(its)
    found[compiler] = os.read(ours, 100).decode()
print(json.dumps(found))
"""


def test_tritons_own_driver_is_used_where_it_can_be_compiled(stub, tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    script = tmp_path / "chosen.py"
    script.write_text(CHOSEN, encoding="utf-8")
    expected = {"works": "CudaDriver", "fails": "CtypesDriver", "absent": "CtypesDriver"}
    assert run(stub, tmp_path, str(script)) == expected
