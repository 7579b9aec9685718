"""What `chat` and `run` keep, how they go on with it, and `sessions`."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest

from localllm.chat.text import one_line
from localllm.cli.options import complete_sessions
from localllm.engine.events import FinishedEvent, Timings, TokenEvent, Usage
from localllm.errors import CheckpointError
from localllm.history import History, Session
from localllm.runtime.engine_handle import RequestStream
from localllm.runtime.engine_thread import EngineThread
from tests.cli_support import Result, fork_cli, run_cli, write_checkpoint
from tests.history_support import ask, said
from tests.patience import PATIENCE_S
from tests.thinning import every_other

SHORT = ("--max-tokens", "4", "--seed", "1")


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "data" / "conversations.db"


def chats(path: Path) -> list[tuple[Session, list[tuple[str, str, str]]]]:
    """The kept chats, the latest first, with what each shows."""
    with History.open(path) as history:
        return [(session, said(history, session)) for session, _ in history.sessions()]


def titles(path: Path) -> list[str]:
    return [session.title for session, _ in chats(path)]


def questions(path: Path, index: int = 0) -> list[str]:
    return [content for role, content, _ in chats(path)[index][1] if role == "user"]


def sessions(*words: str | Path) -> Result:
    return run_cli("sessions", *words)


# chat


def test_an_answer_that_begins_in_a_thought_is_kept_as_that(tmp_path: Path, path: Path) -> None:
    model = write_checkpoint(tmp_path / "m")
    roles = json.loads((model / "tokenizer_config.json").read_text())
    opened = roles["chat_template"] + "<think>"
    assert run_cli("run", model, "-p", "the fox", *SHORT).code == 0
    (model / "tokenizer_config.json").write_text(json.dumps({**roles, "chat_template": opened}))
    assert run_cli("run", model, "-p", "the fox", *SHORT).code == 0
    assert run_cli("chat", model, "--plain", *SHORT, stdin=b"the fox\n").code == 0
    with History.open(path) as history:
        found = [[message.begins_in_thought for message in history.path(session)] for session, _ in history.sessions()]
    assert found == [[False, True], [False, True], [False, False]]


def test_a_chat_is_kept_with_model_system_message_and_the_facts_of_its_answers(talk, model: Path, path: Path) -> None:
    result = talk("the fox", "the owl", flags=("-s", "be brief"))
    assert result.code == 0 and "warning" not in result.err
    ((session, shown),) = chats(path)
    assert (session.title, session.model, session.system) == ("the fox", str(model), "be brief")
    assert [(role, state) for role, _, state in shown] == [("user", "complete"), ("assistant", "complete")] * 2
    answers = [content for role, content, _ in shown if role == "assistant"]
    assert result.out.decode() == "".join(answer.removesuffix("\n") + "\n" for answer in answers)
    with History.open(path) as history:
        facts = history.path(session)[1].facts
    assert facts["completion_tokens"] == 4 and facts["seed"] == 1 and facts["finish_reason"] == "length"


def test_regen_and_undo_make_siblings_and_destroy_nothing(talk, path: Path) -> None:
    talk("one", "/set seed 7", "/regen", "two", "/undo", "three")
    ((session, _),) = chats(path)
    assert questions(path) == ["one", "three"]
    with History.open(path) as history:
        tree = history.tree(session)
    assert [message.content for message in tree if message.role == "user"] == ["one", "two", "three"]
    assert [message.parent for message in tree if message.role == "assistant"][:2] == [tree[0].number] * 2
    talk("one", "/undo")
    assert chats(path)[0][1] == []


def test_clear_and_load_begin_another_chat_and_fork_a_copy(talk, path: Path) -> None:
    talk("one", "/fork", "two", "/title The  copy", "/clear", "three", "/save chat.json", "/load chat.json", "four")
    assert titles(path) == ["three", "three", "The copy", "one"]
    assert [questions(path, index) for index in range(4)] == [["three", "four"], ["three"], ["one", "two"], ["one"]]


def test_a_resumed_chat_goes_on_with_its_model_system_message_and_messages(talk, path: Path, model: Path) -> None:
    talk("the fox", "the owl", flags=("-s", "be brief"))
    before = chats(path)[0][1]
    result = talk("and the hare?", "/save chat.json", flags=("--resume",), named=False)
    assert result.code == 0
    assert f"going on with {chats(path)[0][0].id}: the fox\n>>> the owl\n" in result.err
    assert one_line(before[-1][1].strip().splitlines()[0]) in result.err
    messages = json.loads(Path("chat.json").read_text())["messages"]
    assert [message["content"] for message in messages[:5]] == ["be brief", *(content for _, content, _ in before)]
    ((session, shown),) = chats(path)
    assert shown[:4] == before and len(shown) == 6 and session.model == str(model)


def test_a_chat_is_resumed_by_its_id_or_its_title_and_with_another_model(talk, path: Path, tmp_path: Path) -> None:
    talk("the fox")
    talk("the owl")
    (_, _), (fox, _) = chats(path)
    other = write_checkpoint(tmp_path / "other")
    for word in (fox.id, "fox"):
        result = run_cli("chat", "--resume", word, other, "--plain", *SHORT, "-s", "new", stdin=b"more\n")
        assert result.code == 0, result.err
        session, shown = chats(path)[0]
        assert (session.id, session.model, session.system) == (fox.id, str(other), "new")
        assert shown[-2][1] == "more"
    assert "last" not in talk("/bye", flags=("--resume", "last", "--stats")).err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--resume", "nothing"), "there is no chat 'nothing'"),
        (("--resume", "the"), "more than one chat"),
        (("--resume", "tiny"), "localllm chat tiny --resume"),
        (("--resume=",), "there is no chat ''"),
    ],
)
def test_a_chat_that_cannot_be_resumed_is_refused_before_a_model_is_loaded(talk, flags, words: str) -> None:
    talk("the fox")
    talk("the owl")
    result = run_cli("chat", *flags)
    assert (result.code, result.out) == (1, b"")
    assert words in result.err and len(result.error_lines) == 4


def test_with_no_chat_kept_there_is_nothing_to_resume_and_no_file_is_made(path: Path) -> None:
    for line in (["chat", "--resume"], ["run", "-c", "and then?"]):
        result = run_cli(*line)
        assert result.code == 1 and "no chat is saved yet" in result.err
    assert not path.exists()


def test_a_chat_whose_model_is_gone_names_it_and_how_to_take_another(talk, path: Path, tmp_path: Path) -> None:
    gone = write_checkpoint(tmp_path / "gone")
    run_cli("chat", gone, "--plain", *SHORT, stdin=b"the fox\n")
    gone.rename(tmp_path / "moved")
    name = chats(path)[0][0].id
    result = run_cli("chat", "--resume")
    assert result.code == 3 and str(gone) in result.err and "the chat was held with it" in result.err
    assert f"or:    localllm chat tiny --resume {name}" in result.err
    result = run_cli("run", "-c", "more, please")
    assert result.code == 3 and f"localllm run tiny --session {name} -p TEXT" in result.err


def test_an_answer_that_was_cut_is_shown_as_such_and_part_of_the_chat(talk, path: Path) -> None:
    talk("the fox")
    with History.open(path) as history:
        session = history.find("last")
        number = history.append(session, session.head, "user", "the owl")
        history.append(session, number, "assistant", "The ow", state="writing")
    result = talk("and?", "/save chat.json", flags=("--resume",))
    assert "The ow\n(interrupted: /regen answers anew)\n" in result.err
    assert "The ow" in Path("chat.json").read_text()
    assert [state for _, _, state in chats(path)[0][1]][3] == "interrupted"


def test_a_question_without_an_answer_is_answered_by_regen_or_goes_with_the_next(talk, path: Path, model: Path) -> None:
    with History.open(path) as history:
        ask(history, "the fox?")
    shown = run_cli("run", model, "-c", "the owl?", "--show-prompt")
    assert shown.out == b"<|bos|><|user|>the fox?\n\nthe owl?<|eos|><|assistant|>"
    result = talk("/regen", flags=("--resume",))
    assert "(not answered: /regen answers it)" in result.err
    assert [role for role, _, _ in chats(path)[0][1]] == ["user", "assistant"]


def test_regen_that_fails_leaves_question_and_answer(talk, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talk("the fox")
    before = chats(path)[0][1]
    result = talk("/system " + "x " * 150, "/regen", "/system -", flags=("--resume", "--ctx", "128"))
    assert result.code == 5 and "the context" in result.err and chats(path)[0][1] == before


def test_an_answer_stopped_before_its_first_word_is_none(
    model: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(_thread: EngineThread, _request: object, receive: Any) -> RequestStream:
        receive(FinishedEvent(0, "cancelled", Usage(), Timings()))
        return RequestStream(0, lambda _: None)

    monkeypatch.setattr(EngineThread, "submit", stopped)
    assert run_cli("run", model, "-p", "the fox", *SHORT).code == 130
    assert chats(path)[0][1] == [("user", "the fox", "complete")]


@pytest.mark.parametrize(
    "flags", [(), *(pytest.param((flag,), marks=pytest.mark.slow) for flag in ("--json", "--jsonl"))]
)
def test_what_stdout_refuses_is_kept(model: Path, path: Path, flags: tuple[str, ...]) -> None:
    path.parents[1].mkdir()
    with Path("/dev/full").open("wb") as full:
        process = fork_cli(path.parents[1], "run", model, "-p", "the fox", *SHORT, *flags, stdout=full)
        assert process.wait(PATIENCE_S) == 1
    question, *answers = chats(path)[0][1]
    assert question == ("user", "the fox", "complete")
    assert [(role, state) for role, _, state in answers] == [("assistant", "interrupted")] * ("--jsonl" not in flags)


def test_a_chat_that_was_undone_altogether_is_titled_by_what_is_asked_next(talk, path: Path) -> None:
    assert "there is nothing to copy" in talk("the fox", "/undo", "/fork", "the owl").err
    assert titles(path) == ["the owl"]
    talk("/title a hare", flags=("--resume",))
    talk("/undo", "the dog", flags=("--resume",))
    assert titles(path) == ["a hare"]


def test_who_resumes_with_another_model_and_says_nothing_changes_nothing(talk, path: Path, tmp_path: Path) -> None:
    talk("the fox", flags=("-s", "be brief"))
    before = chats(path)
    other = write_checkpoint(tmp_path / "other")
    line = ("chat", other, "--resume", "--plain", *SHORT, "-s", "be loud")
    assert run_cli(*line, stdin=b"/help\n/tokens\n").code == 0 and chats(path) == before


def test_a_question_that_does_not_fit_is_not_kept(talk, path: Path) -> None:
    result = talk("one", "x " * 150, flags=("--ctx", "128"))
    assert result.code == 5 and questions(path) == ["one"]


def broken_off(submit: Any, tokens: int) -> Any:
    """`EngineThread.submit`, but the disk vanishes after some tokens."""

    def submitted(thread: EngineThread, request: Any, receive: Any = None) -> Any:
        left, events = tokens, queue.SimpleQueue[Any]()
        take = receive or events.put

        def pass_on(item: Any) -> None:
            nonlocal left
            take(item if left else CheckpointError("a file vanished", why="for a test", fix="df -h"))
            left -= isinstance(item, TokenEvent)

        stream = submit(thread, request, pass_on)
        stream.events = events
        return stream

    return submitted


@pytest.mark.parametrize(("tokens", "kept"), [(0, []), (2, ["user", "assistant"])])
@pytest.mark.parametrize("command", ["chat", "run"])
def test_what_was_said_before_an_error_stays_and_a_question_without_a_word_is_taken_back(
    model: Path, path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, kept: list[str], command: str
) -> None:
    submit = EngineThread.submit
    monkeypatch.setattr(EngineThread, "submit", broken_off(submit, tokens))
    line = [command, model, *SHORT, *(["-p", "the fox"] if command == "run" else ["--plain"])]
    result = run_cli(*line, stdin=b"" if command == "run" else b"the fox\n")
    assert result.code == 1 and "a file vanished" in result.err
    ((session, shown),) = chats(path)
    assert [role for role, _, _ in shown] == kept and session.title == "the fox"
    if kept:
        assert shown[-1][2] == "interrupted" and shown[-1][1] == result.out.decode().removesuffix("\n")


def test_sessions_inside_a_chat_lists_the_latest(talk) -> None:
    talk("the fox")
    result = talk("the owl", "/sessions", "/title")
    assert re.search(r"\w{6}  \S+ \S+    2  the owl\n\w{6}  \S+ \S+    2  the fox\n", result.err)
    assert result.err.endswith("title: the owl\n")


def test_a_chat_goes_on_with_another_one_of_the_list(talk) -> None:
    talk("the fox")
    result = talk("the owl", "/sessions the fox", "/title", "/undo", "/sessions nobody")
    assert "going on with" in result.err and ">>> the fox" in result.err and "title: the fox" in result.err
    assert "removed the last question" in result.err and "there is no chat 'nobody'" in result.err


# private


@pytest.mark.parametrize("how", ["flag", "variable", "file"])
def test_a_private_chat_leaves_nothing(talk, model: Path, tmp_path: Path, monkeypatch, how: str) -> None:
    flags = ("--private",) if how == "flag" else ()
    if how == "variable":
        monkeypatch.setenv("LOCALLLM_PRIVATE", "1")
    if how == "file":
        (tmp_path / "home" / "config").mkdir(parents=True)
        (tmp_path / "home" / "config" / "config.toml").write_text("private = true\n")
    result = talk("the fox", "/fork", "/title x", "/sessions", flags=flags)
    assert result.code == 2 and result.err.count("this one is private") == 2
    answer = run_cli("run", model, "-p", "the fox", "--json", *SHORT, *flags)
    assert answer.code == 0 and answer.json["session"] is None
    assert not (tmp_path / "home" / "data").exists()


def test_a_private_chat_may_go_on_from_a_kept_one_and_adds_nothing(talk, path: Path) -> None:
    talk("the fox")
    before = chats(path)
    assert talk("the owl", flags=("--resume", "--private")).code == 0 and chats(path) == before


@pytest.mark.parametrize("flags", [("--private",), ()])
def test_private_is_refused_of_a_job_for_its_journal(
    model: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    monkeypatch.setenv("LOCALLLM_PRIVATE", "0" if flags else "1")
    result = run_cli("run", model, "--batch", "-", *flags, stdin=b'"x"\n')
    what = "--batch and --private" if flags else "LOCALLLM_PRIVATE"
    assert result.code == 2 and f"{what} cannot go together" in result.err and "journal" in result.err


@pytest.mark.parametrize(
    "line", ["chat --plain --private", "run -p x --private", "run --batch -", "run -p x --show-prompt"]
)
def test_a_size_of_the_disk_cache_that_would_have_no_effect_is_refused(line: str) -> None:
    result = run_cli(*line.split(), "--cache-disk", "1GiB")
    assert result.code == 2 and "--cache-disk cannot go together" in result.err


# run


def test_run_keeps_question_and_answer_and_continues_the_last_chat(model: Path, path: Path) -> None:
    first = run_cli("run", model, "the fox runs", "-s", "be brief", "--json", *SHORT).json
    second = run_cli("run", "-c", "and the owl?", "--json", *SHORT)
    assert second.code == 0, second.err
    assert first["session"] == second.json["session"] == chats(path)[0][0].id
    ((session, shown),) = chats(path)
    assert (session.title, session.system) == ("the fox runs", "be brief")
    assert [content for _, content, _ in shown] == ["the fox runs", first["text"], "and the owl?", second.json["text"]]
    prompt = run_cli("run", "-c", "third one", "--show-prompt").out.decode()
    assert prompt.startswith("<|bos|><|system|>be brief<|eos|><|user|>the fox runs<|eos|><|assistant|>")
    assert len(chats(path)[0][1]) == 4


def test_run_goes_on_with_a_chat_that_is_named(model: Path, path: Path) -> None:
    first = run_cli("run", model, "the fox", *SHORT, "--json").json["session"]
    run_cli("run", model, "the owl", *SHORT)
    events = run_cli("run", "--session", first, "-p", "go", "--jsonl", *SHORT).out.splitlines()
    assert json.loads(events[0])["session"] == first
    assert titles(path) == ["the fox", "the owl"]
    assert questions(path) == ["the fox", "go"]


def test_a_piped_text_is_titled_by_what_was_asked_about_it(model: Path, path: Path) -> None:
    run_cli("run", model, "Write a message for this.", *SHORT, stdin=b"diff --git a b\n")
    assert chats(path)[0][0].title == "Write a message for this."
    assert questions(path) == ["diff --git a b\n\nWrite a message for this."]


@pytest.mark.parametrize("flags", [("--raw", "-p", "once upon"), ("--messages", "m.json"), ("--batch", "b.jsonl")])
def test_what_is_no_chat_is_not_kept(model: Path, path: Path, flags: tuple[str, ...]) -> None:
    Path("m.json").write_text('[{"role": "user", "content": "the fox"}]')
    Path("b.jsonl").write_text('"the fox"\n')
    assert run_cli("run", model, *flags, "--max-tokens", "2").code == 0 and not path.exists()


@pytest.mark.parametrize(
    "flags", ["-c --raw -p x", "-c --messages m.json", "--session x --batch b.jsonl", "-c --session x -p y"]
)
def test_going_on_refuses_what_contradicts_it(model: Path, flags: str) -> None:
    result = run_cli("run", model, *flags.split())
    assert result.code == 2 and "cannot go together" in result.err


@pytest.mark.parametrize("number", every_other([signal.SIGKILL, signal.SIGTERM]))
def test_what_was_said_is_kept_whatever_ends_the_program(tmp_path: Path, path: Path, number: int) -> None:
    model = write_checkpoint(tmp_path / "slow", hidden=256, layers=8, context=16384)
    (tmp_path / "home").mkdir()
    process = fork_cli(
        tmp_path / "home", "run", model, "-p", "the fox", "--ctx", "8192", "--seed", "1",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
    )  # fmt: skip

    def kept_answer() -> str:
        said = [each for _, shown in chats(path) for each in shown if each[0] == "assistant"]
        return said[0][1] if said else ""

    with process:
        assert process.stdout is not None
        begun = process.stdout.read(16)
        while len(kept_answer()) <= 8:
            begun += process.stdout.read(64)
        process.send_signal(number)
        process.stdout.read()
    ((_, shown),) = chats(path)
    assert shown[0] == ("user", "the fox", "complete") and shown[1][2] == "interrupted"
    assert len(shown[1][1]) > 8 and begun.decode(errors="replace")[:8] == shown[1][1][:8]


# The history refuses


def test_without_a_disk_to_write_on_they_answer_and_say_so_once(
    talk, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALLLM_HOME", "/proc/none")
    result = talk("the fox", "the owl")
    assert result.code == 0 and len(result.out) > 4
    assert result.err.count("warning: this chat continues, but is not saved: the history cannot be opened") == 1
    single = run_cli("run", model, "-p", "the fox", *SHORT)
    assert single.code == 0 and single.err.count("warning:") == 1


def test_a_history_of_a_newer_version_is_left_alone_and_named(talk, path: Path) -> None:
    talk("the fox")
    with contextlib.closing(sqlite3.connect(path)) as raw:
        raw.execute("PRAGMA user_version = 99")
    before = path.read_bytes()
    result = talk("the owl", "the hare")
    assert result.code == 0 and result.err.count("warning:") == 1 and "version 99" in result.err
    for line in (["list"], ["show", "last"], ["rm", "--all", "--yes"], ["export", "--all"]):
        listed = sessions(*line)
        assert listed.code == 1 and "version 99; this localllm knows version 1" in listed.error_lines[0]
    assert path.read_bytes() == before


def test_a_damaged_history_is_moved_aside_by_whoever_finds_it(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no database at all" * 100)
    assert complete_sessions("") == [] and path.exists()
    for number, line in enumerate((["sessions", "list"], ["chat", "--resume"], ["run", "-c", "go on"]), 1):
        path.write_bytes(b"no database at all" * 100)
        result = run_cli(*line)
        assert (result.code == 0) is (line[0] == "sessions")
        assert result.err.count(f"it is now {path}.damaged-{number}") == 1
        path.unlink()
    assert path.with_name("conversations.db.damaged-1").read_bytes() == b"no database at all" * 100


# sessions


@pytest.fixture
def two(path: Path) -> list[Session]:
    """A chat with two answers, and one whose texts would move a cursor."""
    with History.open(path) as history:
        fox, question = ask(history, "Where is the fox?")
        history.append(fox, question, "assistant", "In the shed with a lantern.", model="tiny")
        history.append(fox, question, "assistant", "In the hut.", model="tiny", state="interrupted")
        owl, _ = ask(history, "An \x1b[31mowl\x07?")
        return [history.refresh(fox), history.refresh(owl)]


def test_list_shows_the_latest_first(two: list[Session]) -> None:
    lines = sessions("list").out.decode().splitlines()
    assert lines[0].split() == ["ID", "WHEN", "MODEL", "MESSAGES", "TITLE"]
    assert [line.split()[0] for line in lines[1:]] == [two[1].id, two[0].id]
    assert "\\x1b[31mowl\\x07" in lines[1]
    assert lines[2].split()[3:] == ["tiny", "2", "Where", "is", "the", "fox?"]
    fields = sessions("list", "--json").json
    assert fields["total"] == 2 and [row["messages"] for row in fields["sessions"]] == [1, 2]
    assert set(fields["sessions"][0]) == {"id", "title", "model", "created", "updated", "messages", "facts"}


def test_completion_offers_the_ids_of_kept_chats(two: list[Session], monkeypatch: pytest.MonkeyPatch) -> None:
    assert complete_sessions("") == [two[1].id, two[0].id]
    assert two[0].id in complete_sessions(two[0].id[:2].upper())
    monkeypatch.setenv("LOCALLLM_HOME", "/proc/none")
    assert complete_sessions("") == []


def test_no_word_is_a_bug_because_it_is_no_text(two: list[Session], model: Path) -> None:
    for line in (["show"], ["search"], ["export"], ["rm", "--yes"]):
        result = sessions(*line, "\udcff")
        assert result.code in (0, 1) and "bug" not in result.err
    assert run_cli("chat", model, "--plain", "--resume", "\udcff", stdin=b"").code == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is closed to root")
def test_a_folder_that_may_not_be_entered_is_named(two: list[Session], path: Path) -> None:
    path.parent.chmod(0)
    try:
        result = sessions("list")
        assert result.code == 1 and "the history cannot be opened" in result.err
        assert complete_sessions("") == []
    finally:
        path.parent.chmod(0o700)


def test_looking_makes_no_history(path: Path) -> None:
    for line in (["list"], ["search", "fox"], ["show", "last"], ["export", "--all"], ["rm", "--all", "--yes"]):
        assert "no chat is saved yet" in sessions(*line).err
    assert sessions("list").out == b"" and sessions("list", "--json").json["sessions"] == []
    assert not path.parent.exists()


def test_list_says_how_many_it_left_out(path: Path) -> None:
    with History.open(path) as history:
        for number in range(23):
            ask(history, f"question {number}")
    short, whole = sessions("list"), sessions("list", "--all")
    assert len(short.out.splitlines()) == 21 and "3 more: localllm sessions list --all" in short.err
    assert len(whole.out.splitlines()) == 24 and whole.err == ""


def test_show_prints_what_a_chat_shows(two: list[Session]) -> None:
    text = sessions("show", "fox").out.decode()
    assert "## You\n\nWhere is the fox?\n\n## Model\n\nIn the hut.\n\n*(interrupted)*\n" in text
    assert "shed" not in text
    fields = sessions("show", two[0].id, "--json").json
    assert [message["state"] for message in fields["messages"]] == ["complete", "interrupted"]
    assert fields["session"]["id"] == two[0].id


def test_search_finds_words_in_what_is_shown_no_more_too(two: list[Session]) -> None:
    result = sessions("search", "lantern")
    assert result.out.decode().splitlines()[1].split()[0] == two[0].id
    assert "In the shed with a lantern." in result.out.decode()
    assert [hit["role"] for hit in sessions("search", "fox", "--json").json["hits"]] == ["title", "user"]
    assert sessions("search", "a lantern", "shed").out
    assert "nothing was found" in sessions("search", "hedgehog").err
    assert sessions("search", " ").code == 2


def test_a_phrase_is_found_as_it_is_and_signs_are_no_words(path: Path) -> None:
    with History.open(path) as history:
        for text in ("a red lantern", "red as a lantern", "I can count", "I write C++ and C#"):
            ask(history, text)

    def found(*words: str) -> list[str]:
        return [hit["text"] for hit in sessions("search", *words, "--json").json["hits"][::2]]

    assert found('"red lantern"') == found("red lantern") == ["a red lantern"]
    assert found("c++") == found("C#") == ["I write C++ and C#"]
    assert len(found("red", "lantern")) == 2


def test_an_export_is_imported_elsewhere_as_it_was(two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sessions("export", "--all", "-o", "all.json").code == 0
    assert oct(Path("all.json").stat().st_mode)[-3:] == "600"
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path / "elsewhere"))
    told = b"imported 2 chats with 4 messages; 0 got new messages, 0 were complete already\n"
    assert sessions("import", "all.json").out == told
    again = sessions("import", "all.json", "--json").json
    assert again == {"schema_version": 1, "read": 2, "new": 0, "grown": 0, "messages": 0}
    assert sessions("export", "--all", "--format", "json").json == json.loads(Path("all.json").read_text())


def test_an_export_goes_to_stdout_or_into_a_file_that_is_not_there(two: list[Session]) -> None:
    printed = sessions("export", two[0].id, "owl").out
    assert printed.startswith(b"# Where is the fox?") and b"# An " in printed
    Path("chats.md").write_text("mine")
    refused = sessions("export", "--all", "-o", "chats.md")
    assert refused.code == 2 and "is there already" in refused.err and Path("chats.md").read_text() == "mine"
    assert sessions("export", two[0].id, "owl", "-o", "chats.md", "--force").code == 0
    assert Path("chats.md").read_bytes() == printed
    assert sorted(each.name for each in Path().iterdir()) == ["chats.md", "home"]
    absent = sessions("export", "--all", "-o", "no/such/folder/x.md")
    assert absent.code == 2 and "cannot be written" in absent.err


def test_an_export_onto_a_full_disk_leaves_no_half_file(two: list[Session], tmp_path: Path) -> None:
    def small_disk() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    process = fork_cli(
        tmp_path / "home", "sessions", "export", "--all", "-o", tmp_path / "all.md",
        preexec_fn=small_disk, stderr=subprocess.PIPE,
    )  # fmt: skip
    errors = process.communicate(timeout=PATIENCE_S)[1].decode()
    assert process.returncode in (1, 2) and "error:" in errors and "Traceback" not in errors
    assert not list(tmp_path.glob("*all.md*"))


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        (["export"], 2, "no chat is named"),
        (["export", "--all", "fox"], 2, "fix:   localllm sessions export fox\n"),
        (["rm", "--all", "fox"], 2, "fix:   localllm sessions rm fox\n"),
        (["search"], 2, "localllm sessions search [OPTIONS] WORD...\n"),
        (["export", "fox", "-o", "/nowhere/at/all.md"], 2, "fix:   mkdir -p /nowhere/at\n"),
        (["export", "fox", "nothing"], 1, "there is no chat 'nothing'"),
        (["export", "fox", "--force"], 2, "--force needs -o FILE"),
        (["export", "fox", "-o", "."], 2, "'.' cannot be written"),
        (["export", "fox", "-o", "/proc/version"], 2, "localllm sessions export fox -o /proc/version --force"),
        (["export", "fox", "--format", "pdf"], 2, "markdown"),
        (["rm"], 2, "no chat is named"),
        (["rm", "fox", "nothing", "--yes"], 1, "there is no chat 'nothing'"),
        (["rm", "fox"], 2, "nobody can be asked"),
        (["show", "nothing"], 1, "there is no chat 'nothing'"),
        (["import", "nothing.json"], 2, "'nothing.json' cannot be imported"),
    ],
)
def test_bad_input_is_refused_by_name_and_changes_nothing(
    two, path: Path, line: list[str], code: int, words: str
) -> None:
    result = sessions(*line)
    assert (result.code, result.out) == (code, b"")
    assert words in result.err and len(result.error_lines) == 4 and len(chats(path)) == 2


def test_an_import_of_several_files_is_made_as_a_whole_or_not_at_all(two: list[Session], path: Path) -> None:
    sessions("export", "--all", "-o", "all.json")
    sessions("rm", "--all", "--yes")
    Path("broken.json").write_text('{"format": "localllm-chats", "format_version": 1, "sessions": [{}]}')
    assert sessions("import", "all.json", "broken.json").code == 2 and chats(path) == []


def test_rm_deletes_for_good_what_it_names(two: list[Session], path: Path) -> None:
    result = sessions("rm", two[0].id, two[0].id, "--yes")
    assert result.out.decode() == f"removed the chat {two[0].id} (Where is the fox?)\n"
    assert [session.id for session, _ in chats(path)] == [two[1].id]
    assert all(b"lantern" not in each.read_bytes() for each in path.parent.iterdir())
    assert sessions("rm", "--all", "--yes", "--json").json == {"schema_version": 1, "removed": [two[1].id]}
    assert chats(path) == []


def test_the_terminals_line_history_has_nothing_of_a_private_chat(tmp_path: Path, model: Path) -> None:
    pytest.importorskip("readline")
    from tests.terminal import Terminal

    (tmp_path / "home").mkdir()
    terminal = Terminal(tmp_path / "home", "chat", model, "--plain", "--private", "--max-tokens", "2")
    try:
        terminal.wait_for(r"private:\s+nothing is saved")
        terminal.wait_for(">>> $")
        terminal.send("a secret\n")
        terminal.wait_for("a secret")
        terminal.wait_for(">>> $")
        terminal.send("/bye\n")
        assert terminal.end() == 0
    finally:
        terminal.close()
    assert not (tmp_path / "home" / "data").exists() and os.name
