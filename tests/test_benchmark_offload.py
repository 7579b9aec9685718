"""The trace of experts that `benchmarks.offload --part experts` decodes with."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.offload_experts import Trace

BLOCKS, EXPERTS, TOP_K, TOKENS = 4, 128, 8, 500


def test_a_trace_repeats_and_foresees_as_often_as_it_says_and_is_the_same_without_guesses() -> None:
    plain, guessed = (Trace(BLOCKS, EXPERTS, 0.45, 0.8, BLOCKS * EXPERTS // 2) for _ in range(2))
    chosen: list[set[int]] = []
    right = []
    for number in range(BLOCKS * TOKENS):
        guess = set(guessed.guess(TOP_K)) if number % BLOCKS else None  # the first block of a token is not guessed
        (row,) = guessed.choose(1, TOP_K).tolist()
        assert [row] == plain.choose(1, TOP_K).tolist()
        chosen.append(set(row))
        right += [] if guess is None else [len(guess & chosen[-1]) / TOP_K]
    repeated = [len(a & b) / TOP_K for block in range(BLOCKS) for a, b in pairwise(chosen[block::BLOCKS])]
    by_chance = 0.55 * TOP_K / EXPERTS
    assert sum(repeated) / len(repeated) == pytest.approx(0.45 + by_chance, abs=0.02)
    assert sum(right) / len(right) == pytest.approx(0.8, abs=0.02)
    assert (plain.wanted, plain.hits) == (guessed.wanted, guessed.hits) and plain.wanted == BLOCKS * TOKENS * TOP_K
