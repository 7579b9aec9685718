"""Checks of langchain-ollama: `python with_langchain_ollama.py URL`."""

from __future__ import annotations

import asyncio
from typing import Any

import degrees
from checks import (
    LENGTH,
    ROOM,
    STORY,
    SYSTEM,
    UNITS,
    URL,
    USER,
    WEATHER,
    chat_text,
    raised,
    said,
    supports,
    tell,
)
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from ollama import ResponseError

CHAT = ChatOllama(model="tiny", base_url=URL, temperature=0, num_predict=LENGTH)
ROOMY = ChatOllama(model="tiny", base_url=URL, temperature=0, num_predict=ROOM)
TEXT = OllamaLLM(model="tiny", base_url=URL, temperature=0, num_predict=LENGTH)
TURNS = [("system", SYSTEM), ("user", USER), ("assistant", "Once there was an owl."), ("user", "And then?")]


weather = tool(degrees.weather)


@supports("langchain-ollama", "/api/chat", "a whole answer")
def check_a_whole_answer() -> None:
    reply = CHAT.invoke(USER)
    assert reply.content == chat_text(), reply
    assert reply.response_metadata["done_reason"] == "length", reply


@supports("langchain-ollama", "/api/chat", "tokens counted")
def check_usage() -> None:
    usage = CHAT.invoke(USER).usage_metadata
    assert usage is not None and usage["output_tokens"] == LENGTH and usage["input_tokens"] > 0, usage


@supports("langchain-ollama", "/api/chat", "an answer, streamed")
def check_a_streamed_answer() -> None:
    chunks = list(CHAT.stream(USER))
    assert "".join(str(chunk.content) for chunk in chunks) == chat_text() and len(chunks) > 3, chunks


@supports("langchain-ollama", "/api/chat", "asynchronously")
def check_asynchronous_answers() -> None:
    async def text() -> str:
        return "".join([str(chunk.content) async for chunk in CHAT.astream(USER)])

    assert asyncio.run(text()) == chat_text()


@supports("langchain-ollama", "/api/chat", "a system prompt", "several turns")
def check_several_turns() -> None:
    assert CHAT.invoke(TURNS).content == chat_text(*({"role": role, "content": text} for role, text in TURNS))


@supports("langchain-ollama", "/api/chat", "options")
def check_options() -> None:
    word = chat_text().split()[3]
    told = ChatOllama(
        model="tiny",
        base_url=URL,
        temperature=0,
        num_predict=LENGTH,
        num_ctx=512,
        num_gpu=0,
        num_thread=2,
        repeat_last_n=16,
        repeat_penalty=1.0,
        top_k=40,
        top_p=0.9,
        seed=3,
        stop=[word],
        keep_alive="5m",
    )
    assert told.invoke(USER).content == chat_text().partition(word)[0]


@supports("langchain-ollama", "/api/chat", "tools: calls that the model chooses to make", "tools: a result goes back")
def check_a_call() -> None:
    called = ROOMY.bind_tools([weather]).invoke(USER)
    [call] = called.tool_calls
    assert call["name"] == "weather" and call["args"]["unit"] in UNITS, called
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage), result
    assert CHAT.bind_tools([weather]).invoke([HumanMessage(USER), called, result]).content


@supports("langchain-ollama", "/api/chat", "tools: a call, streamed")
def check_a_streamed_call() -> None:
    whole: Any = None
    for chunk in ROOMY.bind_tools([weather]).stream(USER):
        whole = chunk if whole is None else whole + chunk
    assert [call["name"] for call in whole.tool_calls] == ["weather"], whole


@supports("langchain-ollama", "/api/chat", "structured output: parsed")
def check_structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        parsed = ROOMY.with_structured_output(degrees.Degrees, method=method).invoke(USER)
        assert isinstance(parsed, degrees.Degrees), (method, parsed)


@supports("langchain-ollama", "/api/chat", "structured output: a JSON Schema")
def check_structured_output_by_a_schema() -> None:
    parsed: Any = ROOMY.with_structured_output(WEATHER, method="json_schema").invoke(USER)
    assert parsed["unit"] in UNITS, parsed


@supports("langchain-ollama", "/api/chat", "refused: an unknown model")
def check_an_unknown_model() -> None:
    unknown = ChatOllama(model="tinny", base_url=URL)
    assert raised(ResponseError, lambda: unknown.invoke(USER)).status_code == 404


@supports("langchain-ollama", "/api/generate", "a whole answer", "an answer, streamed")
def check_a_prompt() -> None:
    whole = TEXT.invoke(STORY)
    assert whole and whole == "".join(TEXT.stream(STORY)), whole


@supports("langchain-ollama", "/api/embed", "several texts")
def check_embeddings() -> None:
    texts = ["An owl in the barn.", "A lantern."]
    assert (
        OllamaEmbeddings(model="tiny", base_url=URL).embed_documents(texts)
        == (said("/api/embed", {"input": texts})["embeddings"])
    )


@supports("langchain-ollama", "/api/tags", "a list")
def check_the_model_is_looked_for() -> None:
    assert ChatOllama(model="tiny", base_url=URL, validate_model_on_init=True).invoke(USER).content


if __name__ == "__main__":
    tell()
