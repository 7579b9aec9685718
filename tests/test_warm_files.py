"""Files of a model that was unloaded: in the page cache where there is room, and nobody's memory is taken for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from benchmarks.measure import drop_from_cache
from localllm import hub
from localllm.offload.streaming.disk_read import cached_share
from localllm.runtime.resident_models import keep_warm
from tests.cli_support import write_checkpoint
from tests.server.support import wait_for


@pytest.fixture
def files(tmp_path: Path) -> hub.ModelFiles:
    """Of a model that nobody has read for long."""
    files = hub.locate(str(write_checkpoint(tmp_path / "model")))
    [path] = files.directory.glob("*.safetensors")
    drop_from_cache([path])
    return files


def share(files: hub.ModelFiles) -> float:
    [path] = files.directory.glob("*.safetensors")
    with path.open("rb") as opened:
        return cached_share(opened.fileno(), path.stat().st_size)


def test_its_files_are_read_where_there_is_room(files: hub.ModelFiles) -> None:
    if share(files) > 0.5:
        pytest.skip("this file system keeps what it is told to drop")
    assert keep_warm(files, "fp32") == sum(path.stat().st_size for path in files.directory.glob("*.safetensors"))
    wait_for(lambda: share(files) == 1.0)


def test_nothing_is_read_where_there_is_none(files: hub.ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    before = share(files)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 20))
    assert keep_warm(files, "fp32") == 0 and share(files) == before


def test_a_model_that_is_gone_is_nobodys_error(files: hub.ModelFiles) -> None:
    [path] = files.directory.glob("*.safetensors")
    path.unlink()
    assert keep_warm(files, "fp32") == 0
