"""Programs that may hang are given up by what they have used of the processor, not by how long a busy machine takes."""

from __future__ import annotations

import os
import sys

import psutil
import pytest

from localllm.kernels.child import run_within
from tests.patience import PATIENCE_S


def run(code: str, cpu_s: float = PATIENCE_S, wait_s: float = PATIENCE_S) -> tuple[int, str, str]:
    ended = run_within([sys.executable, "-c", code], os.environ, cpu_s=cpu_s, wait_s=wait_s)
    return ended.returncode, ended.stdout, ended.stderr


def test_what_it_said_and_how_it_ended_is_told() -> None:
    assert run("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)") == (3, "out\n", "err\n")


def test_one_that_waits_for_its_turn_is_not_given_up() -> None:
    code, out, _ = run("import time; time.sleep(2); print('done')", cpu_s=1)
    assert (code, out) == (0, "done\n")


WORKERS = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"


@pytest.mark.parametrize("code", ["while True: pass", WORKERS], ids=["itself", "what it started"])
def test_one_that_computes_without_end_is_given_up_with_what_it_started(code: str) -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(TimeoutError, match="1 seconds of the processor"):
        run(code, cpu_s=1)
    assert psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, PATIENCE_S)[1] == []


def test_one_that_hangs_is_given_up_in_the_end_and_the_machine_is_named() -> None:
    with pytest.raises(TimeoutError, match="1 seconds; this machine may be very busy"):
        run("import time; time.sleep(10**6)", wait_s=1)


STEPS = "import time\nfor step in range(5):\n    time.sleep(0.7)\n    print('step', step, flush=True)"


def test_one_that_says_how_far_it_is_has_its_limits_for_each_step() -> None:
    heard: list[str] = []
    ended = run_within([sys.executable, "-c", STEPS], os.environ, cpu_s=PATIENCE_S, wait_s=3, hear=heard.append)
    assert heard == ended.stdout.splitlines() == [f"step {step}" for step in range(5)]


def test_whoever_hears_may_end_it_with_what_it_has_started() -> None:
    def hear(line: str) -> None:
        raise InterruptedError(line)

    code = f"print('begun', flush=True)\n{WORKERS}"
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(InterruptedError, match="begun"):
        run_within([sys.executable, "-c", code], os.environ, cpu_s=PATIENCE_S, wait_s=PATIENCE_S, hear=hear)
    assert psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, PATIENCE_S)[1] == []
