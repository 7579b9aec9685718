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

from localllm.chat.context import text_of
from localllm.server.tools.output_format import prompt_of
from localllm.server.tools.tool_formats import GENERIC
from localllm.server.tools.toolset import Tool, call_of, toolset
from localllm.text.chat_template import ChatTemplate
from tests.cli_support import Result, run_cli, write_chain, write_checkpoint, write_sentencepiece

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
def test_a_recorded_case_is_printed_byte_for_byte_wherever_its_template_is(
    cases: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setitem(ChatTemplate.__init__.__kwdefaults__, "now", lambda: DAY)
    case = cases[number]
    template = case["chat_template"]
    in_json = {"chat_template": template}
    files = ({"chat_template": template}, {"tokenizer_config": in_json}, {"chat_template": in_json})[number % 3]
    result = show_prompt(tmp_path, case["data"], **files)
    assert result.code == 0, result.err
    assert result.out == case["target"].encode()


HELLO = [{"role": "user", "content": "hi"}]


def test_the_special_tokens_are_those_of_the_folder(tmp_path: Path) -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    config = {"bos_token": {"content": "<s>"}, "chat_template": source}
    result = show_prompt(tmp_path, HELLO, tokenizer_config=config, special_tokens_map={"eos_token": "</s>"})
    assert result.out == b"<s>hi</s>"


def test_what_a_template_writes_is_printed_as_the_model_is_given_it(tmp_path: Path) -> None:
    result = show_prompt(tmp_path, HELLO, chat_template="a{{ '\\ud800' }}b")
    assert result.out.decode() == "a\ufffdb"


def test_half_a_character_as_a_special_token_is_an_error_of_four_lines(tmp_path: Path) -> None:
    result = show_prompt(tmp_path, HELLO, chat_template="{{ bos_token }}", tokenizer_config={"bos_token": "\ud800"})
    assert result.code == 1 and len(result.error_lines) == 4
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


TOOL = {"type": "function", "function": {"name": "clock", "description": "The time.", "parameters": {"type": "object"}}}
IN_LODZ = '{"zone": "Łódź"}'
CALL = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": IN_LODZ}}
ASKED = [{"role": "user", "content": [{"type": "text", "text": "What time is it?"}]}]
CALLED = [
    {"role": "user", "content": "What time is it?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "name": "clock", "content": "Noon."},
    {"role": "user", "content": "Thanks."},
]


@pytest.mark.parametrize(("messages", "has_tools"), [(ASKED, True), (CALLED, True), (CALLED, False)])
def test_a_template_that_knows_no_tools_is_told_of_them_in_words_as_by_the_server(
    tmp_path: Path, messages: list[dict[str, Any]], has_tools: bool
) -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    given = {"messages": messages, **({"tools": [TOOL]} if has_tools else {})}
    result = show_prompt(tmp_path, given, chat_template=source)
    assert result.code == 0, result.err
    text = result.out.decode()
    assert "What time is it?" in text and "{'type': 'text'" not in text
    assert ('{"name": "clock", "description": "The time.", "parameters"' in text) is has_tools
    if messages is CALLED:
        assert '<assistant><tool_call>\n{"name": "clock", "arguments": {"zone": "Łódź"}}\n</tool_call>\n<user>' in text
        assert "<tool_response>\nNoon.\n</tool_response>\nThanks.\n" in text
    tools = toolset([Tool("clock", "The time.", {"type": "object"})]) if has_tools else None
    call = call_of("call_1", "clock", IN_LODZ)
    calls = [{"tool_calls": [call]} if "tool_calls" in each else {} for each in messages]
    made = [{**each, "content": text_of(each), **more} for each, more in zip(messages, calls, strict=True)]
    words, _ = prompt_of(made, tools, GENERIC)
    as_server = ChatTemplate(source).render(words, add_generation_prompt=False)
    assert text.replace('"object"}', '"object", "properties": {}}') == as_server


@pytest.mark.parametrize("said", [IN_LODZ, json.loads(IN_LODZ)])
@pytest.mark.parametrize(
    "arguments",
    ["{% for k, v in a.items() %}{{ k }}={{ v }}{% endfor %}", "zone={{ a.split(': \"')[-1].rstrip('\"}') }}"],
)
def test_a_template_gets_arguments_as_an_object_or_as_a_text(tmp_path: Path, said: Any, arguments: str) -> None:
    source = (
        "{{ tools }}{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or () %}"
        "{% set a = c.function.arguments %}({{ c.function.name }} " + arguments + "){% endfor %}{% endfor %}"
    )
    call = {**CALL, "function": {"name": "clock", "arguments": said}}
    given = {"messages": [CALLED[0], {**CALLED[1], "tool_calls": [call]}, *CALLED[2:]]}
    result = show_prompt(tmp_path, given, chat_template=source)
    assert "<assistant>(clock zone=Łódź)<tool>" in result.out.decode(), result.err


def test_a_job_and_a_single_prompt_are_told_the_same_of_tools(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", context=1024)
    given = {"messages": CALLED, "tools": [TOOL]}
    (tmp_path / "messages.json").write_text(json.dumps(given))
    (tmp_path / "lines.jsonl").write_text(json.dumps(given) + "\n")
    alone, in_job = (
        run_cli("run", model, *flags, "--max-tokens", "1").json["usage"]["prompt_tokens"]
        for flags in (["--messages", tmp_path / "messages.json", "--json"], ["--batch", tmp_path / "lines.jsonl"])
    )
    assert alone == in_job > 300


def test_malformed_calls_are_named(tmp_path: Path) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [7]}]
    result = show_prompt(tmp_path, messages, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    assert (result.code, "tool_calls of a message are malformed" in result.err) == (2, True)
