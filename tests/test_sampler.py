"""From logits to a token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.engine.request import SamplingParams
from localllm.engine.sampler import penalised, repetitions, sample, truncated
from localllm.errors import UsageError
from localllm.kernels.noise import gumbel_noise, noise_key
from tests.choices.support import running
from tests.thinning import examples

NOTHING = float("-inf")


def logits(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def kept(scores: torch.Tensor) -> list[int]:
    return scores.isfinite().nonzero().squeeze(1).tolist()


def draw(scores: torch.Tensor, position: int, **params: float) -> int:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return sample(scores, running(sampling, position, seed=sampling.seed or 0), [0] * position)


def test_temperature_zero_takes_the_best_token() -> None:
    assert draw(logits(1.0, 3.0, 2.0), 5, temperature=0.0) == 1


def test_the_same_seed_and_position_give_the_same_token() -> None:
    scores = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert [draw(scores, p, seed=7) for p in range(20)] == [draw(scores, p, seed=7) for p in range(20)]


def test_other_seeds_and_other_positions_give_other_tokens() -> None:
    flat = torch.zeros(1000)
    assert len({draw(flat, p, seed=7) for p in range(50)}) > 40
    assert len({draw(flat, 3, seed=s) for s in range(50)}) > 40


def test_draws_follow_the_softmax() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    n = 4000
    counts = torch.bincount(
        torch.tensor([draw(probabilities.log(), p, seed=11, temperature=1.0) for p in range(n)]), minlength=4
    )
    chi_squared = ((counts - n * probabilities) ** 2 / (n * probabilities)).sum().item()
    assert chi_squared < 16.3  # 0.1 % of honest samples exceed this, at 3 degrees of freedom; the seed is fixed


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel_noise(noise_key(3, 17), torch.arange(200_000))
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)


def test_noise_of_a_token_does_not_depend_on_which_others_are_candidates() -> None:
    everything = gumbel_noise(noise_key(5, 9), torch.arange(100))
    assert torch.equal(gumbel_noise(noise_key(5, 9), torch.tensor([3, 50, 99])), everything[[3, 50, 99]])


def test_noise_of_neighbouring_positions_and_seeds_is_uncorrelated() -> None:
    ids = torch.arange(50_000)
    rows = torch.stack([gumbel_noise(noise_key(s, p), ids) for s, p in ((1, 1), (1, 2), (2, 1), (2, 2))])
    off_diagonal = torch.corrcoef(rows) - torch.eye(4, dtype=torch.float64)
    assert off_diagonal.abs().max() < 0.03


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 99}, [0, 1, 2, 3]),
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.55}, [0, 1]),
        ({"top_p": 0.81}, [0, 1, 2]),
        ({"top_p": 0.0}, [0]),
        ({"min_p": 0.5}, [0, 1]),
        ({"min_p": 0.1}, [0, 1, 2, 3]),
        ({"min_p": 1.0}, [0]),
        ({"top_k": 3, "top_p": 0.6}, [0, 1]),
        ({"typical_p": 0.2}, [1]),
    ],
)
def test_truncations_keep_what_their_definition_says(params: dict[str, float], expected: list[int]) -> None:
    scores = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert kept(truncated(scores, SamplingParams(**params))) == expected  # type: ignore[arg-type]


def test_a_nucleus_wider_than_the_first_candidates_is_exact() -> None:
    scores = torch.zeros(5000)
    assert len(kept(truncated(scores, SamplingParams(top_p=0.5)))) == pytest.approx(2500, abs=1)


@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40), st.data())
@settings(max_examples=examples(150), deadline=None)
def test_some_token_always_remains(values: list[float], data: st.DataObject) -> None:
    params = SamplingParams(
        temperature=data.draw(st.floats(0.01, 5)),
        top_k=data.draw(st.integers(0, 50)),
        top_p=data.draw(st.floats(0, 1)),
        min_p=data.draw(st.floats(0, 1)),
        typical_p=data.draw(st.floats(0, 1)),
    )
    token = sample(torch.tensor(values), running(params, 1, seed=data.draw(st.integers(0, 2**63 - 1))), [0])
    assert 0 <= token < len(values)


def test_repetition_penalty_weakens_every_token_of_prompt_and_answer() -> None:
    out = penalised(logits(2.0, -2.0, 2.0), running(SamplingParams(repetition_penalty=2.0), 1), [0, 1])
    assert out.tolist() == [1.0, -4.0, 2.0]


@pytest.mark.parametrize(
    ("window", "repeated", "counted"),
    [
        (-1, {0, 1, 2}, {1: 1, 2: 2}),
        (3, {1, 2}, {1: 1, 2: 2}),
        (2, {2}, {2: 2}),
        (1, {2}, {2: 1}),
        (0, set(), {}),
        (100, {0, 1, 2}, {1: 1, 2: 2}),
    ],
)
def test_penalties_look_at_the_last_tokens_only(window: int, repeated: set[int], counted: dict[int, int]) -> None:
    token_ids = [0, 0, 1, 2, 2]  # a prompt of two
    params = SamplingParams(repetition_penalty=2.0, repeat_last_n=window)
    out = penalised(logits(4.0, 4.0, 4.0, 4.0), running(params, 2), token_ids)
    assert {index for index, value in enumerate(out.tolist()) if value == 2.0} == repeated
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=1.0, repeat_last_n=window)
    out = penalised(logits(4.0, 4.0, 4.0, 4.0), running(params, 2), token_ids)
    assert out.tolist() == [4.0 - (1.0 + 0.5 * counted[index] if index in counted else 0.0) for index in range(4)]


def test_frequency_and_presence_penalties_count_the_answer_only() -> None:
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=1.0)
    out = penalised(torch.zeros(3), running(params, 2), [0, 0, 1, 1, 2])
    assert out.tolist() == [0.0, -2.0, -1.5]


def test_logit_bias_can_force_and_forbid_a_token() -> None:
    assert draw(logits(9.0, 0.0), 0, temperature=0.0) == 0
    out = penalised(logits(9.0, 0.0), running(SamplingParams(logit_bias={1: 100.0}), 0), [])
    assert out.argmax() == 1


def test_penalties_leave_the_models_logits_alone() -> None:
    original = logits(1.0, 2.0)
    penalised(original, running(SamplingParams(repetition_penalty=2.0, logit_bias={0: 5.0}), 0), [0, 1])
    assert original.tolist() == [1.0, 2.0]


def test_dry_finds_the_token_that_would_continue_a_repetition() -> None:
    # 1 2 3 4 ... 1 2 3 -> 4 would make a run of 4
    assert repetitions([1, 2, 3, 4, 9, 1, 2, 3], 2, frozenset()) == {4: 3}


def test_dry_matches_nothing_over_a_breaker() -> None:
    assert repetitions([1, 2, 3, 4, 9, 1, 2, 3], 2, frozenset({2})) == {}
    assert repetitions([1, 2, 3, 4, 9, 1, 2, 3], 2, frozenset({1})) == {4: 2}


def naive_repetitions(tokens: list[int], allowed: int) -> dict[int, int]:
    longest: dict[int, int] = {}
    for end in range(1, len(tokens)):
        length = 0
        while length < end and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= allowed:
            longest[tokens[end]] = max(longest.get(tokens[end], 0), length)
    return longest


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 4))
@settings(max_examples=examples(200), deadline=None)
def test_dry_finds_what_a_search_over_all_ends_finds(tokens: list[int], allowed: int) -> None:
    assert repetitions(tokens, allowed, frozenset()) == naive_repetitions(tokens, allowed)


def test_dry_penalty_grows_with_the_run() -> None:
    params = SamplingParams(dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=2)
    out = penalised(torch.zeros(10), running(params, 0), [1, 2, 3, 4, 9, 1, 2, 3])
    assert out[4].item() == -2.0
    assert out.count_nonzero() == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"temperature": math.nan},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"top_k": -1},
        {"seed": -1},
        {"max_tokens": 0},
        {"repetition_penalty": 0},
        {"stop": ("",)},
        {"logprobs": -1},
        {"logit_bias": {1: math.inf}},
        {"logit_bias": {1: math.nan}},
        {"top_k": 2.5},
        {"seed": 1.5},
        {"stop": "abc"},
    ],
)
def test_a_value_out_of_range_is_refused_by_name(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(bad))):
        SamplingParams(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [1e-40, 1e-38, 1e-10])
def test_a_temperature_near_zero_takes_the_best_token(temperature: float) -> None:
    assert draw(logits(1.0, 3.0, 0.0, 2.9), 5, temperature=temperature, top_p=0.9) == 1
    assert draw(logits(-5.0, -3.0, -9.0), 5, temperature=temperature) == 1
