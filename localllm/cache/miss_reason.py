"""The reason why a prompt was not found whole. Plain data: no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheMiss:
    """The place where a prompt leaves what was computed before.

    position: of the first token that differs; before, now: the ids that stood there in the nearest earlier prompt, and
    those that do now.
    snapshot: the last token before `position` behind which there is a snapshot of recurrent states, where keys and
    values are known of more.
    """

    position: int
    before: tuple[int, ...] = ()
    now: tuple[int, ...] = ()
    snapshot: int | None = None
