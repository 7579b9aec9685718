"""The model in the package: what later measurements rely on, and what a newcomer sees first."""

from __future__ import annotations

import pytest

from localllm import Engine, SamplingParams
from localllm.engine.request import Request
from localllm.hub.names import TINY_DIRECTORY
from localllm.models.families import load_config
from localllm.settings import EngineConfig
from tests.engine_support import Heard, answered

pytestmark = pytest.mark.skipif(
    not (TINY_DIRECTORY / "model.safetensors").exists(), reason="the built-in model is not in this tree"
)


@pytest.fixture(scope="module")
def tiny() -> Engine:
    return Engine.load("tiny", EngineConfig(device="cpu"))


def tales(tiny: Engine, request: str, count: int) -> list[Heard]:
    """So many, each by a seed of its own, in one batch."""
    prompt_ids = tuple(tiny.encode([{"role": "user", "content": request}]))
    draws = [SamplingParams(temperature=0.7, top_p=0.9, seed=seed) for seed in range(count)]
    return answered(tiny, *(Request(prompt_ids, draw, opens_turn=True) for draw in draws))


def test_it_is_small_deep_and_grouped() -> None:
    config = load_config(TINY_DIRECTORY)
    assert sum(path.stat().st_size for path in TINY_DIRECTORY.iterdir()) <= 15 * 2**20
    assert config.model_type == "llama"
    assert config.num_layers >= 12
    assert all(each.num_kv_heads < each.num_heads for each in config.attentions)
    assert config.tie_word_embeddings
    assert config.max_position_embeddings >= 1024


REQUESTS = [
    ("Tell me a tale about a fox who finds a lantern.", ("fox", "lantern")),
    ("Write a short story about a girl named Mira and a key.", ("Mira", "key")),
    ("A story about a dragon, please.", ("dragon",)),
    ("Tell me a story about an otter and a drum.", ("otter", "drum")),
    ("I would like a tale about a boy called Tavrin.", ("Tavrin",)),
]


@pytest.mark.parametrize(
    ("request_text", "named"),
    [REQUESTS[0], *(pytest.param(*request, marks=pytest.mark.slow) for request in REQUESTS[1:])],
    ids=[text for text, _ in REQUESTS],
)
def test_it_tells_a_whole_tale_about_what_was_named(tiny: Engine, request_text: str, named: tuple[str, ...]) -> None:
    told = [heard.text for heard in tales(tiny, request_text, 5) if heard.finished.finish_reason == "stop"]
    whole = [text for text in told if 40 <= len(text.split()) <= 400]
    assert len(whole) >= 4
    assert sum(all(name.lower() in text.lower() for name in named) for text in whole) >= 3
