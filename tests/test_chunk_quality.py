"""What benchmarks/chunk_quality.py measures."""

from __future__ import annotations

import pytest

from benchmarks import chunk_quality, quality
from benchmarks.measure import known, with_section
from localllm.hub.names import TINY_DIRECTORY
from localllm.text.tokenizer import Tokenizer
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.skipif(
    not (TINY_DIRECTORY / "model.safetensors").exists(), reason="the built-in model is not in this tree"
)
CTX = {"facts": 640, "passages": 640, "chains": 1024}


def windows(probe: str) -> list[chunk_quality.Moved]:
    text = (REPOSITORY / "docs" / "internals" / "tiny.md").read_text(encoding="utf-8")
    return chunk_quality.make_windows(Tokenizer.load(TINY_DIRECTORY), text, probe, CTX[probe], 160, 1)


def test_the_page_shows_the_results_that_are_committed() -> None:
    page, tables = quality.PAGE.read_text(encoding="utf-8"), chunk_quality.tables(known("chunk_quality"))
    assert with_section(page, chunk_quality.BEGIN, chunk_quality.END, tables) == page


@pytest.mark.parametrize("kind", ["facts", "passages", "chains"])
def test_both_prompts_of_a_window_have_the_same_documents_and_nothing_before_them(kind: str) -> None:
    for window in windows(kind):
        assert len(window.prompt) + len(window.forced) <= CTX[kind] and len(window.probes) > 1
        assert window.prompt[:64] != window.source[:64]
        ends = [list(each[-window.num_taken :]) for each in (window.prompt, window.source)]
        assert sorted(ends[0]) == sorted(ends[1])
        answers = [tuple(probe.ids[probe.begin : probe.end]) for probe in window.probes]
        for ids in ends:
            found = [
                answer for answer in answers if answer in {tuple(ids[n : n + len(answer)]) for n in range(len(ids))}
            ]
            assert found == ([] if window.is_control else answers)


def test_documents_are_taken_but_for_the_share_that_is_computed() -> None:
    given = windows("passages")
    base, of_base = chunk_quality.reading("tiny", CTX["passages"], given, None)
    own, computed = chunk_quality.reading("tiny", CTX["passages"], given, 0.02)
    assert of_base == 1 and 0.1 < computed < 0.9
    assert 0 < abs(float(str(own.result(base, given)["increase_percent"]))) < 10
