"""What an empty chat shows: the machine, the model and its state, example prompts, and the last chats."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from localllm.chat.text import format_ago, one_line, visible
from localllm.config import format_bytes
from localllm.engine.engine_info import EngineFacts
from localllm.history import Session
from localllm.registry import BUILT_IN
from localllm.tui.history_worker import ChatRow
from localllm.tui.keys import KeyNames

NUM_CHATS = 3
_AGE = 11  # columns, of "59 min ago"
_TALES = (
    "Tell me a story about a fox who is afraid of the dark.",
    "Tell me a tale about a fox who finds a lantern.",
    "Tell a tale of a small boat and a big storm.",
)
_TASKS = (
    "Explain to a child of ten why a bicycle does not fall over.",
    "Write a Python function that finds files with the same content.",
    "Compare heat pumps and gas boilers in a table: cost, effort, emissions.",
)
_CODING = (
    "Write a Python function that finds files with the same content.",
    "What does the regular expression ^(?!.*--)[a-z0-9-]+$ match?",
    "Write a test for a queue that two threads use.",
)


def example_prompts(model: str) -> Sequence[str]:
    """Prompts for a model, by its name: the built-in one can only tell tales."""
    if model == BUILT_IN:
        return _TALES
    return _CODING if "code" in model.casefold() else _TASKS


def residence(facts: EngineFacts) -> str:
    """Where a loaded model rests: "6.3 GiB on the GPU, 9.7 GiB in memory"; "" where that is not known."""
    places: Mapping[str, int] = {
        "on the GPU": facts.held_bytes("vram"),
        "in memory": facts.held_bytes("ram"),
        "from the disk at each step": facts.streamed_bytes,
    }
    parts = [f"{format_bytes(amount)} {where}" for where, amount in places.items() if amount]
    return ", ".join(parts)


class Welcome(Vertical):
    """Its choices are numbered; a number that is sent as a message chooses, too."""

    @dataclass
    class Asked(Message):
        """An example was chosen."""

        prompt: str

    @dataclass
    class Opened(Message):
        """A chat was chosen."""

        session: Session

    def __init__(self, key_names: KeyNames) -> None:
        super().__init__()
        self._key_names = key_names
        self.machine = ""
        self._model = self._state = self._place = ""
        self._chats: Sequence[Session] = ()
        self._choices: list[Message] = []

    def compose(self) -> ComposeResult:
        yield Static("", id="about")
        yield OptionList(markup=False, compact=True)

    def on_mount(self) -> None:
        self._draw()
        self._list()

    def on_resize(self) -> None:
        self._list()

    def show_machine(self, machine: str) -> None:
        """machine: a line about it."""
        self.machine = machine
        self._draw()

    def show_model(self, model: str, state: str, place: str = "") -> None:
        """state: how far it is loaded. place: where it rests."""
        is_another = model != self._model
        self._model, self._state, self._place = model, state, place
        self._draw()
        if is_another:
            self._list()

    def show_chats(self, rows: Sequence[ChatRow]) -> None:
        self._chats = [row.session for row in rows]
        self._list()

    def choose(self, number: str) -> bool:
        """Choose by a number; False where there is none such."""
        is_one = number.isdecimal() and 1 <= int(number) <= len(self._choices)
        if is_one:
            self.post_message(self._choices[int(number) - 1])
        return is_one

    def on_key(self, event: events.Key) -> None:
        if self.choose(event.character or ""):
            event.stop()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.choose(event.option.id or "")

    def _draw(self) -> None:
        lines = [Content.styled("localllm", "bold $text-primary")]
        if self.machine:
            lines.append(Content.styled(one_line(self.machine), "$foreground-muted"))
        if self._model:
            lines += [Content(), Content.styled(visible(one_line(self._model)), "bold") + f"  {one_line(self._state)}"]
        if self._place:
            lines.append(Content.styled(self._place, "$foreground-muted"))
        if self._model == BUILT_IN:
            about = f"It comes with the package and tells tales; {self._key_names['app.models']} has models for more."
            lines.append(Content.styled(about, "$foreground-muted"))
        if self.is_mounted:
            self.query_one("#about", Static).update(Content("\n").join(lines))

    def _list(self) -> None:
        if not self.is_mounted:
            return
        self._choices = []
        listed = self.query_one(OptionList)
        chosen = listed.highlighted
        listed.clear_options()
        listed.add_options(self._options(max(0, listed.content_size.width)))
        listed.highlighted = chosen

    def _options(self, columns: int) -> Iterator[Option]:
        """The rows; those that can be chosen have their number as their id."""
        if self._model:
            yield _heading("Try: a number and enter, or a click")
            for prompt in example_prompts(self._model):
                yield self._option(self.Asked(prompt), Content(prompt))
        if self._chats:
            yield _heading("Go on with")
            for session in self._chats:
                age = format_ago(session.updated, time.time())
                title = Content(visible(one_line(session.title)))
                room = max(1, columns - 5 - _AGE)
                line = title.truncate(room, ellipsis=True) + Content.styled(f"  {age}", "$foreground-muted")
                yield self._option(self.Opened(session), line)

    def _option(self, choice: Message, text: Content) -> Option:
        self._choices.append(choice)
        number = str(len(self._choices))
        return Option(Content.styled(f"  {number}  ", "bold $text-accent") + text, id=number)


def _heading(text: str) -> Option:
    return Option(Content("\n") + Content.styled(text, "$foreground-muted"), disabled=True)
