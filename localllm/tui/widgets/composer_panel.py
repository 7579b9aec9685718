"""The composer with its suggestions and the files attached to the next question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from localllm.chat.text import one_line, visible
from localllm.tui.commands import completions
from localllm.tui.keys import KeyNames
from localllm.tui.messages import Turn
from localllm.tui.widgets.composer import Composer


class Suggestions(OptionList, can_focus=False):
    """Completions of a command, or earlier questions; hidden where there are none. The composer keeps the focus."""

    DEFAULT_CSS = """
    Suggestions {
        height: auto; max-height: 9; border: none; padding: 0 1; background: $surface; display: none;
        text-wrap: nowrap; text-overflow: ellipsis;
        &.-shown { display: block; }
        & > .option-list--option { padding: 0 1; }
    }
    """

    def __init__(self) -> None:
        super().__init__(compact=True, markup=False)
        self._values: list[str] = []

    def suggest(self, found: Sequence[tuple[str, str]]) -> None:
        """found: values and their texts; the first is chosen."""
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
        """The highlighted value."""
        index = self.highlighted
        return self._values[index] if index is not None and index < len(self._values) else None

    def value_of(self, index: int) -> str:
        return self._values[index]


_MOST_FOUND = 30  # questions listed by a search


class ComposerPanel(Vertical):
    """editing: the earlier question that is being replaced, or None."""

    DEFAULT_CSS = """
    ComposerPanel {
        height: auto;
        & > .attached { height: auto; padding: 0 1; color: $text-accent; display: none; }
    }
    """

    @dataclass
    class Finished(Message):
        """Send the message; `take` it where it can be sent."""

        text: str

    def __init__(self, draft: str, key_names: KeyNames) -> None:
        super().__init__()
        self._key_names = key_names
        self.composer = Composer(draft, key_names)
        self.editing: Turn | None = None
        self._suggestions = Suggestions()
        self._attached = Static("", classes="attached")
        self._is_finding = self._has_found = False
        self._aside = ""  # the text when the search began

    def compose(self) -> ComposeResult:
        yield self._suggestions
        yield self._attached
        yield self.composer

    @property
    def unsent(self) -> str:
        """The text being written."""
        return self.composer.unfolded(self._aside) if self._is_finding else self.composer.unsent

    def attach(self, files: Sequence[tuple[str, int]]) -> None:
        """Show the files that wait for the next question: names and characters."""
        names = [f"+ {one_line(name)} ({count:,} characters)" for name, count in files]
        self._attached.update(Content("  ".join(names)))
        self._attached.display = bool(files)

    def edit(self, question: Turn, text: str) -> None:
        """Begin to replace an earlier question."""
        self.editing = question
        self.composer.put_away()
        self.composer.rewrite(text)
        self.screen.set_focus(self.composer)
        self._show_mode()

    def take(self) -> Turn | None:
        """Empty the composer after a message was sent. Returns the question that it replaces."""
        composer, question = self.composer, self.editing
        composer.put_away()
        self.editing = None
        self._show_mode()
        return question

    def leave_edit(self) -> None:
        """Keep the question as it was; the arrow up brings back the replacement."""
        if self.editing is not None:
            self.editing = None
            self.composer.put_away()
            self._show_mode()

    def close(self) -> bool:
        """End the search, the suggestions or the edit. Returns False where there is none."""
        if self._is_finding:
            self._is_finding = False
            self.composer.write(self._aside)
        elif self._suggestions.is_shown:
            self._suggest([])
        elif self.editing is not None:
            self.leave_edit()
        else:
            return False
        self._show_mode()
        return True

    def on_composer_wanted(self, event: Composer.Wanted) -> None:
        if event.what == "send" and self.composer.whole.strip():
            self._send()
        elif event.what == "find":
            self._find()
        elif event.what == "complete":
            self._complete()

    def _send(self) -> None:
        chosen = self._suggestions.chosen if self._suggestions.is_shown else None
        if self._is_finding or (chosen is not None and chosen.strip() != self.composer.text.strip()):
            self._take(chosen)
        else:
            self.post_message(self.Finished(self.composer.whole))

    def on_text_area_changed(self) -> None:
        text = self.composer.text
        if self._is_finding:
            words = text.casefold()
            found = [asked for asked in self.composer.asked if words in asked.casefold()][:_MOST_FOUND]
            self._suggest([(asked, asked[:200]) for asked in found])
            self._has_found = bool(found)
            self._show_mode()
        else:
            self._suggest(completions(text) if self.editing is None else [])

    def _find(self) -> None:
        if self._is_finding:
            self._suggestions.action_cursor_down()
            return
        self._is_finding, self._aside = True, self.composer.text
        self.composer.write("")
        self.on_text_area_changed()
        self._show_mode()

    def _complete(self) -> None:
        if self._is_finding or self._suggestions.chosen is not None:
            self._take(self._suggestions.chosen)
        elif not self.composer.text:  # else what is typed on would be taken for the keys of a message
            self.screen.focus_next()

    def on_composer_step(self, event: Composer.Step) -> None:
        (self._suggestions.action_cursor_down if event.step > 0 else self._suggestions.action_cursor_up)()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self._take(self._suggestions.value_of(event.option_index))

    def _take(self, value: str | None) -> None:
        """Write a suggestion. The arrow up brings back what was being written before a search."""
        if value is None:
            return
        if self._is_finding:
            self._is_finding = False
            self.composer.write(self._aside)
            self.composer.put_away()
            self._show_mode()
        self.composer.write(value)
        self.screen.set_focus(self.composer)

    def _suggest(self, found: Sequence[tuple[str, str]]) -> None:
        self._suggestions.suggest(found)
        self.composer.is_suggesting = bool(found)

    def _show_mode(self) -> None:
        mode = ""
        send, find, close = (self._key_names[name] for name in ("composer.send", "composer.find", "chat.close"))
        if self._is_finding:
            mode = f"search what was asked: type; {find} the next, {send} takes it, {close} closes"
            if not self._has_found:
                mode = f"search what was asked: nothing was found; {close} closes"
        elif self.editing is not None:
            mode = f"written anew: {send} says it, {close} leaves it as it was"
        self.composer.border_title = Content(mode)
        self.refresh_bindings()
