"""Where one block of a model rests and who computes it. Planner, models and engine share these values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tier = Literal["vram", "ram", "disk"]

NEVER = 1 << 62  # rows that no forward has


@dataclass(frozen=True)
class BlockPlacement:
    """A block, where its bytes rest between two steps, and who computes it in a step of a few tokens.

    split: both compute it, side by side; of its bytes in RAM the device has a copy of `device_bytes`.
    """

    name: str
    num_bytes: int
    tier: Tier
    exec: Literal["cpu", "gpu", "split"]
    device_bytes: int = 0
