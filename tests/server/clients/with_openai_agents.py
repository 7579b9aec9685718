"""Checks of openai-agents: `python with_openai_agents.py URL`."""

from __future__ import annotations

import asyncio
from typing import Any

import degrees
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    RunResult,
    RunResultStreaming,
    ToolCallItem,
    function_tool,
    set_tracing_disabled,
)
from checks import LENGTH, ROOM, SYSTEM, TOO_LONG, UNITS, URL, USER, chat_text, raised, supports, tell
from openai import AsyncOpenAI, BadRequestError

set_tracing_disabled(True)  # else it is sent to OpenAI
CLIENT = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
CHAT = OpenAIChatCompletionsModel("tiny", CLIENT)
RESPONSES = OpenAIResponsesModel("tiny", CLIENT)
LOOP = asyncio.Runner()  # one, as the client's connections belong to it


weather = function_tool(degrees.weather)


def agent(model: Any, *, max_tokens: int | None = None, tool_choice: str | None = None, **more: Any) -> Agent[None]:
    """Greedy. The library takes no response that was cut, so those have no limit."""
    limit = None if model is RESPONSES else max_tokens
    settings = ModelSettings(temperature=0, max_tokens=limit, tool_choice=tool_choice)
    return Agent("teller", instructions=SYSTEM, model=model, model_settings=settings, **more)


def asked(teller: Agent[None], text: str = USER) -> RunResult:
    return LOOP.run(Runner.run(teller, text))


def streamed(teller: Agent[None]) -> tuple[str, RunResultStreaming]:
    """The pieces of all answers, put together, and what became of them."""

    async def told() -> tuple[str, RunResultStreaming]:
        run = Runner.run_streamed(teller, USER)
        events = [event.data async for event in run.stream_events() if event.type == "raw_response_event"]
        return "".join(event.delta for event in events if event.type == "response.output_text.delta"), run

    return LOOP.run(told())


def begins(text: str) -> bool:
    """As the same question that is asked by hand is answered."""
    return text.startswith(chat_text({"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}))


def require_answer(model: Any) -> None:
    run = asked(agent(model, max_tokens=LENGTH))
    assert begins(run.final_output), run
    assert run.context_wrapper.usage.output_tokens >= LENGTH, run.context_wrapper.usage


def require_streamed_answer(model: Any) -> None:
    text, run = streamed(agent(model, max_tokens=LENGTH))
    assert text == run.final_output and begins(text), (text, run)


def require_call(model: Any) -> None:
    """The tool that the model has to call is run, and the model says something to what comes of it."""
    calling = agent(model, max_tokens=ROOM, tool_choice="required", tools=[weather])
    for run in (asked(calling), streamed(calling)[1]):
        [call] = [item for item in run.new_items if isinstance(item, ToolCallItem)]
        [result] = [item.output for item in run.new_items if item.type == "tool_call_output_item"]
        assert call.tool_name == "weather" and result in [f"21 {unit}" for unit in UNITS], run
        assert run.final_output, run


def require_structured_output(model: Any) -> None:
    run = asked(agent(model, max_tokens=ROOM, output_type=degrees.Degrees))
    assert isinstance(run.final_output, degrees.Degrees), run


def require_refusal(model: Any) -> None:
    error = raised(BadRequestError, lambda: asked(agent(model), TOO_LONG))
    assert error.code == "context_length_exceeded", error


@supports("openai-agents", "/v1/chat/completions", "answer", "system prompt", "token usage")
def check_a_whole_answer() -> None:
    require_answer(CHAT)


@supports("openai-agents", "/v1/chat/completions", "answer, streamed")
def check_a_streamed_answer() -> None:
    require_streamed_answer(CHAT)


@supports("openai-agents", "/v1/chat/completions", "tools: required call", "tools: call, streamed")
@supports("openai-agents", "/v1/chat/completions", "tools: result sent back")
def check_a_call() -> None:
    require_call(CHAT)


@supports("openai-agents", "/v1/chat/completions", "structured output: parsed")
def check_structured_output() -> None:
    require_structured_output(CHAT)


@supports("openai-agents", "/v1/chat/completions", "refused: prompt too long")
def check_a_prompt_that_is_too_long() -> None:
    require_refusal(CHAT)


@supports("openai-agents", "/v1/responses", "answer", "system prompt")
def check_a_response() -> None:
    require_answer(RESPONSES)


@supports("openai-agents", "/v1/responses", "answer, streamed")
def check_a_streamed_response() -> None:
    require_streamed_answer(RESPONSES)


@supports("openai-agents", "/v1/responses", "tools: required call", "tools: call, streamed")
@supports("openai-agents", "/v1/responses", "tools: result sent back")
def check_a_call_of_a_response() -> None:
    require_call(RESPONSES)


@supports("openai-agents", "/v1/responses", "structured output: parsed")
def check_structured_output_of_a_response() -> None:
    require_structured_output(RESPONSES)


@supports("openai-agents", "/v1/responses", "refused: prompt too long")
def check_a_response_that_is_too_long() -> None:
    require_refusal(RESPONSES)


if __name__ == "__main__":
    tell()
