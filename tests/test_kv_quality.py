"""What benchmarks/kv_quality.py measures, and what docs/internals/quality.md says of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import kv_quality, quality
from benchmarks.kv_quality import outlier_run, removed, runs_of
from benchmarks.measure import known, with_section
from localllm.cache.kv_format import KV_FORMATS
from localllm.hub.names import TINY_DIRECTORY
from localllm.models.families import load_config
from localllm.quant.recipe import RECIPES
from tests.thinning import every_other

pytestmark = pytest.mark.skipif(
    not (TINY_DIRECTORY / "model.safetensors").exists(), reason="the built-in model is not in this tree"
)
MOST_PERCENT = {"int8": 0.05, "k8v4": 0.2, "int4": 0.7}  # of perplexity


def measured() -> dict[str, Any]:
    return known("kv_quality")


def test_the_page_shows_the_results_that_are_committed() -> None:
    text = quality.PAGE.read_text(encoding="utf-8")
    assert with_section(text, kv_quality.BEGIN, kv_quality.END, kv_quality.tables(measured())) == text


@pytest.mark.parametrize("group", ["exact", "shipped"])
@pytest.mark.parametrize("kv", list(MOST_PERCENT))
def test_a_format_costs_no_more_perplexity_than_it_may(group: str, kv: str) -> None:
    (run,) = runs_of(measured()["runs"], group=group, kv=kv)
    assert run["increase_percent"] + run["standard_error_percent"] <= MOST_PERCENT[kv]


def test_int4_takes_29_hundredths_of_the_memory_of_bf16_and_less() -> None:
    (row,) = [row for row in measured()["memory"] if row["kv"] == "int4"]
    assert measured()["memory"] == kv_quality.memory()
    assert row["page"] < row["32768"] < row["8192"] <= 0.29


@pytest.mark.parametrize("loss", ["kl_nats", "increase_percent"])
@pytest.mark.parametrize("factor", [8, 16, 32, 64])
def test_the_rotation_removes_four_fifths_of_what_int4_loses_by_outliers(factor: int, loss: str) -> None:
    plain, rotated = (outlier_run(measured()["runs"], "int4", factor, is_rotated=turned) for turned in (False, True))
    assert removed(plain[loss], rotated[loss]) >= 0.8


def test_of_small_outliers_it_removes_as_much_of_what_they_add() -> None:
    runs = measured()["runs"]
    (exact,), (unrotated,) = (
        runs_of(runs, group="exact", kv="int4"),
        runs_of(runs, group="rounded", kv="int4", factor=1),
    )
    plain, rotated = (outlier_run(runs, "int4", 4, is_rotated=turned)["kl_nats"] for turned in (False, True))
    assert removed(plain - unrotated["kl_nats"], rotated - exact["kl_nats"]) >= 0.8


@pytest.fixture(scope="module")
def make() -> kv_quality.KVSubjects:
    return kv_quality.KVSubjects(quality.Subjects(load_config(TINY_DIRECTORY)))


@pytest.fixture(scope="module")
def window() -> list[int]:
    return [(7 * i * i + 3 * i) % 4000 + 5 for i in range(300)]


@pytest.fixture(scope="module")
def base(make: kv_quality.KVSubjects, window: list[int]) -> torch.Tensor:
    return make.paged("exact", RECIPES["bf16"], "exact", KV_FORMATS["bf16"]).log_probabilities(window)


@pytest.mark.parametrize("kv", every_other(["int8", "k8v4", "int4"]))
def test_rounding_outside_of_pages_is_that_of_the_programs_pages(
    make: kv_quality.KVSubjects, window: list[int], base: torch.Tensor, kv: str
) -> None:
    """But for a code here and there whose value lies between two."""
    kv_format = KV_FORMATS[kv]
    program = make.paged("exact", RECIPES["bf16"], "exact", kv_format).log_probabilities(window)
    ours = make.rounded(kv_format, is_rotated=True).log_probabilities(window)
    lost = (program - base).abs().mean()
    assert (program - ours).abs().mean() < 0.05 * lost
    assert (program - make.rounded(kv_format, is_rotated=False).log_probabilities(window)).abs().mean() > 0.2 * lost


def test_outliers_change_nothing_that_is_computed_exactly(
    make: kv_quality.KVSubjects, window: list[int], base: torch.Tensor
) -> None:
    decoder = make.make.decoder(RECIPES["bf16"], "exact")
    before = decoder.blocks[0].body.linears[0].tensors["weight"].clone()
    kv_quality.put_outliers(decoder, 64)
    assert not torch.equal(decoder.blocks[0].body.linears[0].tensors["weight"], before)
    subject = make._subject({}, decoder, KV_FORMATS["bf16"])
    torch.testing.assert_close(subject.log_probabilities(window), base, rtol=0, atol=1e-5)
