"""The built-in model's vocabulary, and the trial of a grammar without a process for each of hundreds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from localllm import Engine
from localllm.engine.speculative.config import Speculate
from localllm.hub.names import TINY_DIRECTORY
from localllm.text.grammar import definition, trial
from localllm.text.grammar.compiled import Grammars
from localllm.text.tokenizer import Tokenizer


@pytest.fixture
def grammars() -> Grammars:
    tokenizer = Tokenizer.load(TINY_DIRECTORY)
    assert tokenizer.eos_token_id is not None
    return Grammars(tokenizer, {tokenizer.eos_token_id}, tokenizer.vocab_size)


@pytest.fixture
def tried_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does no harm is tried out in this process: 1 ms where another takes 70."""

    def tried(_grammar: Any, asked: dict[str, Any]) -> dict[str, str]:
        return trial.tried(asked)

    monkeypatch.setattr(definition, "tried_apart", tried)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The built-in model, which guesses nothing."""
    engine = Engine.load("tiny", device="cpu", weights="int4", speculate=Speculate("off"))
    yield engine
    engine.close()
