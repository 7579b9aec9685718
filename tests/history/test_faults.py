"""Kills, torn files, full and unwritable disks, locks, damage, newer versions: detected or harmless in every case."""

from __future__ import annotations

import io
import os
import re
import resource
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from localllm.chat.answer import Answer
from localllm.chat.dialogue import Dialogue
from localllm.chat.recorder import ChatRecorder
from localllm.cli.output import Output
from localllm.config import ResolvedSettings
from localllm.engine.events import FinishedEvent, Timings, TokenEvent, Usage
from localllm.errors import HistoryError
from localllm.history import DamagedError, History, LockedError, Recording, database, schema
from tests.history_support import SENTENCES, ask, begun, crashed, ended, in_child, said, titles

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

QUESTIONS = ("Where did the fox go?", "And then?")
WHOLE = "".join(SENTENCES)


class Talk:
    """A chat that is recorded as `chat` does it, with a model that says the SENTENCES."""

    def __init__(self, path: Path, model: str = "tiny") -> None:
        self.errors = io.StringIO()
        self.dialogue = Dialogue(ResolvedSettings())
        self.recorder = ChatRecorder(self.dialogue, Output(None, self.errors), path, model)

    def turns(self, *questions: str) -> Talk:
        for question in questions:
            self.turn(question)
        return self

    def turn(self, question: str, heard: Callable[[str], None] = lambda _: None) -> None:
        self.dialogue.ask(question)
        with self.recorder.answering(Answer(3)) as record:
            heard(question)
            for sentence in SENTENCES:
                for word in re.findall(r"\S+\s*", sentence):
                    record.take(TokenEvent(0, 1, word))
                heard(sentence)
            record.take(FinishedEvent(0, "stop", Usage(), Timings()))
        heard("end\n")

    def end(self) -> Talk:
        self.recorder.close()
        return self

    @property
    def warnings(self) -> list[str]:
        return [line for line in self.errors.getvalue().splitlines() if line.startswith("warning:")]

    def warned_once(self, *words: object) -> bool:
        return len(self.warnings) == 1 and all(str(word) in self.warnings[0] for word in words)


def kept(path: Path) -> list[tuple[str, str, str]]:
    """What the only session shows; nothing where there is none."""
    with History.open(path) as history:
        assert history.moved_to is None
        sessions = history.sessions()
        assert len(sessions) <= 1
        return said(history, sessions[0][0]) if sessions else []


def questions(path: Path) -> list[str]:
    return [content for role, content, _ in kept(path) if role == "user"]


def executed(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as raw:
        raw.execute(statement)


@contextmanager
def locked(path: Path, how: str = "IMMEDIATE") -> Iterator[None]:
    """Another process is in the midst of a transaction."""
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute(f"BEGIN {how}")
        yield


# Kills


def talk_until(path: Path, statement: int) -> tuple[int, str]:
    """Two turns in a child that is killed before its n-th statement; how it ended, and what it knew to be kept."""

    def work(told: int) -> None:
        left = [statement]

        def count(_: str) -> None:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        connect = sqlite3.connect

        def traced(*arguments: object, **options: object) -> sqlite3.Connection:
            connection = connect(*arguments, **options)  # type: ignore[call-overload]
            connection.set_trace_callback(count)
            return connection

        sqlite3.connect = traced  # type: ignore[assignment]
        talk = Talk(path)
        for question in QUESTIONS:
            talk.turn(question, lambda text: os.write(told, text.encode()) and None)
        talk.end()

    status, written = in_child(work)
    return status, written.decode()


def require_kept(path: Path, told: str) -> None:
    """Every sentence that was told to be there is, and nothing is that was not said."""
    expected = []
    for question in QUESTIONS:
        if question in told:
            expected.append(question)
            answer = told.partition(question)[2].partition("end\n")[0]
            expected.append(answer.partition(QUESTIONS[1])[0] if question == QUESTIONS[0] else answer)
    with History.open(path) as history:
        assert all(count for _, count in history.sessions())  # a session and its question come together
    shown = kept(path)
    contents = [content for _, content, _ in shown]
    for (role, content, state), least in zip(shown, expected, strict=False):
        assert content.startswith(least.rstrip()) or role == "user"
        assert content in QUESTIONS if role == "user" else WHOLE.startswith(content.rstrip())
        assert state == "complete" if role == "user" else state in ("complete", "interrupted")
        assert state == "interrupted" or role == "user" or content == WHOLE
    assert len(contents) >= len([text for text in expected if text])


@pytest.mark.parametrize("step", [15, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_before_any_statement_loses_no_sentence_that_was_written(tmp_path: Path, step: int) -> None:
    statement, ended = 1, False
    while not ended:
        path = tmp_path / str(statement) / "conversations.db"
        status, told = talk_until(path, statement)
        ended = os.WIFEXITED(status)
        assert ended or os.WTERMSIG(status) == signal.SIGKILL
        assert not ended or os.WEXITSTATUS(status) == 0
        require_kept(path, told)
        statement += step
    assert statement > 120 and [state for _, _, state in kept(path)] == ["complete"] * 4


@pytest.mark.parametrize("seed", range(6))
def test_a_kill_at_any_moment_loses_no_sentence_that_was_written(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "conversations.db"

    def work(told: int) -> None:
        talk = Talk(path)
        while True:
            talk.turn(QUESTIONS[0], lambda text: os.write(told, text.encode()) and None)

    process, reader = begun(work)
    time.sleep(0.02 + 0.013 * seed)
    os.kill(process, signal.SIGKILL)
    told = ended(process, reader)[1].decode()
    turns = told.split(QUESTIONS[0])[1:]
    shown = [content for role, content, _ in kept(path) if role == "assistant"]
    for turn, content in zip(turns, shown, strict=False):
        assert content.startswith(turn.removesuffix("end\n").rstrip())
    assert len(shown) >= sum(bool(turn) for turn in turns)


@pytest.mark.parametrize(("with_schema", "step"), [(False, 512), (True, 4120)])
def test_a_log_that_is_cut_anywhere_has_what_was_committed(
    path: Path, tmp_path: Path, with_schema: bool, step: int
) -> None:
    log = path.with_name(f"{path.name}-wal")
    states: list[tuple[int, list[tuple[str, str, str]]]] = []  # bytes of the log, what was shown by then

    def note(session: object) -> None:
        shown = said(history, session)  # type: ignore[arg-type]
        settled = [(role, text, "interrupted" if state == "writing" else state) for role, text, state in shown]
        states.append((log.stat().st_size, settled))

    with History.open(path) as history:
        if not with_schema:
            history._database.rows("PRAGMA wal_checkpoint(TRUNCATE)")
        states.append((log.stat().st_size, []))
        session, question = ask(history)
        note(session)
        recording = Recording(history, session, question, "tiny")
        for sentence in SENTENCES[:2]:
            recording.hear(sentence)
            note(session)
        recording.finish("complete", {})
        note(session)
        left = crashed(path, tmp_path / "left")
    whole = left.with_name(log.name).read_bytes()
    assert len(whole) == states[-1][0]
    copy = tmp_path / "copy" / path.name
    copy.parent.mkdir()
    for cut in range(0, len(whole) + 1, step):
        copy.write_bytes(left.read_bytes())
        copy.with_name(log.name).write_bytes(whole[:cut] if cut // step % 2 else whole[:cut] + b"\xa5" * 512)
        copy.with_name(f"{path.name}-shm").unlink(missing_ok=True)
        expected = [shown for size, shown in states if size <= cut]
        found = kept(copy)
        # A session and its question are two commits here, which `chat` puts into one.
        assert found in ([expected[-1]] if expected else [[]])


# Disks


def test_a_full_disk_is_told_once_and_the_chat_goes_on(path: Path) -> None:
    for limit in (0, 4096, 20_000, 60_000, 100_000, 140_000, 180_000):

        def work(told: int, limit: int = limit) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            talk = Talk(path.parent / str(limit) / path.name).turns(*QUESTIONS[:1] * 4).end()
            os.write(told, f"{len(talk.warnings)} {len(talk.dialogue.turns)} {talk.warnings}".encode())

        status, written = in_child(work)
        assert status == 0, written
        warnings, turns = written.split()[:2]
        assert int(turns) == 8 and int(warnings) <= 1
        assert int(warnings) == 1 or limit > 100_000
        assert b"this chat continues, but is not saved" in written or int(warnings) == 0
        shown = kept(path.parent / str(limit) / path.name)
        assert all(text in QUESTIONS or WHOLE.startswith(text.rstrip()) for _, text, _ in shown)


def test_what_was_said_beside_a_full_disk_is_kept_when_it_has_room(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Talk(path).turns(QUESTIONS[0])
    with monkeypatch.context() as patch:

        def full(self: object, patience_s: float) -> None:
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error

        patch.setattr(database.Database, "_begin", full)
        talk.turns("Said meanwhile?", "And this?")
        assert talk.recorder.session_id is None and talk.recorder.fork() is None
    talk.turns(QUESTIONS[1]).end()
    assert talk.warned_once("disk is full", "df -h")
    assert talk.errors.getvalue().count("all of this chat is saved") == 1
    assert questions(path) == [QUESTIONS[0], "Said meanwhile?", "And this?", QUESTIONS[1]]


def test_a_copy_of_a_chat_has_what_was_not_kept_before(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Talk(path).turns(QUESTIONS[0]).end()  # what is opened anew waits for as long as the test says
    with monkeypatch.context() as patch, locked(path):
        patch.setattr(database, "PATIENCE_S", 0.1)
        talk.turn(QUESTIONS[1])
    assert talk.recorder.fork() is not None
    talk.end()
    with History.open(path) as history:
        assert [len(said(history, session)) for session, _ in history.sessions()] == [4, 4]


@pytest.mark.parametrize("folder", ["/proc/none", "/dev/null/none"])
def test_a_disk_that_cannot_be_written_is_told_once(folder: str) -> None:
    assert Talk(Path(folder) / "conversations.db").turns(*QUESTIONS).warned_once(folder)


def test_a_folder_in_the_place_of_the_file_is_told_once(path: Path) -> None:
    path.mkdir(parents=True)
    assert Talk(path).turns(*QUESTIONS).warned_once(path) and path.is_dir()


# Others at the same file


def test_a_held_lock_is_told_once_and_what_was_said_is_kept_after_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "PATIENCE_S", 0.1)
    talk = Talk(path).turns(QUESTIONS[0])
    with locked(path, "EXCLUSIVE"):
        talk.end().turn("Said meanwhile?")
        with pytest.raises(LockedError, match="locked") as caught, History.open(path, patience_s=0.1) as history:
            ask(history)
        assert str(path) in caught.value.why and "lsof" in caught.value.fix
    assert talk.turns(QUESTIONS[1]).end().warned_once("locked")
    assert questions(path)[1] == "Said meanwhile?"


@pytest.mark.parametrize("leaves", ["the chat", "this one for another"])
def test_what_a_lock_held_up_is_kept_at_the_end(path: Path, monkeypatch: pytest.MonkeyPatch, leaves: str) -> None:
    monkeypatch.setattr("localllm.history.database.PATIENCE_S", 0.05)
    monkeypatch.setattr("localllm.chat.recorder._PATIENCE_S", 0.05)
    talk = Talk(path).turns(QUESTIONS[0])
    with locked(path, "EXCLUSIVE"):
        talk.end().dialogue.ask(QUESTIONS[1])
        with pytest.raises(KeyboardInterrupt), talk.recorder.answering(Answer(3)) as record:
            record.take(TokenEvent(0, 1, "Half an"))
            raise KeyboardInterrupt
        assert talk.recorder.session_id is None
    talk.recorder.catch_up()
    if leaves == "this one for another":
        talk.dialogue.clear()
        talk.recorder.begin_anew()
    talk.end()
    assert kept(path)[2:] == [("user", QUESTIONS[1], "complete"), ("assistant", "Half an", "interrupted")]


def test_a_file_that_is_replaced_while_it_is_not_open_is_begun_anew_with_all_of_it(path: Path) -> None:
    talk = Talk(path).turns(QUESTIONS[0]).end()
    path.rename(path.with_name("old.db"))
    with History.open(path) as other:
        assert other.count() == 0
    talk.turns(QUESTIONS[1]).end()
    assert questions(path) == list(QUESTIONS)


def test_the_title_is_of_a_question_that_was_kept(path: Path) -> None:
    talk = Talk(path)
    talk.dialogue.ask("a secret " * 1000)
    talk.dialogue.take_back_question()
    talk.turns(QUESTIONS[0]).end()
    with History.open(path) as history:
        assert titles(history) == [QUESTIONS[0]]


def test_a_model_whose_name_is_no_text_is_kept_all_the_same(path: Path) -> None:
    talk = Talk(path, "/models/\udcff").turns(*QUESTIONS)
    assert not talk.warnings and len(kept(path)) == 4


def test_a_lock_in_the_middle_of_an_answer_costs_nothing(path: Path) -> None:
    with History.open(path) as history:
        session, question = ask(history)
        recording = Recording(history, session, question, "tiny")
        for first in (0, 3):
            with locked(path):
                for sentence in SENTENCES[first : first + 2]:
                    recording.hear(sentence)
            recording.hear(SENTENCES[first + 2])
        assert said(history, session)[-1][1] == WHOLE
        recording.finish("complete", {})
        assert recording.error is None


@pytest.mark.parametrize("position", range(1, 9))
def test_another_process_may_make_the_file_at_any_moment_of_the_opening(
    path: Path, position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    executed: list[str] = []

    class Overtaken(sqlite3.Connection):
        def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
            cursor = super().execute(statement, *values)
            executed.append(statement)
            if len(executed) == position:
                rows, connect = cursor.fetchall(), sqlite3.connect
                with monkeypatch.context() as patch:
                    patch.setattr(sqlite3, "connect", partial(connect, factory=sqlite3.Connection))
                    assert not self.in_transaction
                    History.open(path).close()
                return super().execute(f"SELECT {', '.join(map(repr, rows[0]))}") if rows else cursor
            return cursor

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Overtaken))
    with History.open(path) as history:
        ask(history)
        assert len(executed) > position and history.moved_to is None


def test_two_processes_that_begin_and_write_at_once_lose_nothing(path: Path) -> None:
    def work(told: int) -> None:
        with History.open(path) as history:
            session = history.begin("chat", None, None)
            parent = None
            for number in range(60):
                parent = history.append(session, parent, "user", f"{os.getpid()}: {number}")
            os.write(told, session.id.encode())

    children = [begun(work) for _ in range(3)]
    results = [ended(*child) for child in children]
    assert [status for status, _ in results] == [0, 0, 0]
    with History.open(path) as history:
        for _, name in results:
            contents = [content for _, content, _ in said(history, history.find(name.decode()))]
            assert [int(content.split()[1]) for content in contents] == list(range(60))
            assert len({content.split()[0] for content in contents}) == 1


def test_a_chat_that_another_process_removes_is_not_brought_back(path: Path) -> None:
    talk = Talk(path).turns("A secret?")
    with History.open(path) as history:
        history.remove([history.find("last")])
    assert talk.turns(*QUESTIONS).warned_once("removed")
    talk.recorder.begin_anew()
    talk.dialogue.clear()
    talk.turns("Something else?").end()
    assert questions(path) == ["Something else?"]


def test_a_file_that_is_deleted_under_a_chat_is_begun_anew_with_all_of_it(path: Path) -> None:
    talk = Talk(path).turns(QUESTIONS[0])
    for each in list(path.parent.iterdir()):
        each.unlink()
    talk.turns(QUESTIONS[1]).end()
    assert questions(path) == list(QUESTIONS)


# Damage and versions


def damage_header(path: Path) -> None:
    path.write_bytes(b"something else entirely" + path.read_bytes()[23:])


def damage_pages(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for page in range(1, len(data) // 4096):
        data[4096 * page : 4096 * page + 2048] = b"\xa5" * 2048
    path.write_bytes(data)


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 // 4096 * 4096)


@pytest.mark.parametrize("damage", [damage_header, damage_pages, cut_short])
def test_a_damaged_file_is_moved_aside_told_once_and_begun_anew(path: Path, damage: Callable[[Path], None]) -> None:
    for number in (1, 2):
        with History.open(path) as history:
            session, question = ask(history)
            history.append(session, question, "assistant", WHOLE * 50)
        damage(path)
        damaged = path.read_bytes()
        aside = path.with_name(f"{path.name}.damaged-{number}")
        assert Talk(path).turns(*QUESTIONS).end().warned_once(aside)
        assert aside.read_bytes() == damaged and len(kept(path)) == 4
        path.unlink()
    assert not path.with_name(f"{path.name}-suspect").exists()


def test_what_can_be_read_of_a_damaged_file_is_in_the_new_one(tmp_path: Path) -> None:
    """Three pages of it are noise: what hangs on them is lost, at worst a whole table."""
    whole = tmp_path / "whole" / "conversations.db"
    texts = {f"What does the fox number {number} say? " * 20 for number in range(60)}
    with History.open(whole) as history:
        for text in sorted(texts):
            session, question = ask(history, text)
            history.append(session, question, "assistant", f"It says: {text}")
    rescued = []
    for seed in range(8):
        content, choose = bytearray(whole.read_bytes()), Random(seed)
        for _ in range(3):
            at = choose.randrange(2, len(content) // 4096) * 4096
            content[at : at + 4096] = choose.randbytes(4096)
        path = tmp_path / str(seed) / "conversations.db"
        path.parent.mkdir()
        path.write_bytes(content)
        with History.open(path) as history:
            found = [message for session, _ in history.sessions() for message in history.path(session)]
            assert history.moved_to is None or history.num_rescued == history.count()
            rescued.append(history.count())
            assert len({message.uid for message in found}) == len(found)
            for message in found:
                assert message.content.removeprefix("It says: ") in texts
                assert message.role == ("assistant" if message.content.startswith("It says") else "user")
            session, _ = ask(history, "And now?")
            assert history.find("last") == history.refresh(session) and history.search("now", 5)
    assert sum(rescued) >= 8 * 60 // 2


def test_what_a_log_held_is_in_the_file_that_is_moved_aside_and_not_in_the_new_one(path: Path, tmp_path: Path) -> None:
    with History.open(path) as history:
        history._database.rows("PRAGMA wal_checkpoint(TRUNCATE)")
        ask(history, "an old question")
        left = crashed(path, tmp_path / "left")
    left.write_bytes(b"no database at all" + left.read_bytes()[18:])
    with History.open(left) as history:
        assert history.count() == 0
        aside = history.moved_to
    assert aside is not None
    assert any(b"an old question" in each.read_bytes() for each in aside.parent.glob(f"{aside.name}*"))
    assert not list(left.parent.glob("*-wal"))


def test_a_damaged_file_is_not_moved_from_under_another_process(path: Path) -> None:
    def work(told: int) -> None:
        with History.open(path) as history:
            ask(history, "of another process")
            os.write(told, b"x")
            signal.pause()

    process, reader = begun(work)
    try:
        assert os.read(reader, 1) == b"x"
        with path.open("r+b") as file:
            file.write(b"no database at all")
        path.with_name(f"{path.name}-wal").write_bytes(b"")
        talk = Talk(path).turns(QUESTIONS[0])
        assert talk.warned_once("when no other process has it open")
        assert not list(path.parent.glob("*.damaged*"))
    finally:
        os.kill(process, signal.SIGKILL)
        ended(process, reader)
    talk.turns(QUESTIONS[1]).end()
    assert questions(path) == list(QUESTIONS) and path.with_name(f"{path.name}.damaged-1").exists()


def test_pages_damaged_at_work_are_found_by_the_next_start_of_a_large_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_CHECKED_BYTES", 0)
    with History.open(path) as history:
        session, question = ask(history)
        history.append(session, question, "assistant", WHOLE * 50)
        root = history._database.rows("SELECT rootpage FROM sqlite_master WHERE name = 'messages'")[0][0]
    with path.open("r+b") as file:
        file.seek(4096 * (root - 1))
        file.write(b"\xa5" * 4096)
    with pytest.raises(DamagedError), History.open_to_read(path) as history:
        history.tree(history.find("last"))
    with History.open(path) as history:
        assert history.moved_to is not None and history.count() == 0


def test_a_damaged_index_costs_no_chat_and_is_built_anew(path: Path) -> None:
    with History.open(path) as history:
        for number in range(40):
            ask(history, f"{WHOLE} number{number}")
    executed(path, "UPDATE message_words_data SET block = x'a5a5a5a5' WHERE id > 10")
    Talk(path).turns("A new lantern?", "Another lantern?").end()
    with History.open(path) as history:
        assert history.moved_to is None and history.count() == 41
        assert [len([hit for hit in history.search(word, 100) if hit.message]) for word in ("lantern", "number7")] == [
            2,
            1,
        ]


def test_a_file_of_a_newer_version_is_left_as_it_is(path: Path) -> None:
    with History.open(path) as history:
        ask(history)
    executed(path, "PRAGMA user_version = 99")
    before = path.read_bytes()
    with pytest.raises(HistoryError, match=f"version 99; this localllm knows version {schema.VERSION}"):
        History.open(path)
    assert Talk(path).turns(*QUESTIONS).warned_once("99") and path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_database_of_another_program_is_left_as_it_is(path: Path) -> None:
    path.parent.mkdir()
    executed(path, "CREATE TABLE bookmarks (url)")
    before = path.read_bytes()
    with pytest.raises(HistoryError, match="another program"):
        History.open(path)
    assert path.read_bytes() == before


def test_a_migration_is_made_as_a_whole_or_not_at_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with History.open(path) as history:
        session, _ = ask(history)
    added = "ALTER TABLE sessions ADD COLUMN colour TEXT"

    def migrate(*statements: str) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, statements))
            patch.setattr(schema, "VERSION", schema.VERSION + 1)
            with History.open(path) as history:
                assert len(said(history, session)) == 1

    with pytest.raises(HistoryError):
        migrate(added, "ALTER TABLE nothing ADD COLUMN x")
    with History.open(path) as history:
        assert len(said(history, session)) == 1
    migrate(added)
    with pytest.raises(HistoryError, match="version 2"):
        History.open(path)
