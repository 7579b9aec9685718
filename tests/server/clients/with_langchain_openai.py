"""Checks of langchain-openai: `python with_langchain_openai.py URL`."""

from __future__ import annotations

from typing import Any

import openai
from checks import (
    GREEDY,
    LENGTH,
    ROOM,
    STORY,
    SYSTEM,
    TOO_LONG,
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
from langchain_common import (
    TURNS,
    Degrees,
    joined,
    require_answer_to_result,
    require_asynchronous,
    require_call,
    require_parsed,
    require_streamed,
    text_of,
    text_of_turns,
    weather,
)
from langchain_core.exceptions import ContextOverflowError, ModelNotFoundError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

SERVER: dict[str, Any] = {"base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0}
CHAT = ChatOpenAI(model="tiny", **GREEDY, **SERVER)
RESPONSES = ChatOpenAI(model="tiny", use_responses_api=True, **GREEDY, **SERVER)
ROOMY = ChatOpenAI(model="tiny", temperature=0, max_tokens=ROOM, **SERVER)
ROOMY_RESPONSES = ChatOpenAI(model="tiny", use_responses_api=True, temperature=0, max_tokens=ROOM, **SERVER)


@supports("langchain-openai", "/v1/chat/completions", "answer", "token usage")
def check_a_whole_answer() -> None:
    reply = CHAT.invoke(USER)
    assert reply.content == chat_text(), reply
    assert reply.response_metadata["finish_reason"] == "length", reply
    assert reply.response_metadata["model_name"] == "tiny", reply
    usage = reply.usage_metadata
    assert usage is not None and usage["output_tokens"] == LENGTH, usage
    assert usage["total_tokens"] == usage["input_tokens"] + LENGTH, usage
    assert usage["input_token_details"]["cache_read"] <= usage["input_tokens"], usage


@supports("langchain-openai", "/v1/chat/completions", "answer, streamed")
def check_a_streamed_answer() -> None:
    chunks = require_streamed(CHAT)
    assert [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata] == [], chunks


@supports("langchain-openai", "/v1/chat/completions", "asynchronous calls")
def check_asynchronous_answers() -> None:
    require_asynchronous(CHAT)


@supports("langchain-openai", "/v1/chat/completions", "concurrent conversations")
def check_a_batch() -> None:
    asked = [USER, "A tale about a fox, please."]
    replies = CHAT.batch(asked)
    assert [reply.content for reply in replies] == [chat_text({"role": "user", "content": each}) for each in asked]


@supports("langchain-openai", "/v1/chat/completions", "token usage, streamed")
@supports("langchain-openai", "/v1/responses", "answer, streamed")
def check_usage_of_a_streamed_answer() -> None:
    for chunks in (CHAT.stream(USER, stream_usage=True), RESPONSES.stream(USER)):
        whole = joined(chunks)
        assert text_of(whole) == chat_text(), whole
        assert whole.usage_metadata["output_tokens"] == LENGTH, whole


@supports("langchain-openai", "/v1/chat/completions", "log-probabilities")
def check_logprobs() -> None:
    reply = CHAT.bind(logprobs=True, top_logprobs=2).invoke(USER)
    content = reply.response_metadata["logprobs"]["content"]
    assert len(content) == LENGTH and all(len(each["top_logprobs"]) == 2 for each in content), content


@supports("langchain-openai", "/v1/chat/completions", "log-probabilities, streamed")
def check_logprobs_of_a_streamed_answer() -> None:
    chunks = list(CHAT.bind(logprobs=True).stream(USER))
    told = [each for chunk in chunks for each in (chunk.response_metadata.get("logprobs") or {}).get("content", ())]
    assert len(told) == LENGTH, told


@supports("langchain-openai", "/v1/chat/completions", "system prompt", "several turns")
def check_several_turns() -> None:
    messages = [
        SystemMessage(SYSTEM),
        HumanMessage(USER),
        AIMessage("Once there was an owl."),
        HumanMessage("And then?"),
    ]
    assert CHAT.invoke(messages).content == CHAT.invoke(TURNS).content == text_of_turns()


@supports("langchain-openai", "/v1/chat/completions", "earlier answer sent back")
@supports("langchain-openai", "/v1/responses", "earlier answer sent back")
def check_an_answer_goes_back() -> None:
    for model in (CHAT, RESPONSES):
        first = model.invoke(USER)
        reply = model.invoke([HumanMessage(USER), first, HumanMessage("And then?")])
        assert text_of(reply) and reply.usage_metadata, reply
        assert reply.usage_metadata["input_tokens"] > first.usage_metadata["total_tokens"], reply  # type: ignore[index]


@supports("langchain-openai", "/v1/chat/completions", "content as text parts")
def check_parts_of_text() -> None:
    assert CHAT.invoke([HumanMessage([{"type": "text", "text": USER}])]).content == chat_text()


@supports("langchain-openai", "/v1/chat/completions", "stop sequences")
def check_stop_texts() -> None:
    word = chat_text().split()[3]
    reply = CHAT.invoke(USER, stop=[word])
    assert reply.content == chat_text().partition(word)[0], reply
    assert reply.response_metadata["finish_reason"] == "stop", reply


@supports("langchain-openai", "/v1/chat/completions", "several answers")
def check_several_answers() -> None:
    several = ChatOpenAI(model="tiny", n=2, seed=3, max_tokens=8, temperature=1, **SERVER)
    [choices] = several.generate([[HumanMessage(USER)]]).generations
    assert len({choice.text for choice in choices}) == 2, choices


@supports("langchain-openai", "/v1/chat/completions", "seed")
def check_a_seed() -> None:
    seeded = ChatOpenAI(model="tiny", seed=3, max_tokens=8, temperature=1, **SERVER)
    assert seeded.invoke(USER).content == seeded.invoke(USER).content


@supports("langchain-openai", "/v1/chat/completions", "refused: prompt too long")
def check_a_prompt_that_is_too_long() -> None:
    error = raised(ContextOverflowError, lambda: CHAT.invoke(TOO_LONG))
    assert isinstance(error, openai.BadRequestError) and error.code == "context_length_exceeded", error
    assert isinstance(raised(ContextOverflowError, lambda: list(CHAT.stream(TOO_LONG))), openai.BadRequestError)


@supports("langchain-openai", "/v1/chat/completions", "refused: unknown model")
def check_an_unknown_model() -> None:
    unknown = ChatOpenAI(model="tinny", **SERVER)
    assert raised(ModelNotFoundError, lambda: unknown.invoke(USER)).code == "model_not_found"


@supports("langchain-openai", "/v1/chat/completions", "refused: unsupported fields, by name")
def check_what_cannot_be_honoured() -> None:
    assert (
        "tools"
        in raised(openai.BadRequestError, lambda: CHAT.bind(tools=[{"type": "frobnicate"}]).invoke(USER)).message
    )


@supports("langchain-openai", "/v1/chat/completions", "tools: required call")
def check_a_call_that_is_required() -> None:
    for choice in ("any", "required", True):
        require_call(ROOMY.bind_tools([weather], tool_choice=choice).invoke(USER))


@supports("langchain-openai", "/v1/chat/completions", "tools: named tool")
def check_a_call_of_a_tool_that_is_named() -> None:
    reply = ROOMY.bind_tools([weather], tool_choice="weather", parallel_tool_calls=False).invoke(USER)
    assert reply.response_metadata["finish_reason"] == "tool_calls" and len(reply.tool_calls) == 1, reply


@supports("langchain-openai", "/v1/chat/completions", "tools: strict")
def check_a_strict_tool() -> None:
    require_call(ROOMY.bind_tools([weather], strict=True, tool_choice="weather").invoke(USER))


@supports("langchain-openai", "/v1/chat/completions", "tools: call, streamed")
def check_a_streamed_call() -> None:
    require_call(joined(ROOMY.bind_tools([weather], tool_choice="weather").stream(USER)))


@supports("langchain-openai", "/v1/chat/completions", "tools: result sent back")
def check_a_result_goes_back() -> None:
    require_answer_to_result(CHAT, ROOMY.bind_tools([weather], tool_choice="weather").invoke(USER))


@supports("langchain-openai", "/v1/chat/completions", "structured output: parsed", "structured output: JSON Schema")
@supports("langchain-openai", "/v1/responses", "structured output: parsed")
def check_structured_output() -> None:
    require_parsed(ROOMY)
    require_parsed(ROOMY, {**WEATHER, "title": "degrees", "description": "What the weather is told in."})
    assert isinstance(ROOMY_RESPONSES.with_structured_output(Degrees).invoke(USER), Degrees)


@supports("langchain-openai", "/v1/chat/completions", "structured output: parsed, streamed")
def check_structured_output_streamed() -> None:
    parsed = list(ROOMY.with_structured_output(Degrees, method="json_schema").stream(USER))
    assert isinstance(parsed[-1], Degrees), parsed


@supports("langchain-openai", "/v1/responses", "tools: named tool")
def check_a_call_in_a_response() -> None:
    reply = ROOMY_RESPONSES.bind_tools([weather], tool_choice="weather").invoke(USER)
    require_call(reply)
    require_answer_to_result(RESPONSES, reply)


@supports("langchain-openai", "/v1/completions", "text")
def check_a_text_that_goes_on() -> None:
    assert OpenAI(model="tiny", **GREEDY, **SERVER).invoke(STORY) == completion_text()


@supports("langchain-openai", "/v1/completions", "text, streamed")
def check_a_text_that_goes_on_streamed() -> None:
    parts = list(OpenAI(model="tiny", **GREEDY, **SERVER).stream(STORY))
    assert "".join(parts) == completion_text() and len(parts) > 3, parts


@supports("langchain-openai", "/v1/completions", "several prompts")
def check_several_prompts() -> None:
    prompts = [STORY, "The fox"]
    result = OpenAI(model="tiny", **GREEDY, **SERVER).generate(prompts)
    assert [row[0].text for row in result.generations] == [completion_text(prompt) for prompt in prompts]
    assert (result.llm_output or {})["token_usage"]["completion_tokens"] == 2 * LENGTH, result.llm_output


@supports("langchain-openai", "/v1/responses", "answer")
def check_a_response() -> None:
    reply = RESPONSES.invoke([SystemMessage(SYSTEM), HumanMessage(USER)])
    assert text_of(reply) == text_of_turns(*TURNS[:2]), reply
    assert reply.usage_metadata and reply.usage_metadata["output_tokens"] == LENGTH, reply
    assert reply.response_metadata["status"] == "incomplete", reply


@supports("langchain-openai", "/v1/embeddings", "several texts")
def check_embeddings() -> None:
    texts = ["An owl in the barn.", "A lantern."]
    maker = OpenAIEmbeddings(model="tiny", check_embedding_ctx_length=False, **SERVER)
    rows = said("/v1/embeddings", {"input": texts})["data"]
    many = maker.embed_documents(texts)
    assert all(
        abs(a - b) < 1e-6
        for row, vector in zip(rows, many, strict=True)
        for a, b in zip(row["embedding"], vector, strict=True)
    )
    assert maker.embed_query(texts[0]) == many[0]


@supports("langchain-openai", "/v1/embeddings", "fewer dimensions")
def check_fewer_dimensions() -> None:
    maker = OpenAIEmbeddings(model="tiny", dimensions=16, check_embedding_ctx_length=False, **SERVER)
    assert len(maker.embed_query("An owl.")) == 16


if __name__ == "__main__":
    tell()
