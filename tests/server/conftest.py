"""One server for the tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.server.support import Raw, Running, running

Connect = Callable[..., Raw]


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Running]:
    with running(aliases=("teller",)) as server:
        yield server


@pytest.fixture
def server(shared_server: Running) -> Iterator[Running]:
    """The built-in model. Whatever a test did, the engine is idle afterwards."""
    yield shared_server
    shared_server.wait_until_idle()


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Opens raw connections, which end with the test."""
    with ExitStack() as stack:
        yield lambda to, **how: stack.enter_context(Raw(to.port, **how))
