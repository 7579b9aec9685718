"""Keeps a dialogue in the history as it happens. What the history refuses is told once, and the chat goes on without.

Knows dialogues and the history. Knows no model and no terminal.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from localllm.chat.answer import Answer
from localllm.chat.dialogue import Dialogue, Message
from localllm.chat.notifier import Teller
from localllm.errors import HistoryError, LocalLLMError, UnwrittenError, UsageError
from localllm.runtime.selection import Selection

if TYPE_CHECKING:
    from pathlib import Path

    from localllm.history import History, Recording, Session, State

_PATIENCE_S = 0.2  # with a history that has failed before
_T = TypeVar("_T")


@dataclass(frozen=True)
class Resumed:
    """A chat of the history that is gone on with: what it shows, each message with its number there. thinking: of these
    messages, the answers that begin in a thought."""

    session: Session
    turns: tuple[tuple[Message, int], ...]
    is_cut: bool  # its last message is an answer that did not end
    thinking: tuple[Message, ...] = ()

    def restore(self, dialogue: Dialogue, system: str | None) -> None:
        """Puts what was said into an empty dialogue; `system`: the message that was typed in the place of its own."""
        dialogue.system = self.session.system if system is None else system
        dialogue.turns = [turn for turn, _ in self.turns]
        dialogue.thinking = list(self.thinking)


def look_up(teller: Teller, word: str, message: int | None = None) -> Resumed:
    """The chat that `word` names: an id, the beginning of one, a part of a title, or `last`. message: the number of one
    that is to be among those shown, of another branch maybe. Raises HistoryError."""
    from localllm.history import History, history_file, nothing_is_kept

    if nothing_is_kept():
        raise HistoryError("no chat is kept yet", why=f"there is no {history_file()}", fix="localllm chat")
    with History.open_to_read(history_file()) as history:
        if history.moved_to is not None:
            teller.warn(moved_text(history.moved_to, history.num_rescued))
        session = history.find(word)
        path = history.path(session)
        if message is not None and all(each.number != message for each in path):
            path = history.branch(message) or path
    turns = tuple((message.as_turn, message.number) for message in path)
    thinking = tuple(turn for (turn, _), message in zip(turns, path, strict=True) if message.begins_in_thought)
    return Resumed(session, turns, bool(path) and path[-1].state != "complete", thinking)


def keeper_of(teller: Teller, selection: Selection, resumed: Resumed | None, *, keeps: bool = True) -> Keeper:
    """What keeps the chat with this model; nothing where the user wants it private, or where it is none (`keeps`)."""
    from localllm.history import history_file

    is_kept = keeps and not selection.private
    return Keeper(teller, history_file() if is_kept else None, selection.model_name, resumed)


class Keeper:
    """Makes the history's session show what the dialogue holds: call `sync` where that has changed.

    Turns are known by identity: one that a dialogue has taken back and said anew is another message there, beside the
    first. path: of the history; None: nothing is kept.
    """

    def __init__(self, teller: Teller, path: Path | None, model: str, resumed: Resumed | None = None) -> None:
        self._teller = teller
        self._path = path
        self._model = model
        self._history: History | None = None
        self._session: Session | None = resumed.session if resumed else None
        self._kept: list[tuple[Message, int]] = list(resumed.turns) if resumed else []
        self._head = resumed.session.head if resumed else None  # as this one has left it
        self._is_alone = True  # nobody else was seen to go on with it
        self._recording: Recording | None = None
        self._known: dict[str, Any] = {}  # of the answer that is being written
        self._title: str | None = None
        self._ends: list[tuple[Message, State, Mapping[str, Any]]] = []  # of answers, how each did
        self._identity: os.stat_result | None = None  # of the file, the last time
        self._is_own = resumed is None
        self._is_gone_on_with = resumed is None  # something was said: the model and the system message are these
        self._is_behind = False  # what was said last is not kept
        self._has_failed = False
        self._is_removed = False

    @property
    def is_private(self) -> bool:
        return self._path is None

    @property
    def title(self) -> str:
        """Under which the chat is kept; "" where there is none."""
        return self._title or (self._session.title if self._session is not None else "")

    def title_for(self, dialogue: Dialogue) -> str:
        """The title that a conversation is given by what it begins with; "" before it is."""
        from localllm.history import content_of, title_of

        first = next((content_of(turn)[0] for turn in dialogue.turns if turn["role"] == "user"), "")
        return title_of(dialogue.opening or first) if dialogue.turns else ""

    @property
    def session_id(self) -> str | None:
        """The id of the kept chat; None where nothing is kept of it (yet)."""
        is_kept = self._session is not None and not (self.is_private or self._is_behind or self._is_removed)
        return self._session.id if self._session is not None and is_kept else None

    def next_wording(self, turn: Mapping[str, Any]) -> tuple[int, int, int]:
        """Of a question's wordings, or the answers in an answer's place, the next: its number, which of them it is from
        1 on, how many there are. Raises UsageError where the turn is not kept, HistoryError."""
        from localllm.history import History

        number = next((number for kept, number in self._kept if kept is turn), None)
        if number is None or self._path is None or self.session_id is None:
            fix = "/regen answers anew, /edit writes the last question anew"
            raise UsageError("there is no other", why="this message is not kept", fix=fix)
        with History.open_to_read(self._path) as history:
            numbers = history.wordings(number)
        at = (numbers.index(number) + 1) % len(numbers)
        return numbers[at], at + 1, len(numbers)

    def sync(self, dialogue: Dialogue) -> None:
        """Keeps what was said since, and has the session show what the dialogue does."""
        self._attempt(lambda history: self._sync(history, dialogue))

    def catch_up(self, dialogue: Dialogue) -> None:
        """`sync` where something was missed: the last chance, as the dialogue is about to end."""
        if self._is_behind:
            self.sync(dialogue)

    def begin_answer(self, *, is_thinking: bool = False) -> None:
        """What is heard from now on is the answer to the last message that was kept. is_thinking: it begins in a
        thought."""
        from localllm.history import Recording
        from localllm.history.records import IN_THOUGHT

        self._recording = None
        self._known = {IN_THOUGHT: True} if is_thinking else {}
        self._is_gone_on_with = True
        if self._history is not None and self._session is not None and self._kept and self.session_id is not None:
            self._recording = Recording(self._history, self._session, self._kept[-1][1], self._model, self._known)

    def hear(self, text: str) -> None:
        """Takes a piece of the answer in; tells of nothing, which would stand in the middle of it."""
        if self._recording is not None:
            self._recording.hear(text)

    def end_answer(self, dialogue: Dialogue, answer: Answer | None) -> None:
        """The answer has ended, and is the dialogue's last turn. None: an error ended it."""
        from localllm.history import GoneError

        recording, self._recording = self._recording, None
        state: State = "complete" if answer is not None and _is_whole(answer) else "interrupted"
        self._ends.append((dialogue.turns[-1], state, {**self._known, **_facts(answer)}))
        if recording is not None:
            recording.finish(state, _facts(answer))
            self._head = self._head if recording.message is None else recording.message
            if recording.message is not None and recording.error is None:
                self._kept.append((dialogue.turns[-1], recording.message))
            elif recording.error is not None and not isinstance(recording.error, GoneError):  # that `sync` meets, too
                self._fail(recording.error)
        self.sync(dialogue)

    def drop_answer(self) -> None:
        """Nothing was said."""
        self._recording = None

    def use_model(self, name: str) -> None:
        """The answers from now on are of another model."""
        self._model = name

    def begin_anew(self) -> None:
        """What is said next begins another chat."""
        self._session, self._kept, self._title = None, [], None
        self._ends.clear()
        self._is_alone = True
        self._is_own = self._is_gone_on_with = True
        self._is_removed = False

    def come_back(self, dialogue: Dialogue, uid: str) -> None:
        """A session was put back after it was removed: where it is this one, it is kept again, with what was said
        meanwhile."""
        if self._is_removed and self._session is not None and self._session.uid == uid:
            self._is_removed = False
            self.sync(dialogue)

    def rename(self, dialogue: Dialogue, title: str) -> str:
        """Gives the chat a title, where there is one; returns the one that it has. Raises UsageError, HistoryError."""
        self._require_kept("/title")
        if title:
            self._title = " ".join(title.split())
            self.sync(dialogue)
        return self.title or "none yet"

    def fork(self, dialogue: Dialogue) -> str | None:
        """Goes on in a copy of the chat; returns its id, None where nothing was said yet. Raises UsageError."""
        self._require_kept("/fork")
        return self._attempt(lambda history: self._fork(history, dialogue))

    def close(self) -> None:
        """Ends it. Where the history had refused and then had not, tells that nothing is missing after all."""
        if self._has_failed and self.session_id is not None:
            self._teller.note(f"the history could be written again: all of this chat is kept, as {self.session_id}")
        self._close()

    def _close(self) -> None:
        if self._history is not None:
            self._history.close()
            self._history = None

    def _sync(self, history: History, dialogue: Dialogue) -> None:
        from localllm.history import clean, content_of

        turns, same = dialogue.turns, self._same(dialogue)
        if self._session is None and not turns:
            return
        kept = self._kept[:same]
        with history.together():
            title = self.title_for(dialogue)
            session = self._session and history.refresh(self._session)
            is_moved = session is not None and session.head != self._head
            session = session or history.begin(self._title or title, self._model, dialogue.system)
            for turn in turns[same:]:
                content, fields = content_of(turn)
                model = self._model if turn["role"] == "assistant" else None
                parent = kept[-1][1] if kept else None
                state, facts = next(((state, facts) for of, state, facts in self._ends if of is turn), ("complete", {}))
                number = history.append(
                    session, parent, turn["role"], content, state=state, model=model, fields=fields, facts=facts
                )
                kept.append((turn, number))
            head = kept[-1][1] if kept else None
            session = history.refresh(session)
            has_changed = len(turns) > same or same < len(self._kept)
            if session.head != head and (has_changed or not is_moved):
                history.show(session, head)
            self._is_gone_on_with |= len(turns) > same
            # Of a chat that was begun here and undone altogether, the next question is what it is about.
            is_anew = self._is_own and self._session is not None and not same and len(turns) > 0
            told = (self._title or (title if is_anew else session.title), session.model, session.system)
            if self._is_gone_on_with:
                told = (told[0], clean(self._model), clean(dialogue.system))
            if told != (session.title, session.model, session.system):
                history.update(session, title=told[0], model=told[1], system=told[2])
            session = history.refresh(session)
        self._session, self._kept, self._head = session, kept, head
        if is_moved and has_changed and self._is_alone:
            self._is_alone = False
            self._teller.warn(
                "this chat was gone on with elsewhere, in another window maybe: what is said here is a branch beside "
                "that, and what the chat shows now"
            )

    def _same(self, dialogue: Dialogue) -> int:
        """How many turns of the dialogue are kept as they are."""
        same = 0
        while same < min(len(dialogue.turns), len(self._kept)) and dialogue.turns[same] is self._kept[same][0]:
            same += 1
        return same

    def _fork(self, history: History, dialogue: Dialogue) -> str | None:
        self._sync(history, dialogue)
        if self._session is None or not self._kept:
            return None
        copy = history.fork(self._session, self._kept[-1][1])
        path = history.path(copy)
        self._session, self._head, self._is_alone = copy, copy.head, True
        self._kept = [(turn, message.number) for turn, message in zip(dialogue.turns, path, strict=True)]
        return copy.id

    def _require_kept(self, command: str) -> None:
        if self.is_private:
            raise UsageError(f"{command} needs a chat that is kept", why="this one is private", fix="/save chat.json")

    def _attempt(self, action: Callable[[History], _T]) -> _T | None:
        from localllm.history import GoneError

        if self._path is None or self._is_removed:
            return None
        try:
            result = action(self._opened(self._path))
        except GoneError:
            self._is_removed = True
            self._teller.warn("this chat was removed from the history: it goes on, but is not kept any more")
            return None
        except HistoryError as error:
            self._fail(error)
            return None
        self._is_behind = False
        return result

    def _opened(self, path: Path) -> History:
        from localllm.history import History
        from localllm.history.database import PATIENCE_S

        if self._history is not None and not self._history.is_in_place():  # deleted, or moved aside by another process
            self._close()
            self._session, self._kept = None, []
        if self._history is None:
            self._history = History.open(path, patience_s=_PATIENCE_S if self._has_failed else PATIENCE_S)
            if self._history.moved_to is not None:
                self._teller.warn(moved_text(self._history.moved_to, self._history.num_rescued))
            before, self._identity = self._identity, self._history.identity
            if self._history.moved_to is not None or not (before is None or os.path.samestat(before, self._identity)):
                self._session, self._kept = None, []
        return self._history

    def _fail(self, error: LocalLLMError) -> None:
        self._close()
        self._is_behind = True
        if not self._has_failed:
            self._has_failed = True
            self._teller.warn(f"this chat goes on, but is not kept: {error.what} ({error.why}); {error.fix}")


def kept_answer(
    dialogue: Dialogue,
    keeper: Keeper,
    answer: Callable[[Callable[[str], None]], Answer],
    *,
    is_thinking: bool = False,
) -> Answer:
    """The answer to the dialogue's last question. Keeps both: the question before the model begins, and of what
    `answer` brings about each text as soon as the function that it is given has heard it. is_thinking: it begins in a
    thought.

    Raises the error that ended it; what was said by then stays, and a question of which nothing was said is taken back.
    """
    said: list[str] = []

    def hear(text: str) -> None:
        said.append(text)
        keeper.hear(text)

    try:
        keeper.sync(dialogue)
        keeper.begin_answer(is_thinking=is_thinking)
        found = answer(hear)
    except BaseException as error:  # the reader of a pipe that is gone, too
        if any(said):
            dialogue.answer("".join(said), is_thinking=is_thinking)
            keeper.end_answer(dialogue, None)
        elif isinstance(error, LocalLLMError) and not isinstance(error, UnwrittenError):
            dialogue.take_back_question()
            keeper.sync(dialogue)
        raise
    if found.text or _is_whole(found):
        dialogue.answer(found.text, is_thinking=is_thinking)
        keeper.end_answer(dialogue, found)
    else:  # stopped before the first word: the question waits for its answer
        keeper.drop_answer()
    return found


def moved_text(moved_to: Path, num_rescued: int) -> str:
    """What is told of a history that was found damaged."""
    chats = "the chat" if num_rescued == 1 else f"the {num_rescued} chats"
    with_what = f" with {chats} that could be read of it" if num_rescued else ""
    return (
        f"the history was damaged: it is now {moved_to}, and a new one was begun{with_what} (`localllm help history`)"
    )


def _is_whole(answer: Answer) -> bool:
    return answer.finished is not None and answer.finished.finish_reason in ("stop", "length")


def _facts(answer: Answer | None) -> dict[str, Any]:
    """What is worth knowing of an answer later."""
    if answer is None or answer.finished is None:
        return {}
    usage = answer.finished.usage
    return {
        "finish_reason": answer.finished.finish_reason,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "seed": answer.seed,
    }
