"""The slots of experts that rest on the disk: whose bytes are in them, what is read, and what a disk may do wrong."""

from __future__ import annotations

import itertools
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.errors import CheckpointError
from localllm.offload.streaming import expert_pool, record_reads
from localllm.offload.streaming.disk_read import CachedPages
from localllm.offload.streaming.expert_pool import ExpertFile, ExpertPool
from localllm.offload.streaming.foresight import Foresight
from localllm.offload.streaming.host_buffer import host_buffer
from localllm.offload.streaming.kernel_reads import KernelReads
from localllm.offload.streaming.lru_slots import Expert
from localllm.offload.streaming.record_reads import RecordReads
from tests.packed_support import require_kernel_reads
from tests.thinning import examples

WAYS = ("by the kernel", "by threads", "from the page cache")
BLOCKS, COUNT, SIZE = ("b", "c"), 9, 4096


def fill(expert: Expert) -> int:
    """Return what each byte of the expert's record is."""
    return 1 + expert[1] + 100 * BLOCKS.index(expert[0])


@contextmanager
def pooled(
    way: str, slots: int, damaged: frozenset[Expert] = frozenset(), num_bytes: int = COUNT * SIZE
) -> Iterator[ExpertPool]:
    """A pool of two blocks. way: how they are read. damaged: what the check refuses. num_bytes: of each file."""

    def file(folder: Path, block: str) -> ExpertFile:
        def check(index: int, _content: memoryview) -> None:
            if (block, index) in damaged:
                raise CheckpointError("the file is damaged", why=f"expert {index}")

        path = folder / block
        path.write_bytes(b"".join(bytes([fill((block, index))]) * SIZE for index in range(COUNT))[:num_bytes])
        return ExpertFile(block, path, 0, COUNT, check, "")

    no_kernel = mock.patch.object(record_reads, "KernelReads", side_effect=OSError)
    share = mock.patch.object(CachedPages, "sampled_share", return_value=float(way == "from the page cache"))
    with share, no_kernel if way == "by threads" else nullcontext(), tempfile.TemporaryDirectory() as folder:
        files = [file(Path(folder), block) for block in BLOCKS]
        with closing(ExpertPool(files, host_buffer(slots * SIZE).view(slots, SIZE))) as pool:
            yield pool


def resident(pool: ExpertPool) -> set[Expert]:
    return {(block, index) for block in BLOCKS for index in range(COUNT) if int(pool.table(block)[index])}


@given(st.data())
@settings(max_examples=examples(150))
def test_a_pool_gives_each_expert_its_own_bytes_and_keeps_those_used_last(data: st.DataObject) -> None:
    slots, numbers, blocks = data.draw(st.integers(1, 6)), st.integers(0, COUNT - 1), st.sampled_from(BLOCKS)
    experts = st.tuples(blocks, numbers)
    way = data.draw(st.sampled_from(WAYS))
    damaged = data.draw(st.frozensets(experts, max_size=3))
    guesses_are_read = data.draw(st.booleans())
    worth = mock.patch.object(Foresight, "is_worth", return_value=guesses_are_read)
    here: set[Expert] = set()
    unasked: set[Expert] = set()  # what the disk may have been asked for that nobody waited for: it may come, or not
    wanted = hits = late_hits = 0
    with worth, pooled(way, slots, damaged) as pool:
        for _ in range(data.draw(st.integers(1, 8))):
            block = data.draw(blocks)
            asked = {(block, index) for index in data.draw(st.lists(numbers, min_size=1, max_size=6, unique=True))}
            guesses = data.draw(st.lists(experts, max_size=3, unique=True))
            most_groups = data.draw(st.sampled_from((1, 2, 99, 99)))
            wanted += len(asked)
            hits += len(asked & here)
            late_hits += len((asked & unasked) - here)
            seen: set[Expert] = set()
            has_ended = False
            try:
                with closing(pool.held(block, [index for _, index in asked], guesses.copy)) as groups:
                    for _, group in zip(range(most_groups), groups, strict=False):
                        for index in group:
                            assert pool.record(block, index).unique().tolist() == [fill((block, index))]
                            assert int(pool.table(block)[index]) == pool.record(block, index).data_ptr()
                        seen |= {(block, index) for index in group}
                    has_ended = most_groups == 99
                assert seen <= asked and (seen == asked or not has_ended)
            except CheckpointError as error:
                assert any(error.why == f"expert {index}" for _, index in (damaged & asked) - seen)
                has_ended = False
            here = resident(pool)
            assert len(here) <= slots and not damaged & here
            unasked |= {*guesses} if guesses_are_read else set()
            unasked |= set() if has_ended else asked - seen
            assert len(asked) > slots or unasked or asked <= here  # what came unasked took a slot, or may do so
            unasked -= here  # what has come does not come again
        assert pool.wanted == wanted and hits <= pool.hits <= hits + late_hits
        if not damaged:
            until = time.monotonic() + 60  # for what still comes unasked
            while resident(pool) != {("b", index) for index in range(slots)}:
                assert time.monotonic() < until, "a slot is lost"
                assert sorted(itertools.chain(*pool.held("b", range(slots)))) == [*range(slots)]


@pytest.mark.parametrize("way", WAYS)
def test_what_is_foreseen_is_read_while_nothing_else_is_and_a_wrong_guess_is_evicted_first(way: str) -> None:
    look = RecordReads.look

    def patient(reads: RecordReads) -> bool:
        until = time.monotonic() + 60
        while not look(reads):
            assert time.monotonic() < until, "a read does not end"
        return True

    def hold(asked: list[int], *guesses: int) -> None:
        for _ in pool.held("b", asked, lambda: [("b", index) for index in guesses]):
            pass

    always = mock.patch.object(Foresight, "is_worth", return_value=True)
    with always, mock.patch.object(RecordReads, "look", patient), pooled(way, 3) as pool:
        hold([0, 1], 0, 4, 5)  # the first that is not here
        hold([4])
        assert (pool.hits, pool.wanted, pool.clock.bytes_read) == (0, 3, 3 * SIZE)  # it came by foresight, not by luck
        hold([0, 4])
        assert pool.hits == 2
        hold([4])  # nothing is read: nobody is asked what comes next
        hold([5], 6)  # takes the place of 1; the guess that of 0
        hold([4])
        hold([7])  # takes the place of the wrong guess
        hold([4, 5])
        assert (pool.hits, pool.wanted, pool.clock.bytes_read) == (6, 11, 6 * SIZE)


def test_a_guess_is_read_where_it_is_worth_the_time_that_a_wrong_one_takes() -> None:
    now = 0.0
    foresight = Foresight(lambda: now)

    def block(read_s: float, idle_s: float, *, is_right: bool) -> bool:
        """Return whether the guess behind a block's reads would have been read."""
        nonlocal now
        foresight.disk_is_busy()
        now += 2 * read_s
        foresight.disk_is_idle(num_read=2)
        foresight.guess(("b", 3))
        is_worth = foresight.is_worth(("b", 3))
        now += idle_s
        foresight.learn("b", [3, 7] if is_right else [5, 7])
        return is_worth

    assert not block(1.0, 0.5, is_right=True)  # nothing is known of the disk's idle time
    for _ in range(20):
        assert block(1.0, 0.5, is_right=True)
    assert block(1.0, 0.5, is_right=False)
    worth = [block(1.0, 0.5, is_right=False) for _ in range(30)]
    assert worth == sorted(worth, reverse=True) and not worth[-1]  # it learns from what it would have guessed
    for _ in range(100):
        block(20.0, 0.5, is_right=True)
    for _ in range(100):
        block(20.0, 0.5, is_right=False)
    assert not block(20.0, 0.5, is_right=True)


def test_the_kernel_reads_what_the_page_cache_lacks_and_no_thread_does(tmp_path: Path) -> None:
    require_kernel_reads(tmp_path)
    with mock.patch.object(record_reads, "read_into", side_effect=AssertionError), pooled("by the kernel", 4) as pool:
        for group in pool.held("b", [1, 5, 7]):
            assert [pool.record("b", index).unique().tolist() for index in group] == [[index + 1] for index in group]
        assert pool.clock.bytes_read == 3 * SIZE


@pytest.mark.parametrize("way", ["by the kernel", "by threads"])
def test_a_file_that_ends_before_a_record_is_refused_by_its_number(way: str) -> None:
    with pooled(way, 4, num_bytes=5 * SIZE + 100) as pool:
        for _ in range(2):
            with pytest.raises(CheckpointError, match="cannot be read") as caught:
                for _ in pool.held("b", [4, 5, 6]):
                    pass
            assert re.match("expert [56]: it ends at byte 20580", caught.value.why)


def test_a_disk_that_gives_nothing_ends_the_answer_and_what_it_gives_later_is_no_experts_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_kernel_reads(tmp_path)
    monkeypatch.setattr(record_reads, "_DEPTH", 2)  # the third read waits in line
    with pooled("by the kernel", 6) as pool:
        with monkeypatch.context() as stalled:
            stalled.setattr(expert_pool, "STALLED_S", 0.01)
            stalled.setattr(KernelReads, "ended", lambda _reads, _timeout_s: [])
            with pytest.raises(CheckpointError, match="gives nothing"):
                for _ in pool.held("b", [0, 1, 2]):
                    pass
        assert not resident(pool)
        for block, asked in (("b", [0, 1, 2, 3]), ("c", [0, 1, 2, 3]), ("b", [0, 1, 2, 3])):
            for group in pool.held(block, asked):
                for index in group:
                    assert pool.record(block, index).unique().tolist() == [fill((block, index))]
                    assert int(pool.table(block)[index]) == pool.record(block, index).data_ptr()
            assert len(resident(pool)) == 4  # two slots are lost
