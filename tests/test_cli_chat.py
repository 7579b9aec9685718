"""`chat --plain` fed by a pipe: what a line does to the conversation. On a terminal: test_cli_terminal.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli_support import run_cli, write_checkpoint


def saved(tmp_path: Path) -> list[dict[str, str]]:
    return json.loads((tmp_path / "chat.json").read_text())["messages"]


def questions(tmp_path: Path) -> list[str]:
    return [message["content"] for message in saved(tmp_path) if message["role"] == "user"]


def test_each_line_is_answered_on_stdout_and_the_end_of_input_ends_the_chat(talk, tmp_path: Path) -> None:
    result = talk("the fox", "the owl", "/save chat.json")
    assert result.code == 0
    answers = [message["content"] for message in saved(tmp_path) if message["role"] == "assistant"]
    assert len(answers) == 2
    assert result.out.decode() == "".join(answer.removesuffix("\n") + "\n" for answer in answers)


def test_a_backslash_and_three_quotes_make_one_message_of_several_lines(talk, tmp_path: Path) -> None:
    talk("a\\", "b", '"""c', "d", 'e"""', "/save chat.json")
    assert questions(tmp_path) == ["a\nb", "c\nd\ne"]


def test_what_was_said_before_is_part_of_the_prompt(talk) -> None:
    errors = talk("once", "/tokens", "upon", "/tokens").err
    first, second = (int(line.split()[0]) for line in errors.splitlines() if "of the context" in line)
    assert second > first


def test_undo_takes_the_last_turn_back_and_clear_all_of_them(talk, tmp_path: Path) -> None:
    talk("one", "two", "/undo", "/save chat.json")
    assert questions(tmp_path) == ["one"]
    (tmp_path / "chat.json").unlink()
    result = talk("one", "/clear", "/save chat.json")
    assert "nothing to save: no message stands" in result.err and not (tmp_path / "chat.json").exists()


def test_regen_answers_the_same_question_anew(talk, tmp_path: Path) -> None:
    result = talk("one", "/set seed 7", "/regen", "/save chat.json")
    assert [message["role"] for message in saved(tmp_path)] == ["user", "assistant"]
    assert result.out.decode().startswith(talk("one").out.decode())


def test_system_and_file_are_part_of_what_the_model_reads(talk, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("a note\n")
    talk("/system be brief", "/attach note.txt", "what is it?", "/save chat.json")
    assert saved(tmp_path)[:2] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "File note.txt:\n```txt\na note\n```\n\nwhat is it?"},
    ]


def test_a_saved_chat_is_loaded_again_and_read_by_run(talk, model: Path, tmp_path: Path) -> None:
    talk("/system be brief", "one", "/save chat.json")
    before = saved(tmp_path)
    talk("/load chat.json", "/save again.json")
    assert json.loads((tmp_path / "again.json").read_text())["messages"] == before
    assert json.loads((tmp_path / "chat.json").read_text())["add_generation_prompt"] is True
    shown = run_cli("run", model, "--messages", tmp_path / "chat.json", "--show-prompt")
    assert shown.out.startswith(b"<|bos|><|system|>be brief<|eos|><|user|>one<|eos|><|assistant|>")


def test_save_never_overwrites_unasked(talk, tmp_path: Path) -> None:
    (tmp_path / "chat.json").write_text("mine")
    result = talk("one", "/save chat.json")
    assert result.code == 2 and "'chat.json' is there already" in result.err
    assert (tmp_path / "chat.json").read_text() == "mine"


def test_what_is_decided_when_a_chat_begins_is_shown_where_it_is_not_as_usual(talk) -> None:
    for command in ("/set", "/show"):
        lines = talk(command, flags=("--attend", "top:4")).err.splitlines()
        assert "attend = top:4 (since the chat began)" in lines and not any("kv_evict" in line for line in lines)


def test_the_fix_for_what_cannot_be_set_goes_on_with_a_saved_chat(talk) -> None:
    (line,) = (line for line in talk("one", "/set reuse chunks").err.splitlines() if line.startswith("fix:"))
    assert re.fullmatch(r"fix:   localllm chat --resume \w+ --reuse chunks", line)


def test_set_changes_the_sampling_and_refuses_what_it_does_not_know(talk, model: Path) -> None:
    assert talk("/set max_tokens 2", "/set", "one", "/stats").err.count("answer 2 tokens") == 1
    assert "'temperature'" in talk("/set temprature 1").err
    assert "from 0 to 100" in talk("/set temperature hot").err
    fixed = talk("/set speculate off").err
    assert "it cannot be changed now" in fixed and f"localllm chat {model} --speculate off" in fixed
    assert f"localllm chat {model} --attend ATTEND" in talk("/set attend").err
    unset = talk("/set").err.splitlines()
    assert "top_k = -" in unset and "stop = -" in unset


def test_stats_on_prints_where_the_time_went_after_each_answer_until_stats_off(talk) -> None:
    result = talk("one", "/stats on", "two", "three", "/stats off", "four", "/stats")
    counted = [line for line in result.err.splitlines() if "answer 4 tokens" in line]
    assert len(counted) == 3  # of two, three, and the last one once more
    assert all(re.search(r"\d+% computing, (\d+% sampling, )?", line) for line in counted)


def test_stats_takes_on_or_off_and_nothing_else(talk) -> None:
    result = talk("/stats maybe")
    assert (result.code, result.error_lines[2]) == (2, "fix:   /stats on")


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("/load nowhere.json", "/load PATH"),
        ("/attach nowhere.txt", "ls -l ."),
        ("/load latin.txt", "iconv -f ISO-8859-1 -t UTF-8 latin.txt > latin.txt.utf8, then /load latin.txt.utf8"),
        ("/load number.json", "/help"),
        ("/set temperature hot", "/set temperature 0.8"),
        ("/set temprature 0.5", "/set temperature 0.5"),
        ("/set compress 0.5", "/set shows every setting"),
    ],
)
def test_an_error_in_a_chat_is_mended_in_the_chat(talk, tmp_path: Path, line: str, fix: str) -> None:
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    (tmp_path / "number.json").write_text("3")
    result = talk(line)
    assert (result.code, result.error_lines[2]) == (2, f"fix:   {fix}")


def test_an_unknown_command_names_the_nearest(talk) -> None:
    assert "the nearest is /system" in talk("/sytsem").err


def test_an_overflow_is_an_error_with_both_counts_and_the_chat_goes_on(talk, tmp_path: Path) -> None:
    result = talk("one", "x " * 150, "/save chat.json", flags=("--ctx", "128"))
    assert result.code == 5  # of the last error: a script sees that not all was answered
    assert "128" in result.err and "/clear" in result.err and "--ctx" in result.err
    assert questions(tmp_path) == ["one"]


def test_a_model_without_a_template_cannot_chat(model: Path, tmp_path: Path, talk) -> None:
    bare = write_checkpoint(tmp_path / "bare")
    (bare / "tokenizer_config.json").write_text('{"bos_token": "<|bos|>"}')
    result = run_cli("chat", bare, "--plain", stdin=b"hi\n")
    assert (result.code, result.out) == (1, b"") and "--raw" in result.err
    raw = run_cli("run", bare, "--raw", "-p", "once", "--max-tokens", "2", "--json")
    assert raw.json["finish_reason"] == "length"


def test_chat_without_plain_says_that_it_is_the_line_mode(model: Path, talk) -> None:
    result = run_cli("chat", model, stdin=b"")
    assert result.code == 0 and "--plain" in result.err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "message 1 of 1 has no content"),
        (', "content": null', "system message is not text"),
        (', "content": [{"type": "text", "text": "x"}]', "system message is not text"),
    ],
)
def test_a_system_message_that_is_no_text_cannot_be_loaded_and_the_chat_goes_on(
    talk, tmp_path: Path, content: str, words: str
) -> None:
    (tmp_path / "odd.json").write_text(f'[{{"role": "system"{content}}}]')
    result = talk("/load odd.json", "the fox", "/save chat.json")
    assert words in result.err
    assert questions(tmp_path) == ["the fox"]


def test_a_prompt_in_the_place_of_the_model_is_shown_its_command() -> None:
    result = run_cli("chat", "hello there", "--plain")
    assert result.code == 3 and result.error_lines[2].endswith("localllm run -p 'hello there'")


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        (["run", "-p", "hi", "--resume"], "localllm run -p hi --session last"),
        (["chat", "tiny", "-c", "--plain"], "localllm chat tiny --resume --plain"),
        (["chat", "--session", "kibaro"], "localllm chat --resume kibaro"),
    ],
)
def test_who_takes_the_other_commands_flag_is_shown_this_ones(line: list[str], fix: str) -> None:
    result = run_cli(*line)
    assert result.code == 2 and f"fix:   {fix}\n" in result.err


@pytest.mark.parametrize(
    ("line", "words"), [("/undo 3", "takes no argument"), ("/load", "needs a path"), ("/detach a", "takes no argument")]
)
def test_a_command_refuses_what_it_would_ignore_and_what_it_lacks(talk, line: str, words: str) -> None:
    result = talk(line)
    assert result.code == 2 and words in result.err


def test_another_model_goes_on_with_the_chat_and_one_that_cannot_leaves_it_as_it_is(talk, tmp_path: Path) -> None:
    result = talk(
        "one", "/model", "/model nothing-like-this", "two", "/model tiny", "three", "/model", "/save chat.json"
    )
    errors = result.err
    assert "no model" in errors and "loaded tiny: " in errors and "model tiny: /model NAME continues" in errors
    assert questions(tmp_path) == ["one", "two", "three"]


def test_a_model_that_fails_while_it_loads_gives_the_place_back_to_the_one_before(
    talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    write_checkpoint(broken)
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    result = talk("one", f"/model {broken}", "two", "/save chat.json")
    assert questions(tmp_path) == ["one", "two"] and len(saved(tmp_path)) == 4, result.err


def test_an_answer_is_printed_where_no_terminal_can_copy_it(talk, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Look:\n\n```py\nx = 1\n```\n"}]
    (tmp_path / "said.json").write_text(json.dumps(messages))
    result = talk("/copy", "/load said.json", "/copy 1", "/copy", "/copy 2")
    assert result.out.decode() == "x = 1\n" + messages[1]["content"]
    assert "there is no answer yet" in result.err and "there is no code block '2'" in result.err
