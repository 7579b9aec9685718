"""A full-screen chat for tests: a service that says what it is told to, and a wait for what the screen is to show."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from textual._context import visible_screen_stack
from textual.app import App
from textual.pilot import Pilot
from textual.screen import Screen

from localllm.chat.recorder import Resumed
from localllm.config import load_settings
from localllm.engine.engine_info import EngineFacts
from localllm.engine.events import FinishedEvent, PrefillEvent, Timings, TokenEvent, Usage
from localllm.engine.request import Request
from localllm.errors import Fix
from localllm.history import History, history_file
from localllm.hub.names import TINY_DIRECTORY
from localllm.models.architecture import ModelConfig
from localllm.models.families import load_config
from localllm.runtime.engine_handle import RequestStream
from localllm.runtime.selection import Selection, selected
from localllm.text.chat_template import ChatTemplate
from localllm.tui.app import ChatApp, Start
from localllm.tui.messages import Post
from tests.history_support import said, titles
from tests.patience import PATIENCE_S

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_OF_PLANS = ("ledger", "limits", "bound_by", "streamed_bytes")


def pieces(text: str, length: int = 4) -> list[str]:
    """A text as tokens."""
    return [text[begin : begin + length] for begin in range(0, len(text), length)]


class FakeTokenizer:
    """A token a character."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(character) for character in text]

    special_ids: frozenset[int] = frozenset()
    special_texts: frozenset[str] = frozenset()
    bos_token_id: int | None = None

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> list[int]:
        return self.encode("".join(text for text, _ in pieces))

    def with_bos(self, ids: list[int]) -> list[int]:
        return ids

    def token_id(self, text: str) -> int | None:
        return None

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(map(chr, ids))


_CONFIG = replace(load_config(TINY_DIRECTORY), max_position_embeddings=8192)


@dataclass
class FakeEngine:
    ctx: int = 4096
    current_plan: Any = None
    template: ChatTemplate = field(default_factory=lambda: ChatTemplate(TEMPLATE))
    weights: str = "int4-g64"
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    config: ModelConfig = _CONFIG

    def check(self, request: Request) -> None:
        """Everything fits."""

    def facts(self) -> EngineFacts:
        plan = self.current_plan
        known = {} if plan is None else {name: getattr(plan, name) for name in _OF_PLANS}
        return EngineFacts(self.ctx, self.weights, "int8", **known)

    def fixes_for(self, ctx: int) -> list[Fix]:
        return [Fix.flag("--ctx", ctx)]


_ENDLESS = 400  # tokens


class FakeService:
    """Says `answers` in turn, the last again and again; one may be a function of the request, or an error.

    pause_s: between two tokens; a long answer with pauses does not end before it is stopped, however late that is on a
    busy machine. gate: nothing is loaded before it is set. reads_on: set, unless a prompt is to stay half read until it
    is. finished: fields of the last event.
    """

    def __init__(
        self,
        answers: Iterable[Any] = ("Hello.",),
        pause_s: float = 0.0,
        prefill: int = 0,
        finished: dict[str, Any] | None = None,
    ) -> None:
        self.answers = list(answers)
        self.pause_s = pause_s
        self.prefill = prefill
        self.finished = finished or {}
        self.engine = FakeEngine()
        self.requests: list[Request] = []
        self.gate = threading.Event()
        self.gate.set()
        self.reads_on = threading.Event()
        self.reads_on.set()
        self.failure: Exception | None = None
        self.is_closed = False
        self.loads: list[str] = []
        self._aborted: set[int] = set()

    def __call__(self, selection: Selection, post: Post, before: Callable[[], None]) -> FakeService:
        """As `loading.serve`."""
        before()
        self.loads.append(selection.files.name)
        self.is_closed = False
        return self

    def wait_loaded(self, timeout_s: float | None = None) -> Any:
        if not self.gate.wait(timeout_s):
            return None
        if self.failure is not None:
            raise self.failure
        return self.engine

    def submit(self, request: Request) -> RequestStream:
        number = len(self.requests)
        self.requests.append(request)
        stream = RequestStream(number, self._aborted.add)
        answer = self.answers[min(number, len(self.answers) - 1)]
        threading.Thread(target=self._say, args=(number, request, answer, stream.events), daemon=True).start()
        return stream

    def opens_thought(self) -> None:
        """Has the template open a thought."""
        self.engine.template = ChatTemplate("<assistant><think>{{ '\n' }}")

    def close(self, timeout_s: float = 4.0) -> None:
        self.is_closed = True

    def _say(self, number: int, request: Request, answer: Any, events: queue.SimpleQueue[Any]) -> None:
        text = answer(request) if callable(answer) else answer
        began, count, reason = time.monotonic(), 0, "stop"
        error = text if isinstance(text, Exception) else None
        for done in range(0, self.prefill, max(1, self.prefill // 8)):
            events.put(PrefillEvent(number, done, self.prefill))
            while done >= self.prefill // 2 and number not in self._aborted and not self.reads_on.wait(0.01):
                pass
            time.sleep(self.pause_s)
        said = [] if error is not None else (text if isinstance(text, list) else pieces(text))
        for piece in said:
            if number in self._aborted:
                reason = "cancelled"
                break
            events.put(TokenEvent(number, 1, piece))
            count += 1
            due = began + count * self.pause_s
            if self.pause_s and (rest := due - time.monotonic()) > 0:
                time.sleep(rest)
        while self.pause_s and count >= _ENDLESS and not (number in self._aborted or self.is_closed):
            time.sleep(0.01)
        reason = "cancelled" if number in self._aborted else reason
        timings = Timings(ttft_s=0.01, decode_tok_s=count / max(1e-3, time.monotonic() - began))
        fields: dict[str, Any] = {
            "finish_reason": "error" if error is not None else reason,
            "usage": Usage(len(request.prompt_ids), 0, count),
            "timings": timings,
            "error": error,
            "ctx": self.engine.ctx,
        }
        events.put(FinishedEvent(number, **{**fields, **self.finished}))


def chat_app(service: Any = None, resumed: Resumed | None = None, **settings: Any) -> ChatApp:
    """A chat with `tiny`, under these settings."""
    start = {
        name: settings.pop(name)
        for name in ("theme", "draft", "system", "keys", "follows_terminal")
        if name in settings
    }
    resolved = load_settings(settings)
    selection = selected(resolved, None)
    serve: Any = service if service is not None else FakeService()
    return ChatApp(Start(selection, resolved, resumed, **start), serve)


@asynccontextmanager
async def running(app: ChatApp, size: tuple[int, int] = (100, 30)) -> AsyncIterator[Pilot[None]]:
    """The app on a screen of its own, with its model loaded unless it is held up."""
    try:
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            yield pilot
    finally:
        app.close(2.0)
    if app.failure is not None:
        raise app.failure


@asynccontextmanager
async def chatting(
    service: Any = None,
    resumed: Resumed | None = None,
    *,
    size: tuple[int, int] = (100, 30),
    asked: str | Sequence[str] = (),
    **settings: Any,
) -> AsyncIterator[tuple[ChatApp, Pilot[None]]]:
    """`chat_app`, `running`. asked: the first messages, each of which is answered."""
    app = chat_app(service, resumed, **settings)
    async with running(app, size) as pilot:
        await say(pilot, *([asked] if isinstance(asked, str) else asked))
        yield app, pilot


Wanted = str | type[Screen[Any]] | Callable[[], object]


async def until(pilot: Pilot[Any], wanted: Wanted) -> None:
    """Waits for a text on the screen, for a screen, or for what a function asks for."""

    def is_there() -> object:
        if isinstance(wanted, str):
            return wanted in shown(pilot.app)
        return isinstance(pilot.app.screen, wanted) if isinstance(wanted, type) else wanted()

    end = time.monotonic() + PATIENCE_S
    while not is_there():
        assert time.monotonic() < end, f"it did not come: {wanted}\n{shown(pilot.app)}"
        await pilot.pause(0.01)
    await pilot.pause()


_wait = until


async def press(pilot: Pilot[Any], *keys: str, until: Wanted) -> None:
    await pilot.press(*keys)
    await _wait(pilot, until)


async def command(pilot: Pilot[Any], line: str, until: Wanted) -> None:
    """What a line that begins with a slash does."""
    assert isinstance(pilot.app, ChatApp)
    pilot.app.chat.take_command(line)
    await _wait(pilot, until)


async def send(pilot: Pilot[Any], text: str, until: Wanted | None = None) -> None:
    """Writes a message and sends it."""
    assert isinstance(pilot.app, ChatApp)
    pilot.app.chat.composer.write(text)
    await pilot.press("enter")
    if until is not None:
        await _wait(pilot, until)


async def begin(pilot: Pilot[Any], text: str, length: int = 50) -> None:
    """Asks, and waits until so many characters were said."""
    app = pilot.app
    assert isinstance(app, ChatApp)
    await send(pilot, text)
    await until(pilot, lambda: app.chat.transcript.live is not None and len(app.chat.transcript.live.text) > length)


async def say(pilot: Pilot[Any], *texts: str) -> None:
    """Writes a message and waits for the whole answer, one after another."""
    app = pilot.app
    assert isinstance(app, ChatApp)
    for text in texts:
        await send(pilot, text, until=has_answered(app, app.chat.num_turns + 2))


def has_answered(app: ChatApp, num_turns: int) -> Callable[[], bool]:
    return lambda: app.chat.num_turns >= num_turns and not app.chat.is_answering


def kept() -> list[list[tuple[str, str, str]]]:
    """(role, content, state) of what each chat shows in the history, the latest chat first."""
    with History.peek(history_file()) as history:
        return [said(history, session) for session, _ in history.sessions()]


def kept_titles() -> list[str]:
    with History.peek(history_file()) as history:
        return titles(history)


def shown(app: App[Any]) -> str:
    """What is on the screen, as text."""
    visible_screen_stack.set(app._background_screens)
    lines = app.screen._compositor.render_strips(app.size)
    return "\n".join("".join(segment.text for segment in line) for line in lines)


def assert_shown(app: ChatApp, *texts: str) -> None:
    screen = shown(app)
    assert not [text for text in texts if text not in screen], screen


def texts(app: ChatApp) -> list[tuple[str, str]]:
    """(role, text) of the messages that are mounted."""
    return [(view.role, view.text) for view in app.chat.transcript.views]
