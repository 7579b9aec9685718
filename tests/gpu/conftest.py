"""Every kernel here runs in Triton's interpreter, on tensors of the host."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests import interpreter


@pytest.fixture(autouse=True)
def language_patched_once() -> Iterator[None]:
    with interpreter.language_patched_once():
        yield


@pytest.fixture(autouse=True, scope="session")
def types_looked_up_once() -> Iterator[None]:
    with interpreter.types_looked_up_once():
        yield


@pytest.fixture(autouse=True)
def packed_models_of_its_own(empty_cache: Path) -> None:
    """What is packed here is in no list of what other tests have installed."""
