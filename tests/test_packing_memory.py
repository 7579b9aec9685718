"""Packing under a cap: it holds what it said, or it is refused before anything is written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from localllm.offload.planner.machine import Memory
from localllm.settings import parse_bytes
from tests.cli_support import environment, run_cli, write_checkpoint

GIB = 1 << 30


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its largest matrix takes 33 MB, which no other part of a conversion hides."""
    return write_checkpoint(tmp_path_factory.mktemp("wide"), hidden=2048, layers=1)


# A process starts with the peak of the one that it is forked from: that of a whole test run would be counted.
_LAUNCHER = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def quantized(home: Path, *arguments: str | Path) -> tuple[int, str, int]:
    """In a process of its own: exit code, stderr, the most bytes that it ever held."""
    line = [sys.executable, "-c", _LAUNCHER, sys.executable, "-m", "localllm", "quantize", *map(str, arguments)]
    process = subprocess.run(line, env=environment(home), capture_output=True, check=False)
    return process.returncode, process.stderr.decode(), int(process.stdout.split()[-1]) * 1024


def written(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and "packed" in path.parts]


@pytest.mark.parametrize("weights", ["int4", pytest.param("nf4", marks=pytest.mark.slow)])
def test_packing_is_refused_below_the_cap_that_it_names_and_holds_no_more_than_that_one(wide, tmp_path, weights):
    quantized(tmp_path, wide, "--weights", weights, "--ram", "64MiB")  # compiles kernels, which costs once
    code, err, _ = quantized(tmp_path, wide, "--weights", weights, "--ram", "64MiB")
    assert (code, written(tmp_path)) == (4, [])
    named = re.search(r"fix: .*quantize \S+ --weights \S+ --ram (\S+)", err)
    assert named is not None, err
    least_bytes = parse_bytes(named[1])
    assert least_bytes is not None
    code, err, _ = quantized(tmp_path, wide, "--weights", weights, "--ram", f"{(least_bytes >> 20) - 32}MiB")
    assert (code, written(tmp_path)) == (4, []), err
    code, err, peak_bytes = quantized(tmp_path, wide, "--weights", weights, "--ram", named[1])
    assert code == 0, err
    assert peak_bytes <= 1.05 * least_bytes


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int4", "bf16"])
def test_the_cap_that_plan_names_is_the_one_that_run_names_and_starts_under(wide, tmp_path, weights):
    """Of a model that is not packed yet, in processes of their own: what they hold is what is compared."""

    def command(name: str, *arguments: str) -> tuple[int, str]:
        flags = ("--weights", weights, "--ctx", "128", *arguments)
        line = [sys.executable, "-m", "localllm", name, str(wide), *flags]
        process = subprocess.run(line, env=environment(tmp_path), capture_output=True, check=False)
        return process.returncode, process.stderr.decode()

    answer = ("-p", "the fox", "--max-tokens", "2")
    refusals = [command("plan", "--ram", "64MiB"), command("run", *answer, "--ram", "64MiB")]
    assert [code for code, _ in refusals] == [4, 4] and not written(tmp_path)
    caps = {re.findall(r"fix: .* --ram (\d+MiB)", err)[0] for _, err in refusals}
    assert len(caps) == 1, refusals
    least = caps.pop()
    assert command("run", *answer, "--ram", f"{int(least[:-3]) - 16}MiB")[0] == 4 and not written(tmp_path)
    assert command("plan", "--ram", least)[0] == 0
    code, err = command("run", *answer, "--ram", least)
    assert code == 0, err
    assert written(tmp_path) or weights == "bf16"  # where all of it has room, it is read as it is


def too_small(*_: object) -> Memory:
    return Memory(ram_bytes=1 << 20, program_bytes=0, most_bytes=GIB)


@pytest.mark.parametrize("command", [["quantize"], ["run", "-p", "x", "--weights", "int4"]], ids=["quantize", "run"])
def test_first_use_obeys_the_need_of_packing_too(model, empty_cache, monkeypatch, command):
    monkeypatch.setattr("localllm.engine.weights.process_memory", too_small)
    result = run_cli(command[0], model, *command[1:])
    assert (result.code, written(empty_cache)) == (4, [])
    assert "cannot be packed in 1.0 MiB" in result.err
    assert f"localllm quantize {model} --weights int4-g64 --ram " in result.err


def test_the_setting_and_the_variable_cap_packing(model, empty_cache, monkeypatch):
    monkeypatch.setenv("LOCALLLM_RAM", "32MiB")
    assert run_cli("quantize", model).code == 4
    # Other tests may have left gigabytes in this process, which a cap counts.
    most = psutil.virtual_memory().total * 3 // 4 >> 30
    assert run_cli("quantize", model, "--ram", f"{most}GiB").code == 0
    assert written(empty_cache)


def test_what_is_packed_is_verified_under_any_cap(model, empty_cache):
    assert run_cli("quantize", model).code == 0
    result = run_cli("quantize", model, "--ram", "32MiB")
    assert result.code == 0
    assert b"is whole" in result.out
    assert written(empty_cache)


def test_a_cap_above_what_the_machine_has_is_refused(model, empty_cache):
    result = run_cli("quantize", model, "--ram", "99999GiB")
    assert (result.code, written(empty_cache)) == (2, [])
    assert "more than this machine has" in result.err
