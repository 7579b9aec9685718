"""Answers on their way from the engine's thread to the server's loop.

What a client has not taken yet is one piece of text, however many tokens it is made of: a slow reader costs no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from types import TracebackType

from localllm.chat.best_of import MAX_ANSWERS
from localllm.engine.engine_info import AnswerStream, Service
from localllm.engine.events import Event, FinishedEvent, PrefillEvent, TokenEvent, TokenLogprob
from localllm.errors import EngineGoneError, EngineStuckError
from localllm.server.asking import Asked
from localllm.server.failures import RequestError
from localllm.server.tools.parts import Part, Reader


@dataclass
class CallPiece:
    """More of the call `index` of an answer. name: of its tool, where it begins; arguments: of its JSON."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass
class Piece:
    """What has been said since the last one was taken, in so many tokens. thought: what of it was thought, so many
    tokens about, of which there are no log-probabilities. prompt_logprobs: of the prompt's tokens, None of the first.
    calls: one entry each. finished: it is the last. others: that a search has found beside it."""

    text: str = ""
    thought: str = ""
    calls: list[CallPiece] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    num_tokens: int = 0
    num_thought_tokens: int = 0
    finished: FinishedEvent | None = None
    others: list[Piece] = field(default_factory=list)

    def add(self, later: Piece) -> None:
        """What was said behind it."""
        self.text += later.text
        self.thought += later.thought
        for call in later.calls:
            self.add_call(call)
        self.logprobs += later.logprobs
        self.prompt_logprobs += later.prompt_logprobs
        self.num_tokens += later.num_tokens
        self.num_thought_tokens += later.num_thought_tokens
        self.finished = later.finished
        self.others += later.others

    def add_call(self, more: CallPiece) -> None:
        """Of the last call, or of the next one."""
        if self.calls and self.calls[-1].index == more.index:
            self.calls[-1].arguments += more.arguments
        else:
            self.calls.append(replace(more))

    @property
    def ending(self) -> FinishedEvent:
        """How a whole answer ended."""
        assert self.finished is not None
        return self.finished


class Mail:
    """Takes the events of some requests in on the engine's thread; `take` gives them out on the loop's."""

    def __init__(self, new_reader: Callable[[], Reader | None], ended: Callable[[FinishedEvent], None]) -> None:
        """new_reader: as `Asked` has it. ended: hears of each request that has, on the engine's thread."""
        self._new_reader = new_reader
        self._readers: dict[int, Reader | None] = {}  # by request
        self._num_calls: dict[int, int] = {}
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._lock = threading.Lock()
        self._pieces: dict[int, Piece] = {}  # by request
        self._broken: BaseException | None = None
        self._broken_at: TracebackType | None = None

    def put(self, item: Event | BaseException, /) -> None:
        """As `Recipient` has it."""
        if isinstance(item, FinishedEvent):
            self._ended(item)
        with self._lock:
            wakes = not self._pieces and self._broken is None
            if isinstance(item, BaseException):
                self._broken, self._broken_at = item, item.__traceback__
            elif isinstance(item, TokenEvent | FinishedEvent):
                piece = self._pieces.setdefault(item.request_id, Piece())
                self._add(piece, item)
                piece.others += self._others(item)
            elif isinstance(item, PrefillEvent) and item.logprobs:
                self._pieces.setdefault(item.request_id, Piece()).prompt_logprobs += item.logprobs
            else:
                return
        if wakes:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
                self._loop.call_soon_threadsafe(self._arrived.set)

    async def take(self, silence_s: float | None) -> dict[int, Piece]:
        """By request, what has come since; waits where nothing has, so long at most. Raises what broke the engine."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(silence_s):
                await self._arrived.wait()
        with self._lock:
            self._arrived.clear()
            pieces, self._pieces = self._pieces, {}
            if self._broken is not None:
                # One error for all whom it is told: it would keep the frames of each.
                raise self._broken.with_traceback(self._broken_at)
        return pieces

    def _others(self, item: TokenEvent | FinishedEvent) -> list[Piece]:
        """That come with the end of a search: each is told apart by itself."""
        others = []
        for number, events in enumerate(item.others if isinstance(item, FinishedEvent) else (), start=1):
            piece = Piece()
            for event in events:
                self._add(piece, replace(event, request_id=-number - MAX_ANSWERS * item.request_id))
            others.append(piece)
        return others

    def _add(self, piece: Piece, event: TokenEvent | FinishedEvent) -> None:
        if event.request_id not in self._readers:
            self._readers[event.request_id] = self._new_reader()
        reader = self._readers[event.request_id]
        is_thought = False
        if reader is None:
            piece.text += event.text
        else:
            is_thought = reader.is_thinking
            parts = reader.feed(event.text)
            if isinstance(event, FinishedEvent):
                parts += reader.end(is_cut=event.finish_reason == "length")
            is_thought |= reader.is_thinking
            for part in parts:
                self._add_part(piece, event.request_id, part)
        if isinstance(event, FinishedEvent):
            piece.finished = event
            return
        piece.num_tokens += 1
        piece.num_thought_tokens += is_thought
        if event.logprob is not None and not is_thought:
            piece.logprobs.append(event.logprob)

    def _add_part(self, piece: Piece, request_id: int, part: Part) -> None:
        kind, text = part
        if kind == "text":
            piece.text += text
        elif kind == "thought":
            piece.thought += text
        elif kind == "call":
            count = self._num_calls[request_id] = self._num_calls.get(request_id, 0) + 1
            piece.add_call(CallPiece(count - 1, text))
        else:
            piece.add_call(CallPiece(self._num_calls[request_id] - 1, arguments=text))


class Answers:
    """The answers to one ask, several where it wants n. Closing them stops what still runs."""

    def __init__(
        self,
        service: Service,
        asked: Asked,
        closed: Callable[[], None],
        ended: Callable[[FinishedEvent], None],
        renewed: Callable[[], Awaitable[Service]] | None = None,
    ) -> None:
        """closed: called when they are closed, not where they cannot begin. ended: as `Mail` has it. renewed: another
        engine, where the first is gone before anything was said; None: there is none. Raises as `Service.submit`."""
        self.asked = asked
        self._closed = closed
        self._ended = ended
        self._renewed = renewed
        try:
            self._submit(service)
        except BaseException:
            self._abort()
            raise

    def _submit(self, service: Service) -> None:
        self._streams: list[AnswerStream] = []
        self._indices: dict[int, int] = {}
        self._mail = Mail(self.asked.new_reader, self._ended)
        for index, request in enumerate(self.asked.requests):
            stream = service.submit(request, self._mail)
            self._streams.append(stream)
            self._indices[stream.request_id] = index

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.asked.requests[0].prompt_ids)

    async def pieces(self, silence_s: float | None = None) -> AsyncIterator[tuple[int, Piece] | None]:
        """(which of the answers, what is new of it), to the end of all; None where nothing came for so long. Raises
        what broke the engine, and the error that ended an answer."""
        num_open = len(self._streams)
        while num_open:
            try:
                arrived = await self._mail.take(silence_s)
            except EngineGoneError as error:
                if self._renewed is None or isinstance(error, EngineStuckError):  # it might be stuck in this very one
                    raise
                renewed, self._renewed = self._renewed, None
                self._submit(await renewed())
                continue
            if not arrived:
                yield None
            else:
                self._renewed = None  # what was said is not said again
            for request_id, piece in arrived.items():
                index = self._indices[request_id]
                if piece.finished is not None:
                    num_open -= 1
                    if piece.finished.error is not None:
                        raise piece.finished.error
                    if piece.finished.finish_reason == "cancelled":
                        why = "the server is shutting down, or the model was unloaded by hand"
                        raise RequestError(503, "the answer was stopped", why=why, name="shutting_down")
                yield index, piece

    async def whole(self) -> list[Piece]:
        """All of each. Raises as `pieces`."""
        wholes = [Piece() for _ in self._streams]
        async for news in self.pieces():
            if news is None:
                continue
            index, piece = news
            wholes[index].add(piece)
        return wholes

    def close(self) -> None:
        """Once; also of answers that have ended."""
        self._abort()
        self._closed()

    def _abort(self) -> None:
        for stream in self._streams:
            stream.abort()
