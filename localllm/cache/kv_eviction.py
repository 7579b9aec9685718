"""`--kv-evict`: which keys and values of a long sequence leave before its end. Plain numbers: no torch.

A page leaves as a whole, in all layers without a window of their own. Positions stay true: no key is moved or rotated
anew. The first page never leaves: what a model finds there carries the rest (StreamingLLM, arXiv:2309.17453).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localllm.kernels.sizes import PAGE_TOKENS

# Tokens of a forward that pages are reserved for where earlier ones leave; a longer one lets the pools grow meanwhile.
FORWARD_TOKENS = 2560
MOST_TOKENS = 2**31


@dataclass(frozen=True)
class Eviction:
    """kind: `sinks`, by position alone: a token sees the first page, so many tokens before its own page, and that.
    `heavy`, by attention (H2O, arXiv:2306.14048): where the full pages hold more tokens, the one with the least of it
    leaves, but none of the newest, which are half of them."""

    kind: Literal["sinks", "heavy"]
    tokens: int

    @classmethod
    def of(cls, setting: str) -> Eviction | None:
        """Return what a setting says that was checked before; None where everything stays."""
        kind, _, tokens = setting.partition(":")
        return cls("sinks" if kind == "sinks" else "heavy", int(tokens)) if tokens else None

    @property
    def pages(self) -> int:
        """Beside the first one, those before its own that a token sees; for `heavy`, the full pages that stay."""
        return -(-self.tokens // PAGE_TOKENS) if self.kind == "sinks" else self.tokens // PAGE_TOKENS

    @property
    def newest(self) -> int:
        """The full pages that `heavy` never gives up."""
        return self.pages // 2

    def unseen(self, number: int) -> range:
        """Return the pages that no token of this page or a later one sees, by their position alone."""
        return range(1, max(1, number - self.pages)) if self.kind == "sinks" else range(0)

    @property
    def variant(self) -> bytes:
        """What tells pages from those of other settings. What `heavy` changes is never sealed: see `exact_tokens`."""
        return b"sinks%d" % self.pages if self.kind == "sinks" else b""


def most_pages(window: int | None, eviction: Eviction | None) -> int | None:
    """Return the pages of one layer that a sequence has at most at one time, however long it is, with those of a
    forward; None where it has all. window: of that layer."""
    if window is not None:
        return -(-(window + FORWARD_TOKENS) // PAGE_TOKENS) + 1
    if eviction is None:
        return None
    return 1 + eviction.pages + FORWARD_TOKENS // PAGE_TOKENS + 1
