"""From logits to a token: penalties, truncations, and a sample whose noise depends on (seed, position, token) alone.

Sampling is Gumbel-max: argmax(logits + noise) is a sample of softmax(logits). The same seed gives the same text
whatever the batch, the chunking or the device, and a drafter can share the noise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from localllm.engine.events import TokenLogprob
from localllm.engine.request import SamplingParams
from localllm.engine.sequence import Sequence as Running
from localllm.errors import LocalLLMError
from localllm.kernels.noise import gumbel_noise, noise_key
from localllm.layers.batch import Draw

COLDEST = 1e-30  # of temperatures; what is less may be 0 in fp32
NUCLEUS_CANDIDATES = 1024  # a full sort of a 150k vocabulary costs 10 ms, its best 1024 cost 1


@dataclass(frozen=True)
class PlainDraw:
    """Sampling that looks at no earlier token and compares no probabilities: what a GPU's kernel does by itself."""

    seed: int
    temperature: float
    min_p: float

    @classmethod
    def of(cls, params: SamplingParams, seed: int) -> PlainDraw | None:
        """Return None where the parameters ask for more."""
        penalties = (params.frequency_penalty, params.presence_penalty, params.dry_multiplier, len(params.logit_bias))
        is_plain = (
            not any(penalties)
            and params.repetition_penalty == params.top_p == params.typical_p == 1.0
            and params.top_k == 0
            and params.logprobs is None
        )
        return cls(seed, params.temperature, params.min_p) if is_plain else None

    @classmethod
    def of_sequence(cls, sequence: Running) -> PlainDraw | None:
        """Return None where a GPU's kernel cannot sample for it."""
        request = sequence.request
        looks_at_logits = sequence.likelihood is not None or request.beams > 1 or sequence.pool is not None
        if looks_at_logits or request.mask is not None or sequence.constraint is not None:
            return None
        return cls.of(request.sampling, sequence.seed)

    def at(self, position: int) -> Draw:
        threshold = math.log(self.min_p) if self.min_p > 0 else -math.inf
        return Draw(noise_key(self.seed, position), self.temperature, threshold)


def next_token(logits: Tensor, sequence: Running, token_ids: Sequence[int]) -> int:
    """Sample what follows these tokens, the sequence's own and perhaps drafted ones behind them, from fp32 logits
    [V]."""
    constraint = sequence.constraint
    if constraint is not None:
        answer = token_ids[sequence.num_prompt_tokens :]
        if forced := constraint.forced(answer):
            return forced[0]
        if sequence.request.sampling.temperature == 0:
            # What is the likeliest of all and allowed is the likeliest of what is allowed: no mask is needed.
            best = sample(logits, sequence, token_ids)
            if constraint.allows(answer, best):
                return best
    return sample(_allowed(logits, sequence, token_ids), sequence, token_ids)


def next_token_with_margin(logits: Tensor, sequence: Running, token_ids: Sequence[int]) -> tuple[int, float]:
    """Sample as `next_token` does; return by how much the token won, too: what other logits must differ by, in units of
    the temperature, for another one to win with the same noise. Infinite where there is no other."""
    candidates, scores = _scored(_allowed(logits, sequence, token_ids), sequence, token_ids)
    best = scores.topk(min(2, len(scores)))
    margin = float(best.values[0] - best.values[-1]) if len(scores) > 1 else math.inf
    first = best.indices[0]
    return int(first if candidates is None else candidates[first]), margin


def log_probabilities(logits: Tensor, sequence: Running, token_ids: Sequence[int]) -> Tensor:
    """Return fp32 [V] for what may follow these tokens, where nothing is sampled. Penalties and masks change them as
    they would change logits: they need not sum up to 1 then. Raises LocalLLMError where nothing may follow."""
    return _allowed(penalised(logits.log_softmax(-1), sequence, token_ids), sequence, token_ids)


def _allowed(logits: Tensor, sequence: Running, token_ids: Sequence[int]) -> Tensor:
    """Return logits that are -inf where a mask or a grammar forbids. Raises LocalLLMError where it allows nothing."""
    request = sequence.request
    if sequence.constraint is not None:
        return sequence.constraint.held(logits, token_ids[sequence.num_prompt_tokens :])
    if request.mask is None:
        return logits
    allowed = request.mask(token_ids[sequence.num_prompt_tokens :]).to(logits.device)
    if not bool(allowed.any()):
        why = f"nothing may follow after {len(token_ids) - sequence.num_prompt_tokens} tokens of the answer"
        raise LocalLLMError("the answer cannot go on as it must", why=why)
    return logits.masked_fill(~allowed, -torch.inf)


def sample(logits: Tensor, sequence: Running, token_ids: Sequence[int]) -> int:
    """Sample the token that follows `token_ids` (prompt and answer so far) from fp32 logits [V], whatever is
    allowed."""
    candidates, scores = _scored(logits, sequence, token_ids)
    best = scores.argmax()
    return int(best if candidates is None else candidates[best])


def _scored(logits: Tensor, sequence: Running, token_ids: Sequence[int]) -> tuple[Tensor | None, Tensor]:
    """Return the tokens that may be sampled, None for all, and their scores, with noise in fp64: the best one wins."""
    params = sequence.request.sampling
    logits = penalised(logits, sequence, token_ids)
    if params.temperature == 0:
        return None, logits
    # Measured from the best, so that a temperature near zero makes the others -inf and never the best one +inf.
    scores = truncated((logits - logits.max()) / max(params.temperature, COLDEST), params)
    candidates = _finite(scores)
    noise = gumbel_noise(noise_key(sequence.seed, len(token_ids)), candidates)
    return candidates, scores[candidates].double() + noise


def _finite(scores: Tensor) -> Tensor:
    """Return the indices of finite scores [V]."""
    if scores.device.type != "cpu":
        return scores.isfinite().nonzero().squeeze(1)
    # 130 us of 152,000, where torch takes 690
    return torch.from_numpy(numpy.flatnonzero(numpy.isfinite(scores.numpy())))


def penalised(logits: Tensor, sequence: Running, token_ids: Sequence[int]) -> Tensor:
    """Logit bias and the penalties for what has been said; the input is left as it was."""
    params, logits = sequence.request.sampling, logits.clone()
    for token_id, bias in params.logit_bias.items():
        logits[token_id] += bias
    begin = 0 if params.repeat_last_n < 0 else max(0, len(token_ids) - params.repeat_last_n)
    window = token_ids[begin:]
    if params.repetition_penalty != 1.0 and window:  # CTRL, arXiv:1909.05858: over prompt and answer
        seen = torch.tensor(sorted(set(window)), device=logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    answer = token_ids[max(begin, sequence.num_prompt_tokens) :]
    if (params.frequency_penalty or params.presence_penalty) and answer:  # OpenAI's definition: over the answer
        counts = Counter(answer)
        seen = torch.tensor(list(counts), device=logits.device)
        times = torch.tensor(list(counts.values()), device=logits.device)
        logits[seen] -= params.frequency_penalty * times + params.presence_penalty
    if params.dry_multiplier:
        for token_id, length in repetitions(token_ids, params.dry_allowed_length, sequence.breaker_ids).items():
            exponent = min(length - params.dry_allowed_length, 64)
            logits[token_id] -= params.dry_multiplier * params.dry_base**exponent
    return logits


def repetitions(token_ids: Sequence[int], allowed_length: int, breaker_ids: frozenset[int]) -> dict[int, int]:
    """Tokens that would continue a repeated run, with the longest such run's length (DRY, by p-e-w).

    One backward Z-pass: O(n) however repetitive the text. No run reaches over a breaker.
    """
    backward = list(reversed(token_ids))
    limit = next((i for i, token in enumerate(backward) if token in breaker_ids), len(backward))
    matches = _prefix_matches(backward)
    longest: dict[int, int] = {}
    for start, length in enumerate(matches[1:], start=1):
        length = min(length, limit)
        if length >= allowed_length:
            continuation = backward[start - 1]
            if continuation not in breaker_ids:
                longest[continuation] = max(longest.get(continuation, 0), length)
    return longest


def _prefix_matches(tokens: list[int]) -> list[int]:
    """Z-algorithm: for each position, how many tokens from there on equal the beginning (Gusfield 1997)."""
    n = len(tokens)
    matches = [0] * n
    left = right = 0
    for i in range(1, n):
        length = min(right - i, matches[i - left]) if i < right else 0
        while i + length < n and tokens[length] == tokens[i + length]:
            length += 1
        matches[i] = length
        if i + length > right:
            left, right = i, i + length
    return matches


def truncated(scores: Tensor, params: SamplingParams) -> Tensor:
    """Scores [V] with what top-k, typical, top-p and min-p reject set to -inf; the best token always stays."""
    if 0 < params.top_k < scores.shape[0]:
        scores = _keep(scores, scores.topk(params.top_k).indices)
    if params.typical_p < 1.0:
        scores = _keep(scores, _typical(scores, params.typical_p))
    if params.top_p < 1.0:
        scores = _keep(scores, _nucleus(scores, params.top_p))
    if params.min_p > 0.0:  # relative to the best token's probability (arXiv:2407.01082)
        threshold = scores.max() + torch.tensor(params.min_p).log().item()
        scores = scores.masked_fill(scores < threshold, float("-inf"))
    return scores


def _keep(scores: Tensor, indices: Tensor) -> Tensor:
    kept = torch.full_like(scores, float("-inf"))
    kept[indices] = scores[indices]
    return kept


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Indices of the smallest set of best tokens whose probability reaches top_p (arXiv:1904.09751)."""
    probs = scores.softmax(-1)
    best, indices = probs.topk(min(NUCLEUS_CANDIDATES, probs.shape[0]))
    if best.sum() < top_p:
        best, indices = probs.sort(descending=True)
    before = best.cumsum(-1) - best
    keep = before < top_p
    keep[0] = True
    return indices[keep]


def _typical(scores: Tensor, typical_p: float) -> Tensor:
    """Indices of the tokens whose surprise is nearest to the entropy, up to the mass typical_p (arXiv:2202.00666)."""
    logprobs = scores.log_softmax(-1)
    probs = logprobs.exp()
    entropy = -(probs * logprobs).nansum()
    order = (-logprobs - entropy).abs().argsort()
    sorted_probs = probs[order]
    keep = sorted_probs.cumsum(-1) - sorted_probs < typical_p
    keep[0] = True
    return order[keep]


def breaker_ids(params: SamplingParams, encode: Callable[[str], Sequence[int]]) -> frozenset[int]:
    """The tokens that stand for DRY's breakers: the last one of a text, as its first merges with what is before."""
    if not params.dry_multiplier:
        return frozenset()
    encoded = (encode("a" + breaker) for breaker in params.dry_breakers)
    return frozenset(ids[-1] for ids in encoded if ids)


def token_logprob(logits: Tensor, token_id: int, num_alternatives: int, text_of: Callable[[int], str]) -> TokenLogprob:
    """Return the log-probability of a sampled token and of the likeliest ones, from fp32 logits [V]."""
    logprobs = logits.log_softmax(-1)
    values, indices = logprobs.topk(min(num_alternatives, logprobs.shape[0]))
    pairs = zip(indices.tolist(), values.tolist(), strict=True)
    top = tuple(TokenLogprob(index, text_of(index), value) for index, value in pairs)
    return TokenLogprob(token_id, text_of(token_id), logprobs[token_id].item(), top)
