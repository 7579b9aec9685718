"""How many of the experts that tokens want are in memory, by the share of them that has room there.

Those used last stay (LRU), so a curve follows from how long ago each wanted expert was used last, counted in other
experts of its block: one run tells the whole curve (Mattson et al., 1970).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localllm.offload.streaming.expert_uses import BINS

# Before a model has run: Qwen3-30B-A3B with slots for 5, 15, 30 and 50 % of its experts.
_USUAL_POINTS = ((0.0, 0.0), (0.05, 0.37), (0.15, 0.74), (0.3, 0.89), (0.5, 0.96), (1.0, 1.0))
# Mixtral-8x7B with slots for 2 to 4 of 8: a few large experts are wanted in turn (arXiv:2312.17238: 40 to 60 %).
_POINTS_OF_FEW = ((0.0, 0.0), (0.25, 0.4), (0.5, 0.6), (1.0, 1.0))
_FEW = 16  # experts of a block
LEAST_WANTED = 20_000  # experts, before a run says more than what is usual: 50 tokens of 48 layers with 8 each


@dataclass(frozen=True)
class HitCurve:
    """points: the share of the experts that has room, and that of the hits, both rising from 0 to 1.

    learnt_from: wanted experts of earlier runs; 0 where the curve is the usual one.
    """

    points: tuple[tuple[float, float], ...] = _USUAL_POINTS
    learnt_from: int = 0

    @classmethod
    def of(cls, counts: Sequence[int], usual: HitCurve) -> HitCurve:
        """Return the curve of earlier runs; the usual one where they were too short to tell.

        counts: as `ExpertUses` has them.
        """
        wanted = sum(counts)
        if wanted < LEAST_WANTED:
            return usual
        points, hits = [(0.0, 0.0)], 0
        for index, count in enumerate(counts[:BINS]):
            hits += count
            points.append(((index + 1) / BINS, hits / wanted))
        return cls((*points[:-1], (1.0, 1.0)), learnt_from=wanted)

    def hits(self, share: float) -> float:
        """Return the share of wanted experts that are there if this share of all has room."""
        for (low, fewer), (high, more) in zip(self.points, self.points[1:], strict=False):
            if share <= high:
                return fewer + (more - fewer) * (share - low) / (high - low)
        return 1.0


USUAL = HitCurve()
USUAL_OF_FEW = HitCurve(_POINTS_OF_FEW)


def usual_curve(num_experts: int) -> HitCurve:
    """Return what is expected of a model that has not run. num_experts: of a block."""
    return USUAL_OF_FEW if num_experts <= _FEW else USUAL
