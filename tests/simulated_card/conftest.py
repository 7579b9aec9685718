"""Small packed models for the simulated card."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.packed_support import pack
from tests.test_device_placement import Packed


@pytest.fixture(scope="session")
def packed_models(checkpoint_of_card: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Packed]:
    """The same model in each format that promises its bits on a card."""
    return {
        weights: Packed(
            checkpoint_of_card, pack(checkpoint_of_card, tmp_path_factory.mktemp("packed") / weights, weights), weights
        )
        for weights in ("int4-g32", "int8")
    }


@pytest.fixture(scope="session")
def checkpoint_of_card(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.packed_support import small_checkpoint

    return small_checkpoint(tmp_path_factory.mktemp("card"))
