"""The keys of a screen as a line; each can be clicked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from textual.binding import Binding
from textual.content import Content
from textual.style import Style
from textual.widget import Widget

from localllm.tui.bars import fitting


class KeyBar(Widget):
    """Keys that the focused field would take as letters are muted, but a click still presses them. Where room is short
    the last are dropped."""

    DEFAULT_CSS = "KeyBar { height: 1; padding: 0 1; color: $text-muted; }"

    def __init__(self, words: Mapping[str, str] | None = None) -> None:
        """words: a word for each key, by its binding's id on the screen or the app; several ids separated by a blank
        share a word, and cannot be clicked. By default the bindings of the screen that are shown."""
        super().__init__()
        self.auto_links = False
        self._words = words

    def on_mount(self) -> None:
        self.screen.bindings_updated_signal.subscribe(self, lambda _: self.refresh())

    def render(self) -> Content:
        words = self._words or {
            name: binding.description
            for name, (place, binding) in self._bound.items()
            if place == "screen" and binding.show
        }
        parts = [self._part(names.split(), word) for names, word in words.items()]
        return fitting(list(enumerate(parts)), self.content_size.width)

    @property
    def _bound(self) -> Mapping[str, tuple[str, Binding]]:
        """The bindings by id, each with the namespace of its action."""
        return {
            binding.id: (place, binding)
            for place, node in (("app", self.app), ("screen", self.screen))
            for binding in node.BINDINGS
            if isinstance(binding, Binding) and binding.id is not None
        }

    def _part(self, names: Sequence[str], word: str) -> Content:
        shown, actions = Content(), []
        for name in names:
            place, binding = self._bound[name]
            key = self.app._keymap.get(name, binding.key).split(",")[0].strip()
            shown += Content.styled(self.app.get_key_display(binding.with_key(key)), self._style(key))
            actions.append(f"{place}.{binding.action}")
        shown += Content(f" {word}")
        return shown.stylize(Style.from_meta({"@click": actions[0]})) if len(actions) == 1 else shown

    def _style(self, key: str) -> str:
        focused = self.screen.focused
        is_letter = len(key) == 1 or key in ("slash", "space")
        taken = focused is not None and is_letter and focused.check_consume_key(key, key[0])
        return "bold" if taken else "bold $text-accent"
