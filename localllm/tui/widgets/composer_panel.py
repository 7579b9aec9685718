"""The composer with its suggestions and the files attached to the next question."""

from __future__ import annotations

from collections.abc import Sequence

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList, Static, TextArea
from textual.widgets.option_list import Option

from localllm.frontend.text import one_line, visible
from localllm.tui.commands import completions
from localllm.tui.keys import KeyNames
from localllm.tui.messages import Turn
from localllm.tui.widgets.composer import Composer


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


_MOST_FOUND = 30  # questions that a search lists


class ComposerPanel(Vertical):
    """editing: the earlier question that is written anew, if one is."""

    DEFAULT_CSS = """
    ComposerPanel {
        height: auto;
        & > .attached { height: auto; padding: 0 1; color: $text-accent; display: none; }
    }
    """

    class Finished(Message):
        """The message is to be sent; `take` it where it can be."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class ModeChanged(Message):
        """Enter does something else now."""

    def __init__(self, draft: str, key_names: KeyNames) -> None:
        super().__init__()
        self._key_names = key_names
        self.composer = Composer(draft, key_names)
        self.editing: Turn | None = None
        self._suggestions = Suggestions()
        self._attached = Static("", classes="attached")
        self._is_finding = self._has_found = False
        self._aside = ""  # what was being written when the search began

    def compose(self) -> ComposeResult:
        yield self._suggestions
        yield self._attached
        yield self.composer

    @property
    def unsent(self) -> str:
        """What is being written."""
        return self.composer.unfolded(self._aside) if self._is_finding else self.composer.unsent

    def attach(self, files: Sequence[tuple[str, int]]) -> None:
        """Names of files that wait for the next question, and their characters."""
        names = [f"+ {one_line(name)} ({count:,} characters)" for name, count in files]
        self._attached.update(Content("  ".join(names)))
        self._attached.display = bool(files)

    def edit(self, question: Turn, text: str) -> None:
        """Begins to write an earlier question anew."""
        self.editing = question
        self.composer.put_away()
        self.composer.rewrite(text)
        self.screen.set_focus(self.composer)
        self._tell_mode()

    def take(self) -> Turn | None:
        """The message was sent: the composer is empty for the next. Returns the question that it edits."""
        composer, question = self.composer, self.editing
        composer.put_away()
        self.editing = None
        self._tell_mode()
        return question

    def leave_edit(self) -> None:
        """The question stays as it was; the arrow up brings back what was written for it."""
        if self.editing is not None:
            self.editing = None
            self.composer.put_away()
            self._tell_mode()

    def close(self) -> bool:
        """Leaves what is being searched, suggested or edited; False where nothing is."""
        if self._is_finding:
            self._is_finding = False
            self.composer.write(self._aside)
        elif self._suggestions.is_shown:
            self._suggest([])
        elif self.editing is not None:
            self.leave_edit()
        else:
            return False
        self._tell_mode()
        return True

    @on(Composer.Sent)
    def _on_sent(self, event: Composer.Sent) -> None:
        chosen = self._suggestions.chosen if self._suggestions.is_shown else None
        if self._is_finding:
            self._take_found(chosen)
        elif chosen is not None and chosen.strip() != self.composer.text.strip():
            self._complete(chosen)
        else:
            self.post_message(self.Finished(event.text))

    @on(TextArea.Changed)
    def _on_written(self) -> None:
        text = self.composer.text
        if self._is_finding:
            words = text.casefold()
            found = [asked for asked in self.composer.asked if words in asked.casefold()][:_MOST_FOUND]
            self._suggest([(asked, asked[:200]) for asked in found])
            self._has_found = bool(found)
            self._tell_mode()
        else:
            self._suggest(completions(text) if self.editing is None else [])

    @on(Composer.Find)
    def _on_find(self) -> None:
        if self._is_finding:
            self._suggestions.action_cursor_down()
            return
        self._is_finding, self._aside = True, self.composer.text
        self.composer.write("")
        self._on_written()
        self._tell_mode()

    @on(Composer.Complete)
    def _on_complete(self) -> None:
        if self._is_finding:
            self._take_found(self._suggestions.chosen)
        elif self._suggestions.chosen is not None:
            self._complete(self._suggestions.chosen)
        elif not self.composer.text:  # else what is typed on would be taken for the keys of a message
            self.screen.focus_next()

    @on(Composer.Step)
    def _on_step(self, event: Composer.Step) -> None:
        (self._suggestions.action_cursor_down if event.step > 0 else self._suggestions.action_cursor_up)()

    @on(OptionList.OptionSelected)
    def _on_suggestion(self, event: OptionList.OptionSelected) -> None:
        value = self._suggestions.value_of(event.option_index)
        if self._is_finding:
            self._take_found(value)
        else:
            self._complete(value)

    def _complete(self, value: str) -> None:
        self.composer.write(value)
        self.screen.set_focus(self.composer)

    def _take_found(self, value: str | None) -> None:
        """In the place of what was being written, which the arrow up brings back."""
        if value is None:
            return
        self._is_finding = False
        self.composer.write(self._aside)
        self.composer.put_away()
        self._tell_mode()
        self._complete(value)

    def _suggest(self, found: Sequence[tuple[str, str]]) -> None:
        self._suggestions.suggest(found)
        self.composer.is_suggesting = bool(found)

    def _tell_mode(self) -> None:
        mode = ""
        send, find, close = (self._key_names[name] for name in ("composer.send", "composer.find", "chat.close"))
        if self._is_finding:
            mode = f"search what was asked: type; {find} the next, {send} takes it, {close} closes"
            if not self._has_found:
                mode = f"search what was asked: nothing was found; {close} closes"
        elif self.editing is not None:
            mode = f"written anew: {send} says it, {close} leaves it as it was"
        self.composer.border_title = Content(mode)
        self.post_message(self.ModeChanged())
