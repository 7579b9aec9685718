"""Bars of amounts, lines of the parts that fit, and the keys of a screen as such a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from textual.binding import Binding
from textual.content import Content
from textual.style import Style
from textual.widget import Widget

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_GAP = "  "


def bar(share: float, columns: int, style: str = "$primary") -> Content:
    """A share of 1 as a bar, to an eighth of a column."""
    eighths = round(min(1.0, max(0.0, share)) * columns * 8)
    if share > 0:
        eighths = max(1, eighths)
    full, rest = divmod(eighths, 8)
    text = _EIGHTHS[8] * full + (_EIGHTHS[rest] if rest else "")
    return Content.styled(text.ljust(columns), f"{style} on $foreground 15%")


def split_bar(parts: Mapping[str, float], columns: int, styles: Mapping[str, str]) -> Content:
    """Shares of 1 side by side, each in its style; at least one cell, for the largest."""
    shown, used, total = Content(), 0, 0.0
    for name, share in parts.items():
        total += share
        end = min(columns, round(total * columns))
        shown += Content.styled(_EIGHTHS[8] * (end - used), styles[name])
        used = end
    if total > 0 and not used:
        largest = max(parts, key=lambda name: parts[name])
        shown, used = Content.styled(_EIGHTHS[8], styles[largest]), 1
    return shown + Content.styled("░" * (columns - used), "$foreground-muted")


def fitting(parts: Sequence[tuple[int, Content]], columns: int) -> Content:
    """The parts that fit, in their order; those of the highest rank are dropped first."""
    kept: list[int] = []
    used = -len(_GAP)
    for index in sorted(range(len(parts)), key=lambda index: parts[index][0]):
        length = parts[index][1].cell_length
        if length and used + len(_GAP) + length <= columns:
            kept.append(index)
            used += len(_GAP) + length
    return Content(_GAP).join([parts[index][1] for index in sorted(kept)])


class KeyBar(Widget):
    """Keys that the focused field would take as letters are muted, but a click still presses them. Where room is short
    the last are dropped, but for those that lead away and to the help."""

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
        } | {"app.help": "help", "app.leave": "quit"}
        stays = ("app.", ".back", ".close")
        parts = [
            (0 if any(part in names for part in stays) else rank, self._part(names.split(), word))
            for rank, (names, word) in enumerate(words.items(), start=1)
        ]
        return fitting(parts, self.content_size.width)

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
        shown, actions, focused = Content(), [], self.screen.focused
        for name in names:
            place, binding = self._bound[name]
            key = self.app._keymap.get(name, binding.key).split(",")[0].strip()
            is_letter = len(key) == 1 or key in ("slash", "space")
            is_taken = is_letter and focused is not None and focused.check_consume_key(key, key[0])
            style = "bold" if is_taken else "bold $text-accent"
            shown += Content.styled(self.app.get_key_display(binding.with_key(key)), style)
            actions.append(f"{place}.{binding.action}")
        shown += Content(f" {word}")
        return shown.stylize(Style.from_meta({"@click": actions[0]})) if len(actions) == 1 else shown
