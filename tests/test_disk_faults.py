"""A disk that fails under an engine that streams from it: the answer ends with the file's name, the engine lives on."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from localllm import Engine, FinishedEvent, SamplingParams, TokenEvent
from localllm.engine import planner
from localllm.engine.loader import LoadedModel
from localllm.errors import CheckpointError
from localllm.offload.planner.machine import Machine, Memory, Rates
from localllm.offload.planner.search import Search
from localllm.offload.streaming import disk_stream
from localllm.settings import EngineConfig
from localllm.text.tokenizer import Tokenizer
from tests.cli_support import run_cli
from tests.engine_support import generated
from tests.packed_support import pack, small_checkpoint
from tests.patience import PATIENCE_S
from tests.test_device_placement import Packed
from tests.thinning import every_other

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
PROMPT = tuple(range(3, 23))
KINDS = ["host", "device"]  # streamed to the CPU, and through it to what stands in for a card


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known_machine: Callable[[Path], None]) -> Path:
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path / "cache"))
    known_machine(tmp_path / "cache")
    return small_checkpoint(tmp_path / "model", "llama")


def least_bytes(directory: Path) -> int:
    whole = Engine.load(directory, EngineConfig(device="cpu", weights="int4-g32", ctx=128, speculate="off"))
    assert whole.plan is not None
    whole.close()
    return Search(whole.plan.shape, Machine(Memory(1, 0, 1), Rates(1, 1, 1)), 128).least_ram_bytes()


@pytest.fixture
def nothing_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """These files were written just now: the page cache has them, and they would not be read."""
    monkeypatch.setattr(disk_stream, "can_map", lambda _descriptor: False)


@contextmanager
def streaming(kind: str, directory: Path) -> Iterator[Engine]:
    if kind == "device":
        packed = Packed(directory, pack(directory, directory / "packed", "int4-g32"), "int4-g32")
        with packed.opened() as placed:
            placed.place(packed.blocks(lambda index: ("disk", "resident")[index % 2]), 8)
            yield Engine(LoadedModel(placed.decode_model, 128, placed=placed), Tokenizer.load(directory))
        return
    least = least_bytes(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "process_memory", lambda *_, **__: Memory(least, 0, least))
        engine = Engine.load(directory, EngineConfig(device="cpu", weights="int4-g32", ctx=128))
    assert engine.plan is not None and engine.plan.streamed
    yield engine
    engine.close()


def tokens(engine: Engine) -> list[int]:
    return generated(engine, PROMPT, 8)


class Disk:
    """As the stream reads it. gone: every read fails. hangs: it gives nothing. delay_s: of each read."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.gone, self.delay_s, self.reads = False, 0.0, 0
        self.answers = threading.Event()
        self.answers.set()
        self.reads_left: int | None = None
        self._read = disk_stream.read_into
        patch.setattr(disk_stream, "read_into", self.read)

    def read(self, plain: int, direct: int | None, begin: int, into: memoryview) -> None:
        self.reads += 1
        self.answers.wait()
        time.sleep(self.delay_s)
        if self.gone or (self.reads_left is not None and self.reads > self.reads_left):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._read(plain, direct, begin, into)


@pytest.mark.usefixtures("nothing_mapped")
@pytest.mark.parametrize("kind", every_other(KINDS))
def test_a_disk_that_vanishes_ends_the_answer_with_its_file_and_the_engine_goes_on_when_it_is_back(
    kind, directory, monkeypatch
):
    with streaming(kind, directory) as engine:
        expected = tokens(engine)
        disk, seen = Disk(monkeypatch), []
        answer = engine.generate(PROMPT, GREEDY)
        for event in answer:
            seen.append(event)
            disk.gone |= isinstance(event, TokenEvent) and len(seen) > 2
        assert isinstance(event, FinishedEvent) and isinstance(event.error, CheckpointError)
        assert ".safetensors cannot be read" in event.error.what and "Input/output error" in event.error.why
        assert event.error.fix.startswith("localllm quantize")
        told = [each.token_id for each in seen if isinstance(each, TokenEvent)]
        assert 0 < len(told) < len(expected) and told == expected[: len(told)]
        with pytest.raises(CheckpointError, match="cannot be read"):
            tokens(engine)
        disk.gone = False
        assert tokens(engine) == expected


@pytest.mark.usefixtures("nothing_mapped")
@pytest.mark.parametrize("kind", ["device", pytest.param("host", marks=pytest.mark.slow)])
def test_a_disk_that_gives_nothing_any_more_ends_the_answer_and_a_slow_one_does_not(kind, directory, monkeypatch):
    monkeypatch.setattr(disk_stream, "STALLED_S", 30.0)  # a busy disk may pause for two seconds
    with streaming(kind, directory) as engine:
        expected = tokens(engine)
        disk = Disk(monkeypatch)
        disk.delay_s = 0.02
        assert tokens(engine) == expected
        disk.answers.clear()
        monkeypatch.setattr(disk_stream, "STALLED_S", 0.4)  # it gives nothing, however long one waits
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"\.safetensors cannot be read") as caught:
                tokens(engine)
            assert "has given nothing for" in caught.value.why
        disk.answers.set()
        monkeypatch.setattr(disk_stream, "STALLED_S", 30.0)
        assert tokens(engine) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_block_files_that_are_cut_under_a_running_engine_end_the_answer_with_their_name(kind, directory):
    with streaming(kind, directory) as engine:
        tokens(engine)
        names = engine.model.stream.names
        for path in directory.parent.rglob("*.safetensors"):
            if path.stem in names:
                os.truncate(path, 4096)
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"\.safetensors (was changed|cannot be read)"):
                tokens(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_file_that_is_replaced_under_a_running_engine_changes_no_answer(kind, directory):
    with streaming(kind, directory) as engine:
        expected = tokens(engine)
        names = engine.model.stream.names
        replaced = [path for path in directory.parent.rglob("*.safetensors") if path.stem in names]
        assert replaced
        for path in replaced:
            other = path.with_suffix(".other")
            other.write_bytes(bytes(path.stat().st_size))
            other.replace(path)
        assert tokens(engine) == tokens(engine) == expected


@pytest.mark.usefixtures("nothing_mapped")
def test_the_command_line_keeps_the_text_and_names_the_file(directory, monkeypatch):
    least = least_bytes(directory)
    monkeypatch.setattr(planner, "process_memory", lambda *_, **__: Memory(least, 0, least))
    flags = ["-p", "fox", "--raw", "--weights", "int4-g32", "--ctx", "128", "--max-tokens", "20", "--temperature", "0"]
    disk = Disk(monkeypatch)
    whole = run_cli("run", str(directory), *flags, "--jsonl")
    assert whole.code == 0 and disk.reads > 20
    disk.reads_left, disk.reads = disk.reads // 2, 0
    result = run_cli("run", str(directory), *flags)
    assert result.code == 1 and result.out and ".safetensors cannot be read" in result.err
    assert "Input/output error" in result.err and "localllm quantize" in result.err
    assert "Traceback" not in result.err


def test_a_disk_that_is_full_while_a_model_is_packed_to_be_streamed_is_exit_code_four(tmp_path):
    directory = small_checkpoint(tmp_path / "model", "llama")

    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (14_000, 14_000))

    command = [sys.executable, "-m", "localllm", "run", str(directory), "-p", "A fox", "--weights", "int4-g32", "--raw"]
    environ = {**os.environ, "LOCALLLM_CACHE": str(tmp_path / "cache"), "LOCALLLM_HOME": str(tmp_path / "home")}
    bounds = {"preexec_fn": small_disk, "timeout": PATIENCE_S, "capture_output": True, "text": True}
    done = subprocess.run([*command, "--ram", "2GiB"], env=environ, **bounds)
    assert (done.returncode, done.stdout) == (4, "")
    assert "does not fit" in done.stderr and "are free" in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.tmp"))
