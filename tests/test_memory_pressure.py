"""Memory that runs out anywhere: an answer, or one error, and what comes after is right."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from localllm import Engine
from localllm.engine import planner
from localllm.engine.loader import LoadedModel
from localllm.engine.residency import Residency
from localllm.errors import DoesNotFitError
from localllm.hub import locate
from localllm.offload.planner.machine import Machine, Memory, Rates
from localllm.offload.planner.machine_memory import LEAST_ADDRESS_SPACE_BYTES
from localllm.offload.planner.search import Search
from localllm.offload.streaming import host_buffer as host_buffer_module
from localllm.offload.streaming.host_buffer import give_back_freed
from localllm.settings import EngineConfig
from localllm.text.tokenizer import Tokenizer
from tests.engine_support import generated
from tests.packed_support import pack, small_checkpoint
from tests.patience import PATIENCE_S
from tests.test_device_placement import Packed
from tests.thinning import thinned

MIB = 1 << 20
M_MMAP_THRESHOLD = -3


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("qwen2"), "qwen2")


pytestmark = pytest.mark.usefixtures("empty_cache")


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


SHORT, LONG = tuple(range(3, 23)), tuple(range(3, 123))


def tokens(engine: Engine, prompt: tuple[int, ...] = SHORT) -> list[int]:
    return generated(engine, prompt, 4)


@contextmanager
def placed_engine(kind: str, directory: Path, folder: Path) -> Iterator[Engine]:
    """bf16, int4: all in the host's memory. streamed: most of it from the disk. device: on a CPU that stands in for a
    card, beside it, split between both and on the disk."""
    if kind == "device":
        packed = Packed(directory, pack(directory, folder / "packed", "int4-g32"), "int4-g32")
        kinds = ("resident", "split", "streamed", "computed", "disk", "disk-computed")
        with packed.opened() as placed:
            placed.place(packed.blocks(lambda index: kinds[index % len(kinds)]), 8)
            assert {block.exec for block in placed.blocks} == {"gpu", "cpu", "split"}
            yield Engine(LoadedModel(placed.decode_model, 128, placed=placed), Tokenizer.load(directory))
        return
    weights = "int4" if kind == "streamed" else kind
    with pytest.MonkeyPatch.context() as patch:
        if kind == "streamed":
            engine = Engine.load(directory, EngineConfig(device="cpu", weights=weights, ctx=128, speculate="off"))
            assert engine.plan is not None
            least = Search(engine.plan.shape, Machine(Memory(1, 0, 1), Rates(1, 1, 1)), 128).least_ram_bytes()
            engine.close()
            patch.setattr(planner, "process_memory", lambda *_, **__: Memory(least, 0, least))
        engine = Engine.load(directory, EngineConfig(device="cpu", weights=weights, ctx=128))
    assert engine.plan is not None and bool(engine.plan.streamed) == (kind == "streamed")
    yield engine
    engine.close()


PLACED = ["bf16", "int4", "streamed", "device"]
OFTEN = thinned(PLACED, "int4".__eq__)
# The numbers of the allocations that fail go up by so much. One of three in INT4 takes 9 s.
STEPS = thinned([("int4", 13), ("int4", 3), ("bf16", 1), ("streamed", 3), ("device", 3)], ("int4", 13).__eq__)


@pytest.mark.parametrize(("kind", "step"), STEPS)
def test_whichever_allocation_fails_an_answer_comes_or_one_error_and_the_next_is_right(
    kind: str, step: int, directory: Path, tmp_path: Path
) -> None:
    """Allocation after allocation, until an answer comes through without meeting the failing one."""
    with placed_engine(kind, directory, tmp_path) as engine:
        expected = tokens(engine)
        placed = engine.residency.placed
        start = () if placed is None else placed.blocks
        answered = ended = 0
        for number in (*range(1, 20), *range(20, 10_000, step)):
            with failing(number) as allocations:
                try:
                    assert tokens(engine) == expected
                    answered += allocations.count >= number
                except DoesNotFitError as error:
                    ended += 1
                    assert error.what == "the memory ran out" and error.fix
            assert tokens(engine) == expected
            if allocations.count < number:
                break
            if placed is not None and placed.blocks != start:
                engine.residency.move(start)
        assert answered + ended > 5
        # What can be given up is, before a request ends; under the smallest cap little is left.
        assert answered > ended or placed is None or (kind == "streamed" and answered)


@pytest.mark.parametrize("weights", ["int4", "bf16"])
def test_whichever_allocation_of_a_load_fails_it_is_one_error_and_the_next_load_is_right(
    directory: Path, weights: str
) -> None:
    expected = tokens(Engine.load(directory, EngineConfig(device="cpu", weights=weights, ctx=128)))
    failed = 0
    for number in (*range(1, 12), *range(12, 10_000, 9)):
        with failing(number) as allocations:
            try:
                engine = Engine.load(directory, EngineConfig(device="cpu", weights=weights, ctx=128))
            except DoesNotFitError as error:
                failed += 1
                assert "memory" in error.what
                continue
        assert tokens(engine) == expected
        if allocations.count < number:
            break
    assert failed > 5


def live_on(kind: str, folder: Path) -> None:
    """An address space that ends under a running engine: from no room at all on, step by step to enough."""
    pressed, right = 0, Residency.give_way

    def give_way(*arguments: Any) -> bool:
        nonlocal pressed
        pressed += 1
        return right(*arguments)

    Residency.give_way = give_way  # type: ignore[method-assign]
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)  # nothing of size comes from what was freed before
    with placed_engine(kind, locate("tiny").directory, folder) as engine:
        expected = tokens(engine, LONG)
        for room_bytes in (0, 1 << 16, 1 << 18, 1 << 20, 4 << 20, 256 << 20):
            give_back_freed()
            held_bytes = psutil.Process().memory_info().vms
            resource.setrlimit(resource.RLIMIT_AS, (held_bytes + room_bytes, resource.RLIM_INFINITY))
            try:
                assert tokens(engine, LONG) == expected
            except DoesNotFitError as error:
                assert "memory" in error.what and error.fix
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            assert tokens(engine, LONG) == expected
    assert pressed > 0


@pytest.mark.parametrize("kind", OFTEN)
def test_where_the_address_space_ends_under_a_running_engine_the_process_lives_on(kind: str, tmp_path: Path) -> None:
    """In a process of its own, whose heap has nothing to give yet."""
    script = f"import pathlib; from tests.test_memory_pressure import live_on; live_on({kind!r}, pathlib.Path.cwd())"
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr


def run_within(address_space_bytes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (address_space_bytes, address_space_bytes))

    command = [sys.executable, "-m", "localllm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, timeout=PATIENCE_S)


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


@pytest.mark.slow
def test_under_every_address_space_a_model_that_is_streamed_answers_or_says_that_it_does_not_fit() -> None:
    flags = ["run", "tiny", "-p", "A fox", "--max-tokens", "4", "--weights", "int4"]
    assert run_within(resource.RLIM_INFINITY, *flags).returncode == 0  # packs it, which takes more
    refused = run_within(resource.RLIM_INFINITY, *flags, "--ram", "100MiB")
    least_mib = int(refused.stderr.split("--ram ")[1].split("MiB")[0])
    codes = set()
    for size_mib in range(LEAST_ADDRESS_SPACE_BYTES // MIB, 2100, 128):
        done = run_within(size_mib * MIB, *flags, "--ram", f"{least_mib + 3}MiB")
        codes.add(done.returncode)
        assert "Traceback" not in done.stderr and "bug" not in done.stderr
        assert bool(done.stdout.strip()) == (done.returncode == 0)
    assert codes <= {0, 4} and 0 in codes
