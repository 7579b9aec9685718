"""A folder for pages, on a disk that has room."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.cache import disk


@pytest.fixture(autouse=True)
def roomy_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "KEPT_FREE_BYTES", 0)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kv"
