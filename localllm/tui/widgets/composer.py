"""Where a message is written, with its suggestions and the files attached to the next question."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList, Static, TextArea
from textual.widgets.option_list import Option

from localllm.chat.file_references import completed, dropped, reference
from localllm.chat.text import one_line, printable, visible
from localllm.tui.commands import completions
from localllm.tui.keys import KeyNames
from localllm.tui.messages import Turn

_FOLDED_LINES = 12  # of a paste, from which on it is folded
_FOLDED_CHARACTERS = 1500
_MOST_EDITED = 20_000  # characters of an earlier question; a megabyte on a line takes the field a second to draw
_MOST_FOUND = 30  # questions listed by a search
_FOLD = re.compile(r"\[pasted text (\d+): [^\]\n]*\]")


class Suggestions(OptionList, can_focus=False):
    """Completions of a command, or earlier questions; hidden where there are none. The composer keeps the focus."""

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
        index = self.highlighted
        return self._values[index] if index is not None and index < len(self._values) else None


class Composer(TextArea):
    def __init__(self, draft: str, key_names: KeyNames, suggestions: Suggestions) -> None:
        super().__init__(
            soft_wrap=True, show_line_numbers=False, compact=False, tab_behavior="focus", highlight_cursor_line=False,
            placeholder="Write a message. / for commands, @ for files, ? for help",
        )  # fmt: skip
        self.write(draft)
        self._suggestions = suggestions  # the arrows move in it where it is shown
        self.cursor_blink = False  # each blink is a picture more over ssh
        self.asked: Sequence[str] = ()  # before, the latest first
        self._at = -1  # of those that is shown; -1: what is being written
        self._draft = ""
        self._pasted: list[str] = []

    @property
    def whole(self) -> str:
        """The text with its folded pastes unfolded."""
        return self.unfolded(self.text)

    def unfolded(self, text: str) -> str:
        """A text of this composer with its pastes in place of their signs; valid until the composer is emptied."""

        def paste(match: re.Match[str]) -> str:
            number = int(match[1])
            return self._pasted[number - 1] if 0 < number <= len(self._pasted) else match[0]

        return _FOLD.sub(paste, text)

    def write(self, text: str) -> None:
        """Replace the text; the cursor is at its end. Control characters, which a terminal would obey, are dropped."""
        self.text = printable(text)
        self.move_cursor(self.document.end)

    def rewrite(self, text: str) -> None:
        """`write` for an earlier question: folded where it is too long to be edited here."""
        text = printable(text)
        self.write(self._folded(text) if len(text) > _MOST_EDITED else text)

    def clear_all(self) -> None:
        self.write("")
        self._pasted.clear()
        self._at, self._draft = -1, ""

    @property
    def unsent(self) -> str:
        """The text being written, also while earlier questions are looked through."""
        is_recalled = self._at >= 0 and self.text == self.asked[self._at]
        return self.unfolded(self._draft) if is_recalled else self.whole

    def put_away(self) -> None:
        """Remove the text; the arrow up brings it back."""
        drafts = [self.whole, self.unfolded(self._draft)] if self._at >= 0 else [self.whole]
        self.remember([*(text for text in drafts if text.strip()), *self.asked])
        self.clear_all()

    def remember(self, asked: Sequence[str]) -> None:
        """Set the earlier questions, the latest first."""
        self.asked = list(dict.fromkeys(asked))
        self._at = -1

    def action_delete_left(self) -> None:
        """Delete a folded paste as a whole: the rest of its sign would be sent in its place."""
        row, column = self.cursor_location
        before = self.document.get_line(row)[:column]
        fold = next((found for found in _FOLD.finditer(before) if found.end() == column), None)
        if fold is not None and self.selection.is_empty:
            self.delete((row, fold.start()), (row, column))
        else:
            super().action_delete_left()

    def action_cursor_up(self, select: bool = False) -> None:
        if self._suggestions.is_shown and not select:
            self._suggestions.action_cursor_up()
        elif not select and self.cursor_at_first_line:
            self._recall(self._at + 1)
        else:
            super().action_cursor_up(select)

    def action_cursor_down(self, select: bool = False) -> None:
        if self._suggestions.is_shown and not select:
            self._suggestions.action_cursor_down()
        elif not select and self.cursor_at_last_line and self._at >= 0:
            self._recall(self._at - 1)
        else:
            super().action_cursor_down(select)

    def _recall(self, at: int) -> None:
        if at >= len(self.asked):
            return
        if self._at < 0:
            self._draft = self.text
        self._at = at
        self.write(self.asked[at] if at >= 0 else self._draft)

    def check_consume_key(self, key: str, character: str | None = None) -> bool:
        return not self._asks_for_help(key) and super().check_consume_key(key, character)

    def _asks_for_help(self, key: str) -> bool:
        """Nobody begins a message with a question mark."""
        return key == "question_mark" and not self.text

    async def _on_key(self, event: events.Key) -> None:
        # Enter sends and tab completes: the area's own handler would insert them before a binding is asked.
        if event.key in ("enter", "tab") or self._asks_for_help(event.key):
            event.prevent_default()
            return
        await super()._on_key(event)

    async def _on_paste(self, event: events.Paste) -> None:
        event.prevent_default()
        event.stop()
        text = printable(event.text.replace("\r\n", "\n").replace("\r", "\n"))
        if files := [] if self.text.startswith("/") else dropped(text):
            text = f"{' ' * self._is_in_word}{' '.join(map(reference, files))} "
        elif text.count("\n") + 1 > _FOLDED_LINES or len(text) > _FOLDED_CHARACTERS:
            text = self._folded(text)
        self.insert(text)

    @property
    def _is_in_word(self) -> bool:
        row, column = self.selection.start
        return not self.document.get_line(row)[:column][-1:].isspace() and column > 0

    def _folded(self, text: str) -> str:
        lines = len(text.splitlines())
        self._pasted.append(text)
        size = f"{lines} lines" if lines > _FOLDED_LINES else f"{len(text):,} characters"
        return f"[pasted text {len(self._pasted)}: {size}]"


class ComposerPanel(Vertical):
    """editing: the earlier question that is being replaced, or None."""

    BINDINGS = [
        Binding("enter", "send", "send", id="composer.send"),
        Binding("shift+enter,alt+enter,ctrl+j", "newline", "new line", id="composer.newline", show=False),
        Binding("ctrl+r", "find", "search earlier questions", id="composer.find", show=False),
        Binding("ctrl+g", "screen.edit", "edit in $EDITOR", id="composer.editor", show=False),
        Binding("tab", "complete", "complete", show=False),
    ]

    @dataclass
    class Finished(Message):
        """Send the message; `take` it where it can be sent."""

        text: str

    def __init__(self, draft: str, key_names: KeyNames) -> None:
        super().__init__()
        self._key_names = key_names
        self._suggestions = Suggestions()
        self.composer = Composer(draft, key_names, self._suggestions)
        self.editing: Turn | None = None
        self.adapters: Sequence[str] = ()  # of the chat, as they are shown
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

    def attach(self, files: Sequence[tuple[str, str]]) -> None:
        """Show the files that wait for the next question. files: names, and what they cost."""
        names = [f"+ {one_line(name)} ({cost})" for name, cost in files]
        self._attached.update(Content("  ".join(names)))
        self._attached.display = bool(files)

    def edit(self, question: Turn, text: str) -> None:
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
            self._suggestions.suggest([])
        elif self.editing is not None:
            self.leave_edit()
        else:
            return False
        self._show_mode()
        return True

    def action_send(self) -> None:
        chosen = self._suggestions.chosen
        if not self.composer.whole.strip():
            return
        if self._is_finding or (chosen is not None and chosen.strip() != self.composer.text.strip()):
            self._take(chosen)
        else:
            self.post_message(self.Finished(self.composer.whole))

    def action_newline(self) -> None:
        self.composer.insert("\n")

    def on_text_area_changed(self) -> None:
        text = self.composer.text
        if self._is_finding:
            words = text.casefold()
            found = [asked for asked in self.composer.asked if words in asked.casefold()][:_MOST_FOUND]
            self._suggestions.suggest([(asked, asked[:200]) for asked in found])
            self._has_found = bool(found)
            self._show_mode()
        else:
            commands = completions(text, self.adapters) if self.editing is None else []
            self._suggestions.suggest(commands or completed(text))

    def action_find(self) -> None:
        if self._is_finding:
            self._suggestions.action_cursor_down()
            return
        self._is_finding, self._aside = True, self.composer.text
        self.composer.write("")
        self.on_text_area_changed()
        self._show_mode()

    def action_complete(self) -> None:
        if self._is_finding or self._suggestions.chosen is not None:
            self._take(self._suggestions.chosen)
        elif not self.composer.text:  # else what is typed on would be taken for the keys of a message
            self.screen.focus_next()

    def on_option_list_option_selected(self) -> None:
        self._take(self._suggestions.chosen)

    def _take(self, value: str | None) -> None:
        if value is None:
            return
        if self._is_finding:
            self._is_finding = False
            self.composer.write(self._aside)
            self.composer.put_away()
            self._show_mode()
        self.composer.write(value)
        self.screen.set_focus(self.composer)

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
