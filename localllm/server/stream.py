"""Answers on their way from the engine's thread to the server's loop.

What a client has not taken yet is one delta, however many tokens it is made of: a slow reader costs no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from types import TracebackType

from localllm.chat.answer import MAX_ANSWERS
from localllm.engine.events import Event, FinishedEvent, PrefillEvent, TokenEvent
from localllm.errors import EngineGoneError
from localllm.runtime.engine_handle import EngineHandle, RequestStream
from localllm.runtime.renewed_client import may_renew
from localllm.server.errors import RequestError
from localllm.server.generation_request import PreparedRequest
from localllm.server.tools.deltas import AnswerParser, Delta, Part, ToolCallDelta


class EventMailbox:
    """Receives the events of some requests on the engine's thread; `take` gives deltas out on the loop's."""

    def __init__(self, new_parser: Callable[[], AnswerParser | None], ended: Callable[[FinishedEvent], None]) -> None:
        """new_parser: as `PreparedRequest` has it. ended: called with each end, on the engine's thread."""
        self._new_parser = new_parser
        self._parsers: dict[int, AnswerParser | None] = {}  # by request
        self._num_calls: dict[int, int] = {}
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._lock = threading.Lock()
        self._deltas: dict[int, Delta] = {}  # by request
        self._broken: BaseException | None = None
        self._broken_at: TracebackType | None = None

    def put(self, item: Event | BaseException) -> None:
        """Receive an event, or the error that ends them all."""
        if isinstance(item, FinishedEvent):
            self._ended(item)
        with self._lock:
            wakes = not self._deltas and self._broken is None
            if isinstance(item, BaseException):
                self._broken, self._broken_at = item, item.__traceback__
            elif isinstance(item, TokenEvent | FinishedEvent):
                self._add(self._deltas.setdefault(item.request_id, Delta()), item)
            elif isinstance(item, PrefillEvent) and item.logprobs:
                self._deltas.setdefault(item.request_id, Delta()).prompt_logprobs += item.logprobs
            else:
                return
        if wakes:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._arrived.set)

    async def take(self, silence_s: float | None) -> dict[int, Delta]:
        """Return what has come, by request; wait for it, so long at most. Raises what broke the engine."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(silence_s):
                await self._arrived.wait()
        with self._lock:
            self._arrived.clear()
            deltas, self._deltas = self._deltas, {}
            if self._broken is not None:
                # The same error is raised for each taker, and would keep the frames of all of them.
                raise self._broken.with_traceback(self._broken_at)
        return deltas

    def _add(self, delta: Delta, event: TokenEvent | FinishedEvent) -> None:
        request_id = event.request_id
        if request_id not in self._parsers:
            self._parsers[request_id] = self._new_parser()
        parser = self._parsers[request_id]
        is_thought = False
        parts: list[Part] = [("text", event.text)]
        if parser is not None:
            is_thought = parser.is_thinking
            parts = parser.feed(event.text)
            if isinstance(event, FinishedEvent):
                parts += parser.end(is_cut=event.finish_reason == "length")
            is_thought |= parser.is_thinking
        for kind, text in parts:
            if kind == "text":
                delta.text += text
            elif kind == "thought":
                delta.thought += text
            else:
                count = self._num_calls[request_id] = self._num_calls.get(request_id, 0) + (kind == "call")
                name, arguments = (text, "") if kind == "call" else (None, text)
                delta.add_call(ToolCallDelta(count - 1, name, arguments))
        if isinstance(event, TokenEvent):
            delta.num_tokens += 1
            delta.num_thought_tokens += is_thought
            if event.logprob is not None and not is_thought:
                delta.logprobs.append(event.logprob)
            return
        delta.finished = event
        for number, events in enumerate(event.others, start=1):  # of a beam search, each parsed by itself
            delta.others.append(other := Delta())
            for each in events:
                self._add(other, replace(each, request_id=-number - MAX_ANSWERS * request_id))


class GenerationStream:
    """The answers to one request, several where it wants n. Closing the stream stops what still runs."""

    def __init__(
        self,
        handle: EngineHandle,
        prepared: PreparedRequest,
        closed: Callable[[], None],
        ended: Callable[[FinishedEvent], None],
        renewed: Callable[[], Awaitable[EngineHandle]],
    ) -> None:
        """Submit the requests. Raises as `EngineHandle.submit`.

        closed: called when the stream is closed, not where it cannot begin.
        ended: as `EventMailbox` has it.
        renewed: gives another engine where the first is gone before anything was emitted.
        """
        self.prepared = prepared
        self._closed = closed
        self._ended = ended
        self._kept: Delta | None = None
        self._renewed: Callable[[], Awaitable[EngineHandle]] | None = renewed
        try:
            self._submit(handle)
        except BaseException:
            self._abort()
            raise

    def _submit(self, handle: EngineHandle) -> None:
        self._streams: list[RequestStream] = []
        self._indices: dict[int, int] = {}
        self._mailbox = EventMailbox(self.prepared.new_parser, self._ended)
        for index, request in enumerate(self.prepared.requests):
            stream = handle.submit(request, self._mailbox.put)
            self._streams.append(stream)
            self._indices[stream.request_id] = index

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prepared.requests[0].prompt_ids)

    async def deltas(self, silence_s: float | None = None) -> AsyncIterator[tuple[int, Delta] | None]:
        """Yield (index of the answer, delta) to the end of all; None where nothing came for so long. Raises what broke
        the engine, and the error that ended an answer."""
        if self._kept is not None:
            yield 0, self._kept
            return
        num_open = len(self._streams)
        while num_open:
            try:
                arrived = await self._mailbox.take(silence_s)
            except EngineGoneError as error:
                if self._renewed is None or not may_renew(error):
                    raise
                renewed, self._renewed = self._renewed, None
                self._submit(await renewed())
                continue
            if not arrived:
                yield None
            else:
                self._renewed = None  # what was emitted is not emitted again
            for request_id, delta in arrived.items():
                index = self._indices[request_id]
                if delta.finished is not None:
                    num_open -= 1
                    if delta.finished.error is not None:
                        raise delta.finished.error
                    if delta.finished.finish_reason == "cancelled":
                        why = "the server is shutting down, or the model was unloaded by hand"
                        raise RequestError(503, "the answer was stopped", why=why, name="shutting_down")
                yield index, delta

    async def wholes(self) -> list[Delta]:
        """Return all of each answer. Raises as `deltas`."""
        found = [Delta() for _ in self.prepared.requests]
        async for news in self.deltas():
            if news is not None:
                found[news[0]].add(news[1])
        return found

    def keep(self, index: int, answer: Delta) -> None:
        """Have `deltas` yield this answer, which is whole, as the only one."""
        self.prepared = replace(self.prepared, requests=(self.prepared.requests[index],))
        self._kept = answer

    def close(self) -> None:
        """Call once, also where all answers have ended."""
        self._abort()
        self._closed()

    def _abort(self) -> None:
        for stream in self._streams:
            stream.abort()
