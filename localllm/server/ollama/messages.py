"""The messages and tools of a chat, as Ollama has them: calls without ids, their arguments as objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from localllm.server.bodies import Body, Ignored
from localllm.server.fields import OF_A_REPLY, TEXT_ONLY, ArgumentsSchema, CallObject, Label, Nothing, Number, optional
from localllm.server.tools.toolset import MAX_TOOLS, OpenCalls, Tool, Toolset, call_of, toolset

OllamaFunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class OllamaFunction(Body):
    name: OllamaFunctionName
    description: str | None = None
    parameters: ArgumentsSchema | None = None


class OllamaFunctionTool(Body):
    type: Literal["function"] | None = None
    function: OllamaFunction


Tools = Annotated[list[OllamaFunctionTool], Field(max_length=MAX_TOOLS)]


def tools_of(given: Sequence[OllamaFunctionTool] | None) -> Toolset | None:
    """Raises RequestError for two of one name."""
    functions = [each.function for each in given or ()]
    return toolset([Tool(each.name, each.description or "", each.parameters or {}) for each in functions])


class OllamaCalledFunction(Body):
    name: Annotated[str, Field(min_length=1)]
    arguments: CallObject = None
    index: Annotated[Number | None, OF_A_REPLY] = None


class OllamaToolCall(Body):
    function: OllamaCalledFunction
    id: Annotated[str | None, Field(min_length=1)] = None
    type: Literal["function"] | None = None


class OllamaMessage(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Nothing = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = optional("Whose result it is; without one, the next call's.")
    tool_call_id: str | None = optional("The same, more exactly.")
    name: Annotated[Label | None, Ignored("templates know roles, not names")] = None

    @field_validator("images", mode="before")
    @classmethod
    def _is_text(cls, value: object) -> object:
        if value not in (None, []):
            raise ValueError(TEXT_ONLY)
        return value

    @model_validator(mode="after")
    def _calls_as_assistant(self) -> OllamaMessage:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls are the assistant's")
        if self.role != "tool" and (self.tool_name or self.tool_call_id):
            raise ValueError("tool_name and tool_call_id are of a message of the role 'tool'")
        return self


def chat_messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Return the messages as templates want them. Raises RequestError for the result of a call that never was, and for
    a call without a result."""
    calls = OpenCalls()
    found = [_chat_message(index, message, calls) for index, message in enumerate(messages)]
    calls.settled(f"messages[{len(messages) - 1}]")
    return found


def _chat_message(index: int, message: OllamaMessage, calls: OpenCalls) -> dict[str, Any]:
    where = f"messages[{index}]"
    found: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.role == "tool":
        call_id, name = message.tool_call_id, message.tool_name
        if call_id is not None:
            name = calls.answered(where, call_id)
        else:
            call_id, name = calls.answered_next(where, name)
        return {**found, "tool_call_id": call_id, "name": name}
    calls.settled(where)
    if message.thinking is not None:
        found["reasoning_content"] = message.thinking
    made = []
    for number, call in enumerate(message.tool_calls or ()):
        call_id = call.id or f"call_{index}_{number}"
        calls.made(f"{where}.tool_calls[{number}]", call_id, call.function.name)
        made.append(call_of(call_id, call.function.name, call.function.arguments))
    return {**found, "tool_calls": made} if made else found
