"""The messages of a chat, as OpenAI has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from localllm.server.bodies import Body
from localllm.server.fields import CACHES_ITSELF, OF_A_REPLY, TEXT_ONLY, CallText, Labels, Nothing, Number, optional
from localllm.server.openai.tools import FunctionType
from localllm.server.tools.toolset import OpenCalls, call_of

_OTHER_PARTS = ("image_url", "input_audio", "file", "input_image", "input_file")


def refuse_other_parts(kind: object) -> object:
    """Raises ValueError for images, sound and files."""
    if kind in _OTHER_PARTS:
        raise ValueError(TEXT_ONLY)
    return kind


class OpenAITextPart(Body):
    type: Annotated[Literal["text"], BeforeValidator(refuse_other_parts)]
    text: str
    cache_control: Annotated[Labels | None, CACHES_ITSELF] = None


class OpenAICalledFunction(Body):
    name: Annotated[str, Field(min_length=1)]
    arguments: CallText = None
    # openai's library adds it to what it has parsed.
    parsed_arguments: Annotated[dict[str, Any] | None, OF_A_REPLY] = None


class OpenAIToolCall(Body):
    id: Annotated[str, Field(min_length=1)]
    type: FunctionType
    function: OpenAICalledFunction
    index: Annotated[Number | None, OF_A_REPLY] = None  # some clients keep it of a stream


class OpenAIMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[OpenAITextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = optional("Another name of `reasoning_content`.")
    thinking: str | None = optional("Another name of `reasoning_content`.")
    refusal: None = None
    tool_calls: list[OpenAIToolCall] | None = None
    tool_call_id: str | None = None
    function_call: None = None
    audio: None = None
    annotations: Nothing = None
    # openai's and LiteLLM's libraries add these to an answer.
    parsed: Annotated[Any, OF_A_REPLY] = None
    provider_specific_fields: Annotated[dict[str, Any] | None, OF_A_REPLY] = None
    cache_control: Annotated[Labels | None, CACHES_ITSELF] = None

    @property
    def thought(self) -> str | None:
        names = (self.reasoning_content, self.reasoning, self.thinking)
        return next((given for given in names if given is not None), None)

    @model_validator(mode="after")
    def _calls_as_assistant(self) -> OpenAIMessage:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls are the assistant's")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("a message of the role 'tool', and no other, has the tool_call_id of a call")
        return self


def chat_messages(messages: Sequence[OpenAIMessage]) -> list[dict[str, Any]]:
    """Return the messages as templates want them: text in one piece, no fields that nobody set. Raises RequestError for
    the result of a call that never was, and for a call without a result."""
    calls = OpenCalls()
    found = [_chat_message(f"messages[{index}]", message, calls) for index, message in enumerate(messages)]
    calls.settled(f"messages[{len(messages) - 1}]")
    return found


def _chat_message(where: str, message: OpenAIMessage, calls: OpenCalls) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": joined_text(message.content)}
    more = {"name": message.name, "reasoning_content": message.thought}
    found |= {name: value for name, value in more.items() if value is not None}
    if message.tool_call_id is not None:
        return {**found, "tool_call_id": message.tool_call_id, "name": calls.answered(where, message.tool_call_id)}
    calls.settled(where)
    for index, call in enumerate(message.tool_calls or ()):
        calls.made(f"{where}.tool_calls[{index}]", call.id, call.function.name)
    if message.tool_calls:
        made = [call_of(call.id, call.function.name, call.function.arguments) for call in message.tool_calls]
        found["tool_calls"] = made
    return found


def joined_text(content: str | Sequence[OpenAITextPart] | None) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content or ())
