"""What benchmarks/quality.py measures, and what docs/internals/quality.md says of it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks import quality
from benchmarks.measure import known, with_section
from localllm.cache.paged_kv import PagedKV
from localllm.engine.perplexity import perplexity
from localllm.hub.names import TINY_DIRECTORY
from localllm.models.families import load_config
from localllm.quant.int4 import Int4
from localllm.quant.int8 import Int8
from localllm.quant.recipe import RECIPES
from localllm.text.tokenizer import Tokenizer
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.skipif(
    not (TINY_DIRECTORY / "model.safetensors").exists(), reason="the built-in model is not in this tree"
)


def measured() -> dict[str, Any]:
    return known("quality")


def run(blocks: str, embedding: str, activations: str = "exact") -> dict[str, Any]:
    key = (blocks, embedding, activations)
    (found,) = [run for run in measured()["runs"] if (run["blocks"], run["embedding"], run["activations"]) == key]
    return dict(found)


def test_the_page_shows_the_results_that_are_committed() -> None:
    text = quality.PAGE.read_text(encoding="utf-8")
    assert with_section(text, quality.BEGIN, quality.END, quality.tables(measured())) == text


@pytest.mark.parametrize("activations", ["exact", "int8", "product"])
def test_int8_costs_less_than_a_thousandth_of_perplexity(activations: str) -> None:
    assert run("int8", "int8", activations)["increase_percent"] < 0.1


@pytest.mark.parametrize("activations", ["exact", "int8", "product"])
def test_the_default_recipe_costs_less_than_three_percent_of_perplexity(activations: str) -> None:
    assert run("int4-g64", "int8", activations)["increase_percent"] < 3


@pytest.mark.parametrize("group", [32, 64, 128])
def test_hqq_is_nearer_to_the_model_than_round_to_nearest_and_than_it_was_published(group: int) -> None:
    ours = run(f"int4-g{group}", "bf16")
    assert ours["kl_nats"] < run(f"int4-g{group}-rtn", "bf16")["kl_nats"]
    assert ours["kl_nats"] < run(f"int4-g{group}-published", "bf16")["kl_nats"]


def test_the_default_recipe_has_less_perplexity_than_with_round_to_nearest() -> None:
    assert run("int4-g64", "bf16")["perplexity"] < run("int4-g64-rtn", "bf16")["perplexity"]


@pytest.fixture(scope="module")
def make() -> quality.Subjects:
    return quality.Subjects(load_config(TINY_DIRECTORY))


@pytest.fixture(scope="module")
def window() -> list[int]:
    """Prose that the tiny model has not been trained on."""
    prose = (REPOSITORY / "docs" / "internals" / "tiny.md").read_text(encoding="utf-8").split("Plain continuation")[1]
    return Tokenizer.load(TINY_DIRECTORY).encode(prose, bos=True)[:150]


@pytest.fixture(scope="module")
def base(make: quality.Subjects, window: list[int]) -> torch.Tensor:
    """The log-probabilities of the window in bf16 weights."""
    return make.of(RECIPES["bf16"], "exact").log_probabilities(window)


@pytest.mark.parametrize(
    ("recipe", "activations", "most_kl"),
    [
        ("bf16", "product", 0.002),
        ("int8", "exact", 0.001),
        ("int8", "product", 0.003),
        ("int4-g64", "exact", 0.03),
        ("int4-g64", "int8", 0.03),
        ("int4-g64", "product", 0.03),
    ],
)
def test_the_tiny_model_says_nearly_the_same_in_every_format(
    make: quality.Subjects, window: list[int], base: torch.Tensor, recipe: str, activations: str, most_kl: float
) -> None:
    subject = make.of(RECIPES[recipe], activations)
    subject.read(window, base)
    result = subject.result(quality.token_surprises(base, window).double())
    assert 0 < float(str(result["kl_nats"])) < most_kl  # zero: the format was not in use


def test_the_perplexity_is_that_of_the_command(make: quality.Subjects, window: list[int]) -> None:
    subject = make.of(RECIPES["bf16"], "product")
    own = subject.log_probabilities(window)
    expected = perplexity(subject.runner, window, ctx=len(window), new_kv=partial(PagedKV, subject.kv.pages))
    assert math.isclose(quality.token_surprises(own, window).mean().item(), expected.nll, rel_tol=1e-3)


def test_windows_are_whole_and_spread_over_the_text() -> None:
    assert quality.cut_windows(list(range(25)), 5, None) == [list(range(i, i + 5)) for i in range(0, 25, 5)]
    assert [window[0] for window in quality.cut_windows(list(range(103)), 10, 3)] == [0, 30, 60]
    assert len(quality.cut_windows(list(range(25)), 5, 99)) == 5


def test_formats_are_measured_beside_what_they_have_to_beat() -> None:
    names = [weights.name for weights in quality.FORMATS]
    assert {Int8().name, Int4().name, "int4-g64-rtn", "int4-g64-published", "nf4"} <= set(names)
    assert len(set(names)) == len(names)
