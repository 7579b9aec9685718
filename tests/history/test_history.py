"""What the history keeps, against a plain model of it; what it finds, forks, exports and takes in."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from localllm.config import format_time
from localllm.errors import HistoryError
from localllm.history import GoneError, History, Recording, Session, schema, search, title_of
from tests.history_support import ask, crashed, said
from tests.thinning import examples

# Against a model


@dataclass
class Told:
    """A message as plain Python knows it."""

    parent: int | None
    role: str
    content: str
    state: str


@dataclass
class Chat:
    session: Session
    head: int | None = None
    messages: dict[int, Told] = field(default_factory=dict)

    def path(self) -> list[Told]:
        shown, number = [], self.head
        while number is not None:
            shown.append(self.messages[number])
            number = self.messages[number].parent
        return shown[::-1]


WORDS = st.sampled_from(["fox", "owl", "lantern", "Füchse", "灯笼", "o'clock", 'a "quoted" one', "\x00", "100%", ""])
TEXTS = st.lists(WORDS, max_size=4).map(" ".join)
PICK = st.integers(0, 1000)


class KeptAndModel(RuleBasedStateMachine):
    """Every operation is done to both; nothing that was said may be lost, also by crashes."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.path = self.root / "0" / "conversations.db"
        self.crashes = 0
        self.chats: list[Chat] = []  # the one that was gone on with last comes last
        self.writing: tuple[Chat, int] | None = None

    @initialize()
    def open(self) -> None:
        self.history = History.open(self.path)

    def teardown(self) -> None:
        self.history.close()
        shutil.rmtree(self.root)

    def _pick(self, pick: int) -> Chat:
        return self.chats[pick % len(self.chats)]

    def _append(self, chat: Chat, parent: int | None, role: str, text: str, state: Any = "complete") -> int:
        number = self.history.append(chat.session, parent, role, text, state=state)
        chat.messages[number] = Told(parent, role, text, state)
        self._touch(chat, number)
        return number

    def _touch(self, chat: Chat, head: int | None) -> None:
        chat.head = head
        self.chats.remove(chat)
        self.chats.append(chat)

    @rule(text=TEXTS)
    def begin(self, text: str) -> None:
        self.chats.append(Chat(self.history.begin(title_of(text), "tiny", None)))

    @precondition(lambda self: self.chats)
    @rule(pick=PICK, text=TEXTS, role=st.sampled_from(["user", "assistant"]))
    def append_to_what_is_shown(self, pick: int, text: str, role: str) -> None:
        chat = self._pick(pick)
        self._append(chat, chat.head, role, text)

    @precondition(lambda self: any(chat.messages for chat in self.chats))
    @rule(pick=PICK, text=TEXTS)
    def answer_or_ask_anew(self, pick: int, text: str) -> None:
        chat = next(chat for chat in self.chats if chat.messages)
        other = list(chat.messages.values())[pick % len(chat.messages)]
        self._append(chat, other.parent, other.role, text)

    @precondition(lambda self: self.chats and self.writing is None)
    @rule(pick=PICK, text=TEXTS)
    def begin_to_write(self, pick: int, text: str) -> None:
        chat = self._pick(pick)
        self.writing = chat, self._append(chat, chat.head, "assistant", text, "writing")

    @precondition(lambda self: self.writing is not None)
    @rule(text=TEXTS)
    def write_on(self, text: str) -> None:
        assert self.writing is not None
        chat, number = self.writing
        told = chat.messages[number]
        told.content, told.state = f"{told.content} {text}", "writing"
        self.history.write(number, told.content)

    @precondition(lambda self: self.writing is not None)
    @rule(state=st.sampled_from(["complete", "interrupted"]))
    def finish(self, state: Any) -> None:
        assert self.writing is not None
        chat, number = self.writing
        self.history.finish(number, chat.messages[number].content, state, {"seed": 1})
        chat.messages[number].state = state
        self.writing = None

    @precondition(lambda self: any(chat.messages for chat in self.chats))
    @rule(pick=PICK)
    def go_back(self, pick: int) -> None:
        chat = next(chat for chat in self.chats if chat.messages)
        head = [None, *chat.messages][pick % (len(chat.messages) + 1)]
        self.history.show(chat.session, head)
        self._touch(chat, head)

    @precondition(lambda self: self.chats and self.writing is None)
    @rule(pick=PICK)
    def fork(self, pick: int) -> None:
        chat = self._pick(pick)
        session = self.history.fork(chat.session, chat.head)
        copies = self.history.path(session)
        copy = Chat(session, session.head)
        for message, told in zip(copies, chat.path(), strict=True):
            copy.messages[message.number] = Told(message.parent, told.role, told.content, told.state)
        self.chats.append(copy)

    @precondition(lambda self: self.chats)
    @rule(pick=PICK)
    def remove(self, pick: int) -> None:
        chat = self._pick(pick)
        self.history.remove([chat.session])
        self.chats.remove(chat)
        if self.writing is not None and self.writing[0] is chat:
            self.writing = None
        with pytest.raises(GoneError):
            self.history.append(chat.session, None, "user", "still there?")

    @rule(text=TEXTS)
    def fail_half_way(self, text: str) -> None:
        with pytest.raises(ZeroDivisionError), self.history.together():
            self.history.append(self.history.begin(text, None, None), None, "user", text)
            _ = 1 / 0

    @rule()
    def crash(self) -> None:
        self.crashes += 1
        left = crashed(self.path, self.root / str(self.crashes))
        self._open_again(left)

    @rule()
    def reopen(self) -> None:
        self._open_again(self.path)

    def _open_again(self, path: Path) -> None:
        self.history.close()
        self.path, self.history = path, History.open(path)
        for chat in self.chats:
            for told in chat.messages.values():
                told.state = "interrupted" if told.state == "writing" else told.state

    @invariant()
    def shows_the_same(self) -> None:
        found = self.history.sessions()
        assert [session.id for session, _ in found] == [chat.session.id for chat in reversed(self.chats)]
        assert [count for _, count in found] == [len(chat.path()) for chat in reversed(self.chats)]
        for chat in self.chats:
            told, tree = list(chat.messages.values()), self.history.tree(chat.session)
            assert said(self.history, chat.session) == [(each.role, each.content, each.state) for each in chat.path()]
            assert [message.content for message in tree] == [each.content for each in told]

    @invariant()
    def finds_the_same(self) -> None:
        hits = {hit.message.number for hit in self.history.search("lantern", 10_000) if hit.message is not None}
        told = {number: each for chat in self.chats for number, each in chat.messages.items()}
        expected = {n for n, each in told.items() if "lantern" in each.content and each.state != "writing"}
        assert hits - expected == set() or not expected  # letter by letter, what is being written is found too
        assert expected <= hits


KeptAndModel.TestCase.settings = settings(
    max_examples=examples(20), stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestKeptAndModel = KeptAndModel.TestCase


# Files


def test_the_file_and_its_folder_are_their_owners_alone(history: History, path: Path) -> None:
    ask(history)
    modes = {each.name: each.stat().st_mode & 0o777 for each in path.parent.iterdir()}
    assert path.parent.stat().st_mode & 0o777 == 0o700 and set(modes.values()) == {0o600}
    assert {"conversations.db", "conversations.db-wal"} <= set(modes)


def test_a_file_that_others_could_read_is_closed_to_them(path: Path) -> None:
    path.parent.mkdir()
    path.touch(0o644)
    path.chmod(0o644)
    History.open(path).close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_was_removed_is_in_no_byte_of_the_file(path: Path) -> None:
    with History.open(path) as history:
        ask(history, "an ordinary question")
        for number in range(20):
            session, question = ask(history, f"a chrysanthemum {number}")
            history.append(session, question, "assistant", "chrysanthemums, " * 2000)
            history.remove([session])
        for each in path.parent.iterdir():
            assert b"chrysanthemum" not in each.read_bytes(), each
    assert b"ordinary" in path.read_bytes()


def test_the_order_does_not_depend_on_the_clock(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([2e9, 1e9, 5.0, -3e9, 1e8, 0.0, 7e9, 1.0, 2.0, 3.0, 4.0, 5.0])
    monkeypatch.setattr(time, "time", lambda: next(times))
    sessions = [ask(history, f"question {number}")[0] for number in range(3)]
    assert [session.id for session, _ in history.sessions()] == [session.id for session in reversed(sessions)]
    assert history.find("last").id == sessions[-1].id == history.sessions(1)[0][0].id
    assert [format_time(session.updated) for session, _ in history.sessions()]


def test_a_text_with_half_a_surrogate_is_kept_without_it(history: History) -> None:
    session, _ = ask(history, "half \ud83d of it")
    assert said(history, session) == [("user", "half ? of it", "complete")]


def test_an_index_that_another_python_left_stale_is_built_anew(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with History.open(path) as history:
        ask(history, "the first lantern")
    with monkeypatch.context() as patch:
        patch.setattr(schema, "has_fts5", lambda _: False)
        with History.open(path) as history:
            ask(history, "the second lantern")
            assert len([hit for hit in history.search("lantern", 9) if hit.message]) == 2
    with History.open(path) as history:
        assert len([hit for hit in history.search("lantern", 9) if hit.message]) == 2
        assert history._database.has_words


def test_an_index_that_has_lost_one_of_its_triggers_is_built_anew(path: Path) -> None:
    with History.open(path) as history:
        ask(history, "a lantern")
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("DROP TRIGGER words_message_added")
        raw.commit()
    with History.open(path) as history:
        ask(history, "another lantern")
        assert len([hit for hit in history.search("lantern", 9) if hit.message]) == 2


def test_a_history_that_can_only_be_read_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with History.open(path) as history:
        session, _ = ask(history)

    def refuse(*_: object, **__: object) -> History:
        raise HistoryError("it cannot be written")

    monkeypatch.setattr(History, "open", refuse)
    before = path.read_bytes()
    with History.open_to_read(path) as history:
        assert [role for role, _, _ in said(history, session)] == ["user"]
        assert history.search("fox", 3)
        with pytest.raises(HistoryError, match="cannot be written"):
            history.append(session, None, "user", "more")
    assert path.read_bytes() == before


# Finding


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("lantern", ["Two lanterns, one fox", "A red lantern"]),
        ("RED lantern", ["A red lantern"]),
        ('"red lantern"', ["A red lantern"]),
        ('"lantern red"', []),
        ("uber", ["Über den Wolken"]),
        ("笼", ["一个红灯笼"]),
        ("antern", ["Two lanterns, one fox", "A red lantern"]),
        ("100%", ["It is 100% sure"]),
        ('lant" OR content:fox NEAR(', []),
        ("*", []),
        ('"', []),
    ],
)
def test_words_phrases_and_parts_of_words_are_found(history: History, query: str, expected: list[str]) -> None:
    texts = ["A red lantern", "Two lanterns, one fox", "Über den Wolken", "一个红灯笼", "It is 100% sure", "99 others"]
    session = history.begin("untitled", None, None)
    for text in texts:
        history.append(session, None, "user", text)
    found = [hit.message.content for hit in history.search(query, 10) if hit.message is not None]
    assert found == expected


def test_an_excerpt_is_what_stands_around_the_word() -> None:
    text = "before " * 50 + "the lantern\nshone " + "after " * 50
    shown = search.excerpt(text, "lantern")
    assert "the lantern shone" in shown and len(shown) < 140 and shown[0] == shown[-1] == "…"


def test_a_session_is_found_by_its_id_the_beginning_of_it_its_title_or_as_the_last(history: History) -> None:
    first, _ = ask(history, "The red fox")
    second, _ = ask(history, "The red owl")
    assert history.find(first.id).id == history.find(first.id.upper()).id == first.id
    assert history.find("last").id == history.find("OWL").id == second.id
    if first.id[0] != second.id[0]:
        assert history.find(second.id[0]).id == second.id
    with pytest.raises(HistoryError, match="more than one") as caught:
        history.find("red")
    assert first.id in caught.value.why and second.id in caught.value.why
    for absent in ("nothing", "", " ", "%", "_"):
        with pytest.raises(HistoryError, match="there is no chat"):
            history.find(absent)


@pytest.mark.parametrize(
    ("question", "title"),
    [
        ("Why is the sky blue?", "Why is the sky blue?"),
        ("\n  a\tb \nsecond line", "a b"),
        ("word " * 30, "word word word word word word word word word word word word…"),
        ("x" * 100, "x" * 60 + "…"),
        (" \n", "untitled"),
    ],
)
def test_a_title_is_the_first_line_of_the_question_cut_between_words(question: str, title: str) -> None:
    assert title_of(question) == title


# An answer while it comes


class CountedHistory:
    """Counts what a Recording has it write."""

    def __init__(self, history: History) -> None:
        self.history, self.writes = history, 0

    def __getattr__(self, name: str) -> Any:
        self.writes += name in ("append", "write", "finish")
        return getattr(self.history, name)


def test_an_answer_is_written_with_each_sentence_and_each_half_second(history: History) -> None:
    session, question = ask(history)
    counted, now = CountedHistory(history), [0.0]
    recording = Recording(counted, session, question, "tiny", clock=lambda: now[0])  # type: ignore[arg-type]
    writes = []
    for second, text in [(0, "The"), (0.1, " fox"), (0.2, " ran."), (0.3, " And"), (0.8, " on"), (0.9, "\n")]:
        now[0] = second
        recording.hear(text)
        writes.append(counted.writes)
    assert writes == [1, 1, 2, 2, 3, 4]
    assert said(history, session)[-1] == ("assistant", "The fox ran. And on\n", "writing")
    recording.finish("complete", {"seed": 3})
    assert said(history, session)[-1][2] == "complete" and recording.error is None


def test_an_answer_that_another_process_calls_interrupted_is_written_on(history: History, path: Path) -> None:
    session, question = ask(history)
    recording = Recording(history, session, question, "tiny")
    recording.hear("The fox. ")
    with History.open(path) as other:
        assert said(other, session)[-1] == ("assistant", "The fox. ", "interrupted")
        recording.hear("It ran. ")
        assert said(other, session)[-1] == ("assistant", "The fox. It ran. ", "writing")
    recording.finish("complete", {})
    assert said(history, session)[-1] == ("assistant", "The fox. It ran. ", "complete")
    assert [hit.message.role for hit in history.search("ran", 5) if hit.message] == ["assistant"]
