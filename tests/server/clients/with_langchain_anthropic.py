"""Checks of langchain-anthropic: `python with_langchain_anthropic.py URL`."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import degrees
from checks import GREEDY, LENGTH, ROOM, SYSTEM, TOO_LONG, UNITS, URL, USER, chat_text, raised, supports, tell
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool

SERVER: dict[str, Any] = {"base_url": URL, "api_key": "none", "max_retries": 0}
CHAT = ChatAnthropic(model="tiny", **GREEDY, **SERVER)
ROOMY = ChatAnthropic(model="tiny", temperature=0, max_tokens=ROOM, **SERVER)
TURNS = [("system", SYSTEM), ("user", USER), ("assistant", "Once there was an owl."), ("user", "And then?")]


weather = tool(degrees.weather)


def text_of(message: BaseMessage) -> str:
    return str(message.text)


@supports("langchain-anthropic", "/v1/messages", "a whole answer")
def check_a_whole_answer() -> None:
    reply = CHAT.invoke(USER)
    assert text_of(reply) == chat_text(), reply
    assert reply.response_metadata["stop_reason"] == "max_tokens", reply


@supports("langchain-anthropic", "/v1/messages", "tokens counted")
def check_usage() -> None:
    usage = CHAT.invoke(USER).usage_metadata
    assert usage is not None and usage["output_tokens"] == LENGTH and usage["input_tokens"] > 0, usage


@supports("langchain-anthropic", "/v1/messages", "an answer, streamed")
def check_a_streamed_answer() -> None:
    chunks = list(CHAT.stream(USER))
    assert "".join(map(text_of, chunks)) == chat_text() and len(chunks) > 3, chunks


@supports("langchain-anthropic", "/v1/messages", "asynchronously")
def check_asynchronous_answers() -> None:
    async def text() -> str:
        return "".join([text_of(chunk) async for chunk in CHAT.astream(USER)])

    assert asyncio.run(text()) == chat_text()


@supports("langchain-anthropic", "/v1/messages", "a system prompt", "several turns")
def check_several_turns() -> None:
    assert text_of(CHAT.invoke(TURNS)) == chat_text(*({"role": role, "content": text} for role, text in TURNS))


@supports("langchain-anthropic", "/v1/messages", "an answer goes back")
def check_an_answer_goes_back() -> None:
    assert text_of(CHAT.invoke([HumanMessage(USER), CHAT.invoke(USER), HumanMessage("And then?")]))


@supports("langchain-anthropic", "/v1/messages", "stop texts")
def check_stop_texts() -> None:
    word = chat_text().split()[3]
    reply = CHAT.invoke(USER, stop=[word])
    assert text_of(reply) == chat_text().partition(word)[0], reply
    assert reply.response_metadata["stop_reason"] == "stop_sequence", reply


@supports("langchain-anthropic", "/v1/messages", "tools: a call that is required", "tools: a result goes back")
def check_a_call_that_is_required() -> None:
    called = ROOMY.bind_tools([weather], tool_choice="any").invoke(USER)
    [call] = called.tool_calls
    assert call["name"] == "weather" and call["args"]["unit"] in UNITS, called
    require_answer_to_result(called)


def require_answer_to_result(called: Any) -> None:
    """A result of the call goes back, and something is said to it."""
    result = weather.invoke(called.tool_calls[0])
    assert isinstance(result, ToolMessage), result
    assert text_of(CHAT.bind_tools([weather]).invoke([HumanMessage(USER), called, result]))


@supports("langchain-anthropic", "/v1/messages", "tools: calls that the model chooses to make")
def check_a_call_that_the_model_chooses_to_make() -> None:
    called = ROOMY.bind_tools([weather]).invoke(USER)
    assert [call["args"] for call in called.tool_calls] == [{"unit": "C"}], called
    require_answer_to_result(called)


@supports("langchain-anthropic", "/v1/messages", "tools: a call of one that is named", "tools: a call, streamed")
@supports("langchain-anthropic", "/v1/messages", "tools: one call at most")
def check_a_streamed_call() -> None:
    whole: Any = None
    for chunk in ROOMY.bind_tools([weather], tool_choice="weather", parallel_tool_calls=False).stream(USER):
        whole = chunk if whole is None else whole + chunk
    [call] = whole.tool_calls
    assert call["name"] == "weather" and call["args"]["unit"] in UNITS, whole


@supports("langchain-anthropic", "/v1/messages", "tools: strict")
def check_a_strict_tool() -> None:
    [call] = ROOMY.bind_tools([weather], strict=True, tool_choice="weather").invoke(USER).tool_calls
    assert call["args"]["unit"] in UNITS, call


@supports("langchain-anthropic", "/v1/messages", "structured output: parsed")
def check_structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        parsed = ROOMY.with_structured_output(degrees.Degrees, method=method).invoke(USER)
        assert isinstance(parsed, degrees.Degrees), (method, parsed)


@supports("langchain-anthropic", "/v1/messages/count_tokens", "tokens counted")
def check_tokens_are_counted() -> None:
    usage = CHAT.invoke(USER).usage_metadata
    assert usage is not None and CHAT.get_num_tokens_from_messages([HumanMessage(USER)]) == usage["input_tokens"], usage


@supports("langchain-anthropic", "/v1/messages", "refused: a prompt that is too long")
def check_a_prompt_that_is_too_long() -> None:
    error = raised(ContextOverflowError, lambda: CHAT.invoke(TOO_LONG))
    assert "1024 maximum" in str(error), error


@supports("langchain-anthropic", "/v1/messages", "refused: an unknown model")
def check_an_unknown_model() -> None:
    unknown = ChatAnthropic(model="tinny", **SERVER)
    raised(anthropic.NotFoundError, lambda: unknown.invoke(USER))


if __name__ == "__main__":
    tell()
