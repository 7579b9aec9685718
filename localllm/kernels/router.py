"""Which experts of a mixture compute a token, and with which weights. Plain data: no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scores = Literal["softmax", "sigmoid", "chosen", "sparsemixer"]


@dataclass(frozen=True)
class RouterConfig:
    """One row of the table of routers: how logits [num_experts] become `top_k` experts and their weights.

    scores: softmax or sigmoid of all logits, a softmax over the chosen logits only (`chosen`), or SparseMixer
    (arXiv:2310.00811), which chooses one expert after another, each by a softmax over those within `jitter` of it.
    has_correction: a vector [num_experts] is added to the scores for the choice, not for the weights.
    groups, top_groups: experts are chosen from the `top_groups` groups whose two best scores have the largest sum.
    normalizes: weights are divided by max(their sum + sum_epsilon, sum_floor).
    scale: multiplies the weights at last.
    has_expert_scales: a vector [num_experts] does, too, each expert's number its weight.
    """

    scores: Scores
    num_experts: int
    top_k: int
    has_correction: bool = False
    groups: int = 1
    top_groups: int = 1
    normalizes: bool = False
    sum_epsilon: float = 0.0
    sum_floor: float = 0.0
    scale: float = 1.0
    jitter: float = 0.0
    has_expert_scales: bool = False
