"""Fixtures that several test files share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
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


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the tests pack stays out of the developer's cache, and what is packed there out of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCALLLM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
