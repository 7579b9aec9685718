"""The expected gain of drafting under a plan: one read of the weights verifies several tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from localllm.config import format_bytes, format_figure
from localllm.offload.planner.costs import Costs
from localllm.offload.planner.plan import Plan
from localllm.settings import DRAFT_TOKENS

# Of drafted tokens that are accepted, before any run: on a text that quotes itself, and on others.
USUAL_ALPHAS = (0.8, 0.6)
# The harm of leaving a block out, h where a share exp(-h) of drafts stays right. Published sets skip half of the
# attention and a quarter to half of the MLPs, and nothing at either end (SWIFT, arXiv:2410.06916).
_ATTENTION_HARM, _MLP_HARM, _EDGE_FACTOR, _EDGE_SHARE = 0.02, 0.06, 5.0, 0.1


@dataclass(frozen=True)
class Gain:
    """A step of one sequence with the best number of drafts. speedup: beside a step without; below 1, none is made."""

    count: int
    tok_s: float
    speedup: float


def gain(
    costs: Costs, depth: int, alpha: float, draft_s: float, *, staging_s: float = 0.0, most: int = DRAFT_TOKENS
) -> Gain:
    """Return the best gain (Leviathan et al., arXiv:2211.17192, theorem 3.8, with what is fetched meanwhile).

    alpha: the share of drafts that are accepted.
    draft_s: seconds of one draft.
    staging_s: of what is fetched in that time, as much as there is a place for.
    """
    plain_s = costs.decode_s(depth)
    options = []
    for count in range(1, most + 1):
        drafting_s = count * draft_s
        verifying_s = costs.decode_s(depth, 1 + count) - min(drafting_s, staging_s)
        tokens = sum(alpha**place for place in range(count + 1))
        options.append(Gain(count, tokens / (drafting_s + verifying_s), plain_s * tokens / (drafting_s + verifying_s)))
    return max(options, key=lambda option: option.tok_s)


def slow(plan: Plan) -> frozenset[str]:
    """Return the blocks, and perhaps the head, that are not where they are computed fastest."""
    return frozenset(block.name for block in plan.blocks[1:] if block.tier != plan.fast or block.exec == "split")


def skipped(plan: Plan) -> frozenset[str]:
    """Return what is left out while drafting: all that is slow; nothing where the head is, or no block would stay."""
    left_out = slow(plan)
    is_possible = plan.blocks[-1].name not in left_out and len(left_out) < len(plan.blocks) - 2 and plan.shape.can_skip
    return left_out if is_possible else frozenset()


def skipping(plan: Plan, harm: Mapping[str, float], most: int) -> tuple[float, Gain]:
    """Return the expected share of accepted drafts, and their gain. harm: of each block, as `usual_harm` has it."""
    left_out = skipped(plan)
    alpha = expected_alpha(left_out, harm)
    kept = sum(block.num_bytes for block in plan.blocks[1:] if block.name not in left_out)
    head = plan.shape.embed.num_bytes if plan.shape.is_tied else 0
    draft_s = plan.costs.fast_s(kept + head)
    return alpha, gain(plan.costs, plan.prompt_tokens, alpha, draft_s, staging_s=staging_s(plan), most=most)


def usual_harm(names: Sequence[str]) -> dict[str, float]:
    """Return what leaving out each of these blocks usually does; attention and MLP take turns."""
    harm = {}
    for index, name in enumerate(names):
        place = (index + 0.5) / len(names)
        is_edge = min(place, 1 - place) < _EDGE_SHARE
        harm[name] = (_MLP_HARM if index % 2 else _ATTENTION_HARM) * (_EDGE_FACTOR if is_edge else 1.0)
    return harm


def why_left_out(num_bytes: int, weight_bytes: int, with_it: Plan | None, without: Plan) -> str:
    """Return why a model should draft without a second one; "" where the second one pays.

    num_bytes: that the second one takes.
    weight_bytes: of its weights.
    """
    taken = f"it takes {format_bytes(num_bytes)}"
    if with_it is None:
        return f"{taken}, for which there is no room"
    found = gain(with_it.costs, with_it.prompt_tokens, USUAL_ALPHAS[0], with_it.costs.fast_s(weight_bytes))
    alone_tok_s = 1 / without.costs.decode_s(without.prompt_tokens)
    if found.tok_s > alone_tok_s:
        return ""
    return (
        f"{taken}, with which {format_figure(found.tok_s)} tok/s are expected, and {format_figure(alone_tok_s)} without"
    )


def expected_alpha(left_out: frozenset[str], harm: Mapping[str, float]) -> float:
    return math.exp(-sum(harm.get(name, 0.0) for name in left_out))


def staging_s(plan: Plan) -> float:
    """Return the seconds in which the ring is filled while nothing is taken from it."""
    by = "gpu" if plan.fast == "vram" else "cpu"
    fetched_bytes = sum(block.num_bytes for block in plan.blocks[1:] if block.tier != plan.fast and block.exec == by)
    if not fetched_bytes:
        return 0.0
    return plan.costs.decode_s(plan.prompt_tokens) * min(1.0, plan.ring_bytes / fetched_bytes)
