"""Files that pass through a ring: the right bytes at the right time, and an error that names the file otherwise."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.measure import drop_from_cache
from localllm.errors import CheckpointError
from localllm.offload.streaming import disk_stream
from localllm.offload.streaming.disk_read import cached_share, open_direct
from localllm.offload.streaming.disk_stream import DiskStream, StreamedFile
from localllm.offload.streaming.host_buffer import host_buffer
from localllm.offload.streaming.page_map import can_map
from localllm.offload.streaming.ring import Ring
from tests.patience import PATIENCE_S, wait_for
from tests.thinning import examples

PAGE = 4096


def content(number: int, pages: int) -> bytes:
    return b"".join(bytes([number, page % 256]) * (PAGE // 2) for page in range(pages))


def written(folder: Path, pages: list[int], check=lambda _content: None) -> list[StreamedFile]:
    files = []
    for number, count in enumerate(pages):
        path = folder / f"{number}.bin"
        path.write_bytes(content(number, count))
        files.append(StreamedFile(str(number), path, count * PAGE, check, "make it anew"))
    return files


class GivenUpError(Exception):
    pass


class Opened:
    """A stream over files, and what one sees of a run."""

    def __init__(self, files: list[StreamedFile], *, maps: bool = True) -> None:
        self.files = files
        self.ring = Ring.of([file.num_bytes for file in files])
        self.memory = host_buffer(self.ring.num_bytes)
        self.stream = DiskStream(files, self.ring, self.memory, maps=maps)

    def seen(self, number: int) -> bytes:
        begin = self.ring.offsets[number]
        return bytes(self.memory[begin : begin + self.files[number].num_bytes].numpy().data)

    def is_mapped(self, number: int) -> bool:
        """Whether the system says that the file's own pages are where its run is."""
        address = self.memory.data_ptr() + self.ring.offsets[number]
        for line in Path("/proc/self/maps").read_text().splitlines():
            begin, end = (int(bound, 16) for bound in line.split(maxsplit=1)[0].split("-"))
            if begin <= address < end:
                return line.endswith(str(self.files[number].path))
        raise AssertionError("the ring is nowhere")

    def lap(self, until: int | None = None, *, expected: Callable[[int], bytes] | None = None) -> None:
        """A forward that sees the bytes of every file, or gives up inside file number `until`."""
        self.stream.begin()
        with suppress(GivenUpError):
            for number, file in enumerate(self.files):
                with self.stream.held(file.name):
                    assert self.seen(number) == (expected(number) if expected else file.path.read_bytes())
                    if number == until:
                        raise GivenUpError


@contextmanager
def opened(files: list[StreamedFile], *, maps: bool = True) -> Iterator[Opened]:
    it = Opened(files, maps=maps)
    try:
        yield it
    finally:
        it.stream.close()


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.data())
def test_every_lap_sees_the_bytes_of_every_file(tmp_path_factory, pages, data):
    """Also after laps that were given up at any point, and with pieces so small that a run is of several."""
    before, disk_stream._PIECE_BYTES = disk_stream._PIECE_BYTES, 2 * PAGE
    try:
        with opened(written(tmp_path_factory.mktemp("files"), pages)) as it:
            for _ in range(data.draw(st.integers(1, 4))):
                stop = data.draw(st.none() | st.integers(0, len(pages) - 1))
                it.lap(stop, expected=lambda number: content(number, pages[number]))
    finally:
        disk_stream._PIECE_BYTES = before


def test_the_time_of_reading_counts_while_more_is_being_read(tmp_path, monkeypatch):
    first, second = written(tmp_path, [1, 1])
    finish, read = threading.Event(), disk_stream._BlockFile.read

    def read_slowly(file: disk_stream._BlockFile, *arguments) -> None:
        time.sleep(0.02)
        if file._file is second:
            finish.wait(PATIENCE_S)
        read(file, *arguments)

    monkeypatch.setattr(disk_stream._BlockFile, "read", read_slowly)
    with opened([first, second]) as it:
        it.stream.begin()
        with it.stream.held(first.name):
            assert it.stream.clock.reading_s >= 0.02  # a slow disk's readers are never all idle before the last step
        finish.set()


def test_what_is_not_streamed_is_always_there(tmp_path):
    with opened(written(tmp_path, [2, 2, 2])) as it, it.stream.held("head"):
        assert it.stream.clock.wait_s == 0


def test_the_next_lap_is_read_while_nobody_asks(tmp_path):
    with opened(written(tmp_path, [2, 3, 2, 3, 2])) as it:
        it.lap()
        with it.stream._changed:
            it.stream._changed.wait_for(lambda: it.stream.clock.bytes_read >= 17 * PAGE, PATIENCE_S)
        assert it.stream.clock.bytes_read == 17 * PAGE  # 12 of the first lap, and what the ring has room for


def test_bytes_are_checked_once_and_a_refusal_names_the_file(tmp_path):
    checked: list[int] = []

    def check(seen: memoryview) -> None:
        checked.append(seen[0])
        if seen[0] == 2:
            raise CheckpointError("2.bin is damaged")

    with opened(written(tmp_path, [1, 1, 1, 1], check)) as it:
        for _ in range(2):
            with pytest.raises(CheckpointError, match="damaged"):
                it.lap()
    assert checked == [0, 1, 2, 2]


def test_a_file_that_was_cut_ends_the_forward_and_once_mended_the_next_one_goes_on(tmp_path):
    files = written(tmp_path, [3, 3, 3, 3, 3])
    with opened(files) as it:
        it.lap()
        whole = files[2].path.read_bytes()
        os.truncate(files[2].path, PAGE)
        with pytest.raises(CheckpointError, match=r"2\.bin") as caught:
            for _ in range(3):  # a lap that was read ahead may still be whole
                it.lap()
        assert caught.value.fix == "make it anew"
        files[2].path.write_bytes(whole)
        os.utime(files[2].path, ns=(it.stream._files[2]._stamp[1],) * 2)
        it.lap()


def test_a_file_that_is_written_to_is_refused(tmp_path):
    files = written(tmp_path, [2, 2, 2, 2])
    with opened(files) as it:
        it.lap()
        with files[3].path.open("r+b") as file:
            file.write(b"other")
        os.utime(files[3].path)
        with pytest.raises(CheckpointError, match="was changed while it was in use"):
            for _ in range(3):
                it.lap()


def test_a_file_that_is_replaced_goes_on_as_it_was(tmp_path):
    files = written(tmp_path, [2, 2, 2, 2])
    with opened(files) as it:
        other = tmp_path / "other"
        other.write_bytes(content(9, 2))
        other.replace(files[1].path)
        for _ in range(3):
            it.lap(expected=lambda number: content(number, 2))


def test_a_disk_that_gives_nothing_is_an_error_and_not_a_wait_without_end(tmp_path, monkeypatch):
    answers = threading.Event()
    real = disk_stream.read_into

    def hang(*arguments) -> None:
        answers.wait()
        real(*arguments)

    monkeypatch.setattr(disk_stream, "read_into", hang)
    monkeypatch.setattr(disk_stream, "STALLED_S", 0.1)
    with opened(written(tmp_path, [2, 2, 2, 2]), maps=False) as it:
        with pytest.raises(CheckpointError, match=r"0\.bin cannot be read") as caught:
            it.lap()
        assert "has given nothing for" in caught.value.why
        monkeypatch.setattr(disk_stream, "STALLED_S", PATIENCE_S)
        answers.set()
        it.lap()


@pytest.mark.usefixtures("no_descriptor_left")
def test_a_file_that_is_not_there_is_refused_at_the_door(tmp_path):
    files = written(tmp_path, [2, 2])
    files[1].path.unlink()
    with pytest.raises(CheckpointError, match=r"1\.bin cannot be read"), opened(files):
        pytest.fail("it was opened")


@pytest.mark.usefixtures("no_descriptor_left")
def test_closing_ends_the_readers_and_gives_the_files_back(tmp_path):
    with opened(written(tmp_path, [2, 3, 2])) as it:
        it.lap(until=1)
    for thread in it.stream._readers:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_a_reader_that_finds_no_memory_ends_the_forward_at_once_and_the_next_one_goes_on(tmp_path, monkeypatch):
    left_to_fail = 2 * disk_stream.READERS
    real = disk_stream.cached_share

    def share(descriptor: int, num_bytes: int) -> float:
        nonlocal left_to_fail
        if left_to_fail:
            left_to_fail -= 1
            raise MemoryError("none left")
        return real(descriptor, num_bytes)

    with opened(written(tmp_path, [2, 2, 2, 2])) as it:
        it.lap()
        monkeypatch.setattr(disk_stream, "cached_share", share)
        with pytest.raises(MemoryError):
            for _ in range(3):  # a lap that was read ahead may still be whole
                it.lap()
        while left_to_fail:
            with suppress(MemoryError):
                it.lap()
        it.lap()


@pytest.mark.usefixtures("no_descriptor_left")
def test_where_no_thread_can_be_started_no_file_and_no_thread_stays(tmp_path, monkeypatch):
    start, started = threading.Thread.start, []

    def second_fails(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", second_fails)
    with pytest.raises(RuntimeError, match="thread"), opened(written(tmp_path, [2, 2])):
        pytest.fail("it was opened")
    started[0].join(PATIENCE_S)
    assert not started[0].is_alive()


# What the page cache holds


@pytest.fixture
def on_a_disk(tmp_path: Path) -> Path:
    """A folder whose files can be read past the page cache, and mapped."""
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(PAGE))
    direct = open_direct(probe)
    with probe.open("rb") as file:
        if direct is None or not can_map(file.fileno()):
            pytest.skip("this file system has no O_DIRECT, or no leases")
    os.close(direct)
    return tmp_path


def test_what_the_page_cache_holds_is_used_where_it_lies(on_a_disk):
    files = written(on_a_disk, [4, 4, 4, 4])
    for maps in (True, False):
        with opened(files, maps=maps) as it:
            it.stream.begin()
            with it.stream.held("0"):
                assert it.is_mapped(0) == maps and it.seen(0) == content(0, 4)


def test_what_leaves_the_page_cache_and_comes_back_is_the_same(on_a_disk):
    files = written(on_a_disk, [3, 5, 2, 4, 3, 6])
    with opened(files) as it:
        for lap in range(12):
            for number, file in enumerate(files):
                if (lap + number) % 3 == 0:
                    drop_from_cache([file.path])
                else:
                    file.path.read_bytes()
            it.lap(until=lap if lap % 4 == 3 else None)


def test_whether_a_file_can_be_mapped_is_found_out_without_reading_it(on_a_disk):
    (file,) = written(on_a_disk, [4096])
    drop_from_cache([file.path])
    with file.path.open("rb") as opened_file:
        assert can_map(opened_file.fileno())
        assert cached_share(opened_file.fileno(), file.num_bytes) == 0


def have_left(paths: list[Path]) -> bool:
    """Drop these files from the page cache; a file stays there as long as a place of the ring has it mapped."""
    drop_from_cache(paths)
    shares = []
    for path in paths:
        with path.open("rb") as file:
            shares.append(cached_share(file.fileno(), path.stat().st_size))
    return max(shares) < 0.5


def test_what_leaves_the_page_cache_is_read_past_it_from_the_next_lap_on(on_a_disk, monkeypatch):
    files = written(on_a_disk, [2048] * 4)
    past_the_cache: list[str] = []
    read = disk_stream.read_into

    def watched(plain: int, direct: int | None, begin: int, into: memoryview) -> None:
        if direct is not None:
            past_the_cache.append(Path(f"/proc/self/fd/{plain}").readlink().stem)
        read(plain, direct, begin, into)

    monkeypatch.setattr(disk_stream, "read_into", watched)
    monkeypatch.setattr(disk_stream, "_MAPPED_GBS", 1000.0)  # however fast this disk is, it was slow
    with opened(files) as it:
        it.lap()
        for _ in range(2):
            wait_for(lambda: have_left([file.path for file in files[2:]]))
            it.stream.begin()
            for file in files:
                with it.stream.held(file.name):
                    pass
    assert {"2", "3"} <= set(past_the_cache)


def test_a_file_that_changed_while_it_was_in_use_is_refused(on_a_disk):
    files = written(on_a_disk, [4, 4, 4, 4])
    with opened(files) as it:
        it.stream.begin()
        with pytest.raises(CheckpointError, match="was changed while it was in use"), it.stream.held("0"):
            assert it.is_mapped(0)
            os.utime(files[0].path)


def test_whoever_wants_to_write_to_a_file_in_use_waits(on_a_disk):
    files = written(on_a_disk, [4, 4, 4, 4])
    with opened(files) as it:
        it.stream.begin()
        with it.stream.held("0"):
            assert it.is_mapped(0)
            with pytest.raises(BlockingIOError):
                os.open(files[0].path, os.O_WRONLY | os.O_NONBLOCK)
            assert it.seen(0) == content(0, 4)
        os.close(os.open(files[0].path, os.O_WRONLY | os.O_NONBLOCK))


def test_a_file_that_somebody_has_open_for_writing_is_copied(on_a_disk):
    files = written(on_a_disk, [4, 4, 4, 4])
    with opened(files) as it:
        it.lap()
        with files[2].path.open("r+b"):
            for _ in range(3):
                it.lap()
            assert not it.is_mapped(2)


def test_cutting_files_that_are_mapped_is_an_error_and_not_the_end(on_a_disk):
    files = written(on_a_disk, [4, 4, 4, 4])
    with opened(files) as it:
        it.lap()
        for file in files:
            os.truncate(file.path, 0)
        with pytest.raises(CheckpointError, match=r"changed while it was in use|cannot be read"):
            it.lap()
