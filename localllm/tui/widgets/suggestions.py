"""A list above the composer: commands that begin as the line does, or what was asked before."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from localllm.chat.text import visible


class Suggestions(OptionList, can_focus=False):
    """Hidden while there is nothing to suggest. The keys stay with the composer."""

    DEFAULT_CSS = """
    Suggestions {
        height: auto;
        max-height: 9;
        border: none;
        padding: 0 1;
        background: $surface;
        display: none;
        text-wrap: nowrap;
        text-overflow: ellipsis;
        &.-shown { display: block; }
        & > .option-list--option { padding: 0 1; }
    }
    """

    def __init__(self) -> None:
        super().__init__(compact=True, markup=False)
        self._values: list[str] = []

    def suggest(self, found: Sequence[tuple[str, str]]) -> None:
        """(value, how it is shown); the first is chosen."""
        self._values = [value for value, _ in found]
        self.clear_options()
        self.add_options([Option(Content(visible(" ".join(shown.split("\n"))))) for _, shown in found])
        self.highlighted = 0 if found else None
        self.set_class(bool(found), "-shown")

    @property
    def is_shown(self) -> bool:
        return bool(self._values)

    @property
    def chosen(self) -> str | None:
        """The value that is highlighted."""
        index = self.highlighted
        return self._values[index] if index is not None and index < len(self._values) else None

    def value_of(self, index: int) -> str:
        return self._values[index]
