"""What guessing tokens ahead would give under a plan: one reading of the weights verifies several of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from localllm.kernels.kv_page import PAGE_TOKENS
from localllm.offload.planner.plan import BlockShape, Costs, ModelShape, Plan
from localllm.settings import DRAFT_TOKENS

# Of drafted tokens that are accepted, before any run: on a text that quotes itself, and on others.
USUAL_ALPHAS = (0.8, 0.6)
# The harm of leaving a block out, h where a share exp(-h) of drafts stays right. Published sets skip half of the
# attention and a quarter to half of the MLPs, and nothing at either end (SWIFT, arXiv:2410.06916).
_ATTENTION_HARM, _MLP_HARM, _EDGE_FACTOR, _EDGE_SHARE = 0.02, 0.06, 5.0, 0.1


@dataclass(frozen=True)
class Gain:
    """Of a step of one sequence, with the best number of guesses. speedup: beside a step without; below 1, nobody
    guesses."""

    count: int
    tok_s: float
    speedup: float


def gain(
    costs: Costs, depth: int, alpha: float, guess_s: float, *, staging_s: float = 0.0, most: int = DRAFT_TOKENS
) -> Gain:
    """alpha: the share of guesses that are right. guess_s: what one takes. staging_s: of what is fetched in that time,
    as much as there is a place for. (Leviathan et al., arXiv:2211.17192, theorem 3.8, with what is fetched meanwhile.)
    """
    plain_s = costs.decode_s(depth)
    options = []
    for count in range(1, most + 1):
        guessing_s = count * guess_s
        verifying_s = costs.decode_s(depth, 1 + count) - min(guessing_s, staging_s)
        tokens = sum(alpha**place for place in range(count + 1))
        options.append(Gain(count, tokens / (guessing_s + verifying_s), plain_s * tokens / (guessing_s + verifying_s)))
    return max(options, key=lambda option: option.tok_s)


def fork_bytes(shape: ModelShape) -> int:
    """Of a second end of one sequence, for other guesses and for trials: two pages, and what any sequence has; pools
    grow by as much again."""
    return 2 * shape.kv_bytes(2 * PAGE_TOKENS)


def slow(plan: Plan) -> frozenset[str]:
    """The blocks, and perhaps the head, that are not where they are computed fastest."""
    return frozenset(block.name for block in plan.blocks[1:] if block.tier != plan.fast or block.exec == "split")


def skipped(plan: Plan) -> frozenset[str]:
    """What is left out while guessing: all that is slow. Nothing where the head is, or no block would stay."""
    left_out = slow(plan)
    is_possible = plan.blocks[-1].name not in left_out and len(left_out) < len(plan.blocks) - 2
    return left_out if is_possible else frozenset()


def skipping(plan: Plan, harm: Mapping[str, float], most: int) -> tuple[float, Gain]:
    """The share of guesses expected to be right, and what they give. harm: of each block, as `usual_harm`
    has it."""
    left_out = skipped(plan)
    alpha = expected_alpha(left_out, harm)
    kept = sum(block.num_bytes for block in plan.blocks[1:] if block.name not in left_out)
    head = plan.shape.embed.num_bytes if plan.shape.is_tied else 0
    guess_s = plan.costs.fast_s(kept + head)
    return alpha, gain(plan.costs, plan.prompt_tokens, alpha, guess_s, staging_s=staging_s(plan), most=most)


def usual_harm(names: Sequence[str]) -> dict[str, float]:
    """Return what leaving out each of these blocks usually does; attention and MLP take turns."""
    harm = {}
    for index, name in enumerate(names):
        place = (index + 0.5) / len(names)
        is_edge = min(place, 1 - place) < _EDGE_SHARE
        harm[name] = (_MLP_HARM if index % 2 else _ATTENTION_HARM) * (_EDGE_FACTOR if is_edge else 1.0)
    return harm


def rate(plan: Plan, harm: Mapping[str, float], most: int) -> float:
    """Tokens a second of one sequence, with the guesses of what is near, where they pay; at most so many at once."""
    guessed = skipping(plan, harm, most)[1].tok_s if harm and most and skipped(plan) else 0.0
    return max(1 / plan.costs.decode_s(plan.prompt_tokens), guessed)


def needed(blocks: Sequence[BlockShape], count: int, harm: Mapping[str, float]) -> set[str]:
    """The names of so many of the blocks, those that do the most harm where they are left out."""
    return set(sorted((block.name for block in blocks), key=lambda name: -harm.get(name, 0.0))[:count])


def expected_alpha(left_out: frozenset[str], harm: Mapping[str, float]) -> float:
    return math.exp(-sum(harm.get(name, 0.0) for name in left_out))


def staging_s(plan: Plan) -> float:
    """In which the ring is filled while nothing is taken from it."""
    by = "gpu" if plan.fast == "vram" else "cpu"
    fetched_bytes = sum(block.num_bytes for block in plan.blocks[1:] if block.tier != plan.fast and block.exec == by)
    if not fetched_bytes:
        return 0.0
    return plan.costs.decode_s(plan.prompt_tokens) * min(1.0, plan.ring_bytes / fetched_bytes)
