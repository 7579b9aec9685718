"""One server for the tests that leave it as they found it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from localllm.engine.engine import Engine
from localllm.server import generation_request
from localllm.server.tools.output_format import OutputFormat
from localllm.text.chat_template import ChatTemplate
from localllm.text.grammar.grammar import Grammar
from tests.cli_support import share_kernels
from tests.server.support import Patch, Raw, Running, Says, running

Connect = Callable[..., Raw]


@pytest.fixture(scope="session")
def served_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return share_kernels(tmp_path_factory.mktemp("served") / "cache")


@pytest.fixture(scope="module", autouse=True)
def cache_of_its_own(served_cache: Path) -> Iterator[None]:
    """What tests elsewhere have packed is in no list of a server's models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCALLLM_CACHE", str(served_cache))
        yield


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Running]:
    with running(aliases=("teller",)) as server:
        yield server


@pytest.fixture
def server(shared_server: Running) -> Iterator[Running]:
    """The built-in model. Whatever a test did, the engine is idle afterwards."""
    yield shared_server
    shared_server.wait_until_idle()


@pytest.fixture(scope="session")
def libraries(shared_server: Running) -> Iterator[Mapping[str, Any]]:
    """The clients of the dialects' own libraries."""
    import anthropic
    import ollama
    import openai

    with (
        openai.OpenAI(base_url=f"{shared_server.url}/v1", api_key="none", max_retries=0) as of_openai,
        anthropic.Anthropic(base_url=shared_server.url, api_key="none", max_retries=0) as of_anthropic,
        ollama.Client(host=shared_server.url) as of_ollama,
    ):
        yield {"openai": of_openai, "anthropic": of_anthropic, "ollama": of_ollama}


@pytest.fixture
def client(server: Running, libraries: Mapping[str, Any], request: pytest.FixtureRequest) -> Any:
    """The library that the tests' file is about: `test_openai_chat.py` is about openai."""
    return libraries[request.path.stem.split("_")[1]]


@pytest.fixture
def says(monkeypatch: Patch) -> Says:
    """What the model says from now on, as if it had come upon that by itself."""

    def set_said(text: str) -> None:
        grammar = Grammar("lark", f"start: {json.dumps(text)}")
        monkeypatch.setattr(OutputFormat, "grammar", lambda *_args, **_options: grammar)

    return set_said


@dataclass(frozen=True)
class _Playing(OutputFormat):
    said: str = ""

    def grammar(self, *_: object, **__: object) -> Grammar:
        return Grammar("lark", f"start: {json.dumps(self.said)}")


@pytest.fixture
def calls(monkeypatch: Patch) -> Callable[..., None]:
    """From now on the model calls the first tool that it is free to call and has arguments for, and that only until it
    is told of a result. text: what it says otherwise; None: what it likes."""

    def set_calls(arguments: Mapping[str, Any], text: str | None = None) -> None:
        output_format_of = generation_request.output_format_of

        def playing(*given: Any, **how: Any) -> OutputFormat:
            manner, (_, _, messages, tools) = output_format_of(*given, **how), given
            is_free = tools is not None and not tools.must_call and messages[-1]["role"] != "tool"
            name = next((name for name in tools.callable if name in arguments), None) if is_free else None
            call = json.dumps({"name": name, "arguments": arguments.get(name)})
            said = text if name is None else f"Let me look.\n<tool_call>\n{call}\n</tool_call>"
            return manner if said is None else _Playing(**vars(manner), said=said)

        monkeypatch.setattr(generation_request, "output_format_of", playing)

    return set_calls


@pytest.fixture
def speaks(server: Running, monkeypatch: Patch) -> Says:
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
