"""Checks of langchain-anthropic: `python with_langchain_anthropic.py URL`."""

from __future__ import annotations

from typing import Any

import anthropic
from checks import GREEDY, LENGTH, ROOM, TOO_LONG, URL, USER, chat_text, raised, supports, tell
from langchain_anthropic import ChatAnthropic
from langchain_common import (
    TURNS,
    joined,
    require_answer_to_result,
    require_asynchronous,
    require_call,
    require_parsed,
    require_streamed,
    require_usage,
    text_of,
    text_of_turns,
    weather,
)
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage

SERVER: dict[str, Any] = {"base_url": URL, "api_key": "none", "max_retries": 0}
CHAT = ChatAnthropic(model="tiny", **GREEDY, **SERVER)
ROOMY = ChatAnthropic(model="tiny", temperature=0, max_tokens=ROOM, **SERVER)


@supports("langchain-anthropic", "/v1/messages", "a whole answer")
def check_a_whole_answer() -> None:
    reply = CHAT.invoke(USER)
    assert text_of(reply) == chat_text(), reply
    assert reply.response_metadata["stop_reason"] == "max_tokens", reply


@supports("langchain-anthropic", "/v1/messages", "tokens counted")
def check_usage() -> None:
    require_usage(CHAT, LENGTH)


@supports("langchain-anthropic", "/v1/messages", "an answer, streamed")
def check_a_streamed_answer() -> None:
    require_streamed(CHAT)


@supports("langchain-anthropic", "/v1/messages", "asynchronously")
def check_asynchronous_answers() -> None:
    require_asynchronous(CHAT)


@supports("langchain-anthropic", "/v1/messages", "a system prompt", "several turns")
def check_several_turns() -> None:
    assert text_of(CHAT.invoke(TURNS)) == text_of_turns()


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
    require_call(called)
    require_answer_to_result(CHAT, called)


@supports("langchain-anthropic", "/v1/messages", "tools: calls that the model chooses to make")
def check_a_call_that_the_model_chooses_to_make() -> None:
    called = ROOMY.bind_tools([weather]).invoke(USER)
    assert [call["args"] for call in called.tool_calls] == [{"unit": "C"}], called
    require_answer_to_result(CHAT, called)


@supports("langchain-anthropic", "/v1/messages", "tools: a call of one that is named", "tools: a call, streamed")
@supports("langchain-anthropic", "/v1/messages", "tools: one call at most")
def check_a_streamed_call() -> None:
    require_call(joined(ROOMY.bind_tools([weather], tool_choice="weather", parallel_tool_calls=False).stream(USER)))


@supports("langchain-anthropic", "/v1/messages", "tools: strict")
def check_a_strict_tool() -> None:
    require_call(ROOMY.bind_tools([weather], strict=True, tool_choice="weather").invoke(USER))


@supports("langchain-anthropic", "/v1/messages", "structured output: parsed")
def check_structured_output() -> None:
    require_parsed(ROOMY)


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
