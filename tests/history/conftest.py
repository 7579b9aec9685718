"""A history of its own for each test, and another one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.history import History


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "conversations.db"


@pytest.fixture
def history(path: Path) -> Iterator[History]:
    with History.open(path) as history:
        yield history


@pytest.fixture
def other(tmp_path: Path) -> Iterator[History]:
    with History.open(tmp_path / "other" / "conversations.db") as other:
        yield other
