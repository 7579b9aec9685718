"""What to give up when memory that was there at the start is gone: the cheapest thing first, and only what helps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from localllm.offload.plan import Placed, Tier

# Of the blocks that rest on a device, so many move at once; fewer would be asked for again at the next step.
_SHARE = 8
_LEAST = 3  # two of them have room in the ring that they pass through from then on


def demoted(blocks: Sequence[Placed], tier: Tier) -> list[Placed] | None:
    """Some of the blocks that rest in `tier` one tier further down, MLPs first and the last ones; None where none is.

    From a device's memory they go to the host's and are copied at every step; from the host's to the disk.
    """
    movable = [block for block in blocks[1:-1] if block.tier == tier]  # the vocabulary's matrices stay
    there = [block for block in movable if block.name.endswith("mlp")] or movable
    if not there:
        return None
    count = max(_LEAST, len(there) // _SHARE)
    leaving = {block.name for block in there[-count:]}
    return [_down(block) if block.name in leaving else block for block in blocks]


def _down(block: Placed) -> Placed:
    if block.tier == "vram":
        return replace(block, tier="ram", exec="gpu")
    return replace(block, tier="disk", exec="cpu" if block.exec == "cpu" else "gpu", device_bytes=0)
