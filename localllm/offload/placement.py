"""Where one block of a model rests and who computes it: values that planner, models and engine share.

When memory that was there at the start is gone, the cheapest thing is given up first, and only what helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Tier = Literal["vram", "ram", "disk"]

NEVER = 1 << 62  # rows that no forward has
# Of shapes of a GPU's forwards whose graphs are kept. A chat has those of one token, of a draft's rows, of a question's
# rest (32 or 64) and of whole chunks, and its steps grow over two or three numbers of pages.
GRAPH_ROOMS = 8
# Of the blocks that rest on a device, so many move at once; fewer would be asked for again at the next step.
_SHARE = 8
_LEAST = 3  # two of them have room in the ring that they pass through from then on
LEAST_SLOTS = 2  # of each mixture, on average: with a few layers that is fewer than a token needs, which come in turn


@dataclass(frozen=True)
class ExpertSlots:
    """The experts of a block, each of `num_bytes`: `slots` of the `count` have room at a time in the memory that they
    are brought to, the host's from the disk, a device's from the host's."""

    count: int
    num_bytes: int
    slots: int


@dataclass(frozen=True)
class BlockPlacement:
    """A block, where its bytes rest between two steps, and who computes it in a step of a few tokens.

    split: both compute it, side by side; of its bytes in RAM the device has a copy of `device_bytes`.
    experts: of a mixture. Where that is on the disk, what all tokens share of it is in memory nevertheless; where it is
    in RAM and the GPU computes it, what all tokens share is in the device's memory, and so are the slots.
    """

    name: str
    num_bytes: int
    tier: Tier
    exec: Literal["cpu", "gpu", "split"]
    device_bytes: int = 0
    experts: ExpertSlots | None = None

    @property
    def is_slotted(self) -> bool:
        """Whether a device computes it with those of its experts that are in slots, and the host with the others."""
        return self.experts is not None and self.tier == "ram" and self.exec == "gpu"

    @property
    def slotted_bytes(self) -> int:
        """The bytes of a slotted block that the device has: what all tokens share, and slots."""
        if self.experts is None or not self.is_slotted:
            return 0
        return self.num_bytes - (self.experts.count - self.experts.slots) * self.experts.num_bytes

    @property
    def held_bytes(self) -> int:
        """The bytes of a mixture on the disk that are in memory: what all tokens share, and slots for its experts."""
        if self.experts is None or self.tier != "disk":
            return 0
        return self.num_bytes - (self.experts.count - self.experts.slots) * self.experts.num_bytes


@dataclass(frozen=True)
class ExpertCount:
    """Experts of all blocks together: those of blocks that are in memory as a whole, slots for others, and all.

    tier: of the slots, and so of the memory that this is about: "vram" where a device computes with slots of its own.
    """

    resident: int
    slots: int
    total: int
    tier: Tier = "ram"

    @classmethod
    def of(cls, blocks: Sequence[BlockPlacement]) -> ExpertCount | None:
        """Return the experts of a mixture; None for any other model."""
        placed = [(block, block.experts) for block in blocks if block.experts is not None]
        if not placed:
            return None
        slotted = [experts for block, experts in placed if block.is_slotted or block.tier == "disk"]
        total = sum(experts.count for _, experts in placed)
        resident, slots = total - sum(each.count for each in slotted), sum(each.slots for each in slotted)
        return cls(resident, slots, total, "vram" if any(block.is_slotted for block, _ in placed) else "ram")

    @property
    def in_memory(self) -> int:
        """The most that are in memory at a time."""
        return self.resident + self.slots


def demoted(blocks: Sequence[BlockPlacement], tier: Tier, is_tied: bool) -> list[BlockPlacement] | None:
    """Move some of the blocks that have bytes in `tier` one tier further down; return None where none has any.

    From a device's memory blocks go to the host's and are copied at every step, while what was split, and the head, is
    computed there; from the host's to the disk. is_tied: the embedding is the head's matrix, and goes where that goes.
    """
    leaving = next((names for names in _in_turn(blocks, tier, is_tied) if names), None)
    if leaving is None:
        return None
    return [_down(block, tier) if block.name in leaving else block for block in blocks]


def _in_turn(blocks: Sequence[BlockPlacement], tier: Tier, is_tied: bool) -> Iterator[set[str]]:
    """Yield the names of blocks that go together, the cheapest first, and of MLPs the last ones."""
    embed, *layers, head = blocks
    if tier == "vram":
        yield {block.name for block in layers if block.exec == "split"}
        yield {block.name for block in layers if block.is_slotted and block.experts and _halved(block.experts)}
    elif not is_tied:  # a token needs a row of it
        yield {embed.name} if embed.tier == tier else set()
    if tier == "ram":  # fewer experts at a time, in all blocks alike
        yield {block.name for block in layers if block.experts and block.held_bytes and _halved(block.experts)}
    there = [block for block in layers if block.tier == tier or (tier == "vram" and block.is_slotted)]
    for some in ([block for block in there if block.name.endswith("mlp")], there):
        yield {block.name for block in some[-max(_LEAST, len(some) // _SHARE) :]}
    if tier == "vram" or not is_tied:
        yield {block.name for block in ((embed, head) if is_tied else (head,)) if block.tier == tier}


def _halved(experts: ExpertSlots) -> ExpertSlots | None:
    """Return the experts with half as many slots; None where they have as few as can be."""
    slots = experts.slots // 2
    return replace(experts, slots=slots) if slots >= LEAST_SLOTS else None


def _down(block: BlockPlacement, tier: Tier) -> BlockPlacement:
    if tier == "ram" and block.experts is not None and block.exec == "cpu":
        return replace(block, tier="disk", experts=_halved(block.experts) or block.experts)
    if tier == "vram" and block.is_slotted and block.experts is not None:  # with none it passes through the ring
        return replace(block, experts=_halved(block.experts))
    if tier == "ram":
        experts = None if block.is_slotted else block.experts
        return replace(
            block, tier="disk", exec="cpu" if block.exec == "cpu" else "gpu", device_bytes=0, experts=experts
        )
    stays = block.exec == "split" or block.name in ("embed", "head")
    return replace(block, tier="ram", exec="cpu" if stays else "gpu", device_bytes=0)
