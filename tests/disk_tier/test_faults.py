"""Disks that fail, damaged files, processes that were killed: detected or harmless, and never a wrong byte."""

from __future__ import annotations

import errno
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from localllm.cache import disk, page_file
from localllm.cache.page_file import HEADER_BYTES, BadPageError, read_key, read_page
from localllm.cache.page_folder import name_of, quarantined_sizes
from tests.disk_tier.support import (
    FILE_BYTES,
    PAGE_BYTES,
    ROOT,
    chain,
    held_bytes,
    opened,
    orphans,
    page,
    path_of,
    payload,
    put,
    read,
    refusing,
    stored,
    temporaries,
)
from tests.forks import ended, in_child, started

# What a page's way to the disk is made of.
WRITES = ("open", "writev", "rename", "mkdir", "utime", "unlink", "chmod")


# Damage


@pytest.fixture
def damaged(directory: Path) -> Iterator[Callable[[int, bytes], None]]:
    """Reads a page of which bytes from some place on were replaced, and puts the right ones back."""
    first, second = chain(2)
    stored(directory, [first, second])
    path = path_of(directory, second)
    whole = path.read_bytes()
    descriptor = os.open(path, os.O_WRONLY)
    into, header = memoryview(bytearray(PAGE_BYTES)), memoryview(bytearray(HEADER_BYTES))

    def examine(at: int, replacement: bytes) -> None:
        os.pwrite(descriptor, replacement, at)
        with pytest.raises(BadPageError):
            read_page(path, ROOT, second, into, header, past_cache=True)
        if at < HEADER_BYTES:
            with pytest.raises(BadPageError):
                read_key(path, ROOT)
        os.pwrite(descriptor, whole[at : at + len(replacement)], at)

    yield examine
    read_page(path, ROOT, second, into, header, past_cache=True)
    assert into == payload(second) and read_key(path, ROOT) == second
    os.close(descriptor)


def test_a_flipped_bit_in_any_byte_of_a_page_is_detected(damaged, directory):
    whole = path_of(directory, chain(2)[1]).read_bytes()
    for at, byte in enumerate(whole):
        damaged(at, bytes([byte ^ 1 << at % 8]))


@pytest.mark.parametrize("begin", [0, 8, 12, 16, 24, 56, 88, 120, 376, 392, 4080, 4096, 6000])
def test_a_field_of_zeros_or_ones_is_detected(damaged, begin):
    damaged(begin, b"\xff" * 8)
    if not 392 <= begin < 4080:  # where zeros are what should be
        damaged(begin, bytes(8))


@pytest.mark.parametrize("times", [500, pytest.param(2000, marks=pytest.mark.slow)])
def test_flips_and_cuts_are_all_detected_and_mended(times, directory):
    keys, chance = chain(4), random.Random(0)
    with opened(directory) as tier:
        put(tier, keys)
        for count in range(times):
            index = chance.randrange(len(keys))
            damage(path_of(directory, keys[index]), path_of(directory, keys[index - 1]), chance)
            assert read(tier, keys[index:] if count % 50 else keys) == (0 if count % 50 else index)
            assert tier.num_quarantined == count + 1
            assert put(tier, keys[index : index + 1]) == [True]
        assert read(tier, keys) == 4
    assert not temporaries(directory)


def test_all_damaged_pages_of_a_chain_are_found_by_one_read_of_it(directory):
    keys = chain(40)
    with opened(directory) as tier:
        put(tier, keys)
        for key in keys[10:30]:
            os.truncate(path_of(directory, key), 5000)
        assert read(tier, keys) == 10 and tier.num_quarantined == 20
        assert put(tier, keys) == [True] * 40 and read(tier, keys) == 40


def test_of_damaged_pages_only_the_last_ones_are_kept(directory):
    keys = chain(20)
    with opened(directory) as tier:
        put(tier, keys)
        for key in reversed(keys):
            os.truncate(path_of(directory, key), 10)
            assert read(tier, [key]) == 0
        assert tier.num_quarantined == 20
    assert quarantined_sizes(directory) == [10] * 8


def damage(path: Path, other: Path, chance: random.Random) -> None:
    """Of a kind that changes the file: a bit, its end, a stretch, what is behind it, all of it."""
    whole = path.read_bytes()
    at = chance.randrange(len(whole))
    flipped = bytearray(whole)
    flipped[at] ^= 1 << chance.randrange(8)
    stretch = bytes(whole[:at]) + bytes(byte ^ 0x55 for byte in whole[at : at + 512]) + whole[at + 512 :]
    kinds = [bytes(flipped), whole[:at], stretch, whole + b"\0" * (1 + at), other.read_bytes(), bytes(len(whole))]
    path.write_bytes(chance.choice(kinds))


def test_a_page_of_another_format_is_set_aside_and_computed_anew(directory, monkeypatch):
    keys = chain(3)
    with monkeypatch.context() as patch, opened(directory) as tier:
        patch.setattr("localllm.cache.page_file.LAYOUT_VERSION", 2)
        put(tier, keys)
    with opened(directory) as tier:
        assert read(tier, keys) == 0 and tier.children(ROOT) == []
        assert tier.num_quarantined == 3
        put(tier, keys[:1])
        assert read(tier, keys) == 1


def test_a_page_that_was_moved_here_from_another_model_is_set_aside(directory):
    other = bytes(32)
    theirs, ours = chain(1, root=other), chain(1)
    with opened(directory, root=other) as tier:
        put(tier, theirs)
    with opened(directory) as tier:
        put(tier, ours)
        path_of(directory, theirs[0], other).replace(path_of(directory, ours[0]))
        assert read(tier, ours) == 0 and tier.num_quarantined == 1


def test_where_a_damaged_page_cannot_be_moved_it_is_not_asked_again(directory, monkeypatch):
    keys = chain(2)
    with opened(directory) as tier:
        put(tier, keys)
        os.truncate(path_of(directory, keys[0]), 5000)
        monkeypatch.setattr(os, "rename", refusing(errno.EROFS))
        assert read(tier, keys) == read(tier, keys) == 0
        assert tier.num_quarantined == 1


# Disks that refuse


@contextmanager
def full_after(num_bytes: int) -> Iterator[None]:
    """A disk that takes as many bytes, the last of them of a write that is cut short."""
    plain, left = os.writev, num_bytes

    def writev(descriptor: int, views: list[memoryview]) -> int:
        nonlocal left
        content = b"".join(views)[:left]
        if not content:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left -= len(content)
        return plain(descriptor, [content])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "writev", writev)
        yield


@pytest.mark.parametrize("percent", range(0, 101, 5))
def test_a_disk_that_is_full_in_the_middle_of_a_chain_keeps_what_is_whole_and_says_so_once(directory, percent):
    keys, warnings = chain(8), []
    with full_after(8 * FILE_BYTES * percent // 100), opened(directory, warnings=warnings) as tier:
        put(tier, keys)
        whole = 8 * percent // 100
        assert read(tier, keys) == whole
        assert (len(warnings), len(temporaries(directory))) == (whole < 8, 0)
        assert not warnings or "No space left on device" in warnings[0]
        if whole < 8:
            assert not tier.put(keys[whole], payload(keys[whole]))  # not asked again for a while
        put(tier, chain(2, seed=1))
    assert len(warnings) == (percent < 100) or percent == 100
    assert held_bytes(directory) % FILE_BYTES == 0
    with opened(directory) as tier:
        assert put(tier, keys) == [True] * 8
        assert read(tier, keys) == 8


def test_a_disk_that_has_room_again_is_written_to_again(directory, monkeypatch):
    monkeypatch.setattr(disk, "_PAUSE_S", 0.0)
    keys = chain(4)
    with opened(directory, says=("No space left on device",)) as tier:
        for _ in range(3):
            with full_after(2 * FILE_BYTES):
                put(tier, keys)
        put(tier, keys)
        assert read(tier, keys) == 4


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["open", "writev", "rename", "mkdir"])
def test_a_folder_that_cannot_be_written_is_still_read(directory, monkeypatch, call, number):
    keys = chain(4)
    if call != "mkdir":
        with opened(directory) as tier:
            put(tier, keys[:3])
    plain = os.open

    def only_reading(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(number, os.strerror(number))
        return plain(path, flags, *rest, **options)

    monkeypatch.setattr(os, call, only_reading if call == "open" else refusing(number))
    monkeypatch.setattr(os, "utime", refusing(number))
    with opened(directory, says=(os.strerror(number), str(directory))) as tier:
        put(tier, keys)
        put(tier, chain(2, seed=5))
        assert read(tier, keys) == (0 if call == "mkdir" else 3)
    assert not temporaries(directory)


def test_a_page_that_the_disk_cannot_give_is_set_aside(directory, monkeypatch):
    keys = chain(4)
    with opened(directory) as tier:
        put(tier, keys)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", refusing(errno.EIO))
            assert read(tier, keys[2:3]) == 0
        assert tier.num_quarantined == 1
        assert read(tier, keys) == 2
        assert put(tier, keys) == [True] * 4
        assert read(tier, keys) == 4


def exhausted(*_: object, **__: object) -> None:
    raise MemoryError


NO_ROOM = [(os, "open", refusing(number)) for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)]
NO_ROOM += [(page_file, "mmap", refusing(errno.ENOMEM)), (disk, "read_page", exhausted)]


@pytest.mark.parametrize(("module", "name", "failing"), NO_ROOM)
def test_a_process_that_has_no_more_files_or_memory_loses_no_page(directory, monkeypatch, module, name, failing):
    keys = chain(4)
    with opened(directory) as tier:
        put(tier, keys)
        with monkeypatch.context() as patch:
            patch.setattr(module, name, failing)
            assert read(tier, keys) == 0
        assert read(tier, keys) == 4 and tier.num_quarantined == 0


def test_memory_that_ends_while_a_page_is_written_is_a_miss(directory, monkeypatch):
    keys = chain(3)
    with opened(directory, says=("MemoryError",)) as tier:
        put(tier, keys[:2])
        monkeypatch.setattr(disk, "header_of", exhausted)
        put(tier, keys)
        assert read(tier, keys) == 2


def test_a_listing_that_fails_is_told_and_ends_no_thread(directory, monkeypatch):
    monkeypatch.setattr(disk, "remove_stale", exhausted)
    monkeypatch.setattr(disk, "_PAUSE_S", 0.0)
    with opened(directory, says=("MemoryError",)) as tier:
        assert read(tier, chain(3)) == 0
        put(tier, chain(3))
        assert read(tier, chain(3)) == 3


def test_a_file_that_is_cut_while_it_is_read_is_no_page(directory, monkeypatch):
    (key,) = chain(1)
    with opened(directory) as tier:
        put(tier, [key])
        path, plain = path_of(directory, key), os.preadv

        def cut(descriptor: int, *rest: Any) -> int:
            os.truncate(path, 5000)
            return plain(descriptor, *rest)

        monkeypatch.setattr(os, "preadv", cut)
        assert read(tier, [key]) == 0 and tier.num_quarantined == 1


# Processes that end


def killed_at(count: int, moment: str) -> None:
    """From now on this process dies at its `count`-th call that changes the disk: before it, after it, or in it."""
    left = count

    def fatal(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= name != "open" or bool(arguments[1] & os.O_CREAT)
            if left:
                return plain(*arguments, **options)
            if moment == "after":
                plain(*arguments, **options)
            elif moment == "in" and name == "writev":
                whole = b"".join(arguments[1])
                plain(arguments[0], [whole[: len(whole) * 2 // 3]])
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("it lives")

        return call

    for name in WRITES:
        setattr(os, name, fatal(name, getattr(os, name)))


@pytest.mark.parametrize("moment", ["before", "in", pytest.param("after", marks=pytest.mark.slow)])
def test_a_kill_at_any_write_leaves_whole_pages_or_none(tmp_path, moment):
    first, second = chain(3, seed=1), chain(4, seed=2)
    for count in range(1, 200):
        directory = tmp_path / str(count) / "kv"

        def work(directory: Path = directory, count: int = count) -> None:
            killed_at(count, moment)
            with opened(directory, limit_bytes=5 * FILE_BYTES) as tier:
                put(tier, first)
                read(tier, first)
                put(tier, second)

        ended = in_child(work)
        assert ended in (0, -signal.SIGKILL)
        with opened(directory, limit_bytes=5 * FILE_BYTES) as tier:
            assert read(tier, first) + read(tier, second) == tier.num_pages
            assert tier.num_quarantined == 0
            assert not temporaries(directory) and not orphans(directory)
            put(tier, second)
            assert read(tier, second) == 4
        if ended == 0:
            break
    assert count > 20, "fewer writes than pages were put"


def test_two_processes_that_write_the_same_pages_lose_none(directory):
    chains = [chain(10, seed) for seed in range(5)]

    def work(order: int) -> Callable[[], None]:
        def write() -> None:
            with opened(directory) as tier:
                for keys in chains[::order]:
                    put(tier, keys)
                    assert read(tier, keys) == 10

        return write

    children = [started(work(order)) for order in (1, -1, 2)]
    assert list(map(ended, children)) == [0, 0, 0]
    with opened(directory) as tier:
        assert [read(tier, keys) for keys in chains] == [10] * 5
    assert not temporaries(directory)


def test_what_a_living_process_is_writing_is_left_alone(directory):
    stored(directory, chain(1))
    folder = directory / name_of(ROOT)
    alive = folder / f".{'a' * 32}.{os.getppid()}-{'0' * 16}.tmp"
    dead = folder / f".{'a' * 32}.{2**22 + 1}-{'0' * 16}.tmp"
    old = folder / f".{'b' * 32}.{os.getppid()}-{'0' * 16}.tmp"
    for path in (alive, dead, old):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    with opened(directory) as tier:
        assert read(tier, chain(1)) == 1
    assert temporaries(directory) == [alive]


def test_another_process_that_evicts_makes_misses_and_no_wrong_bytes(directory):
    keys = chain(6)
    with opened(directory, limit_bytes=6 * FILE_BYTES) as ours:
        put(ours, keys)

        def evict() -> None:
            with opened(directory, limit_bytes=6 * FILE_BYTES) as theirs:
                put(theirs, chain(3, seed=2))

        assert in_child(evict) == 0
        assert read(ours, keys) == 3
        assert put(ours, [*keys[:4], page(keys[3].digest, 7)])[:4] == [True] * 4
        assert read(ours, keys) == 4
    assert not orphans(directory)


def test_a_folder_that_cannot_be_made_is_told_of():
    with opened(Path("/proc/nowhere/kv"), says=("No such file or directory", "/proc/nowhere/kv")) as tier:
        put(tier, chain(2))
