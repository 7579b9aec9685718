"""Checks of llm, the command and the library: `LLM_USER_PATH=FOLDER python with_llm.py URL`. It keeps all in FOLDER."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import llm
import llm.cli
from checks import (
    LENGTH,
    ROOM,
    STORY,
    SYSTEM,
    TOO_LONG,
    UNITS,
    URL,
    USER,
    WEATHER,
    chat_text,
    completion_text,
    said,
    supports,
    tell,
)
from click.testing import CliRunner, Result

API = f'model_name: tiny, api_base: "{URL}/v1"'
MODELS = f"""
- {{model_id: tiny-local, {API}}}
- {{model_id: tiny-whole, {API}, can_stream: false}}
- {{model_id: tiny-able, {API}, supports_tools: true, supports_schema: true}}
- {{model_id: tiny-text, {API}, completion: true}}
- {{model_id: tiny-responses, {API}, responses: true}}
- {{model_id: tinny, model_name: tinny, api_base: "{URL}/v1"}}
"""
Path(os.environ["LLM_USER_PATH"], "extra-openai-models.yaml").write_text(MODELS)
GREEDY = ("-o", "temperature", "0", "-o", "max_tokens", str(LENGTH))
ASKED = {"role": "user", "content": USER}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(llm.cli.cli, arguments)


def text_of(*arguments: str) -> str:
    """What the command prints, but for the end of the line."""
    result = run(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout.removesuffix("\n")


@supports("llm", "/v1/chat/completions", "answer", "answer, streamed")
@supports("llm", "/v1/responses", "answer", "answer, streamed")
@supports("llm", "/v1/completions", "text", "text, streamed")
def check_whole_and_streamed_answers() -> None:
    for more in (("--no-stream",), ()):
        assert text_of("-m", "tiny-local", *more, *GREEDY, USER) == chat_text()
        assert text_of("-m", "tiny-responses", *more, *GREEDY, USER) == chat_text()
        assert text_of("-m", "tiny-text", *more, *GREEDY, STORY) == completion_text()
    assert text_of("-m", "tiny-whole", *GREEDY, USER) == chat_text()


@supports("llm", "/v1/chat/completions", "system prompt", "several turns")
@supports("llm", "/v1/responses", "system prompt", "several turns")
def check_a_conversation_goes_on() -> None:
    for model in ("tiny-local", "tiny-responses"):
        first = text_of("-m", model, *GREEDY, "-s", SYSTEM, USER)
        turns = [{"role": "system", "content": SYSTEM}, ASKED]
        assert first == chat_text(*turns)
        turns += [{"role": "assistant", "content": first}, {"role": "user", "content": "And then?"}]
        assert text_of("-c", *GREEDY, "And then?") == chat_text(*turns)


@supports("llm", "/v1/chat/completions", "token usage")
def check_usage_of_a_whole_answer() -> None:
    count = said("/v1/chat/completions", {"messages": [ASKED], "max_tokens": 1})["usage"]["prompt_tokens"]
    told = run("-m", "tiny-local", "--no-stream", "-u", *GREEDY, USER).stderr
    assert f"{count} input, {LENGTH} output" in told, told


@supports("llm", "/v1/chat/completions", "token usage, streamed")
def check_usage_of_a_streamed_answer() -> None:
    told = run("-m", "tiny-local", "-u", *GREEDY, USER).stderr
    assert f" input, {LENGTH} output" in told, told


@supports("llm", "/v1/chat/completions", "token limit")
def check_a_limit_of_tokens() -> None:
    short = text_of("-m", "tiny-local", "-o", "temperature", "0", "-o", "max_tokens", "4", USER)
    assert short and chat_text().startswith(short) and short != chat_text(), short


@supports("llm", "/v1/chat/completions", "seed")
def check_a_seed() -> None:
    asked = ("-m", "tiny-local", "-o", "seed", "1", "-o", "temperature", "1.5", "-o", "max_tokens", "8", USER)
    assert text_of(*asked) == text_of(*asked) != ""


@supports("llm", "/v1/chat/completions", "token usage, streamed")
def check_the_log() -> None:
    text_of("-m", "tiny-local", *GREEDY, USER)
    [entry] = json.loads(text_of("logs", "-n", "1", "--json"))
    assert entry["response"] == chat_text() and entry["output_tokens"] == LENGTH, entry
    assert entry["response_json"]["finish_reason"] == "length", entry


ROOMY = ("-o", "temperature", "0", "-o", "max_tokens", str(ROOM))


@supports("llm", "/v1/chat/completions", "structured output: JSON Schema")
def check_a_schema() -> None:
    for more in ((), ("--no-stream",)):
        text = text_of("-m", "tiny-able", *more, *ROOMY, "--schema", json.dumps(WEATHER), USER)
        assert json.loads(text)["unit"] in UNITS, text


@supports("llm", "/v1/chat/completions", "tools: described to the model")
def check_tools() -> None:
    function = 'def weather(unit: str) -> str:\n    "The weather of today."\n    return unit'
    for more in ((), ("--no-stream",)):
        assert text_of("-m", "tiny-able", *more, *GREEDY, "--functions", function, USER)


@supports("llm", "/v1/chat/completions", "asynchronous calls")
def check_asynchronous_answers() -> None:
    async def text() -> str:
        return await llm.get_async_model("tiny-local").prompt(USER, temperature=0, max_tokens=LENGTH).text()

    assert asyncio.run(text()) == chat_text()


@supports("llm", "/v1/chat/completions", "refused: prompt too long")
def check_a_prompt_that_is_too_long() -> None:
    result = run("-m", "tiny-local", TOO_LONG)
    assert result.exit_code == 1 and "maximum context length is 1024 tokens" in result.stderr, result.output


@supports("llm", "/v1/chat/completions", "refused: unknown model")
def check_an_unknown_model() -> None:
    result = run("-m", "tinny", USER)
    assert result.exit_code == 1 and "'tiny'" in result.stderr, result.output


@supports("llm", "/v1/chat/completions", "answer, streamed")
def check_an_endpoint_that_is_named() -> None:
    assert text_of("openai", "endpoint", f"{URL}/v1", USER, "-m", "tiny", *GREEDY) == chat_text()


@supports("llm", "/v1/completions", "log-probabilities")
def check_logprobs_of_a_text() -> None:
    text_of("-m", "tiny-text", *GREEDY, "-o", "logprobs", "2", STORY)
    [entry] = json.loads(text_of("logs", "-n", "1", "--json"))
    tops = [top for piece in entry["response_json"]["logprobs"] for top in piece["top_logprobs"]]
    assert len(tops) == LENGTH and all(len(top) == 2 for top in tops), entry


@supports("llm", "/v1/models", "list of models")
def check_the_models() -> None:
    assert "tiny" in text_of("openai", "endpoint", f"{URL}/v1", "--models").splitlines()


if __name__ == "__main__":
    tell()
