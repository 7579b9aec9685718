"""Checks of pydantic-ai, in OpenAI's two dialects and Anthropic's: `python with_pydantic_ai.py URL`."""

from __future__ import annotations

import asyncio
from typing import Any

from anthropic import AsyncAnthropic
from checks import LENGTH, ROOM, SYSTEM, TOO_LONG, UNITS, URL, USER, chat_text, raised, supports, tell
from degrees import Degrees, weather
from openai import AsyncOpenAI
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolCallPart, ToolOutput, ToolReturnPart
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

OPENAI = OpenAIProvider(openai_client=AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0))
ANTHROPIC = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=URL, api_key="none", max_retries=0))
CHAT = OpenAIChatModel("tiny", provider=OPENAI)
RESPONSES = OpenAIResponsesModel("tiny", provider=OPENAI)
MESSAGES = AnthropicModel("tiny", provider=ANTHROPIC)
MODELS: tuple[Model, ...] = (CHAT, RESPONSES, MESSAGES)
LOOP = asyncio.Runner()  # one, as the clients' connections belong to it


def agent(model: Model, max_tokens: int = LENGTH, **more: Any) -> Agent[None, Any]:
    settings = ModelSettings(temperature=0, max_tokens=max_tokens)
    return Agent(model, instructions=SYSTEM, model_settings=settings, **more)


def asked(teller: Agent[None, Any], text: str = USER) -> Any:
    return LOOP.run(teller.run(text))


def streamed(teller: Agent[None, Any]) -> tuple[str, Any]:
    """The pieces of the last answer, put together, and what became of all."""

    async def told() -> tuple[str, Any]:
        async with teller.run_stream(USER) as run:
            return "".join([piece async for piece in run.stream_text(delta=True, debounce_by=None)]), run

    return LOOP.run(told())


def whole() -> str:
    return chat_text({"role": "system", "content": SYSTEM}, {"role": "user", "content": USER})


@supports("pydantic-ai", "/v1/chat/completions", "answer", "system prompt", "token usage")
@supports("pydantic-ai", "/v1/responses", "answer", "system prompt")
@supports("pydantic-ai", "/v1/messages", "answer", "system prompt", "token usage")
def check_a_whole_answer() -> None:
    for model in MODELS:
        run = asked(agent(model))
        assert run.output == whole(), run
        assert run.usage.output_tokens == LENGTH and run.usage.input_tokens > 0, run.usage


@supports("pydantic-ai", "/v1/chat/completions", "answer, streamed", "token usage, streamed")
@supports("pydantic-ai", "/v1/responses", "answer, streamed")
@supports("pydantic-ai", "/v1/messages", "answer, streamed")
def check_a_streamed_answer() -> None:
    for model in MODELS:
        text, run = streamed(agent(model))
        assert text == whole(), text
        assert run.usage.output_tokens == LENGTH, run.usage


@supports("pydantic-ai", "/v1/chat/completions", "tools: optional calls")
@supports("pydantic-ai", "/v1/chat/completions", "tools: call, streamed", "tools: result sent back")
@supports("pydantic-ai", "/v1/responses", "tools: optional calls", "tools: call, streamed")
@supports("pydantic-ai", "/v1/responses", "tools: result sent back")
@supports("pydantic-ai", "/v1/messages", "tools: optional calls", "tools: call, streamed")
@supports("pydantic-ai", "/v1/messages", "tools: result sent back")
def check_a_call() -> None:
    """The tool that the model chooses to call is run, and the model says something to what comes of it."""
    for model in MODELS:
        calling = agent(model, ROOM, tools=[weather])
        for run in (asked(calling), streamed(calling)[1]):
            parts = [part for message in run.all_messages() for part in message.parts]
            assert [part.args_as_dict() for part in parts if isinstance(part, ToolCallPart)] == [{"unit": "C"}], parts
            assert [part.content for part in parts if isinstance(part, ToolReturnPart)] == ["21 C"], parts
            assert parts[-1].content, parts


@supports("pydantic-ai", "/v1/chat/completions", "tools: required call", "structured output: parsed")
@supports("pydantic-ai", "/v1/responses", "tools: required call", "structured output: parsed")
@supports("pydantic-ai", "/v1/messages", "tools: required call", "structured output: parsed")
def check_structured_output() -> None:
    native = [(model, output) for model in (CHAT, RESPONSES) for output in (Degrees, NativeOutput(Degrees))]
    for model, output in (*native, (MESSAGES, ToolOutput(Degrees))):
        run = asked(agent(model, ROOM, output_type=output))
        assert isinstance(run.output, Degrees) and run.output.unit in UNITS, run


@supports("pydantic-ai", "/v1/chat/completions", "refused: prompt too long", "refused: unknown model")
@supports("pydantic-ai", "/v1/messages", "refused: prompt too long", "refused: unknown model")
def check_refusals() -> None:
    models: list[tuple[Model, Model]] = [
        (CHAT, OpenAIChatModel("tinny", provider=OPENAI)),
        (MESSAGES, AnthropicModel("tinny", provider=ANTHROPIC)),
    ]
    for model, unknown in models:
        error = raised(ModelHTTPError, lambda model=model: asked(agent(model), TOO_LONG))
        assert error.status_code == 400 and "1024" in str(error), error
        assert raised(ModelHTTPError, lambda unknown=unknown: asked(agent(unknown))).status_code == 404


if __name__ == "__main__":
    tell()
