"""What benchmarks/context_quality.py measures."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import closing

import pytest

from benchmarks import context_quality, quality
from benchmarks.context_quality import NAMES, Probe, Reading, Window
from benchmarks.measure import known, with_section
from localllm.engine.engine import Engine
from localllm.engine.events import TokenLogprob
from localllm.engine.prefix_config import NO_REUSE
from localllm.hub.names import TINY_DIRECTORY
from localllm.settings import EngineConfig
from localllm.text.tokenizer import Tokenizer
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.skipif(
    not (TINY_DIRECTORY / "model.safetensors").exists(), reason="the built-in model is not in this tree"
)
CTX = 512


@pytest.fixture(scope="module")
def text() -> str:
    return (REPOSITORY / "docs" / "internals" / "tiny.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY_DIRECTORY)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with closing(Engine.load("tiny", EngineConfig(ctx=CTX, speculate="off"), reuse=NO_REUSE)) as engine:
        yield engine


def test_the_page_shows_the_results_that_are_committed() -> None:
    page, result = quality.PAGE.read_text(encoding="utf-8"), known("context_quality") or {"runs": {}}
    tables = context_quality.tables(result)
    assert with_section(page, context_quality.BEGIN, context_quality.END, tables) == page


def test_what_is_forced_has_the_probabilities_that_perplexity_is_made_of(
    engine: Engine, tokenizer: Tokenizer, text: str
) -> None:
    ids = tokenizer.encode(text)[:120]
    windows = [Window(ids[:begin], ids[begin:], (), ()) for begin in (1, 100)]
    read = context_quality.forced(engine, windows)
    assert [[each.token_id for each in tokens] for tokens in read] == [ids[1:], ids[100:]]
    surprise = -sum(each.logprob for each in read[0])
    assert math.isclose(surprise / 119, engine.perplexity(ids).nll, rel_tol=2e-3)
    assert math.isclose(sum(each.logprob for each in read[0][99:]), sum(each.logprob for each in read[1]), rel_tol=1e-2)


@pytest.mark.parametrize("probe", ["facts", "passages"])
def test_a_window_fills_the_context_and_asks_for_every_needle(tokenizer: Tokenizer, text: str, probe: str) -> None:
    windows = context_quality.make_windows(tokenizer, text * 4, probe, 1024, 2)
    asked, *controls = windows[:2] if probe == "passages" else windows[:1]
    assert len(asked.prompt) + len(asked.forced) == 1024
    assert sorted(asked.order) == list(range(len(NAMES)))
    for control in controls:
        assert control.forced == asked.forced
        assert len(control.prompt) == len(asked.prompt) - sum(len(each.ids) for each in asked.probes)


def test_needles_lie_at_tenths_of_the_hay() -> None:
    hidden = context_quality.hidden([[-n] for n in range(1, 10)], list(range(100)))
    assert [token for token in hidden if token >= 0] == list(range(100))
    assert [hidden.index(-n) for n in range(1, 10)] == [10 * n + n - 1 for n in range(1, 10)]


def test_a_fact_is_asked_for_by_a_token_that_no_other_number_begins_with(tokenizer: Tokenizer) -> None:
    needles, probes = context_quality.facts(tokenizer, random.Random(0))
    assert {probe.ids[probe.begin] for probe in probes} == probes[0].rivals
    for needle, probe in zip(needles, probes, strict=True):
        assert tokenizer.decode(list(probe.ids)) in tokenizer.decode(needle)


def test_an_answer_is_found_where_every_token_is_the_likeliest_and_likeliest_where_it_leads_its_rivals() -> None:
    def told(token_id: int, logprob: float, *others: tuple[int, float]) -> TokenLogprob:
        top = sorted([(token_id, logprob), *others], key=lambda pair: -pair[1])
        return TokenLogprob(token_id, "", logprob, tuple(TokenLogprob(each, "", value) for each, value in top))

    probe = Probe((7, 1, 2), 1, 3, frozenset({1, 5}))
    cue, second = told(7, -9.0), told(2, -1.0)
    assert probe.scores([cue, told(1, -0.5, (5, -2.0)), second]) == {"found": 1, "likeliest": 1, "logprob": -0.75}
    assert probe.scores([cue, told(1, -1.5, (4, -0.1), (5, -2.0)), second])["found"] == 0
    assert probe.scores([cue, told(1, -1.5, (4, -0.1), (5, -2.0)), second])["likeliest"] == 1
    assert probe.scores([cue, told(1, -1.5, (5, -1.0)), second])["likeliest"] == 0


def test_a_setting_is_measured_beside_all_of_the_context(tokenizer: Tokenizer, text: str) -> None:
    windows = context_quality.make_windows(tokenizer, text, "passages", CTX, 1)
    base, coded = (Reading.of("tiny", CTX, fields, windows) for fields in ({}, {"kv": "int4"}))
    same, other = base.result(base, windows), coded.result(base, windows)
    assert same["increase_percent"] == same["gain_change"] == 0
    assert 0 < abs(float(str(other["increase_percent"]))) < 10
    assert 0 < abs(float(str(other["gain_change"]))) < 0.1
