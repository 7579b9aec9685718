"""One message of the conversation: a question as it was typed, or an answer as Markdown behind its thought."""

from __future__ import annotations

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget
from textual.widgets import Static

from localllm.chat.attachments import folded
from localllm.chat.text import visible
from localllm.chat.thoughts import Splitter, kept_apart, split
from localllm.history import content_of
from localllm.tui.messages import Turn
from localllm.tui.widgets.document import Clear, Document


class Thought(Clear, Vertical):
    """A model's thought before its answer: open while it streams and where `stays_open`, else a line that unfolds."""

    is_open = reactive(False)

    def __init__(self, text: str = "", *, is_live: bool = False, stays_open: bool = False) -> None:
        super().__init__()
        self._fold = _Fold()
        self._document = Document(visible(text))
        self._num_words = len(text.split())
        self._is_thinking, self._stays_open = is_live, stays_open
        self.set_reactive(Thought.is_open, is_live or stays_open)

    def compose(self) -> ComposeResult:
        yield self._fold
        yield self._document

    def on_mount(self) -> None:
        self._refold()

    async def append(self, text: str) -> None:
        self._is_thinking = True
        self._num_words += len(text.split())
        self._refold()
        await self._document.write(visible(text))

    async def end(self) -> None:
        """End the thought: the answer begins, or goes on."""
        if self._is_thinking:
            self._is_thinking, self.is_open = False, self._stays_open
            self._refold()
            await self._document.end()

    def watch_is_open(self) -> None:
        if self.is_mounted:
            self._refold()

    def _refold(self) -> None:
        self.set_class(self.is_open, "-open")
        sign = "▾" if self.is_open else "▸"
        self._fold.update(Content(f"{sign} {'thinking' if self._is_thinking else 'thought'}: {self._num_words} words"))


class _Fold(Static, can_focus=True):
    BINDINGS = [Binding("enter,space", "refold", "unfold or fold", show=False)]

    def on_click(self, event: events.Click) -> None:
        event.stop()
        self.action_refold()

    def action_refold(self) -> None:
        thought = self.query_ancestor(Thought)
        thought.is_open = not thought.is_open


_MOST_LINES = 16  # of a question, before it is folded
_MOST_CHARACTERS = 4000


class MessageView(Widget, can_focus=True):
    """turn: the message; None while it streams. index: its place among the turns."""

    BINDINGS = [
        Binding("c", "screen.want('copy')", "copy", id="message.copy"),
        Binding("y", "screen.want('code')", "code", id="message.code"),
        Binding("e", "screen.want('edit')", "edit", id="message.edit"),
        Binding("r", "screen.want('regenerate')", "regenerate", id="message.regenerate"),
        Binding("o", "screen.want('other')", "other wording", id="message.other"),
        Binding("f", "screen.want('fork')", "fork here", id="message.fork"),
    ]

    def __init__(self, index: int, turn: Turn | None) -> None:
        super().__init__()
        self.index = index
        self.turn = turn

    @property
    def role(self) -> str:
        return "assistant" if self.turn is None else str(self.turn["role"])

    @property
    def text(self) -> str:
        return "" if self.turn is None else content_of(self.turn)[0]

    @property
    def copy_text(self) -> str:
        """The text to copy: an answer without its thought."""
        return self.text


class QuestionView(MessageView):
    """A question, or any other message that is not an answer."""

    def render(self) -> Content:
        text = folded(self.text)
        lines = visible(text[:_MOST_CHARACTERS]).split("\n")
        parts = [Content("\n".join(lines[:_MOST_LINES]))]
        if self.role != "user":
            parts.insert(0, Content.styled(visible(self.role), "$foreground-muted"))
        if len(lines) > _MOST_LINES:
            more = len(lines) - _MOST_LINES + text.count("\n", _MOST_CHARACTERS)
            parts.append(Content.styled(f"… {more} more lines", "$foreground-muted"))
        elif len(text) > _MOST_CHARACTERS:
            parts.append(Content.styled(f"… {len(text) - _MOST_CHARACTERS:,} more characters", "$foreground-muted"))
        return Content("\n").join(parts)


class AnswerView(Clear, MessageView):
    """An answer; `append` takes its words while it streams."""

    def __init__(
        self,
        index: int,
        turn: Turn | None,
        *,
        is_thinking: bool = False,
        shows_thoughts: bool = False,
        ending: str = "",
        num_codes: int = 0,
    ) -> None:
        """is_thinking: the prompt has opened a thought. shows_thoughts: thoughts are not folded. ending: why it ends
        where it does, shown below it. num_codes: code blocks in the answers before."""
        super().__init__(index, turn)
        self._is_thinking, self._shows_thoughts = is_thinking, shows_thoughts
        self._splitter = Splitter(is_thinking=is_thinking)
        self._said: list[str] = []
        self._thought: Thought | None = None
        self._num_codes = num_codes
        self.document = Document("", num_codes)  # the answer without its thought
        self._meta: Static | None = None
        self._ending, self._figures = ending, ""

    @property
    def text(self) -> str:
        return "".join(self._said) if self.turn is None else super().text

    @property
    def copy_text(self) -> str:
        return kept_apart(self.text, is_thinking=self._is_thinking)[1]

    def compose(self) -> ComposeResult:
        if self.turn is not None:
            thought, answer = split(self.text, is_thinking=self._is_thinking)
            if thought.strip():
                self._thought = Thought(thought, stays_open=self._shows_thoughts)
                yield self._thought
            self.document = Document(visible(answer), self._num_codes)
        yield self.document
        if self._ending:
            self._meta = Static(Content(self._ending), classes="meta")
            yield self._meta

    async def append(self, text: str) -> None:
        self._said.append(text)
        await self._take(self._splitter.feed(text))

    async def end(self) -> None:
        """End the answer; all of it is shown when this returns."""
        await self._take(self._splitter.end())
        await self.document.end()
        if self._thought is not None:
            await self._thought.end()

    def show_meta(self, *, ending: str | None = None, figures: str | None = None) -> None:
        """Show below the answer why it ends where it does ("" for nothing), and its figures."""
        before = self._ending, self._figures
        self._ending = self._ending if ending is None else ending
        self._figures = self._figures if figures is None else figures
        if before == (self._ending, self._figures):
            return
        text = Content("\n".join(filter(None, (self._ending, self._figures))))
        if self._meta is not None:
            self._meta.update(text)
            self._meta.display = bool(text)
        elif text:
            self._meta = Static(text, classes="meta")
            self.mount(self._meta)

    async def _take(self, parts: list[tuple[bool, str]]) -> None:
        for is_thought, text in parts:
            if is_thought:
                if self._thought is None:
                    self._thought = Thought(is_live=True, stays_open=self._shows_thoughts)
                    await self.mount(self._thought, before=self.document)
                await self._thought.append(text)
            else:
                if self._thought is not None:
                    await self._thought.end()
                await self.document.write(visible(text))
