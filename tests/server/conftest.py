"""One server for the tests that leave it as they found it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from localllm.engine.engine import Engine
from localllm.server import asking
from localllm.server.tools.manner import Manner
from localllm.text.chat_template import ChatTemplate
from localllm.text.grammar.grammar import Grammar
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


@dataclass(frozen=True)
class _Playing(Manner):
    said: str = ""

    def grammar(self, *_: object, **__: object) -> Grammar:
        return Grammar("lark", f"start: {json.dumps(self.said)}")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """From now on the model calls the first tool that it is free to call and has arguments for, and that only until it
    is told of a result. text: what it says otherwise; None: what it likes."""

    def set_calls(arguments: Mapping[str, Any], text: str | None = None) -> None:
        manner_of = asking.manner_of

        def playing(*given: Any, **how: Any) -> Manner:
            manner, (_, _, messages, tools) = manner_of(*given, **how), given
            is_free = tools is not None and not tools.must_call and messages[-1]["role"] != "tool"
            name = next((name for name in tools.callable if name in arguments), None) if is_free else None
            call = json.dumps({"name": name, "arguments": arguments.get(name)})
            said = text if name is None else f"Let me look.\n<tool_call>\n{call}\n</tool_call>"
            return manner if said is None else _Playing(**vars(manner), said=said)

        monkeypatch.setattr(asking, "manner_of", playing)

    return set_calls


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
