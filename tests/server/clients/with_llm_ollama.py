"""Checks of llm-ollama, of llm: `LLM_USER_PATH=FOLDER python with_llm_ollama.py URL`. It keeps all in FOLDER."""

from __future__ import annotations

import json
import os

from checks import LENGTH, ROOM, SYSTEM, UNITS, URL, USER, WEATHER, chat_text, supports, tell

os.environ["OLLAMA_HOST"] = URL  # read when the plugin is loaded

import llm.cli
from click.testing import CliRunner, Result

GREEDY = ("-o", "temperature", "0", "-o", "num_predict", str(LENGTH))
ROOMY = ("-o", "temperature", "0", "-o", "num_predict", str(ROOM))
MODEL = ("-m", "ollama/tiny")
ASKED = {"role": "user", "content": USER}
FUNCTION = 'def weather(unit: str) -> str:\n    "The weather of today."\n    return f"21 {unit}"'


def run(*arguments: str) -> Result:
    return CliRunner().invoke(llm.cli.cli, arguments)


def text_of(*arguments: str) -> str:
    """What the command prints, but for the end of the line."""
    result = run(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout.removesuffix("\n")


@supports("llm-ollama", "/api/tags", "list of models")
@supports("llm-ollama", "/api/show", "tool support of a model")
def check_the_model_is_found() -> None:
    listed = text_of("models", "--tools")
    assert "Ollama: " in listed and "ollama/tiny" in listed, listed


@supports("llm-ollama", "/api/chat", "answer", "answer, streamed")
def check_an_answer() -> None:
    for more in ((), ("--no-stream",)):
        assert text_of(*MODEL, *more, *GREEDY, USER) == chat_text()


@supports("llm-ollama", "/api/chat", "token usage")
def check_usage() -> None:
    assert f" input, {LENGTH} output" in run(*MODEL, "-u", *GREEDY, USER).stderr


@supports("llm-ollama", "/api/chat", "system prompt", "several turns")
def check_a_conversation_goes_on() -> None:
    first = text_of(*MODEL, *GREEDY, "-s", SYSTEM, USER)
    turns = [{"role": "system", "content": SYSTEM}, ASKED, {"role": "assistant", "content": first}]
    assert text_of("-c", *GREEDY, "And then?") == chat_text(*turns, {"role": "user", "content": "And then?"})


@supports("llm-ollama", "/api/chat", "options")
def check_options() -> None:
    options = {
        "num_ctx": 512,
        "repeat_last_n": 16,
        "repeat_penalty": 1,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0,
        "seed": 1,
    }
    flags = [flag for name, value in options.items() for flag in ("-o", name, str(value))]
    assert text_of(*MODEL, *GREEDY, *flags, USER) == chat_text()


@supports("llm-ollama", "/api/chat", "tools: optional calls", "tools: result sent back")
def check_a_call() -> None:
    for more in ((), ("--no-stream",)):
        assert text_of(*MODEL, *more, *ROOMY, "--functions", FUNCTION, USER)
        calling, answering = json.loads(text_of("logs", "-n", "2", "--json"))
        assert [call["arguments"] for call in calling["tool_calls"]] == [{"unit": "C"}], calling
        assert [result["output"] for result in answering["tool_results"]] == ["21 C"], answering
        assert answering["response"], answering


@supports("llm-ollama", "/api/chat", "structured output: JSON Schema")
def check_a_schema() -> None:
    for more in ((), ("--no-stream",)):
        text = text_of(*MODEL, *more, *ROOMY, "--schema", json.dumps(WEATHER), USER)
        assert json.loads(text)["unit"] in UNITS, text


@supports("llm-ollama", "/api/chat", "structured output: any object")
def check_an_object() -> None:
    assert text_of(*MODEL, *GREEDY, "-o", "json_object", "1", USER).startswith("{")


if __name__ == "__main__":
    tell()
