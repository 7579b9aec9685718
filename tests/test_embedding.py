"""Embeddings are made of the hidden states that transformers computes, however a prompt is chunked or known already."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from localllm.engine.engine import Engine
from localllm.engine.events import FinishedEvent
from localllm.engine.request import Pooling, Request, SamplingParams
from localllm.engine.sequence import Pooler
from localllm.engine.step_types import Limits
from localllm.errors import ContextOverflowError, NonFiniteError
from localllm.settings import EngineConfig
from tests.checkpoints import write_checkpoint
from tests.engine_support import steps
from tests.thinning import every_other

POOLINGS: tuple[Pooling, ...] = ("mean", "last")


@dataclass
class Pair:
    """The same model twice."""

    engine: Engine
    peer: Any


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3", "phi3-longrope", "mistral-windowed"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp(request.param)
    peer = write_checkpoint(directory, request.param)
    limits = Limits(chunk_tokens=32)
    engine = Engine.load(directory, EngineConfig(device="cpu", dtype="fp32"), limits=limits)
    yield Pair(engine, peer)
    engine.close()


def ids(length: int) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def embedding(engine: Engine, token_ids: list[int], pooling: Pooling) -> FinishedEvent:
    engine.submit(Request(tuple(token_ids), SamplingParams(max_tokens=1), pooling=pooling))
    last = list(steps(engine))[-1]
    assert isinstance(last, FinishedEvent) and last.error is None
    return last


@torch.inference_mode()
def expected(peer: Any, token_ids: list[int], pooling: Pooling) -> torch.Tensor:
    states = peer.model(torch.tensor([token_ids]), use_cache=False).last_hidden_state[0].double()
    return torch.nn.functional.normalize(states.mean(0) if pooling == "mean" else states[-1], dim=0)


@pytest.mark.parametrize("length", every_other([33, 1, 90, 32]))
@pytest.mark.parametrize("pooling", POOLINGS)
def test_an_embedding_is_made_of_the_states_of_transformers(pair, pooling, length):
    found = embedding(pair.engine, ids(length), pooling)
    assert found.embedding is not None
    vector = torch.tensor(found.embedding, dtype=torch.float64)
    torch.testing.assert_close(vector, expected(pair.peer, ids(length), pooling), rtol=0, atol=1e-5)
    assert found.usage.completion_tokens == 0


def test_a_mean_needs_every_token_and_a_last_one_takes_what_is_known(pair):
    embedding(pair.engine, ids(200), "mean")  # the pool grows with what is asked, and keeps what it then has room for
    first, again = (embedding(pair.engine, ids(90), "mean") for _ in range(2))
    last = embedding(pair.engine, ids(90), "last")
    assert first.embedding == again.embedding and again.usage.cached_tokens == 0
    assert last.usage.cached_tokens > 0 or pair.engine.prefix is None


@pytest.mark.parametrize("length", [1, 33])
def test_what_a_gpu_would_draw_a_token_for_is_embedded_all_the_same(pair, monkeypatch, length):
    def draw(*_: Any, **__: Any) -> Any:
        raise AssertionError("there is no token to be drawn")

    monkeypatch.setattr(pair.engine.runner, "draws", lambda _chunks: True)
    monkeypatch.setattr(pair.engine.runner, "draw", draw)
    assert embedding(pair.engine, ids(length), "mean").embedding is not None


def test_an_embedding_that_is_no_number_is_an_error(pair, monkeypatch):
    plain = Pooler.take
    monkeypatch.setattr(Pooler, "take", lambda self, states, position: plain(self, states * torch.nan, position))
    pair.engine.submit(Request(tuple(ids(5)), SamplingParams(max_tokens=1), pooling="mean"))
    last = list(steps(pair.engine))[-1]
    assert isinstance(last, FinishedEvent) and isinstance(last.error, NonFiniteError)


def test_an_embedding_beside_answers_is_the_same(pair):
    alone = embedding(pair.engine, ids(70), "mean").embedding
    answer = pair.engine.submit(Request(tuple(ids(40)), SamplingParams(max_tokens=20)))
    pair.engine.submit(Request(tuple(ids(70)), SamplingParams(max_tokens=1), pooling="mean"))
    found = {event.request_id: event for event in steps(pair.engine) if isinstance(event, FinishedEvent)}
    assert [event.embedding for event in found.values() if event.request_id != answer] == [alone]
    assert found[answer].embedding is None


def test_a_prompt_may_fill_the_whole_context_and_no_more(pair):
    embedding(pair.engine, ids(pair.engine.ctx), "mean")
    with pytest.raises(ContextOverflowError):
        embedding(pair.engine, ids(pair.engine.ctx + 1), "mean")


def test_an_embedding_that_is_given_up_leaves_nothing(pair):
    request_id = pair.engine.submit(Request(tuple(ids(90)), SamplingParams(max_tokens=1), pooling="mean"))
    pair.engine.step()
    pair.engine.abort(request_id)
    (last,) = pair.engine.step()
    assert isinstance(last, FinishedEvent) and last.finish_reason == "cancelled" and last.embedding is None
