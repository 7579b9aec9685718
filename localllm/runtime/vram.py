"""A cap on the memory of a GPU where none is used: refused where it was typed, left aside where it is stored."""

from __future__ import annotations

from collections.abc import Callable

from localllm.config import ResolvedSettings


def vram_cap(resolved: ResolvedSettings, tell: Callable[[str], None], *, has_gpu: bool) -> int | None:
    """The cap on the GPU's memory. One of a file or a variable is left aside where no GPU is used, which `tell` hears
    of: machines with a GPU and without share such files.

    Raises UsageError for one that was typed there.
    """
    cap, origin = resolved.settings.vram, resolved.origins["vram"]
    if cap is None or has_gpu:
        return cap
    refuse_idle_vram(resolved)
    tell(f"the setting vram from {origin.where} is left aside: no GPU is used")
    return None


def refuse_idle_vram(resolved: ResolvedSettings) -> None:
    """Raises UsageError for a cap on a GPU's memory that was typed where none is used."""
    if resolved.origins["vram"].kind == "flag":
        from localllm.offload.planner.fit_errors import idle_vram

        raise idle_vram()
