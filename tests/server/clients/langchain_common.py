"""What the scripts of LangChain's clients share: a tool, a form, and what every chat model does alike."""

from __future__ import annotations

import asyncio
import functools
import operator
from collections.abc import Iterable
from typing import Any

import degrees
from checks import SYSTEM, UNITS, USER, chat_text
from degrees import Degrees
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool

TURNS = [("system", SYSTEM), ("user", USER), ("assistant", "Once there was an owl."), ("user", "And then?")]


weather = tool(degrees.weather)


def text_of(message: BaseMessage) -> str:
    return str(message.text)


def joined(chunks: Iterable[Any]) -> Any:
    """The message that the chunks add up to."""
    return functools.reduce(operator.add, chunks)


def text_of_turns(*turns: tuple[str, str]) -> str:
    """A greedy answer to them, or to `TURNS`."""
    return chat_text(*({"role": role, "content": text} for role, text in turns or TURNS))


def require_usage(chat: BaseChatModel, num_tokens: int) -> None:
    usage = chat.invoke(USER).usage_metadata
    assert usage is not None and usage["output_tokens"] == num_tokens and usage["input_tokens"] > 0, usage


def require_streamed(chat: BaseChatModel) -> list[Any]:
    """The chunks of a streamed answer, which are several, and say what the whole one does."""
    chunks = list(chat.stream(USER))
    assert "".join(map(text_of, chunks)) == chat_text() and len(chunks) > 3, chunks
    return chunks


def require_asynchronous(chat: BaseChatModel) -> None:
    async def both() -> list[str]:
        whole, *parts = text_of(await chat.ainvoke(USER)), *[text_of(chunk) async for chunk in chat.astream(USER)]
        return [whole, "".join(parts)]

    assert asyncio.run(both()) == [chat_text()] * 2


def require_call(called: Any) -> None:
    """It calls the weather, once."""
    [call] = called.tool_calls
    assert call["name"] == "weather" and call["args"]["unit"] in UNITS, called


def require_answer_to_result(chat: BaseChatModel, called: Any) -> None:
    """A result of the call goes back, and something is said to it."""
    result = weather.invoke(called.tool_calls[0])
    assert isinstance(result, ToolMessage), result
    assert text_of(chat.bind_tools([weather]).invoke([HumanMessage(USER), called, result]))


def require_parsed(chat: BaseChatModel, form: Any = Degrees) -> None:
    for method in ("json_schema", "function_calling"):
        parsed: Any = chat.with_structured_output(form, method=method).invoke(USER)
        assert (parsed.unit if form is Degrees else parsed["unit"]) in UNITS, (method, parsed)
