"""Memory that runs out anywhere: an answer, or one error, and what comes after is right."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm import Engine, FinishedEvent, SamplingParams, TokenEvent
from localllm.errors import DoesNotFitError
from localllm.offload import host_buffer as host_buffer_module
from localllm.offload.machine_memory import LEAST_ADDRESS_SPACE_BYTES
from tests.packed_support import small_checkpoint

MIB = 1 << 20


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("qwen2"), "qwen2")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path))


class Allocations:
    """Counts the tensors that Python code makes, and fails the `failing`-th."""

    def __init__(self, failing: int) -> None:
        self.count = 0
        self.failing = failing

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            self.count += 1
            if self.count == self.failing:
                raise MemoryError("none left")
            return function(*arguments, **named)

        return counted


@contextmanager
def failing(number: int) -> Iterator[Allocations]:
    allocations = Allocations(number)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "zeros", "cat", "tensor", "empty_like", "zeros_like"):
            patch.setattr(torch, name, allocations.wrap(getattr(torch, name)))
        patch.setattr(host_buffer_module.mmap, "mmap", allocations.wrap(host_buffer_module.mmap.mmap))
        yield allocations


def tokens(engine: Engine) -> list[int]:
    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    events = list(engine.generate(tuple(range(3, 23)), sampling))
    finished = events[-1]
    assert isinstance(finished, FinishedEvent)
    if finished.error is not None:
        raise finished.error
    return [event.token_id for event in events if isinstance(event, TokenEvent)]


@pytest.mark.parametrize("weights", ["int4", "bf16"])
def test_whichever_allocation_fails_an_answer_ends_in_one_error_and_the_next_is_right(
    directory: Path, weights: str
) -> None:
    """Allocation after allocation, until an answer comes through without meeting the failing one."""
    engine = Engine.load(directory, device="cpu", weights=weights, ctx=128)
    expected = tokens(engine)
    failed = 0
    for number in range(1, 10_000):
        with failing(number) as allocations:
            try:
                assert tokens(engine) == expected
            except DoesNotFitError as error:
                failed += 1
                assert error.what == "the memory ran out" and error.fix
        assert tokens(engine) == expected
        if allocations.count < number:
            break
    assert failed > 5


@pytest.mark.parametrize("weights", ["int4", "bf16"])
def test_whichever_allocation_of_a_load_fails_it_is_one_error_and_the_next_load_is_right(
    directory: Path, weights: str
) -> None:
    expected = tokens(Engine.load(directory, device="cpu", weights=weights, ctx=128))
    failed = 0
    for number in (*range(1, 12), *range(12, 10_000, 9)):
        with failing(number) as allocations:
            try:
                engine = Engine.load(directory, device="cpu", weights=weights, ctx=128)
            except DoesNotFitError as error:
                failed += 1
                assert "memory" in error.what
                continue
        assert tokens(engine) == expected
        if allocations.count < number:
            break
    assert failed > 5


def run_within(address_space_bytes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (address_space_bytes, address_space_bytes))

    command = [sys.executable, "-m", "localllm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, timeout=120)


@pytest.mark.parametrize("size_mib", [700, LEAST_ADDRESS_SPACE_BYTES // MIB - 1])
@pytest.mark.parametrize("command", ["run", "plan"])
def test_an_address_space_too_small_for_the_libraries_is_refused_in_one_error(command: str, size_mib: int) -> None:
    prompt = ["-p", "A fox", "--max-tokens", "2"] if command == "run" else []
    done = run_within(size_mib * MIB, command, "tiny", *prompt)
    assert done.returncode == 4, done.stderr
    assert f"the address space is limited to {size_mib} MiB" in done.stderr and "ulimit -v unlimited" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bf16", "int4", "int8"])
@pytest.mark.parametrize("size_mib", range(LEAST_ADDRESS_SPACE_BYTES // MIB, 2100, 64))
def test_under_every_address_space_it_answers_or_says_that_it_does_not_fit(weights: str, size_mib: int) -> None:
    done = run_within(size_mib * MIB, "run", "tiny", "-p", "A fox", "--max-tokens", "4", "--weights", weights)
    assert done.returncode in (0, 4), done.stderr
    assert "Traceback" not in done.stderr and "bug" not in done.stderr
    assert bool(done.stdout.strip()) == (done.returncode == 0)
