"""One server for the tests that leave it as they found it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from localllm.engine.chat_template import ChatTemplate
from localllm.engine.engine import Engine
from localllm.engine.request import Grammar
from localllm.server.tools.manner import Manner
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
def says(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """What the model says from now on, as if it had come upon that by itself."""

    def set_said(text: str) -> None:
        grammar = Grammar("lark", f"start: {json.dumps(text)}")
        monkeypatch.setattr(Manner, "grammar", lambda *_args, **_options: grammar)

    return set_said


@pytest.fixture
def speaks(server: Running, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """The model has another chat template from now on."""

    def set_template(source: str) -> None:
        template = ChatTemplate(source, special_tokens=server.engine.tokenizer.special_tokens)
        monkeypatch.setattr(Engine, "template", property(lambda _engine: template))

    return set_template


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Opens raw connections, which end with the test."""
    with ExitStack() as stack:
        yield lambda to, **how: stack.enter_context(Raw(to.port, **how))
