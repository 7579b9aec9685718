"""How fast a disk is read: past the cache, and nothing stays behind."""

from __future__ import annotations

import errno
import itertools
import os
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.offload.planner import disk_speed
from localllm.offload.planner.disk_speed import disk_file


def test_the_disk_is_read_past_the_page_cache_and_nothing_stays(tmp_path):
    with disk_file(tmp_path / "not" / "there", 16 << 20) as file:
        assert file is not None
        assert file.num_bytes == 16 << 20
        assert file.read_gbs() > 0
        assert not list(tmp_path.iterdir())


def test_the_disks_rate_is_what_was_read_over_the_time(tmp_path, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(disk_speed, "time", SimpleNamespace(perf_counter=lambda: next(ticks) / 1000))
    with disk_file(tmp_path, 16 << 20) as file:
        assert file is not None
        assert file.read_gbs() == pytest.approx((16 << 20) / 0.003e9)  # asked at both ends, and after either chunk


def test_a_file_system_without_direct_reads_is_read_with_its_cache_dropped(tmp_path, monkeypatch):
    opened = os.open

    def refuse(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    with disk_file(tmp_path, 16 << 20) as file:
        assert file is not None
        assert (file.method, file.read_gbs() > 0) == ("page cache dropped", True)


def test_a_disk_without_room_is_not_filled(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 20 << 20})
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage)
    with disk_file(tmp_path, 16 << 20) as file:
        assert file is None
