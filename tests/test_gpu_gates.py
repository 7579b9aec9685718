"""The kernels compile for cards that are not here, by both Tritons that users have; and the gate that says so works."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import REPOSITORY

pytest.importorskip("triton")
OLDER = Path(os.environ.get("LOCALLLM_OLDER_TRITON", REPOSITORY / ".venv" / "triton-3.6"))

PLANTED = """
import sys, torch, triton, triton.language as tl
from localllm.kernels.gpu.launch import KernelLaunch, after_previous
from tools.check_kernels import faults

@triton.jit
def wrong(x, SIZE: tl.constexpr, OVERLAPS: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), 0.0)

@triton.jit
def crowded(x, y, SIZE: tl.constexpr, OVERLAPS: tl.constexpr):
    values = tl.load(x + tl.arange(0, SIZE)).to(tl.float32)
    tl.store(y + tl.arange(0, SIZE), values / tl.sum(values))

@triton.jit
def _gemv(x, y, SIZE: tl.constexpr, OVERLAPS: tl.constexpr):
    at = tl.arange(0, SIZE) * 3
    tl.store(y + at, tl.load(x + at))

@triton.jit
def early(x, y, SIZE: tl.constexpr, OVERLAPS: tl.constexpr):
    values = tl.load(x + tl.arange(0, SIZE))
    after_previous(OVERLAPS)
    tl.store(y + tl.arange(0, SIZE), values)

@triton.jit
def in_time(x, y, SIZE: tl.constexpr, OVERLAPS: tl.constexpr):
    after_previous(OVERLAPS)
    tl.store(y + tl.arange(0, SIZE), tl.load(x + tl.arange(0, SIZE)))

x, y = torch.empty(1 << 18, dtype=torch.float16), torch.empty(1 << 18)
for kernel, size, card in ((wrong, 3, 89), (crowded, 65536, 89), (_gemv, 1024, 89), (early, 64, 90), (in_time, 64, 90)):
    arguments = {"x": x} if kernel is wrong else {"x": x, "y": y}
    print("; ".join(faults(KernelLaunch(kernel, (1,), arguments, {"SIZE": size}), card)) or "nothing found")
"""


def run(*command: str, triton: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = [str(REPOSITORY), *([str(triton)] if triton else [])]
    environment["PYTHONPATH"] = os.pathsep.join(reversed(path))
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False
    )


def run_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], module: str, *arguments: str
) -> tuple[object, str]:
    """(exit code, what went to stderr) of a program that ends before it compiles anything, in this process: another one
    takes 3 s to import torch and Triton."""
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(module).main()
    code = ended.value.code
    return (1, str(code)) if isinstance(code, str) else (code, capsys.readouterr().err)


@pytest.mark.parametrize(
    "arguments",
    [
        ("120", "--one-each"),  # of consumers' cards the newest, with the least shared memory
        pytest.param(("120", "--brief"), marks=pytest.mark.slow),
        pytest.param(("75", "--brief"), marks=pytest.mark.slow),
        pytest.param(("75", "80", "86", "89", "90", "120"), marks=pytest.mark.slow),
    ],
)
def test_every_kernel_compiles_without_spills_and_with_wide_loads(arguments):
    done = run("-m", "tools.check_kernels", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not OLDER.exists(), reason=f"{OLDER} is absent; `make {OLDER.relative_to(REPOSITORY)}` installs it")
@pytest.mark.parametrize(
    "arguments",
    [("89", "--one-each"), *(pytest.param((card, "--brief"), marks=pytest.mark.slow) for card in ("75", "89", "90"))],
)
def test_the_oldest_triton_compiles_them_too(arguments):
    done = run("-m", "tools.check_kernels", *arguments, triton=OLDER)
    assert done.returncode == 0 and "triton 3.6." in done.stdout, done.stdout + done.stderr


def test_the_gate_names_what_was_planted(tmp_path):
    script = tmp_path / "planted.py"
    script.write_text(PLANTED, encoding="utf-8")
    wrong, crowded, narrow, early, in_time = run(str(script)).stdout.splitlines()
    assert "power of 2" in wrong
    assert "spills" in crowded or "wants" in crowded
    assert "no load of 128 bits" in narrow
    assert "does not wait" in early and in_time == "nothing found"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["85"], "invalid choice: 85"),
        pytest.param([], "are required", marks=pytest.mark.slow),
        (["interpreted", "89"], "unset TRITON_INTERPRET"),
        (["89", "--threads", "0"], "0 is not a number"),
    ],
)
def test_what_the_gate_cannot_do_is_refused_by_name(arguments, said, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1" if "interpreted" in arguments else "0")
    code, told = run_here(
        monkeypatch, capsys, "tools.check_kernels", *[each for each in arguments if each != "interpreted"]
    )
    assert code == 2 and said in told


@pytest.mark.parametrize("name", ["nonsense", "cpu", "cuda:99"])
def test_a_check_of_what_is_no_gpu_is_refused(name, monkeypatch, capsys):
    code, told = run_here(monkeypatch, capsys, "localllm.kernels.gpu.check", name)
    assert code and "Traceback" not in told
    assert name == "cuda:99" or f"{name!r} is not a GPU here" in told


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("module", ["tools.tune_kernels", "localllm.kernels.gpu.check", "benchmarks.gpu"])
def test_what_needs_a_gpu_says_so_in_one_line(module, monkeypatch, capsys):
    code, told = run_here(monkeypatch, capsys, module)
    assert code and "Traceback" not in told and "there is no GPU here" in told
