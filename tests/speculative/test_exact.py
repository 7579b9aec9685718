"""The law of sampled tokens is that of the model, whatever is drafted: the tokens of many seeds beside the exact
probabilities (chi-squared)."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from localllm.engine.request import Request, SamplingParams
from localllm.engine.sampler import next_token
from localllm.engine.sequence import Sequence
from localllm.text.detokenizer import Detokenizer
from localllm.text.tokenizer import Tokenizer
from tests.speculative.support import loaded

VOCAB, LENGTH = 5, 3
Text = tuple[int, ...]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    engine = loaded()
    engine.close()
    return engine.tokenizer


def tables(seed: int) -> Tensor:
    """Logits [VOCAB + 1, VOCAB] behind each token; the last row is behind the prompt."""
    return 1.5 * torch.randn(VOCAB + 1, VOCAB, generator=torch.Generator().manual_seed(seed))


def speculated(tokenizer: Tokenizer, target: Tensor, draft: Tensor, sampling: SamplingParams, seed: int) -> Text:
    """Three tokens, drafted by the other table and sampled as an engine does; each depends on the last one alone."""
    request = Request((VOCAB,), sampling)
    sequence = Sequence(0, request, seed=seed, ctx=64, detokenizer=Detokenizer(tokenizer), breaker_ids=frozenset())
    while sequence.num_completion_tokens < LENGTH:
        drafted = list(sequence.token_ids)
        for _ in range(LENGTH - sequence.num_completion_tokens - 1):
            drafted.append(next_token(draft[drafted[-1]], sequence, drafted))
        length = len(sequence.token_ids)
        rows = torch.stack([target[token] for token in drafted[length - 1 :]])
        for row in range(len(rows)):
            token_id = next_token(rows[row], sequence, sequence.token_ids)
            sequence.token_ids.append(token_id)
            if row + 1 < len(rows) and token_id != drafted[length + row]:
                break
    return tuple(sequence.token_ids[1 : 1 + LENGTH])


def exact(target: Tensor, temperature: float) -> dict[Text, float]:
    probabilities = (target.double() / temperature).softmax(-1)
    found: dict[Text, float] = {(): 1.0}
    for _ in range(LENGTH):
        found = {
            (*text, token): share * float(probabilities[text[-1] if text else VOCAB, token])
            for text, share in found.items()
            for token in range(VOCAB)
        }
    return found


def chi_squared(counts: Counter[Text], expected: dict[Text, float], total: int) -> float:
    """By how many standard deviations the statistic is above its mean; texts that are too rare count as one."""
    cells = [(counts[text], total * share) for text, share in expected.items() if total * share >= 5]
    rare = total - sum(count for count, _ in cells), total - sum(mean for _, mean in cells)
    cells += [rare] if rare[1] >= 5 else []
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    freedom = len(cells) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def check(tokenizer: Tokenizer, samples: int, temperature: float) -> None:
    target, draft = tables(1), tables(1) + 0.7 * tables(2)
    sampling = SamplingParams(temperature=temperature, max_tokens=LENGTH)
    counts = Counter(speculated(tokenizer, target, draft, sampling, seed) for seed in range(samples))
    assert chi_squared(counts, exact(target, temperature), samples) < 4
    assert chi_squared(counts, exact(draft, temperature), samples) > 20  # it would be seen


def test_the_law_is_the_models(tokenizer: Tokenizer) -> None:
    check(tokenizer, 4000, 0.9)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_the_law_is_the_models_over_100_000_samples(tokenizer: Tokenizer, temperature: float) -> None:
    check(tokenizer, 100_000, temperature)
