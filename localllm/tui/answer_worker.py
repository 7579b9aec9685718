"""The answers of a conversation: the one that streams, posted as it comes, and the state of the last."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from localllm.chat.answer import Answer, silence
from localllm.chat.context import grown_text
from localllm.chat.pending_turn import PendingTurn
from localllm.chat.recorder import AnswerRecording, Resumed
from localllm.chat.session import ChatSession
from localllm.engine.engine_info import EngineFacts
from localllm.engine.events import Event, FinishedEvent, GrownEvent, PrefillEvent, TokenEvent
from localllm.errors import EngineGoneError
from localllm.runtime.engine_handle import RequestStream
from localllm.tui import messages
from localllm.tui.keys import KeyNames
from localllm.tui.messages import Post, Turn

_CUTS = {"cancelled": "stopped", "length": "cut by its length", "error": "ended by an error"}
_SHORTEST_S = 0.07  # between two batches: what an eye follows
_LONGEST_S = 0.25
_SHARE = 0.2  # of a core, for drawing
_POLL_S = 0.02  # the delay with which the end of an answer is noticed


class StreamThrottle:
    """The interval between two batches: as short as the screen's thread can draw them in a fifth of its time."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget the measured costs, before an answer."""
        self.interval_s = _SHORTEST_S
        self._spent_s: float | None = None

    def drawn(self) -> None:
        """Take the cost of the last batch; called on the screen's thread at each batch."""
        spent_s = time.thread_time()
        if self._spent_s is not None:
            self.interval_s = min(max(_SHORTEST_S, (spent_s - self._spent_s) / _SHARE), _LONGEST_S)
        self._spent_s = spent_s

    def batches(self, stream: RequestStream) -> Iterator[list[Event]]:
        """The events as they come, those of an interval together; the first at once."""
        events, flushed_at = iter(stream), 0.0
        for event in events:
            batch = [event]
            while not isinstance(batch[-1], FinishedEvent):
                if not stream.events.empty():
                    batch.append(next(events))
                elif (rest_s := flushed_at + self.interval_s - time.monotonic()) > 0:
                    time.sleep(min(rest_s, _POLL_S))
                else:
                    break
            flushed_at = time.monotonic()
            yield batch


class AnswerWorker:
    """Used by the conversation's thread; `stop` and the properties by any thread."""

    def __init__(self, post: Post, key_names: KeyNames) -> None:
        self._post = post
        # Shown on the other screens where something has to wait for an answer.
        self.busy_text = f"an answer is being written: {key_names['chat.stop']} in the chat stops it"
        self._anew = f"{key_names['chat.regenerate']} answers anew"
        self._goes_on = f"{key_names['chat.continue']} goes on, {self._anew}"
        self._stream: RequestStream | None = None
        self._stops = threading.Event()
        self.throttle = StreamThrottle()
        self._ending: tuple[Turn, str] = {}, ""  # the latest answer that is not whole, and the reason
        self.tok_s: float | None = None  # of the last answer of the loaded model
        self.facts: EngineFacts | None = None  # of the model when it was loaded, or behind its last answer

    @property
    def is_under_way(self) -> bool:
        return self._stream is not None

    def resume(self, resumed: Resumed) -> None:
        """Take the state of a saved conversation's last answer."""
        if resumed.is_cut:
            self._ending = resumed.turns[-1][0], f"interrupted: {self._goes_on}"

    def settle(self, session: ChatSession) -> None:
        """Take the state of the last answer, which has become a turn of the conversation."""
        if ending := self._ending_now(session):
            self._ending = session.dialogue.turns[-1], ending

    def ending_of(self, turns: Sequence[Turn]) -> str:
        """Why the last of the turns ends where it does; "" for a complete answer."""
        turn, ending = self._ending
        return ending if turns and turns[-1] is turn else ""

    def _ending_now(self, session: ChatSession) -> str:
        """Why the last answer ends where it does, and how to go on; "" for a complete answer."""
        finished = None if session.answer is None else session.answer.finished
        if finished is None:
            return f"interrupted: {self._goes_on}"
        if not session.can_go_on():
            return f"cut by the full context: {self._anew}"
        reason = _CUTS.get(finished.finish_reason)
        return f"{reason}: {self._goes_on}" if reason else ""

    def expect(self) -> None:
        """An answer is requested: a stop of the one before does not apply to it."""
        self._stops.clear()

    def stop(self) -> None:
        """End the answer that streams or is requested; its text so far stays."""
        self._stops.set()
        stream = self._stream
        if stream is not None:
            stream.abort()

    def write(self, session: ChatSession, pending: PendingTurn, on_submitted: Callable[[], None]) -> None:
        """Stream the answer to its end. on_submitted: called while the prompt is prefilled.

        Raises the error that ended the answer.
        """
        for text in pending.notices:
            self._post(messages.Noted(text))
        try:
            with session.answering(pending) as record:
                self._post(messages.AnswerStarted(pending.said, record.answer.begins_in_thought))
                self._stream = session.submit(pending)
                try:
                    if self._stops.is_set():
                        self._stream.abort()
                    on_submitted()
                    self._follow(self._stream, record)
                finally:
                    self._stream = None
        finally:
            self._stops.clear()
            if (answer := session.answer) is not None:
                self._end(answer, pending.said)

    def _follow(self, stream: RequestStream, record: AnswerRecording) -> None:
        """Take the events of the answer; each text is recorded before it is posted."""
        began = 0.0
        for events in self.throttle.batches(stream):
            text = "".join([record.take(event).text for event in events])
            if not began and any(isinstance(event, TokenEvent) for event in events):
                began = time.monotonic()
            for event in events:
                if isinstance(event, GrownEvent):
                    self._post(messages.Noted(grown_text(event)))
            if prefilled := [event for event in events if isinstance(event, PrefillEvent)]:
                self._post(messages.PrefillProgress(prefilled[-1].done, prefilled[-1].total))
            if text:
                elapsed_s = time.monotonic() - began if began else 0.0
                self._post(messages.AnswerDelta(text, len(record.answer.token_ids), elapsed_s))

    def _end(self, answer: Answer, said: str) -> None:
        """Post the end of the answer. said: its beginning, which was continued."""
        finished = answer.finished
        self.tok_s = None if finished is None else finished.timings.decode_tok_s
        self._post(messages.AnswerEnded(answer.text, finished, answer.seed))
        if finished is not None and finished.finish_reason == "stop" and said and answer.text == said:
            self._post(messages.Noted("nothing was added: to the model the answer is whole"))

    def report(self, session: ChatSession) -> None:
        """Post what the last answer has changed: the place of the blocks, the fullness of the context."""
        answer = session.answer
        if answer is None or answer.finished is None:
            return
        if answer.finished.ctx is not None and session.engine is not None:  # blocks may have moved, the context grown
            with suppress(EngineGoneError):
                self.facts = session.engine.facts()
                self._post(messages.ModelReady(session.selection.files.name, self.facts))
        if (empty := silence(answer)) is not None:
            self._post(messages.Noted(empty, "warning"))
        if (fullness := session.fullness()) is not None:
            self._post(messages.Noted(fullness.text, "warning"))
