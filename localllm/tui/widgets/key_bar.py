"""The keys of a screen in one line, as far as there is room; each can be clicked."""

from __future__ import annotations

from collections.abc import Iterator

from textual.binding import Binding
from textual.content import Content
from textual.style import Style
from textual.widget import Widget

from localllm.tui.bars import fitting


class KeyBar(Widget):
    """Shows the bindings of its screen that are to be shown, under the keys that the user has given them; those that
    come first stay longest."""

    DEFAULT_CSS = """
    KeyBar { height: 1; padding: 0 1; color: $text-muted; link-style: none; link-color: $text-muted; }
    """

    def render(self) -> Content:
        return fitting(list(self._parts()), self.content_size.width)

    def _parts(self) -> Iterator[tuple[int, Content]]:
        for rank, binding in enumerate(self.screen.BINDINGS):
            if not isinstance(binding, Binding) or not binding.show:
                continue
            key = self.app._keymap.get(binding.id or "", binding.key).partition(",")[0]
            shown = self.app.get_key_display(binding.with_key(key))
            text = Content.styled(shown, "bold $text-accent") + Content(f" {binding.description}")
            yield rank, text.stylize(Style.from_meta({"@click": f"screen.{binding.action}"}))
