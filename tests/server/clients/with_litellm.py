"""Checks of litellm, which speaks all three dialects: `python with_litellm.py URL`."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else prices are asked for over the network, at import

import litellm
from checks import (
    GREEDY,
    LENGTH,
    ROOM,
    STORY,
    SYSTEM,
    TOO_LONG,
    TOOL,
    UNITS,
    URL,
    USER,
    WEATHER,
    chat_text,
    completion_text,
    raised,
    said,
    supports,
    tell,
)

ASKED: list[dict[str, Any]] = [{"role": "user", "content": USER}]
TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": SYSTEM},
    *ASKED,
    {"role": "assistant", "content": "Once there was an owl."},
    {"role": "user", "content": "And then?"},
]
OPENAI: dict[str, Any] = {"api_base": f"{URL}/v1", "api_key": "none", "max_retries": 0}
CHAT: dict[str, Any] = {"model": "openai/tiny", "messages": ASKED, **GREEDY, **OPENAI}
TEXT: dict[str, Any] = {"model": "text-completion-openai/tiny", "prompt": STORY, **GREEDY, **OPENAI}
# It asks for no less than 16 tokens.
RESPONSE: dict[str, Any] = {
    "model": "openai/tiny",
    "input": USER,
    "temperature": 0,
    "max_output_tokens": LENGTH,
    **OPENAI,
}
ANTHROPIC: dict[str, Any] = {"model": "anthropic/tiny", "messages": ASKED, **GREEDY, "api_base": URL, "api_key": "none"}
OLLAMA_CHAT: dict[str, Any] = {
    "model": "ollama_chat/tiny",
    "messages": ASKED,
    **GREEDY,
    "api_base": URL,
}
OLLAMA: dict[str, Any] = {**OLLAMA_CHAT, "model": "ollama/tiny"}


def text_of(reply: Any) -> str:
    return str(reply.choices[0].message.content)


def streamed(asked: dict[str, Any]) -> tuple[str, Any]:
    """(what was said, the last piece)."""
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), chunks[-1]


@supports("litellm", "/v1/chat/completions", "answer", "token usage")
@supports("litellm", "/v1/messages", "answer")
@supports("litellm", "/api/chat", "answer")
@supports("litellm", "/api/generate", "answer")
def check_whole_answers() -> None:
    for asked in (CHAT, ANTHROPIC, OLLAMA_CHAT, OLLAMA):
        reply = litellm.completion(**asked)
        assert asked is OLLAMA or text_of(reply) == chat_text(), reply
        assert text_of(reply) and reply.usage.completion_tokens == LENGTH, reply
        assert asked in (OLLAMA_CHAT, OLLAMA) or reply.choices[0].finish_reason == "length", reply
    usage = litellm.completion(**CHAT).usage
    assert usage.total_tokens == usage.prompt_tokens + LENGTH, usage


@supports("litellm", "/v1/chat/completions", "answer, streamed")
def check_a_streamed_answer() -> None:
    chunks = list(litellm.completion(**CHAT, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == chat_text(), chunks
    assert chunks[-1].choices[0].finish_reason == "length", chunks[-1]


@supports("litellm", "/v1/chat/completions", "token usage, streamed")
@supports("litellm", "/v1/messages", "answer, streamed")
@supports("litellm", "/api/chat", "answer, streamed")
@supports("litellm", "/api/generate", "answer, streamed")
def check_usage_of_streamed_answers() -> None:
    for asked in (CHAT, ANTHROPIC, OLLAMA_CHAT, OLLAMA):
        text, last = streamed(asked)
        assert text == text_of(litellm.completion(**asked)), text
        assert last.usage.completion_tokens == LENGTH and (asked is OLLAMA or text == chat_text()), last
        assert asked is not CHAT or last.usage.prompt_tokens == litellm.completion(**CHAT).usage.prompt_tokens, last


@supports("litellm", "/v1/chat/completions", "stream accumulated by the client")
def check_pieces_put_together() -> None:
    chunks = list(litellm.completion(**CHAT, stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks, messages=ASKED)
    assert text_of(whole) == chat_text() and whole.usage.completion_tokens == LENGTH, whole


@supports("litellm", "/v1/chat/completions", "asynchronous calls")
def check_asynchronous_answers() -> None:
    async def both() -> list[str]:
        whole = text_of(await litellm.acompletion(**CHAT))
        parts = [chunk.choices[0].delta.content or "" async for chunk in await litellm.acompletion(**CHAT, stream=True)]
        return [whole, "".join(parts)]

    assert asyncio.run(both()) == [chat_text()] * 2


@supports("litellm", "/v1/chat/completions", "system prompt", "several turns")
@supports("litellm", "/v1/messages", "system prompt", "several turns")
@supports("litellm", "/api/chat", "system prompt", "several turns")
def check_several_turns() -> None:
    for asked in (CHAT, ANTHROPIC, OLLAMA_CHAT):
        assert text_of(litellm.completion(**{**asked, "messages": TURNS})) == chat_text(*TURNS), asked


@supports("litellm", "/v1/chat/completions", "log-probabilities")
def check_logprobs() -> None:
    content = litellm.completion(**CHAT, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert len(content) == LENGTH and len(content[0].top_logprobs) == 2, content


@supports("litellm", "/v1/chat/completions", "several answers")
def check_several_answers() -> None:
    choices = litellm.completion(**{**CHAT, "temperature": 1}, n=2, seed=3).choices
    assert len({choice.message.content for choice in choices}) == 2, choices


@supports("litellm", "/v1/chat/completions", "stop sequences")
def check_stop_texts() -> None:
    word = chat_text().split()[3]
    reply = litellm.completion(**CHAT, stop=[word])
    assert text_of(reply) == chat_text().partition(word)[0], reply
    assert reply.choices[0].finish_reason == "stop", reply


def arguments_of(message: Any) -> Any:
    """Of its one call."""
    [call] = message.tool_calls
    assert call.function.name == "weather", message
    return json.loads(call.function.arguments)


NAMED: dict[str, Any] = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
FORM: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "unit", "schema": WEATHER, "strict": True}}


@supports("litellm", "/v1/chat/completions", "tools: required call")
def check_a_call_that_is_required() -> None:
    choice = litellm.completion(**{**CHAT, "max_tokens": ROOM}, tools=[TOOL], tool_choice="required").choices[0]
    assert choice.finish_reason == "tool_calls" and arguments_of(choice.message)["unit"] in UNITS, choice


@supports("litellm", "/v1/chat/completions", "tools: named tool")
@supports("litellm", "/v1/messages", "tools: named tool")
def check_a_call_of_a_tool_that_is_named() -> None:
    for asked in (CHAT, ANTHROPIC):
        choice = litellm.completion(**{**asked, "max_tokens": ROOM}, **NAMED).choices[0]
        assert choice.finish_reason == "tool_calls" and arguments_of(choice.message)["unit"] in UNITS, choice


@supports("litellm", "/v1/chat/completions", "tools: call, streamed")
@supports("litellm", "/v1/messages", "tools: call, streamed")
def check_a_streamed_call() -> None:
    for asked in (CHAT, ANTHROPIC):
        chunks = list(litellm.completion(**{**asked, "max_tokens": ROOM}, **NAMED, stream=True))
        whole = litellm.stream_chunk_builder(chunks, messages=ASKED).choices[0]
        assert arguments_of(whole.message)["unit"] in UNITS, whole
        assert asked is ANTHROPIC or whole.finish_reason == "tool_calls", whole


@supports("litellm", "/v1/chat/completions", "tools: result sent back")
@supports("litellm", "/v1/messages", "tools: result sent back")
def check_a_result_goes_back() -> None:
    for asked in (CHAT, ANTHROPIC):
        called = litellm.completion(**{**asked, "max_tokens": ROOM}, **NAMED).choices[0].message
        result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "21"}
        sent = called if asked is CHAT else called.model_dump()
        reply = litellm.completion(**{**asked, "messages": [*ASKED, sent, result]}, tools=[TOOL])
        assert text_of(reply), reply


@supports("litellm", "/v1/chat/completions", "structured output: JSON Schema")
@supports("litellm", "/api/chat", "structured output: JSON Schema")
def check_a_form() -> None:
    for asked in (CHAT, OLLAMA_CHAT):
        reply = litellm.completion(**{**asked, "max_tokens": ROOM}, response_format=FORM)
        assert json.loads(text_of(reply))["unit"] in UNITS, reply


@supports("litellm", "/v1/chat/completions", "`top_k`, `min_p`, `num_ctx`")
def check_fields_of_other_servers() -> None:
    assert text_of(litellm.completion(**CHAT, top_k=1, extra_body={"min_p": 0.1, "num_ctx": 512})) == chat_text()


@supports("litellm", "/v1/chat/completions", "refused: prompt too long")
@supports("litellm", "/v1/messages", "refused: prompt too long")
@supports("litellm", "/api/chat", "refused: prompt too long")
def check_a_prompt_that_is_too_long() -> None:
    owls = {"messages": [{"role": "user", "content": TOO_LONG}]}
    raised(litellm.ContextWindowExceededError, lambda: litellm.completion(**{**CHAT, **owls}))
    raised(litellm.ContextWindowExceededError, lambda: list(litellm.completion(**{**CHAT, **owls}, stream=True)))
    raised(litellm.ContextWindowExceededError, lambda: litellm.completion(**{**ANTHROPIC, **owls}))
    error = raised(litellm.BadRequestError, lambda: litellm.completion(**{**OLLAMA_CHAT, **owls}))
    assert "maximum context length is 1024" in str(error), error


@supports("litellm", "/v1/chat/completions", "refused: unknown model")
@supports("litellm", "/v1/messages", "refused: unknown model")
def check_an_unknown_model() -> None:
    raised(litellm.NotFoundError, lambda: litellm.completion(**{**CHAT, "model": "openai/tinny"}))
    raised(litellm.NotFoundError, lambda: litellm.completion(**{**ANTHROPIC, "model": "anthropic/tinny"}))


@supports("litellm", "/v1/chat/completions", "refused: unsupported fields, by name")
def check_what_cannot_be_honoured() -> None:
    searching: Any = [{"type": "frobnicate"}]
    error = raised(litellm.BadRequestError, lambda: litellm.completion(**CHAT, tools=searching))
    assert "tools" in str(error), error


@supports("litellm", "/v1/completions", "text")
def check_a_text_that_goes_on() -> None:
    reply = litellm.text_completion(**TEXT)
    assert reply.choices[0].text == completion_text() and reply.usage.completion_tokens == LENGTH, reply


@supports("litellm", "/v1/completions", "text, streamed")
def check_a_text_that_goes_on_streamed() -> None:
    chunks = list(litellm.text_completion(**TEXT, stream=True))
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == completion_text(), chunks


@supports("litellm", "/v1/completions", "several prompts")
def check_several_prompts() -> None:
    prompts = [STORY, "The fox"]
    reply = litellm.text_completion(**{**TEXT, "prompt": prompts})
    assert [choice.text for choice in reply.choices] == [completion_text(prompt) for prompt in prompts], reply


@supports("litellm", "/v1/responses", "answer")
def check_a_response() -> None:
    reply = litellm.responses(**RESPONSE)
    assert reply.output[0].content[0].text == chat_text(), reply
    assert reply.usage.output_tokens == LENGTH, reply


@supports("litellm", "/v1/responses", "answer, streamed")
def check_a_streamed_response() -> None:
    events = list(litellm.responses(**RESPONSE, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == chat_text(), events


@supports("litellm", "/v1/embeddings", "several texts")
def check_embeddings() -> None:
    texts = ["An owl in the barn.", "A lantern."]
    reply = litellm.embedding(model="openai/tiny", input=texts, **OPENAI)
    rows = said("/v1/embeddings", {"input": texts})["data"]
    for row, told in zip(rows, reply.data, strict=True):
        assert all(abs(a - b) < 1e-6 for a, b in zip(row["embedding"], told["embedding"], strict=True))
    assert reply.usage.prompt_tokens > 0, reply.usage


@supports("litellm", "/api/embed", "several texts")
def check_embeddings_of_ollama() -> None:
    texts = ["An owl in the barn.", "A lantern."]
    reply = litellm.embedding(model="ollama/tiny", input=texts, api_base=URL)
    assert [each["embedding"] for each in reply.data] == said("/api/embed", {"input": texts})["embeddings"]


if __name__ == "__main__":
    tell()
