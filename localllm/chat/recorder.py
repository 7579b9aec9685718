"""Records a chat in the history as it happens, resumes and exports it. A refusal of the history is reported once.

Knows dialogues and the history. Knows no model and no terminal.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol, TypeVar

from localllm.chat.adapters import on_disk, shown, used, with_adapters
from localllm.chat.answer import Answer, Piece
from localllm.chat.attachments import typed_part
from localllm.chat.dialogue import IN_CHAT, Dialogue, Message
from localllm.chat.text_file import write_new
from localllm.chat.thoughts import kept_apart
from localllm.engine.events import Event
from localllm.errors import Fix, HistoryError, LocalLLMError, UnwrittenError, UsageError
from localllm.history import (
    GoneError,
    History,
    Recording,
    Session,
    State,
    clean,
    content_of,
    database,
    exchange,
    history_file,
    nothing_is_kept,
    title_of,
)
from localllm.history.records import IN_THOUGHT, adapter_facts, used_adapters
from localllm.runtime.selection import Selection

_MOST_NAMED = 50  # characters of a title in a file's name
_PATIENCE_S = 0.2  # with a history that has failed before
_T = TypeVar("_T")


class Notifier(Protocol):
    """The receiver of notices beside an answer: a line on stderr, a notice on a screen. Called from any thread."""

    def note(self, text: str) -> None:
        """Show information."""
        ...

    def warn(self, text: str) -> None:
        """Show a warning."""
        ...


@dataclass(frozen=True)
class Resumed:
    """A saved chat that is resumed.

    turns: the messages that it shows, each with its number in the history.
    is_cut: the last message is an answer that did not end.
    thinking: the turns that are answers beginning in a thought.
    adapters: with which the last answer was computed, as the setting names them; None where there is no answer.
    """

    session: Session
    turns: tuple[tuple[Message, int], ...]
    is_cut: bool
    thinking: tuple[Message, ...] = ()
    adapters: tuple[str, ...] | None = None

    def restore(self, dialogue: Dialogue, system: str | None) -> None:
        """Put the chat into an empty dialogue. system: the message that was typed in place of the chat's own."""
        dialogue.system = self.session.system if system is None else system
        dialogue.turns = [turn for turn, _ in self.turns]
        dialogue.thinking = list(self.thinking)

    def adapters_for(self, model: str, warn: Callable[[str], object]) -> tuple[str, ...] | None:
        """Return the adapters of the last answer that are on this disk; None where there is no answer, or another model
        gave it. model: the one that goes on with the chat. warn: called with what is left out."""
        if self.adapters and self.session.model != model:
            gave_it = self.session.model
            warn(f"its last answer was given by {gave_it} with {shown(self.adapters)}: {model} goes on without that")
        if self.adapters is None or self.session.model != model:
            return None
        return on_disk(self.adapters, warn)

    def under_its_adapters(self, selection: Selection, warn: Callable[[str], object]) -> Selection:
        """Return the selection with the adapters of the last answer, unless the line, or a preset on it, names others.
        warn: as of `adapters_for`."""
        origin = selection.resolved.origins["adapter"]
        if origin != IN_CHAT and origin.kind in ("flag", "preset"):
            return selection
        texts = self.adapters_for(selection.model_name, warn)
        return selection if texts is None else replace(selection, resolved=with_adapters(selection.resolved, texts))


@contextmanager
def opened_history(warn: Callable[[str], object], *, makes: bool = False) -> Iterator[History]:
    """Open the history. warn: called where it was found damaged. makes: also where there is none.

    Raises HistoryError.
    """
    if not makes and nothing_is_kept():
        raise HistoryError("no chat is saved yet", why=f"there is no {history_file()}", fix=Fix.command("chat"))
    with History.open_to_read(history_file()) as history:
        if history.moved_to is not None:
            warn(moved_text(history.moved_to, history.num_rescued))
        yield history


def look_up(notifier: Notifier, word: str, message: int | None = None) -> Resumed:
    """Return the chat that `word` names: an id, the beginning of one, a part of a title, or `last`.

    message: the number of one that has to be among those shown, maybe of another branch. Raises HistoryError.
    """
    with opened_history(notifier.warn) as history:
        session = history.find(word)
        path = history.path(session)
        if message is not None and all(each.number != message for each in path):
            path = history.branch(message) or path
    turns = tuple((message.as_turn, message.number) for message in path)
    thinking = tuple(turn for (turn, _), message in zip(turns, path, strict=True) if message.begins_in_thought)
    last = next((message for message in reversed(path) if message.role == "assistant"), None)
    adapters = None if last is None else tuple(each.text for each in used_adapters(last.facts))
    return Resumed(session, turns, bool(path) and path[-1].state != "complete", thinking, adapters)


def recorder_of(
    dialogue: Dialogue, notifier: Notifier, selection: Selection, resumed: Resumed | None, *, records: bool = True
) -> ChatRecorder:
    """Return the recorder of a chat with this model. It records nothing where the user wants the chat private, or
    where it is not a chat (`records`)."""
    path = history_file() if records and not selection.private else None
    return ChatRecorder(dialogue, notifier, path, selection.model_name, resumed)


@dataclass
class AnswerRecording:
    """An answer on its way: each piece is recorded before it is shown.

    answer: the one that becomes a turn of the dialogue when it has ended.
    """

    answer: Answer
    recording: Recording | None
    parts: list[str] = field(default_factory=list)

    def take(self, event: Event) -> Piece:
        """Add an event to the answer, record its text, and return its piece of the answer."""
        piece = self.answer.take(event)
        self.write(piece.text)
        return piece

    def write(self, text: str) -> None:
        """Record text. Failures are reported when the answer has ended, not in the middle of it."""
        self.parts.append(text)
        if self.recording is not None:
            self.recording.hear(text)


class ChatRecorder:
    """Makes the history's session equal to the dialogue: call `sync` where that has changed.

    Turns are known by identity: one that was taken back and asked anew is another message, beside the first.
    """

    def __init__(
        self, dialogue: Dialogue, notifier: Notifier, path: Path | None, model: str, resumed: Resumed | None = None
    ) -> None:
        """path: of the history; None records nothing."""
        self.dialogue = dialogue
        self._notifier = notifier
        self._path = path
        self._model = model
        self._history: History | None = None
        self._session: Session | None = resumed.session if resumed else None
        self._recorded: list[tuple[Message, int]] = list(resumed.turns) if resumed else []
        self._head = resumed.session.head if resumed else None  # as this recorder has left it
        self._is_alone = True  # no other process was seen to change the session
        self._title: str | None = None
        self._ends: list[tuple[Message, State, Mapping[str, Any]]] = []  # of answers: the turn, its state, its facts
        self._identity: os.stat_result | None = None  # of the history's file when it was last opened
        self._is_own = resumed is None
        self._is_continued = resumed is None  # something was added: the model and the system message are these
        self._is_behind = False  # the last messages are not recorded
        self._has_failed = False
        self._is_removed = False

    @property
    def is_private(self) -> bool:
        return self._path is None

    @property
    def title(self) -> str:
        """The title of the saved chat, or the one that the first question gives it; "" for an empty chat."""
        return self._title or (self._session.title if self._session is not None else "") or self._first_title

    @property
    def _first_title(self) -> str:
        first = next((typed_part(content_of(turn)[0]) for turn in self.dialogue.turns if turn["role"] == "user"), "")
        return title_of(self.dialogue.opening or first) if self.dialogue.turns else ""

    @property
    def session_id(self) -> str | None:
        """The id of the saved chat; None while nothing of it is saved."""
        is_saved = self._session is not None and not (self.is_private or self._is_behind or self._is_removed)
        return self._session.id if self._session is not None and is_saved else None

    def next_wording(self, turn: Mapping[str, Any]) -> tuple[int, int, int]:
        """Return the next wording of a question, or the next answer in an answer's place: its number, its place from
        1 on, the number of them. Raises UsageError where the turn is not saved, HistoryError."""
        number = next((number for recorded, number in self._recorded if recorded is turn), None)
        if number is None or self._path is None or self.session_id is None:
            fix = "/regen answers anew, /edit writes the last question anew"
            raise UsageError("there is no other", why="this message is not saved", fix=fix)
        with History.open_to_read(self._path) as history:
            numbers = history.wordings(number)
        at = (numbers.index(number) + 1) % len(numbers)
        return numbers[at], at + 1, len(numbers)

    def sync(self) -> None:
        """Record the new messages, and have the session show what the dialogue does."""
        self._attempt(self._sync)

    def catch_up(self) -> None:
        """`sync` where something was missed: the last chance before the dialogue ends."""
        if self._is_behind:
            self.sync()

    @contextmanager
    def answering(self, answer: Answer) -> Iterator[AnswerRecording]:
        """Record the answer to the last question: the question before the model begins, each piece as it is taken.

        An error in the block is raised again: the answer so far stays, and a question without any is taken back.
        """
        is_thinking = answer.begins_in_thought
        facts = {**({IN_THOUGHT: True} if is_thinking else {}), **self._adapter_facts}
        record = AnswerRecording(answer, None)
        try:
            self.sync()
            self._is_continued = True
            if self._history is not None and self._session is not None and self._recorded and self.session_id:
                parent = self._recorded[-1][1]
                record.recording = Recording(self._history, self._session, parent, self._model, facts)
            record.write(answer.text)
            yield record
        except BaseException as error:  # also of a printer whose pipe is closed
            if any(record.parts):
                self.dialogue.answer("".join(record.parts), is_thinking=is_thinking)
                self._end_answer(record.recording, None, facts)
            elif isinstance(error, LocalLLMError) and not isinstance(error, UnwrittenError):
                self.dialogue.take_back_question()
                self.sync()
            raise
        if record.answer.text or _is_whole(record.answer):  # else stopped before the first word: the question waits
            self.dialogue.answer(record.answer.text, is_thinking=is_thinking)
            self._end_answer(record.recording, record.answer, facts)

    @property
    def _adapter_facts(self) -> dict[str, Any]:
        """The adapters of an answer that begins; they were found when it was asked for."""
        with suppress(LocalLLMError):  # gone since
            return adapter_facts([used(text) for text in self.dialogue.resolved.settings.adapter])
        return {}

    def _end_answer(self, recording: Recording | None, answer: Answer | None, facts: Mapping[str, Any]) -> None:
        """Record the end of the answer that is the last turn. answer: None where an error ended it."""
        turn = self.dialogue.turns[-1]
        state: State = "complete" if answer is not None and _is_whole(answer) else "interrupted"
        self._ends.append((turn, state, {**facts, **_facts(answer)}))
        if recording is not None:
            recording.finish(state, _facts(answer))
            self._head = self._head if recording.message is None else recording.message
            if recording.message is not None and recording.error is None:
                self._recorded.append((turn, recording.message))
            elif recording.error is not None and not isinstance(recording.error, GoneError):  # which `sync` meets, too
                self._fail(recording.error)
        self.sync()

    def use_model(self, name: str) -> None:
        """Take the name of the model that gives the next answers."""
        self._model = name

    def begin_anew(self) -> None:
        """Record the next messages as another chat."""
        self._session, self._recorded, self._title = None, [], None
        self._ends.clear()
        self._is_alone = True
        self._is_own = self._is_continued = True
        self._is_removed = False

    def come_back(self, uid: str) -> bool:
        """Record again where the session of this chat, which was removed, was put back into the history; return whether
        it was."""
        is_back = self._is_removed and self._session is not None and self._session.uid == uid
        if is_back:
            self._is_removed = False
            self.sync()
        return is_back

    def rename(self, title: str) -> str:
        """Give the chat a title unless it is empty, and return its title. Raises UsageError, HistoryError."""
        self._require_path("/title")
        if title:
            self._title = " ".join(title.split())
            self.sync()
        return self.title or "none yet"

    def fork(self) -> str | None:
        """Continue in a copy of the chat. Returns its id, None where it is empty. Raises UsageError."""
        self._require_path("/fork")
        return self._attempt(self._fork)

    def close(self) -> None:
        """Close the history. Where it had refused and recovered, report that all of the chat is saved."""
        if self._has_failed and self.session_id is not None:
            self._notifier.note(f"the history could be written again: all of this chat is saved, as {self.session_id}")
        self._close()

    def _close(self) -> None:
        if self._history is not None:
            self._history.close()
            self._history = None

    def _sync(self, history: History) -> None:
        dialogue = self.dialogue
        turns, recorded = dialogue.turns, self._recorded
        pairs = zip(turns, recorded, strict=False)  # the same as long as the history has the turns as they are
        same = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1][0], pairs))
        if self._session is None and not turns:
            return
        recorded = recorded[:same]
        with history.together():
            title = self._first_title
            session = self._session and history.refresh(self._session)
            is_moved = session is not None and session.head != self._head
            session = session or history.begin(self._title or title, self._model, dialogue.system)
            for turn in turns[same:]:
                content, fields = content_of(turn)
                model = self._model if turn["role"] == "assistant" else None
                parent = recorded[-1][1] if recorded else None
                state, facts = next(((state, facts) for of, state, facts in self._ends if of is turn), ("complete", {}))
                number = history.append(
                    session, parent, turn["role"], content, state=state, model=model, fields=fields, facts=facts
                )
                recorded.append((turn, number))
            head = recorded[-1][1] if recorded else None
            session = history.refresh(session)
            has_changed = len(turns) > same or same < len(self._recorded)
            if session.head != head and (has_changed or not is_moved):
                history.show(session, head)
            self._is_continued |= len(turns) > same
            # A chat that was begun here and undone altogether takes its title from the next question.
            is_anew = self._is_own and self._session is not None and not same and len(turns) > 0
            about = (self._title or (title if is_anew else session.title), session.model, session.system)
            if self._is_continued:
                about = (about[0], clean(self._model), clean(dialogue.system))
            if about != (session.title, session.model, session.system):
                history.update(session, title=about[0], model=about[1], system=about[2])
            session = history.refresh(session)
        self._session, self._recorded, self._head = session, recorded, head
        if is_moved and has_changed and self._is_alone:
            self._is_alone = False
            self._notifier.warn(
                "this chat was gone on with elsewhere, in another window maybe: what is said here is a branch beside "
                "that, and what the chat shows now"
            )

    def _fork(self, history: History) -> str | None:
        self._sync(history)
        if self._session is None or not self._recorded:
            return None
        copy = history.fork(self._session, self._recorded[-1][1])
        path = history.path(copy)
        self._session, self._head, self._is_alone = copy, copy.head, True
        self._recorded = [(turn, message.number) for turn, message in zip(self.dialogue.turns, path, strict=True)]
        return copy.id

    def _require_path(self, command: str) -> None:
        if self.is_private:
            raise UsageError(f"{command} needs a saved chat", why="this one is private", fix="/save chat.json")

    def _attempt(self, action: Callable[[History], _T]) -> _T | None:
        if self._path is None or self._is_removed:
            return None
        try:
            result = action(self._opened(self._path))
        except GoneError:
            self._is_removed = True
            self._notifier.warn("this chat was removed from the history: it continues, but is no longer saved")
            return None
        except HistoryError as error:
            self._fail(error)
            return None
        self._is_behind = False
        return result

    def _opened(self, path: Path) -> History:
        if self._history is not None and not self._history.is_in_place():  # deleted, or moved aside by another process
            self._close()
            self._session, self._recorded = None, []
        if self._history is None:
            self._history = History.open(path, patience_s=_PATIENCE_S if self._has_failed else database.PATIENCE_S)
            if self._history.moved_to is not None:
                self._notifier.warn(moved_text(self._history.moved_to, self._history.num_rescued))
            before, self._identity = self._identity, self._history.identity
            if self._history.moved_to is not None or not (before is None or os.path.samestat(before, self._identity)):
                self._session, self._recorded = None, []
        return self._history

    def _fail(self, error: LocalLLMError) -> None:
        self._close()
        self._is_behind = True
        if not self._has_failed:
            self._has_failed = True
            self._notifier.warn(f"this chat continues, but is not saved: {error.what} ({error.why}); {error.fix}")


def moved_text(moved_to: Path, num_rescued: int) -> str:
    """Return the warning about a history that was found damaged."""
    chats = "the chat" if num_rescued == 1 else f"the {num_rescued} chats"
    with_what = f" with {chats} that could be read of it" if num_rescued else ""
    return (
        f"the history was damaged: it is now {moved_to}, and a new one was begun{with_what} (`localllm help history`)"
    )


def export_chat(session_id: str, path: Path) -> None:
    """Write a chat as Markdown, or with every branch as JSON where the name ends so.

    Raises UsageError for a file that exists or cannot be written, HistoryError.
    """
    with History.open_to_read(history_file()) as history:
        text = exported(history, [history.find(session_id)], form_of(path))
    write_new(path, text)


def form_of(path: Path | None) -> str:
    """Return the form that a file is written in by its name: "json" or "markdown"."""
    return "json" if path is not None and path.suffix.casefold() == ".json" else "markdown"


def exported(history: History, sessions: Sequence[Session], form: str) -> str:
    """Return chats as text: as Markdown, or with every branch as JSON. Raises HistoryError."""
    if form == "json":
        value = exchange.as_json(map(history.conversation, sessions), kept_apart)
        return json.dumps(value, ensure_ascii=False, indent=1) + "\n"
    return "\n".join(exchange.as_markdown(session, history.path(session), kept_apart) for session in sessions)


def proposed_name(title: str) -> str:
    """Return a file name made of a title, without an ending: letters and digits of any script, and hyphens."""
    words = re.sub(r"[\W_]+", "-", unicodedata.normalize("NFC", title)).strip("-").lower()
    return words[:_MOST_NAMED].rstrip("-") or "chat"


def _is_whole(answer: Answer) -> bool:
    return answer.finished is not None and answer.finished.finish_reason in ("stop", "length")


def _facts(answer: Answer | None) -> dict[str, Any]:
    """Return the facts of an answer that the history keeps."""
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
