"""The built-in model's vocabulary, and the check of a grammar without a process for each of hundreds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from localllm import Engine
from localllm.hub.names import TINY_DIRECTORY
from localllm.settings import EngineConfig
from localllm.text.grammar import compile_check, definition
from localllm.text.grammar.compiled import Grammars
from localllm.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY_DIRECTORY)


@pytest.fixture
def grammars(tokenizer: Tokenizer) -> Grammars:
    assert tokenizer.eos_token_id is not None
    return Grammars(tokenizer, {tokenizer.eos_token_id}, tokenizer.vocab_size)


@pytest.fixture
def tried_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does no harm is compiled in this process: 1 ms where another takes 70."""
    monkeypatch.setattr(definition, "check_apart", lambda _grammar, request: compile_check.check(request))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The built-in model, which drafts nothing."""
    engine = Engine.load("tiny", EngineConfig(device="cpu", weights="int4", speculate="off"))
    yield engine
    engine.close()
