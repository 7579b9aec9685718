"""The answers of a conversation: the one that is being written, posted as it comes, and what is known of the last."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from localllm.errors import EngineGoneError
from localllm.frontend.answer import Answer, silence
from localllm.frontend.context import evicted_text
from localllm.frontend.keeping import Resumed
from localllm.frontend.talk import Asked, Talk
from localllm.tui.facts import facts_of
from localllm.tui.key_names import KeyNames
from localllm.tui.messages import AnswerEnded, AnswerStarted, ModelReady, Noted, Turn
from localllm.tui.model_loader import Post
from localllm.tui.stream_throttle import StreamThrottle, follow

if TYPE_CHECKING:
    from localllm.engine.facts import AnswerStream, Service


class AnswerWorker:
    """Of the conversation's thread, but `stop` and what may be read, which are anybody's."""

    def __init__(self, post: Post, key_names: KeyNames) -> None:
        """busy_text: what is said on the other screens of what has to wait for an answer."""
        self._post = post
        self.busy_text = f"an answer is being written: {key_names['chat.stop']} in the chat stops it"
        self._anew = f"{key_names['chat.regenerate']} answers anew"
        self._goes_on = f"{key_names['chat.continue']} goes on, {self._anew}"
        self._stream: AnswerStream | None = None
        self._stops = threading.Event()
        self.pace = StreamThrottle()
        self._asked: Asked | None = None
        self._ending: tuple[Turn, str] = {}, ""  # the latest answer that is not whole, and why
        self.last: Answer | None = None
        self.tok_s: float | None = None  # of the last answer of the model that is loaded

    @property
    def is_under_way(self) -> bool:
        return self._stream is not None

    def resume(self, resumed: Resumed) -> None:
        """What is known of a kept conversation's answers."""
        if resumed.is_cut:
            self._ending = resumed.turns[-1][0], f"interrupted: {self._goes_on}"

    def settle(self, talk: Talk, turn: Turn) -> None:
        """The last answer has become a turn of the conversation."""
        if ending := self._ending_now(talk):
            self._ending = turn, ending

    def ending_of(self, turns: Sequence[Turn]) -> str:
        """Why the last of them ends where it does; of an answer that is whole nothing."""
        turn, ending = self._ending
        return ending if turns and turns[-1] is turn else ""

    def _ending_now(self, talk: Talk) -> str:
        """Why the last answer ends where it does, and what can be done about it; "" where it is whole."""
        finished = None if self.last is None else self.last.finished
        if finished is None:
            return f"interrupted: {self._goes_on}"
        if not talk.has_room_behind(finished):
            return f"cut by the full context: {self._anew}"
        reasons = {"cancelled": "stopped", "length": "cut by its length", "error": "ended by an error"}
        reason = reasons.get(finished.finish_reason)
        return f"{reason}: {self._goes_on}" if reason else ""

    def expect(self) -> None:
        """An answer is asked for: what stopped the one before has nothing to do with it."""
        self._stops.clear()

    def stop(self) -> None:
        """Ends the answer that is being written, or is asked for; what was said stays."""
        self._stops.set()
        stream = self._stream
        if stream is not None:
            stream.abort()

    def forget_model(self) -> None:
        """Another is loaded: what was measured and explained was the one's before."""
        self._asked = self.tok_s = None

    def write(
        self,
        talk: Talk,
        service: Service,
        ask: Callable[[], Asked],
        show: Callable[[], None],
        count: Callable[[int], None],
    ) -> None:
        """Has a question answered. show: what it did to the conversation; count: what it took of the context,
        given the tokens of an answer that is gone on with.

        Raises what kept it from being asked (`last` is then None), and the error that ended the answer.
        """
        self.last = None
        asked = ask()
        self._asked = asked
        if asked.said:
            show()
        if asked.evicted.turns:
            self._post(Noted(evicted_text(asked.evicted)))
        self._post(AnswerStarted(asked.said, asked.is_thinking))
        if asked.note:
            self._post(Noted(asked.note))
        said = [asked.said] if asked.said else []
        answer = Answer(len(asked.request.prompt_ids), asked.request.sampling.seed, said, thinking=asked.thinking)
        try:
            talk.answer(asked, lambda hear: self._heard(service, asked, answer, hear, count))
        finally:
            self._stops.clear()
            self.last = answer
            self.tok_s = None if answer.finished is None else answer.finished.timings.decode_tok_s
            self._post(AnswerEnded(answer.text, answer.finished, answer.seed))
            is_whole = answer.finished is not None and answer.finished.finish_reason == "stop"
            if is_whole and asked.said and answer.text == asked.said:
                self._post(Noted("nothing was added: to the model the answer is whole"))

    def tell_of(self, talk: Talk) -> None:
        """What the last answer has changed: where blocks are, how full the context is."""
        finished = None if self.last is None else self.last.finished
        if finished is None:
            return
        if finished.ctx is not None:  # blocks may have moved, the context grown
            with suppress(EngineGoneError):
                self._post(ModelReady(facts_of(talk.files.name, talk.engine)))
        if self.last is not None and (empty := silence(self.last)) is not None:
            self._post(Noted(empty, "warning"))
        if (fullness := talk.fullness(finished)) is not None:
            self._post(Noted(fullness.text, "warning" if fullness.is_full else "information"))

    def why_missed(self) -> str:
        """What of the last prompt had to be computed, and why."""
        if self._asked is None or self.last is None or self.last.finished is None:
            return "there is no answer yet"
        return self._asked.told_of_cache(self.last.finished)

    def _heard(
        self,
        service: Service,
        asked: Asked,
        answer: Answer,
        hear: Callable[[str], None],
        count: Callable[[int], None],
    ) -> Answer:
        """The answer, when it has ended. Raises the error that ended it."""
        hear(asked.said)
        stream = self._stream = service.submit(asked.request)
        if self._stops.is_set():
            stream.abort()
        try:
            count(asked.num_said_ids)  # while the prompt is being read
            follow(stream, answer, hear, self._post, self.pace)
        finally:
            self._stream = None
        if answer.finished is not None and answer.finished.error is not None:
            raise answer.finished.error
        return answer
