"""The messages, tools and `options` of Ollama's requests: calls have no ids, their arguments are objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from localllm.engine.request import SamplingParams
from localllm.runtime.served_model import AskedModel
from localllm.server import fields
from localllm.server.bodies import Body, Ignored, OnlyTrue
from localllm.server.fields import OF_A_REPLY, Count, LastN, Penalty, Seed, Share, Stop, Temperature, TopK, optional
from localllm.server.tools.toolset import MAX_TOOLS, OpenCalls, Tool, Toolset, call_of, toolset

_AT_START = Ignored("it is chosen when the server starts: --threads, --vram, --weights, --kv")
_NO_MIROSTAT = Ignored("mirostat is off")
_ANY = Field(ge=-(2**31), le=2**31 - 1)


class Options(Body):
    """Options for how the model is computed are chosen when the server starts. They change no answer here."""

    num_ctx: Count | None = optional(fields.NUM_CTX)
    num_predict: int | None = optional(
        "The longest answer in tokens; -1, -2: up to the end of the context.", ge=-2, le=2**31 - 1
    )
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    typical_p: Share | None = None
    seed: Seed | None = optional("-1: a new one for each request.")
    stop: Stop | None = None
    repeat_penalty: Annotated[float | None, Field(ge=0.01, le=100)] = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_last_n: LastN | None = None
    penalize_newline: OnlyTrue | None = None
    mirostat: Annotated[int | None, Field(ge=0, le=0)] = None
    mirostat_tau: Annotated[float | None, _NO_MIROSTAT] = None
    mirostat_eta: Annotated[float | None, _NO_MIROSTAT] = None
    tfs_z: Annotated[float | None, Field(ge=1, le=1)] = None
    num_keep: Annotated[int | None, _ANY, Ignored("the context does not shift, so no part needs to be kept")] = None
    numa: Annotated[bool | None, _AT_START] = None
    num_batch: Annotated[int | None, _ANY, _AT_START] = None
    num_gpu: Annotated[int | None, _ANY, _AT_START] = None
    main_gpu: Annotated[int | None, _ANY, _AT_START] = None
    low_vram: Annotated[bool | None, _AT_START] = None
    f16_kv: Annotated[bool | None, _AT_START] = None
    logits_all: Annotated[bool | None, _AT_START] = None
    vocab_only: Annotated[bool | None, _AT_START] = None
    use_mmap: Annotated[bool | None, _AT_START] = None
    use_mlock: Annotated[bool | None, _AT_START] = None
    embedding_only: Annotated[bool | None, _AT_START] = None
    num_thread: Annotated[int | None, _ANY, _AT_START] = None

    @field_validator("num_predict")
    @classmethod
    def _predicts_something(cls, num_predict: int | None) -> int | None:
        if num_predict == 0:
            raise ValueError("an answer has at least one token; -1: to the end of the context")
        return num_predict


def sampling_of(options: Options | None, asked: AskedModel, **more: Any) -> SamplingParams:
    """Return the options over the model's own settings. Raises RequestError."""
    given = options or Options()
    names = (
        "temperature", "top_k", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "repeat_last_n",
    )  # fmt: skip
    known = {name: getattr(given, name) for name in names}
    known |= {"seed": None if given.seed == -1 else given.seed, "stop": given.stop or None}
    known |= {"repetition_penalty": given.repeat_penalty, "max_tokens": given.num_predict, **more}
    if (given.num_predict or 1) > 0:
        return fields.overlaid(asked.sampling(), known)
    return replace(fields.overlaid(asked.sampling(), {**known, "max_tokens": None}), max_tokens=None)


OllamaFunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class OllamaFunction(Body):
    name: OllamaFunctionName
    description: str | None = None
    parameters: fields.ArgumentsSchema | None = None


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
    arguments: fields.CallObject = None
    index: Annotated[fields.Number | None, OF_A_REPLY] = None


class OllamaToolCall(Body):
    function: OllamaCalledFunction
    id: Annotated[str | None, Field(min_length=1)] = None
    type: Literal["function"] | None = None


class OllamaMessage(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: fields.Nothing = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = optional("The tool whose result this is; the default is that of the next call.")
    tool_call_id: str | None = optional("The call whose result this is.")
    name: Annotated[fields.Label | None, Ignored("chat templates use roles, not names")] = None

    @field_validator("images", mode="before")
    @classmethod
    def _is_text(cls, value: object) -> object:
        if value not in (None, []):
            raise ValueError(fields.TEXT_ONLY)
        return value

    @model_validator(mode="after")
    def _calls_as_assistant(self) -> OllamaMessage:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only the assistant's messages have tool_calls")
        if self.role != "tool" and (self.tool_name or self.tool_call_id):
            raise ValueError("only a message with the role 'tool' has tool_name and tool_call_id")
        return self


def chat_messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Return the messages as templates want them. Raises RequestError for the result of a call that never was, and for
    a call without a result."""
    calls, told = OpenCalls(), []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        found: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        told.append(found)
        if message.role == "tool":
            call_id, name = message.tool_call_id, message.tool_name
            if call_id is not None:
                name = calls.answered(where, call_id)
            else:
                call_id, name = calls.answered_next(where, name)
            found |= {"tool_call_id": call_id, "name": name}
            continue
        calls.settled(where)
        if message.thinking is not None:
            found["reasoning_content"] = message.thinking
        made = []
        for number, call in enumerate(message.tool_calls or ()):
            call_id = call.id or f"call_{index}_{number}"
            calls.made(f"{where}.tool_calls[{number}]", call_id, call.function.name)
            made.append(call_of(call_id, call.function.name, call.function.arguments))
        if made:
            found["tool_calls"] = made
    calls.settled(f"messages[{len(messages) - 1}]")
    return told
