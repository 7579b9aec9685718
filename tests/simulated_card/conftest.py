"""Small packed models for the simulated card."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli_support import share_kernels
from tests.simulated_card.support import packed_in_formats
from tests.test_device_placement import Packed


@pytest.fixture(scope="module", autouse=True)
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is packed here is in no list of what other tests have installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCALLLM_CACHE", str(share_kernels(tmp_path_factory.mktemp("own") / "cache")))
        yield


@pytest.fixture(scope="session")
def packed_models(checkpoint_of_card: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Packed]:
    """The same model in each format that promises its bits on a card."""
    return packed_in_formats(checkpoint_of_card, tmp_path_factory.mktemp("packed"))


@pytest.fixture(scope="session")
def checkpoint_of_card(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.packed_support import small_checkpoint

    return small_checkpoint(tmp_path_factory.mktemp("card"))
