"""The receiver of notices beside an answer: a line on stderr, a notice on a screen."""

from __future__ import annotations

from typing import Protocol


class Teller(Protocol):
    """May be called from any thread."""

    def note(self, text: str) -> None:
        """Something that a person may want to know."""
        ...

    def warn(self, text: str) -> None:
        """Something that is not as it was wanted."""
        ...
