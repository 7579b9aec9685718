"""Checks of langchain-ollama: `python with_langchain_ollama.py URL`."""

from __future__ import annotations

from typing import Any

from checks import LENGTH, ROOM, STORY, UNITS, URL, USER, WEATHER, chat_text, raised, said, supports, tell
from langchain_common import (
    TURNS,
    joined,
    require_answer_to_result,
    require_asynchronous,
    require_call,
    require_parsed,
    require_streamed,
    require_usage,
    text_of_turns,
    weather,
)
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from ollama import ResponseError

CHAT = ChatOllama(model="tiny", base_url=URL, temperature=0, num_predict=LENGTH)
ROOMY = ChatOllama(model="tiny", base_url=URL, temperature=0, num_predict=ROOM)
TEXT = OllamaLLM(model="tiny", base_url=URL, temperature=0, num_predict=LENGTH)


@supports("langchain-ollama", "/api/chat", "a whole answer")
def check_a_whole_answer() -> None:
    reply = CHAT.invoke(USER)
    assert reply.content == chat_text(), reply
    assert reply.response_metadata["done_reason"] == "length", reply


@supports("langchain-ollama", "/api/chat", "tokens counted")
def check_usage() -> None:
    require_usage(CHAT, LENGTH)


@supports("langchain-ollama", "/api/chat", "an answer, streamed")
def check_a_streamed_answer() -> None:
    require_streamed(CHAT)


@supports("langchain-ollama", "/api/chat", "asynchronously")
def check_asynchronous_answers() -> None:
    require_asynchronous(CHAT)


@supports("langchain-ollama", "/api/chat", "a system prompt", "several turns")
def check_several_turns() -> None:
    assert CHAT.invoke(TURNS).content == text_of_turns()


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
    require_call(called)
    require_answer_to_result(CHAT, called)


@supports("langchain-ollama", "/api/chat", "tools: a call, streamed")
def check_a_streamed_call() -> None:
    require_call(joined(ROOMY.bind_tools([weather]).stream(USER)))


@supports("langchain-ollama", "/api/chat", "structured output: parsed")
def check_structured_output() -> None:
    require_parsed(ROOMY)


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
