"""Pages on the disk: what was put there comes back whole or not at all, and the oldest tails go first."""

from __future__ import annotations

import mmap
import os
import threading
import time

import pytest

from benchmarks.measure import drop_from_cache
from localllm.cache import disk, page_folder
from localllm.cache.disk import DiskTier
from localllm.cache.page_file import HEADER_BYTES, PageKey
from localllm.cache.page_folder import remove_pages, root_folders
from tests.disk_tier.support import (
    ABOUT,
    FILE_BYTES,
    PAGE_BYTES,
    PATIENCE_S,
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
    stored,
)

# What comes back


def test_pages_outlive_the_process_that_put_them(directory):
    keys = chain(6)
    with opened(directory) as tier:
        assert put(tier, keys) == [True] * 6
        assert (tier.num_written, tier.num_pages, tier.bytes_on_disk) == (6, 6, 6 * FILE_BYTES)
    with opened(directory) as tier:
        assert all(key.digest in tier for key in keys)
        assert read(tier, keys) == 6


@pytest.mark.parametrize("num_bytes", [1, 511, 4096, 5000, 65536, 300_001])
@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize("is_cached", [True, False])
def test_a_page_of_any_size_is_read_into_any_buffer_from_the_cache_and_past_it(
    directory, num_bytes, is_aligned, is_cached
):
    keys = chain(5)
    with opened(directory) as tier:
        assert all(tier.put(key, payload(key, num_bytes)) for key in keys) and tier.flush(PATIENCE_S)
        if not is_cached:
            drop_from_cache(path_of(directory, key) for key in keys)
        buffers = [buffer(num_bytes, is_aligned) for _ in keys]
        assert tier.read(keys, buffers) == 5
        assert [bytes(each) for each in buffers] == [payload(key, num_bytes) for key in keys]


def buffer(num_bytes: int, is_aligned: bool) -> memoryview:
    return memoryview(mmap.mmap(-1, num_bytes + 1))[0 if is_aligned else 1 :][:num_bytes]


def test_the_first_pages_are_read_up_to_one_that_is_missing(directory):
    keys = chain(6)
    with opened(directory) as tier:
        put(tier, keys)
        path_of(directory, keys[3]).unlink()
        assert read(tier, keys) == 3
        assert keys[3].digest not in tier
        assert read(tier, keys[:3]) == 3
        assert tier.num_quarantined == 0


def test_pages_of_other_tokens_or_another_root_are_not_found(directory):
    keys, other = chain(2), bytes(32)
    with opened(directory) as tier:
        put(tier, keys)
        assert page(keys[0].digest, 77).digest not in tier
    with opened(directory, root=other) as tier:
        assert read(tier, keys) == 0
        assert tier.num_pages == 0 and tier.bytes_on_disk == 2 * FILE_BYTES


@pytest.mark.parametrize("what", ["token_ids", "parent"])
def test_a_page_is_compared_with_the_tokens_and_the_parent_that_are_asked_for(directory, what):
    first, second = chain(2)
    with opened(directory) as tier:
        put(tier, [first, second])
        forged = {"token_ids": first.token_ids, "parent": ROOT}[what]
        assert read(tier, [PageKey(**{**vars(second), what: forged})]) == 0


def test_the_pages_behind_a_page_say_where_a_prefix_broke(directory):
    first, *_ = chain(1)
    behind = [page(first.digest, seed) for seed in (1, 2)]
    with opened(directory) as tier:
        put(tier, [first, *behind])
        assert tier.children(ROOT) == [first]
        assert sorted(tier.children(first.digest), key=hash) == sorted(behind, key=hash)
        assert tier.children(behind[0].digest) == []
    with opened(directory) as tier:
        assert len(tier.children(first.digest)) == 2


def test_many_readers_and_writers_share_a_tier(directory):
    chains = [chain(8, seed) for seed in range(6)]
    found: list[int] = []
    with opened(directory) as tier:

        def work(mine: list[PageKey]) -> None:
            for key in mine:
                tier.put(key, payload(key))
            tier.flush(PATIENCE_S)
            found.append(read(tier, mine))

        threads = [threading.Thread(target=work, args=(each,)) for each in chains]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [8] * 6


# What is taken


def test_a_page_goes_behind_its_parent_or_is_refused(directory):
    first, second, third = chain(3)
    with opened(directory) as tier:
        assert second.digest not in tier  # by now the folder is listed
        assert not tier.put(second, payload(second))
        assert put(tier, [first, second, third]) == [True] * 3


def test_a_page_that_is_there_is_not_written_again(directory):
    keys = chain(3)
    with opened(directory) as tier:
        put(tier, keys)
        before = path_of(directory, keys[0]).stat().st_ino
        assert put(tier, keys) == [True] * 3
        assert (tier.num_written, path_of(directory, keys[0]).stat().st_ino) == (3, before)


def test_a_full_queue_refuses_and_never_waits(directory, monkeypatch):
    keys, goes_on = chain(6), threading.Event()
    plain = disk.write_page

    def slow(*arguments: object) -> None:
        goes_on.wait()
        plain(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(disk, "write_page", slow)
    tier = DiskTier(directory, ROOT, ABOUT, 1 << 30, [].append, queue_bytes=3 * PAGE_BYTES)
    accepted = [tier.put(key, payload(key)) for key in keys]
    assert accepted == [True] * 3 + [False] * 3
    assert not tier.flush(0.01)
    goes_on.set()
    assert tier.flush(PATIENCE_S)
    assert [key.digest in tier for key in keys] == accepted
    assert tier.close(PATIENCE_S)


def test_closing_waits_no_longer_than_it_may(directory, monkeypatch):
    goes_on = threading.Event()
    monkeypatch.setattr(disk, "write_page", lambda *_: goes_on.wait())
    tier = DiskTier(directory, ROOT, ABOUT, 1 << 30, [].append)
    (key,) = chain(1)
    assert tier.put(key, payload(key))
    assert not tier.close(0.05)
    assert not tier.put(key, payload(key))
    goes_on.set()


def test_without_a_thread_what_is_there_is_still_read(directory, monkeypatch):
    keys = stored(directory, chain(3))

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with opened(directory, says=("can't start new thread",)) as tier:
        assert read(tier, keys) == 3
        assert not tier.put(page(keys[-1].digest, 5), bytes(PAGE_BYTES))


# What goes


def test_the_tail_that_was_used_longest_ago_goes_first(directory):
    old, new = chain(4, seed=1), chain(4, seed=2)
    with opened(directory, limit_bytes=8 * FILE_BYTES) as tier:
        put(tier, [*old, *new])
        read(tier, old)
        more = [page(old[-1].digest, 50), page(old[-1].digest, 51)]
        assert put(tier, more) == [True] * 2
        assert [key.digest in tier for key in new] == [True, True, False, False]
        assert all(key.digest in tier for key in [*old, *more])
        assert held_bytes(directory) == 8 * FILE_BYTES


def test_a_chain_longer_than_the_limit_keeps_its_beginning(directory):
    keys = chain(9)
    with opened(directory, limit_bytes=5 * FILE_BYTES) as tier:
        put(tier, keys)
        assert read(tier, keys) == 5
    assert not orphans(directory)


def test_a_limit_that_was_lowered_holds_from_the_start(directory):
    stored(directory, chain(6))
    with opened(directory, limit_bytes=4 * FILE_BYTES) as tier:
        assert read(tier, chain(6)) == 4
    assert held_bytes(directory) == 4 * FILE_BYTES


def test_the_limit_is_one_for_all_models(directory):
    other = bytes(32)
    with opened(directory, limit_bytes=6 * FILE_BYTES) as tier:
        put(tier, chain(5))
    with opened(directory, limit_bytes=6 * FILE_BYTES, root=other) as tier:
        put(tier, chain(4, root=other))
        assert read(tier, chain(4, root=other)) == 4
    assert held_bytes(directory) == 6 * FILE_BYTES
    with opened(directory, limit_bytes=6 * FILE_BYTES) as tier:
        assert read(tier, chain(5)) == 2


def test_without_a_limit_a_tenth_of_what_is_free_is_taken_and_eight_gib_at_most(directory, monkeypatch):
    monkeypatch.setattr(page_folder, "free_bytes", lambda _directory: 30 * FILE_BYTES)
    with opened(directory, limit_bytes=None) as tier:
        put(tier, chain(9))
        assert read(tier, chain(9)) == 3
    monkeypatch.setattr(page_folder, "free_bytes", lambda _directory: 1 << 50)
    with opened(directory, limit_bytes=None) as tier:
        assert tier.limit_bytes == 8 << 30


def test_pages_give_way_where_the_disk_fills_up_and_what_is_kept_free_is_named(directory, monkeypatch):
    monkeypatch.setattr(disk, "KEPT_FREE_BYTES", 1 << 30)
    total = 1 << 40
    monkeypatch.setattr(disk, "free_bytes", lambda _directory: max(0, total - held_bytes(directory)))
    warnings: list[str] = []
    with opened(directory, warnings=warnings) as tier:
        put(tier, chain(4, seed=1))
        total = (1 << 30) + 3 * FILE_BYTES  # others have taken the rest, and one page too much
        (new,) = chain(1, seed=2)
        put(tier, [new])
        assert new.digest in tier and read(tier, chain(4, seed=1)) == 2
        assert not warnings
        total = 0
        others = chain(2, seed=3)
        put(tier, others)
        assert others[0].digest not in tier
    assert len(warnings) == 1
    assert "0 B are free on its disk, and 1.0 GiB is left to others" in warnings[0]


def test_what_another_process_has_used_meanwhile_stays(directory):
    old, new = chain(3, seed=1), chain(3, seed=2)
    with opened(directory, limit_bytes=6 * FILE_BYTES) as tier:
        put(tier, [*old, *new])
        later = time.time() + 100
        os.utime(path_of(directory, old[-1]), (later, later))
        (more,) = chain(1, seed=3)
        put(tier, [more])
        assert read(tier, old) == 3
        assert read(tier, new) == 2 and more.digest in tier


def test_two_processes_keep_one_limit(directory):
    limit = 16 * FILE_BYTES
    with opened(directory, limit_bytes=limit) as first, opened(directory, limit_bytes=limit) as second:
        for seed in range(12):
            put(first if seed % 2 else second, chain(4, seed))
    assert held_bytes(directory) <= limit + 2 * (limit // 8 + 4 * FILE_BYTES)


def test_pages_whose_parent_is_gone_are_deleted_at_the_next_start(directory):
    keys = stored(directory, chain(5))
    path_of(directory, keys[1]).unlink()
    with opened(directory) as tier:
        assert [key.digest in tier for key in keys] == [True, False, False, False, False]
    assert not orphans(directory) and held_bytes(directory) == FILE_BYTES


def test_a_cache_that_is_cleared_under_a_run_is_begun_anew(directory):
    keys = chain(4)
    with opened(directory) as tier:
        put(tier, keys)
        remove_pages(directory, root_folders(directory))
        assert not directory.exists()
        assert read(tier, keys) == 0
        assert put(tier, keys) == [True] * 4
        assert read(tier, keys) == 4
        remove_pages(directory, root_folders(directory))
        put(tier, [page(keys[-1].digest, 9)])  # hangs on what the tier believes to be there
    assert held_bytes(directory) == 0


# Clocks


@pytest.mark.parametrize("dates", [(4_070_908_800, 0), (0, 4_070_908_800), (4_070_908_800,) * 2, (0, 0)])
def test_a_clock_that_jumps_changes_the_order_and_nothing_else(directory, dates):
    first, second = chain(4, seed=1), chain(4, seed=2)
    stored(directory, [*first, *second])
    for keys, date in zip((first, second), dates, strict=True):
        for key in keys:
            os.utime(path_of(directory, key), (date, date))
    with opened(directory, limit_bytes=8 * FILE_BYTES) as tier:
        assert read(tier, first) == read(tier, second) == 4
        third = chain(4, seed=3)
        assert put(tier, third) == [True] * 4
        assert read(tier, third) == 4
        assert held_bytes(directory) == 8 * FILE_BYTES
    assert not orphans(directory)


def test_what_is_dated_in_the_future_goes_before_what_was_used_last(directory):
    first, second = chain(2, seed=1), chain(2, seed=2)
    stored(directory, [*first, *second])
    for key in first:
        os.utime(path_of(directory, key), (4_070_908_800, 4_070_908_800))
    with opened(directory, limit_bytes=4 * FILE_BYTES) as tier:
        put(tier, chain(2, seed=3))
        assert read(tier, second) == 2 and read(tier, first) == 0


def test_a_clock_that_jumps_under_a_run_loses_nothing(directory, monkeypatch):
    times = iter(range(10**18, 0, -(10**15)))
    monkeypatch.setattr(time, "time_ns", lambda: next(times))
    with opened(directory, limit_bytes=8 * FILE_BYTES) as tier:
        for seed in range(4):
            put(tier, chain(4, seed))
            assert read(tier, chain(4, seed)) == 4
    assert held_bytes(directory) == 8 * FILE_BYTES


def test_a_header_fills_a_page_of_the_disk():
    assert HEADER_BYTES == 4096
