"""Files in front of a question: which are read and how, which are refused and what is said then, what a message has."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.chat.attachments import files_of, read_attachment, typed_part
from localllm.chat.file_references import completed, dropped, references
from localllm.errors import UsageError
from tests.cli_support import Result, run_cli
from tests.pdf_support import encrypted, pdf

Talk = Callable[..., Result]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def questions(file: str = "chat.json") -> list[str]:
    messages = json.loads(Path(file).read_text())["messages"]
    return [message["content"] for message in messages if message["role"] == "user"]


# In the chat line by line


def test_a_named_file_stands_in_front_of_the_question_which_stays_as_it_was_typed(talk: Talk) -> None:
    Path("notes.md").write_text("# Fox\n\nIt is red.\n")
    result = talk("What does @notes.md say?", "/save chat.json")
    assert questions() == ["File notes.md:\n```md\n# Fox\n\nIt is red.\n```\n\nWhat does @notes.md say?"]
    assert re.search(r"^notes\.md: \d+ tokens$", result.err, re.MULTILINE)


def test_attach_takes_several_files_lists_them_and_detach_removes_them(talk: Talk) -> None:
    Path("a.txt").write_text("one")
    Path("my notes.txt").write_text("two")
    result = talk("/attach", "/attach a.txt 'my notes.txt'", "/attach", "What?", "/file a.txt", "/detach", "And?",
                  "/save chat.json")  # fmt: skip
    assert [[file.path for file in files_of(question)] for question in questions()] == [["a.txt", "my notes.txt"], []]
    listed = [line for line in result.err.splitlines() if line.startswith("before the next question: ")]
    assert len(listed) == 3 and re.fullmatch(r".*a\.txt: \d+ tokens, my notes\.txt: \d+ tokens", listed[1])
    assert result.err.count("no file is attached") == 1 and "no longer before the next question: a.txt" in result.err


def test_of_several_files_all_are_attached_or_none(talk: Talk) -> None:
    Path("a.txt").write_text("one")
    result = talk("/attach a.txt b.txt", "/attach")
    assert "'b.txt' cannot be read" in result.err and "no file is attached" in result.err


def test_a_line_that_is_nothing_but_the_path_of_a_file_attaches_it(talk: Talk, folder: Path) -> None:
    (folder / "my notes.txt").write_text("two")
    typed = (f"{folder}/my\\ notes.txt", f"'{folder}/my notes.txt'", f"file://{folder}/my%20notes.txt")
    talk(*typed, "What?", "/save chat.json")
    assert [file.text for file in files_of(questions()[0])] == ["two"] and typed_part(questions()[0]) == "What?"


def test_a_file_that_cannot_be_read_takes_the_question_with_it(talk: Talk) -> None:
    Path("a.bin").write_bytes(b"\x00\x01")
    result = talk("What is @a.bin?", "/undo")
    assert "'a.bin' cannot be read" in result.err and "there is no question to undo" in result.err


def test_a_path_that_is_not_there_stays_text_and_is_told_of(talk: Talk) -> None:
    result = talk("Mail me@home.org about @dataclass and @src/none.py.", "/save chat.json")
    assert questions() == ["Mail me@home.org about @dataclass and @src/none.py."]
    assert result.err.count("it stays text") == 1 and "there is no file 'src/none.py'" in result.err


def test_a_file_larger_than_the_context_is_refused_with_both_numbers(talk: Talk) -> None:
    Path("large.txt").write_text("A fox met an owl. " * 2000)
    result = talk("/attach large.txt", "/attach", flags=("--ctx", "256"))
    assert "'large.txt' is larger than the context" in result.err and "no file is attached" in result.err
    assert re.search(r"it has [\d,]+ tokens, the context 256", result.err)
    part = re.search(r"head -c (\d+) large.txt > part.txt", result.err)
    assert part is not None
    Path("part.txt").write_bytes(Path("large.txt").read_bytes()[: int(part[1])])
    assert talk("What of @part.txt?", flags=("--ctx", "256")).code == 0


def test_a_chat_goes_on_when_its_file_is_gone_and_shows_a_line_for_it(talk: Talk) -> None:
    Path("notes.md").write_text("The fox is red.\nThe owl is grey.")
    talk("Who is red in @notes.md?")
    Path("notes.md").unlink()
    result = talk("And grey?", "/tokens", "/save chat.json", flags=("--resume",), named=False)
    assert "The owl is grey." in questions()[0]
    assert ">>> + notes.md (2 lines)\n... Who is red in @notes.md?\n" in result.err
    assert re.search(r"files [1-9]", result.err)
    assert b"The owl is grey." in run_cli("sessions", "show", "last").out


def test_the_tokens_of_files_are_counted_apart(talk: Talk) -> None:
    Path("notes.md").write_text("The fox is red. " * 20)
    before, after = talk("Who?", "/tokens").err, talk("Who? @notes.md", "/tokens").err
    assert "files" not in before
    files, question = re.search(r"files (\d+)", after), re.search(r"question (\d+)", after)
    assert files is not None and question is not None and int(files[1]) > 40 > int(question[1])


def test_a_file_in_front_of_another_question_is_found_in_the_cache(talk: Talk) -> None:
    Path("notes.md").write_text("The fox met an owl by the mill. " * 8)
    errors = talk("@notes.md Who met?", "/clear", "@notes.md Where did they meet?", "/cache").err
    found = re.search(r"(\d+) of the last prompt's (\d+) tokens were found", errors)
    assert found is not None and int(found[1]) >= 64


def test_run_takes_the_text_of_a_pdf_for_a_file(model: Path) -> None:
    Path("a.pdf").write_bytes(pdf("The first page."))
    shown = run_cli("run", model, "--file", "a.pdf", "-p", "What of me@a.pdf and @a.pdf?", "--show-prompt")
    assert shown.out.decode().count("The first page.\n\nWhat of me@a.pdf and @a.pdf?") == 1


def test_run_reads_a_file_as_a_chat_does(model: Path) -> None:
    Path("latin.txt").write_bytes("Der Bär.".encode("latin-1"))
    shown = run_cli("run", model, "--file", "latin.txt", "-p", "Who?", "--show-prompt")
    assert "Der Bär.\n\nWho?" in shown.out.decode() and "read as Latin-1" in shown.err


def test_a_raw_prompt_has_the_text_of_a_file_as_it_is(model: Path) -> None:
    Path("lines.txt").write_bytes(b"one\r\ntwo\r\n")
    assert run_cli("run", model, "--raw", "--file", "lines.txt", "--show-prompt").out == b"one\r\ntwo\r\n"


def test_a_file_waits_for_the_next_question_in_another_chat_too(talk: Talk) -> None:
    Path("notes.md").write_text("The owl.")
    assert (
        "before the next question: notes.md"
        in talk("One?", "/clear", "/attach notes.md", "/sessions One", "/attach").err.split("going on with")[1]
    )


def test_a_misspelt_name_is_mended_by_a_command_of_the_chat(talk: Talk) -> None:
    Path("my notes.md").write_text("x")
    assert "fix:   /attach 'my notes.md'\n" in talk("/attach 'my nots.md'").err


# What is read


@pytest.mark.parametrize(
    ("data", "text", "remark"),
    [
        (b"caf\xc3\xa9\r\nand tea\n", "café\nand tea", ""),
        (b"\xef\xbb\xbfcaf\xc3\xa9", "café", ""),
        ("café\n".encode("utf-16"), "café", "read as UTF-16"),
        (b"\xfe\xff" + "café".encode("utf-16-be"), "café", "read as UTF-16"),
        (b"caf\xe9 \x93au lait\x94", "café “au lait”", "read as Latin-1 (Windows-1252), as it is not UTF-8"),
        ("Füße und Bär".encode()[:-2], "Füße und B", "without its last character, which is cut"),
        (b"", "", ""),
    ],
)
def test_a_text_is_read_in_the_encoding_that_it_has(data: bytes, text: str, remark: str) -> None:
    Path("a.txt").write_bytes(data)
    file = read_attachment("a.txt")
    assert (file.text, file.remark) == (text, remark)


def test_the_text_of_a_pdf_is_read() -> None:
    Path("a.pdf").write_bytes(pdf("The first page.", "", "The last."))
    file = read_attachment("a.pdf")
    assert (file.text, file.remark) == ("The first page.\n\nThe last.", "3 pages, 1 without text")


def test_a_pdf_that_is_encrypted_with_an_empty_password_is_read() -> None:
    Path("a.pdf").write_bytes(encrypted(pdf("A secret."), ""))
    assert read_attachment("a.pdf").text == "A secret."


@pytest.mark.parametrize(
    ("name", "data", "why", "fix"),
    [
        ("a.png", b"\x89PNG\r\n\x1a\n\x00", "vision is not supported", "tesseract"),
        ("a.mp4", b"\x00" * (17 << 20), "it is video", "transcript"),
        ("a.mp3", b"ID3\x04\x00", "it is audio", "transcript"),
        ("a.docx", b"PK\x03\x04\x00", "an office program", "libreoffice --headless --convert-to pdf a.docx"),
        ("a.bin", b"abc\x00", "control character '\\x00' at character 3", "strings a.bin"),
        ("a.gz", b"\x1f\x8b\xff\x81", "byte 0x8b at offset 1", "strings a.gz"),
        ("a.txt", b"a" * (16 << 20) + b"a", "more than 16.0 MiB", "head -c"),
        ("scan.pdf", pdf("", ""), "its 2 pages have no text", "ocrmypdf scan.pdf"),
        ("closed.pdf", encrypted(pdf("A secret."), "word"), "it is encrypted", "qpdf --decrypt"),
        ("cut.pdf", pdf("A text.")[:200], "it is damaged", "pdftotext cut.pdf"),
        ("loop.pdf", pdf("A text.").replace(b"/Kids [4 0 R]", b"/Kids [2 0 R]"), "it is damaged", "pdftotext"),
        ("bomb.pdf", pdf("a", draws=" " * (1 << 29)), "it is damaged, or made so: Limit", "pdftotext"),
    ],
)
def test_what_has_no_text_is_refused_by_its_kind(name: str, data: bytes, why: str, fix: str) -> None:
    Path(name).write_bytes(data)
    with pytest.raises(UsageError) as caught:
        read_attachment(name)
    assert why in caught.value.why and fix in caught.value.fix


@pytest.mark.slow
def test_a_pdf_that_takes_too_long_is_given_up() -> None:
    Path("slow.pdf").write_bytes(pdf(*["a"] * 60, draws="BT /F1 12 Tf " + "(a) Tj " * 400_000 + "ET"))
    with pytest.raises(UsageError, match=r"slow.pdf") as caught:
        read_attachment("slow.pdf")
    assert "30 s of the CPU" in caught.value.why


def test_what_is_no_plain_file_is_refused_at_once() -> None:
    Path("folder").mkdir()
    os.mkfifo("pipe")
    for name, why in (("folder", "a folder"), ("pipe", "a pipe or a device"), ("/dev/zero", "a pipe or a device")):
        with pytest.raises(UsageError) as caught:
            read_attachment(name)
        assert why in caught.value.why


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_that_may_not_be_read_is_refused() -> None:
    Path("mine.txt").write_text("x")
    Path("mine.txt").chmod(0)
    with pytest.raises(UsageError) as caught:
        read_attachment("mine.txt")
    assert caught.value.why == "Permission denied"


def test_a_name_that_is_not_there_is_answered_with_the_nearest() -> None:
    Path("notes.md").write_text("x")
    with pytest.raises(UsageError) as caught:
        read_attachment("notse.md")
    assert caught.value.fixes[0].words == ("notse.md", "notes.md")


# What a message has


@pytest.mark.parametrize("text", ["", "\n", "a", "```\ncode\n```", "````", "a `b`", "File a:\n```\nb\n```\n\nc"])
def test_files_and_question_are_told_apart_whatever_is_in_them(text: str) -> None:
    Path("a b:c.md").write_text(text)
    Path("d.txt").write_text(text)
    files = [read_attachment(name) for name in ("a b:c.md", "d.txt")]
    message = "\n\n".join([*(file.quoted for file in files), text])
    assert [(file.path, file.text) for file in files_of(message)[:2]] == [(file.path, file.text) for file in files]
    assert message.endswith(typed_part(message)) and (text.startswith("File") or typed_part(message) == text)


@pytest.mark.parametrize(
    ("message", "files"),
    [
        ("@a.txt", ["a.txt"]),
        ("see (@a.txt), @./a.txt, and @a.txt.", ["a.txt", "./a.txt"]),
        ('@"my notes.txt" @"my notes.txt"', ["my notes.txt"]),
        ("@~/home.txt", ["~/home.txt"]),
        ("me@a.txt \\@a.txt @@a.txt @ a.txt", []),
        ("@folder @folder/ @none @" + "a" * 10_000 + " @" + "." * 10_000, []),
    ],
)
def test_a_file_is_named_at_the_start_of_a_word(
    message: str, files: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    for name in ("a.txt", "my notes.txt", "home.txt"):
        Path(name).write_text("x")
    Path("folder").mkdir()
    assert list(references(message).files) == files


def test_a_folder_stays_text_and_the_remark_tells_how_its_files_are_named() -> None:
    Path("folder").mkdir()
    assert references("What is in @folder?").remarks == (
        "@folder is a folder, and stays text: @folder/NAME attaches a file in it",
    )


@pytest.mark.parametrize("text", ["a.txt", "", "What of ./a.txt?", "./none.txt", "don't", "./folder", "a/" * 10_000])
def test_a_paste_that_is_not_just_the_paths_of_files_stays_as_it_is(text: str) -> None:
    Path("a.txt").write_text("x")
    Path("folder").mkdir()
    assert dropped(text) == []


def test_a_path_is_completed_behind_its_sign() -> None:
    Path("my folder").mkdir()
    for name in ("notes.md", "Notes.txt", ".hidden", "my folder/a b.txt"):
        Path(name).write_text("x")
    assert completed("see @no") == [("see @Notes.txt ", "Notes.txt"), ("see @notes.md ", "notes.md")]
    assert completed("@my") == [('@"my folder/', "my folder/")]
    assert completed('@"my folder/') == [('@"my folder/a b.txt" ', "my folder/a b.txt")]
    assert completed("@notes.m")[0] == completed("@notes.md")[0] == ("@notes.md ", "notes.md")
    assert completed("@.h") == [("@.hidden ", ".hidden")]
    assert [path for _, path in completed("@")] == ["Notes.txt", "my folder/", "notes.md"]
    Path("Notes.md").write_text("x")
    assert [path for _, path in completed("@notes.md")] == ["notes.md", "Notes.md"]
    assert completed("me@no") == completed("no") == completed("@none/") == []
