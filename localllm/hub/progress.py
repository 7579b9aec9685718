"""The progress of a pull as plain data: imports nothing of the network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PullProgress:
    """The progress of a pull. `done_bytes` of `total_bytes` are on the disk and hashed."""

    phase: Literal["listing", "waiting", "verifying", "downloading", "retrying"]
    file: str = ""
    file_done_bytes: int = 0
    file_bytes: int = 0
    done_bytes: int = 0
    total_bytes: int = 0
    note: str = ""


Progress = Callable[[PullProgress], None]
