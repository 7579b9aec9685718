"""`localllm run DIR --messages FILE --show-prompt`: to the letter, from a folder with nothing but a template.

And the end of a turn, which a template alone may know.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localllm.engine.chat_template import ChatTemplate
from tests.cli_support import Result, run_cli, write_chain, write_sentencepiece

Locate = Callable[[str], Path]
CASES = 27  # the page of cases says so
DAY = datetime.datetime(2025, 7, 10)  # of the case that writes the date


@pytest.fixture(scope="module")
def cases(shared_data: Locate) -> list[dict[str, Any]]:
    recorded = json.loads(shared_data("chat_templates/cases.json").read_text(encoding="utf-8"))
    found = [case for group in ("default", "custom") for case in recorded[group].values()]
    assert len(found) == CASES
    return found


def show_prompt(folder: Path, messages: object, **files: object) -> Result:
    model = folder / "model"
    model.mkdir()
    for name, content in files.items():
        suffix = "jinja" if isinstance(content, str) else "json"
        text = content if isinstance(content, str) else json.dumps(content)
        (model / f"{name}.{suffix}").write_text(text, encoding="utf-8", newline="")
    (folder / "messages.json").write_text(json.dumps(messages), encoding="utf-8")
    return run_cli("run", model, "--messages", folder / "messages.json", "--show-prompt")


@pytest.mark.parametrize("number", range(CASES))
@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "chat_template.json"])
def test_a_recorded_case_is_printed_byte_for_byte(
    cases: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, place: str
) -> None:
    monkeypatch.setitem(ChatTemplate.__init__.__kwdefaults__, "now", lambda: DAY)
    case = cases[number]
    stem, suffix = place.split(".")
    files = {stem: case["chat_template"] if suffix == "jinja" else {"chat_template": case["chat_template"]}}
    result = show_prompt(tmp_path, case["data"], **files)
    assert result.code == 0, result.err
    assert result.out == case["target"].encode()


HELLO = [{"role": "user", "content": "hi"}]


def test_the_special_tokens_are_those_of_the_folder(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<s>"},
        "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    }
    result = show_prompt(tmp_path, HELLO, tokenizer_config=config, special_tokens_map={"eos_token": "</s>"})
    assert result.out == b"<s>hi</s>"


def test_what_a_template_writes_is_printed_as_the_model_is_given_it(tmp_path: Path) -> None:
    result = show_prompt(tmp_path, HELLO, chat_template="a{{ '\\ud800' }}b")
    assert result.out.decode() == "a\ufffdb"


def test_half_a_character_as_a_special_token_is_an_error_of_four_lines(tmp_path: Path) -> None:
    result = show_prompt(tmp_path, HELLO, chat_template="{{ bos_token }}", tokenizer_config={"bos_token": "\ud800"})
    assert result.code == 1
    assert len(result.error_lines) == 4
    assert "tokenizer_config.json" in result.err


def test_the_template_of_a_folder_without_a_tokenizer_is_shown(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert run_cli("show", tmp_path, "--template").out == b"{{ messages }}\n"


def test_an_answer_ends_with_the_turn_where_the_template_alone_knows_its_end(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }} {{ '[/INST]' if m.role == 'user' else '<|end|>' }}{% endfor %}"
    model = write_chain(
        tmp_path,
        *("]", "▁Once", "▁upon", "<|end|>", "▁a"),
        write_tokenizer=lambda directory: write_sentencepiece(directory, template),
    )
    answer = run_cli("run", model, "-p", "Tell me", "--json", "--max-tokens", "6", "--temperature", "0").json
    assert (answer["text"], answer["finish_reason"]) == ("Once upon", "stop")
