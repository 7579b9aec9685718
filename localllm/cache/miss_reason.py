"""The reason why a prompt was not found whole. Plain data: no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheMiss:
    """The place where a prompt leaves what was computed before.

    position: of the first token that differs; before, now: the ids that stood there in the nearest earlier prompt, and
    those that do now.
    known: the tokens whose keys and values are known, where nothing differs: recurrent states are known of no more than
    the first `position`.
    """

    position: int
    before: tuple[int, ...] = ()
    now: tuple[int, ...] = ()
    known: int | None = None
