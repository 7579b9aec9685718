"""Fixtures that several test files share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Callable[[str], Path]:
    """Real tokenizers, templates, configs and texts that are too large or not ours to ship."""
    root = Path(os.environ.get("LOCALLLM_TEST_DATA", REPOSITORY.parent / "shared" / "data"))

    def locate(relative: str) -> Path:
        path = root / relative
        if not path.exists():
            pytest.skip(f"{path} is absent; set LOCALLLM_TEST_DATA to a folder that has {relative}")
        return path

    return locate
