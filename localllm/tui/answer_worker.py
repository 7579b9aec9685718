"""The answers of a conversation: the one that streams, posted as it comes, and the state of the last."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from localllm.chat.answer import Answer, silence
from localllm.chat.context import evicted_text, grown_text
from localllm.chat.recorder import Resumed
from localllm.chat.session import Asked, Talk
from localllm.engine.events import Event, GrownEvent, PrefillEvent, TokenEvent
from localllm.errors import EngineGoneError
from localllm.runtime.engine_handle import EngineHandle, RequestStream
from localllm.tui import messages
from localllm.tui.keys import KeyNames
from localllm.tui.messages import Post, Turn
from localllm.tui.stream_throttle import StreamThrottle

_CUTS = {"cancelled": "stopped", "length": "cut by its length", "error": "ended by an error"}


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
        self._asked: Asked | None = None
        self._ending: tuple[Turn, str] = {}, ""  # the latest answer that is not whole, and the reason
        self.last: Answer | None = None
        self.tok_s: float | None = None  # of the last answer of the loaded model

    @property
    def is_under_way(self) -> bool:
        return self._stream is not None

    def resume(self, resumed: Resumed) -> None:
        """Take the state of a saved conversation's last answer."""
        if resumed.is_cut:
            self._ending = resumed.turns[-1][0], f"interrupted: {self._goes_on}"

    def settle(self, talk: Talk, turn: Turn) -> None:
        """The last answer has become a turn of the conversation."""
        if ending := self._ending_now(talk):
            self._ending = turn, ending

    def ending_of(self, turns: Sequence[Turn]) -> str:
        """Why the last of the turns ends where it does; "" for a complete answer."""
        turn, ending = self._ending
        return ending if turns and turns[-1] is turn else ""

    def _ending_now(self, talk: Talk) -> str:
        """Why the last answer ends where it does, and how to go on; "" for a complete answer."""
        finished = None if self.last is None else self.last.finished
        if finished is None:
            return f"interrupted: {self._goes_on}"
        if not talk.has_room_behind(finished):
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

    def forget_model(self) -> None:
        """Another model is loaded: rates and explanations were of the one before."""
        self._asked = self.tok_s = None

    def prepare(self, ask: Callable[[], Asked]) -> Asked:
        """The next question as `ask` prepares it. Raises what it raises; `last` is then None."""
        self.last = None
        self._asked = asked = ask()
        return asked

    def write(self, talk: Talk, service: EngineHandle, asked: Asked, on_submitted: Callable[[], None]) -> None:
        """Stream the answer to its end. on_submitted: called while the prompt is prefilled.

        Raises the error that ended the answer.
        """
        if asked.evicted.turns:
            self._post(messages.Noted(evicted_text(asked.evicted)))
        self._post(messages.AnswerStarted(asked.said, asked.is_thinking))
        if asked.note:
            self._post(messages.Noted(asked.note))
        begun = [asked.said] if asked.said else []
        answer = Answer(len(asked.request.prompt_ids), asked.request.sampling.seed, begun, thinking=asked.thinking)

        def stream(record: Callable[[str], None]) -> Answer:
            record(asked.said)
            self._stream = service.submit(asked.request)
            try:
                if self._stops.is_set():
                    self._stream.abort()
                on_submitted()
                self._follow(self._stream, answer, record)
            finally:
                self._stream = None
            if answer.finished is not None and answer.finished.error is not None:
                raise answer.finished.error
            return answer

        try:
            talk.answer(asked, stream)
        finally:
            self._stops.clear()
            self.last = answer
            self.tok_s = None if answer.finished is None else answer.finished.timings.decode_tok_s
            self._post(messages.AnswerEnded(answer.text, answer.finished, answer.seed))
            is_whole = answer.finished is not None and answer.finished.finish_reason == "stop"
            if is_whole and asked.said and answer.text == asked.said:
                self._post(messages.Noted("nothing was added: to the model the answer is whole"))

    def _follow(self, stream: RequestStream, answer: Answer, record: Callable[[str], None]) -> None:
        """Collect the answer; each text is recorded before it is posted."""
        began = 0.0
        for events in self.throttle.batches(stream):
            texts = []
            for event in events:
                texts.append(answer.take(event).text)
                record(texts[-1])
                if isinstance(event, TokenEvent):
                    began = began or time.monotonic()
            self._post_progress(events)
            if any(texts):
                elapsed_s = time.monotonic() - began if began else 0.0
                self._post(messages.AnswerDelta("".join(texts), len(answer.token_ids), elapsed_s))

    def _post_progress(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, GrownEvent):
                self._post(messages.Noted(grown_text(event)))
        if prefilled := [event for event in events if isinstance(event, PrefillEvent)]:
            self._post(messages.PrefillProgress(prefilled[-1].done, prefilled[-1].total))

    def report(self, talk: Talk) -> None:
        """Post what the last answer has changed: the place of the blocks, the fullness of the context."""
        finished = None if self.last is None else self.last.finished
        if self.last is None or finished is None:
            return
        if finished.ctx is not None:  # blocks may have moved, the context grown
            with suppress(EngineGoneError):
                self._post(messages.ModelReady(talk.files.name, talk.engine.facts()))
        if (empty := silence(self.last)) is not None:
            self._post(messages.Noted(empty, "warning"))
        if (fullness := talk.fullness(finished)) is not None:
            self._post(messages.Noted(fullness.text, "warning" if fullness.is_full else "information"))

    def why_missed(self) -> str:
        """The cached share of the last prompt, and why it is not larger."""
        if self._asked is None or self.last is None or self.last.finished is None:
            return "there is no answer yet"
        return self._asked.told_of_cache(self.last.finished)
