"""Conversion: the same bytes however often it was interrupted, and nothing half made under a final name."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from localllm.errors import DoesNotFitError, LocalLLMError
from localllm.hub.locks import LOCK, exclusive
from localllm.hub.packed import PACKED_INDEX
from localllm.models import convert as convert_module
from localllm.models.block_layouts import model_bytes
from localllm.models.families import load_config
from localllm.models.packed_file import needs_conversion
from localllm.quant.recipe import recipe
from tests.forks import ended, in_child, started
from tests.packed_support import (
    FORMATS,
    WEIGHTS,
    assert_no_half_file,
    contents,
    dying_at,
    inodes,
    killed_after,
    killed_and_taken_up,
    open_packed,
    pack,
    plan,
    read_all,
    resized,
    small_checkpoint,
    spoil,
)
from tests.patience import PATIENCE_S
from tests.thinning import every_other, one_in, thinned

NUM_BLOCKS = 10


# What comes of it


def test_nothing_but_the_blocks_and_the_index_is_left(whole, checkpoint):
    names = {file.file_name for file in plan(checkpoint).files.values()}
    assert whole.keys() == names | {PACKED_INDEX}
    assert len(names) == NUM_BLOCKS


@pytest.mark.parametrize("weights", every_other(FORMATS))
def test_the_number_of_threads_does_not_change_a_byte(weights, tmp_path, threads):
    """Of matrices that are large enough for torch to share them out among threads."""
    sizes = {"hidden_size": 512, "intermediate_size": 1040, "num_hidden_layers": 1, "head_dim": 128}
    checkpoint = resized(tmp_path / "m", seed=1, **sizes)
    for count in (1, 2, 3):
        threads(count)
        pack(checkpoint, tmp_path / str(count), weights)
    assert contents(tmp_path / "1") == contents(tmp_path / "2") == contents(tmp_path / "3")


def test_progress_counts_every_matrix_up_to_all_packed_bytes(checkpoint, tmp_path):
    heard: list[tuple[int, int]] = []
    pack(checkpoint, tmp_path, progress=lambda done, total: heard.append((done, total)))
    assert {total for _, total in heard} == {model_bytes(load_config(checkpoint), recipe(WEIGHTS))}
    done = [done for done, _ in heard]
    assert done == sorted(done)
    assert done[-1] == heard[0][1]
    assert len(heard) >= 4 * 4 + 2


def test_a_checkpoint_with_a_head_of_its_own_is_packed_with_it_although_it_says_tied(tmp_path):
    checkpoint = small_checkpoint(tmp_path / "m", "llama-biases-tied")
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, checkpoint / "model.safetensors")
    pack(checkpoint, tmp_path / "p")
    assert load_config(checkpoint).tie_word_embeddings
    packed = open_packed(checkpoint, tmp_path / "p")
    assert not packed.config.tie_word_embeddings
    assert "head/lm_head.qweight" in read_all(packed)


# Taken up again


def test_blocks_that_are_there_are_kept_and_the_rest_is_made(checkpoint, target, whole):
    kept = inodes(target)
    for name in (PACKED_INDEX, "head.safetensors", "layers.2.mlp.safetensors"):
        (target / name).unlink()
    pack(checkpoint, target)
    assert contents(target) == whole
    changed = {name for name, inode in inodes(target).items() if kept[name] != inode}
    assert changed <= {PACKED_INDEX, "head.safetensors", "layers.2.mlp.safetensors"}


def test_a_finished_model_is_checked_and_left_alone(checkpoint, target, whole):
    def stamps() -> dict[str, tuple[int, int]]:
        return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in target.iterdir()}

    before, heard = stamps(), []
    pack(checkpoint, target, progress=lambda done, total: heard.append(total - done))
    assert stamps() == before
    assert heard[-1] == 0


def with_a_pipe(target: Path) -> None:
    path = target / "layers.2.mlp.safetensors"
    path.unlink()
    os.mkfifo(path)


def flipped_at(place: int) -> Callable[[Path], None]:
    return lambda target: spoil(target / "layers.1.attention.safetensors", place)


def with_index(content: bytes) -> Callable[[Path], object]:
    return lambda target: (target / PACKED_INDEX).write_bytes(content)


SPOILT = [with_a_pipe, *map(flipped_at, (3, 100, 4095, 4096, 5000, -1))]
SPOILT += map(with_index, (b"", b"{}", b"\xff", b"[" * 100_000, b'{"layout_version": 9}'))


@pytest.mark.parametrize("damage", SPOILT)
def test_what_is_damaged_in_a_finished_model_is_made_anew(checkpoint, target, whole, damage):
    damage(target)
    pack(checkpoint, target)
    assert contents(target) == whole


@pytest.mark.parametrize("other", [{"source": "maker/model@4567"}, {"weights": "int4-g64-rtn"}, {"weights": "int8"}])
def test_bytes_of_another_revision_or_format_are_never_kept(checkpoint, target, tmp_path, other):
    pack(checkpoint, target, **other)
    pack(checkpoint, tmp_path / "fresh", **other)
    assert contents(target) == contents(tmp_path / "fresh")


def test_bytes_of_an_older_layout_are_never_kept(checkpoint, target, whole, monkeypatch):
    for module in ("packed", "packed_file"):
        monkeypatch.setattr(f"localllm.models.{module}.LAYOUT_VERSION", 2)
    pack(checkpoint, target)
    found = contents(target)
    assert found.keys() == whole.keys()
    assert all(found[name] != data for name, data in whole.items())


def test_a_conversion_that_fails_on_a_finished_model_leaves_it_unfinished(checkpoint, target, monkeypatch):
    os.truncate(target / "head.safetensors", 5)
    monkeypatch.setattr(convert_module, "free_bytes", lambda _: 0)
    with pytest.raises(DoesNotFitError):
        pack(checkpoint, target)
    assert_no_half_file(checkpoint, target)


def test_files_that_are_not_ours_are_left_alone(checkpoint, target):
    (target / "model.safetensors").write_bytes(b"precious")
    (target / "embed.safetensors").write_bytes(b"not whole")
    pack(checkpoint, target)
    assert (target / "model.safetensors").read_bytes() == b"precious"


# Killed


@pytest.mark.parametrize("call", every_other([1, 2, 5, 9, 14, 22, 37, 61, 99, 140, 180, 210]))
def test_death_at_any_call_to_the_disk_leaves_what_the_next_start_takes_up(call, checkpoint, tmp_path, whole):
    assert killed_and_taken_up(partial(dying_at, call), checkpoint, tmp_path / "p", whole)


@pytest.mark.slow
def test_death_at_every_call_to_the_disk_in_turn_leaves_what_the_next_start_takes_up(checkpoint, whole, tmp_path):
    call = 1
    while killed_and_taken_up(partial(dying_at, call), checkpoint, tmp_path / str(call), whole):
        call += 1
    assert call > 200


@pytest.mark.parametrize("seed", thinned(range(50), lambda seed: seed < 5))
def test_death_at_a_random_moment_leaves_what_the_next_start_takes_up(seed, checkpoint, tmp_path, whole):
    started = time.perf_counter()
    pack(checkpoint, tmp_path / "timed")
    seconds = random.Random(seed).uniform(0, time.perf_counter() - started)
    killed_and_taken_up(partial(killed_after, seconds), checkpoint, tmp_path / "p", whole)


@pytest.fixture(scope="module", params=["qwen3_moe", "granitemoe"])
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tensor for each expert, and with one for all of a layer."""
    return small_checkpoint(tmp_path_factory.mktemp(request.param) / "m", request.param)


@pytest.mark.parametrize("seed", thinned(range(20), lambda seed: seed < 3))
def test_the_conversion_of_a_mixture_that_dies_at_a_random_moment_is_taken_up(seed, mixture, tmp_path):
    started = time.perf_counter()
    pack(mixture, tmp_path / "timed")
    seconds = random.Random(seed).uniform(0, time.perf_counter() - started)
    killed_and_taken_up(partial(killed_after, seconds), mixture, tmp_path / "p", contents(tmp_path / "timed"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_conversion_that_is_killed_again_and_again_ends_with_the_same_bytes(seed, checkpoint, whole, tmp_path):
    calls = random.Random(seed)
    while in_child(dying_at(calls.randint(1, 120), lambda: pack(checkpoint, tmp_path))) < 0:
        assert_no_half_file(checkpoint, tmp_path)
    assert contents(tmp_path) == whole


def test_what_a_dead_process_left_behind_is_collected(checkpoint, tmp_path, whole):
    (tmp_path / ".embed.safetensors.4711.tmp").write_bytes(b"half")
    (tmp_path / ".index.json.4711.tmp").write_bytes(b"half")
    (tmp_path / LOCK).write_bytes(b"4711")
    pack(checkpoint, tmp_path)
    assert contents(tmp_path) == whole


def test_a_name_is_given_only_to_what_is_on_the_disk_already(checkpoint, tmp_path, monkeypatch):
    """What a power cut may leave: whatever was written but not synchronised may be lost, in any order."""
    unsynced: set[str] = set()
    named: list[str] = []
    write, fsync, replace = os.write, os.fsync, os.replace

    def path_of(descriptor: int) -> str:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())

    def logged_write(descriptor: int, data: memoryview) -> int:
        unsynced.add(path_of(descriptor))
        return write(descriptor, data)

    def logged_fsync(descriptor: int) -> None:
        unsynced.discard(path_of(descriptor))
        fsync(descriptor)

    def logged_replace(source: Path, destination: Path) -> None:
        assert str(source) not in unsynced, "half a file under its final name"
        assert str(tmp_path) not in unsynced, f"{destination.name} without what came before it"
        unsynced.add(str(tmp_path))
        named.append(destination.name)
        replace(source, destination)

    for name, function in (("write", logged_write), ("fsync", logged_fsync), ("replace", logged_replace)):
        monkeypatch.setattr(os, name, function)
    pack(checkpoint, tmp_path)
    assert not unsynced
    assert named[-1] == PACKED_INDEX
    assert len(named) == NUM_BLOCKS + 1


# A disk that is full, or fails


class FullDisk:
    """Takes `room` bytes; the write that would pass it is cut, the next one fails."""

    def __init__(self, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = room
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, descriptor: int, data: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = self._write(descriptor, data[: self.room])
        self.room -= count
        return count


@pytest.mark.parametrize("share", one_in(4, [i / 20 for i in range(20)]))
def test_a_disk_that_fills_up_is_an_error_with_numbers_and_what_was_finished_is_kept(
    share, checkpoint, tmp_path, whole, monkeypatch
):
    target = tmp_path / "p"
    room = int(share * sum(map(len, whole.values())))
    with monkeypatch.context() as patch, pytest.raises(DoesNotFitError) as caught:
        FullDisk(room, patch)
        pack(checkpoint, target)
    assert str(target) in caught.value.what
    assert all(word in caught.value.why for word in ("No space left", "needed", "free"))
    assert_no_half_file(checkpoint, target)
    left = contents(target)
    assert left.items() <= whole.items()
    assert sum(map(len, left.values())) >= room - max(map(len, whole.values()))
    kept = inodes(target)
    pack(checkpoint, target)
    assert contents(target) == whole
    assert kept.items() <= inodes(target).items()


def test_a_limit_on_the_size_of_files_is_an_error_of_the_same_kind(checkpoint, tmp_path):
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (14_000, 14_000))
        with pytest.raises(DoesNotFitError, match="does not fit"):
            pack(checkpoint, tmp_path / "p")
        assert contents(tmp_path / "p") == {}

    assert in_child(limited) == 0


@pytest.mark.parametrize("name", ["write", "fsync", "replace", "open"])
@pytest.mark.parametrize("call", every_other([1, 2, 7, 11]))
def test_a_disk_that_fails_is_an_error_and_what_was_finished_is_kept(
    name, call, checkpoint, tmp_path, whole, monkeypatch
):
    target = tmp_path / "p"
    real, count = getattr(os, name), 0

    def failing(*arguments: object, **named: object) -> object:
        nonlocal count
        ours = name != "open" or ".tmp" in str(arguments[0])
        count += ours
        if ours and count == call:
            raise OSError(errno.EIO, "Input/output error")
        return real(*arguments, **named)

    with monkeypatch.context() as patch, pytest.raises(LocalLLMError) as caught:
        patch.setattr(os, name, failing)
        pack(checkpoint, target)
    assert str(target) in caught.value.what and "Input/output error" in caught.value.why
    assert_no_half_file(checkpoint, target)
    assert not [entry for entry in contents(target) if entry.endswith(".tmp")]
    pack(checkpoint, target)
    assert contents(target) == whole


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(convert_module, "free_bytes", lambda _: 1 << 20)
    with pytest.raises(DoesNotFitError) as caught:
        pack(checkpoint, tmp_path / "p")
    assert "1.2 MiB more are needed" in caught.value.why and "1.0 MiB are free" in caught.value.why
    assert contents(tmp_path / "p") == {}


def test_only_the_room_for_what_is_missing_is_asked_for(checkpoint, target, whole, monkeypatch):
    (target / "head.safetensors").unlink()
    monkeypatch.setattr(convert_module, "free_bytes", lambda _: (1 << 20) + len(whole["head.safetensors"]))
    pack(checkpoint, target)
    assert contents(target) == whole


def test_a_disk_that_has_no_room_for_the_index_is_told_how_much_it_needs(checkpoint, tmp_path, whole, monkeypatch):
    room = sum(len(data) for name, data in whole.items() if name != PACKED_INDEX)
    with monkeypatch.context() as patch, pytest.raises(DoesNotFitError, match="does not fit") as caught:
        FullDisk(room, patch)
        pack(checkpoint, tmp_path)
    assert "No space left on device: 1.0 MiB more are needed" in caught.value.why


def test_a_folder_that_may_not_be_looked_into_is_an_error_that_names_it(checkpoint, tmp_path):
    target = tmp_path / ("x" * 300)  # no file system has such names: nothing in it can be asked for
    assert needs_conversion(target)
    with pytest.raises(LocalLLMError, match="x cannot be written"):
        pack(checkpoint, target)


def test_a_folder_that_may_not_be_made_is_an_error_that_names_it(checkpoint, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(LocalLLMError) as caught:
        pack(checkpoint, tmp_path / "file" / "p")
    assert str(tmp_path / "file" / "p") in caught.value.what


def test_an_interrupt_leaves_finished_blocks_and_nothing_else(checkpoint, tmp_path, whole):
    def interrupt(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(checkpoint, tmp_path, progress=interrupt)
    left = contents(tmp_path)
    assert 2 < len(left) < NUM_BLOCKS
    assert left.items() <= whole.items()


# Two at once


def test_of_two_processes_one_converts_and_the_other_waits(checkpoint, tmp_path, whole, monkeypatch):
    target, log = tmp_path / "p", tmp_path / "log"
    real = convert_module.write_block

    def logged(file: object, *arguments: object) -> str:
        with log.open("a") as stream:
            stream.write(f"{os.getpid()}\n")
        time.sleep(0.05)
        return real(file, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(convert_module, "write_block", logged)
    children = [started(lambda: pack(checkpoint, target)) for _ in range(3)]
    assert list(map(ended, children)) == [0, 0, 0]
    assert contents(target) == whole
    assert len(log.read_text().split()) == NUM_BLOCKS


def test_who_waits_hears_of_whom_and_how_far_that_one_is(checkpoint, target, whole):
    (target / PACKED_INDEX).unlink()
    (target / "head.safetensors").unlink()
    heard: list[object] = []
    done = threading.Event()

    def progress(*far: int) -> None:
        heard.append(far)
        done.set()

    thread = threading.Thread(target=lambda: pack(checkpoint, target, waiting=heard.append, progress=progress))
    with exclusive(target, lambda _: None):
        thread.start()
        assert done.wait(PATIENCE_S)
    thread.join()
    assert heard[0] == str(os.getpid())
    assert 0 < heard[1][0] < heard[1][1]  # type: ignore[index]
    assert contents(target) == whole


def test_a_folder_that_is_deleted_meanwhile_is_an_error_and_no_traceback(checkpoint, tmp_path):
    with pytest.raises(LocalLLMError, match="cannot be written"):
        pack(checkpoint, tmp_path / "p", progress=lambda *_: shutil.rmtree(tmp_path / "p", ignore_errors=True))
