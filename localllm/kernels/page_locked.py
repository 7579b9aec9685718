"""The host's memory as a GPU copies to and from it on its own: pages that stay where they are. A system gives only so
many of them, Windows under WSL 0.5 to 1 GiB in all."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def page_locked(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros in the host's memory for copies to and from `device`; in ordinary memory, which is copied slower and
    not beside what is computed, where the system gives no more of the other."""
    import torch

    if device.type == "cuda":
        # The driver says "CUDA error: out of memory" of the host's as well, and nobody shall give up the card's for it.
        # An error that is not of this allocation is told by the next call.
        with suppress(RuntimeError):
            return torch.zeros(shape, dtype=dtype, pin_memory=True)
    return torch.zeros(shape, dtype=dtype)


def copy_event() -> torch.cuda.Event:
    """Return an event for the end of a copy. A thread that waits for it sleeps: one that spins takes a whole core."""
    import torch

    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
