"""The bodies of Anthropic's requests, and the prompt that they come to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, Field, StringConstraints, Tag, model_validator

from localllm.server import fields
from localllm.server.bodies import Body, Ignored, tagged_by_type
from localllm.server.compression import CompressBody
from localllm.server.errors import RequestError
from localllm.server.fields import optional
from localllm.server.generation_request import GenerationRequest
from localllm.server.tools.toolset import (
    MAX_TOOLS,
    NO_SUCH_TOOL,
    TYPES,
    ForeignTool,
    OpenCalls,
    Tool,
    Toolset,
    call_of,
    toolset,
)
from localllm.text.chat_template import ChatInput
from localllm.text.grammar.grammar import Grammar

_OTHER_BLOCKS = "this server reads only text and the client's tools: no images, no documents, no server tools"

# Claude Code has another one in each request, behind which the prefix cache would find nothing.
_BILLING = re.compile(r"\A(?:x-anthropic-billing-header[^\n]*\n?)+")

_USUAL_EFFORT = "high"  # the same as none, as Anthropic has it; Claude Code sends it to every model

CacheControl = Annotated[fields.Labels | None, fields.CACHES_ITSELF]
Opaque = Annotated[str | None, Ignored("only its author can read it")]


class TextBlock(Body):
    type: Literal["text"]
    text: str
    citations: fields.Nothing = None
    cache_control: CacheControl = None


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str
    signature: Opaque = None


class RedactedThinkingBlock(Body):
    type: Literal["redacted_thinking"]
    data: Opaque = None


class DirectCaller(Body):
    type: Literal["direct"]


def _is_text(kind: object) -> object:
    if kind in ("image", "document", "search_result", "tool_reference"):
        raise ValueError(fields.TEXT_ONLY)
    return kind


class ResultText(TextBlock):
    type: Annotated[Literal["text"], BeforeValidator(_is_text)]


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    input: fields.CallObject = None
    cache_control: CacheControl = None
    caller: Annotated[DirectCaller | None, fields.OF_A_REPLY] = None


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1)]
    content: str | list[ResultText] | None = None
    is_error: bool | None = optional("true: tells the model that the call failed.")
    cache_control: CacheControl = None

    @property
    def text(self) -> str:
        """The text that the model is given."""
        parts = self.content or []
        text = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
        return f"Error: {text}" if self.is_error else text


MessageBlock = Annotated[
    Annotated[TextBlock, Tag("Text")]
    | Annotated[ThinkingBlock, Tag("Thinking")]
    | Annotated[RedactedThinkingBlock, Tag("Redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("Tool_use")]
    | Annotated[ToolResultBlock, Tag("Tool_result")],
    tagged_by_type(_OTHER_BLOCKS),
]


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[MessageBlock]

    @model_validator(mode="after")
    def _has_its_own_blocks(self) -> AnthropicMessage:
        kinds = {type(block) for block in self.blocks}
        if self.role != "assistant" and kinds & {ThinkingBlock, RedactedThinkingBlock, ToolUseBlock}:
            raise ValueError("only the assistant's messages have thinking and tool_use")
        if self.role != "user" and ToolResultBlock in kinds:
            raise ValueError("only the user's messages have tool_result")
        return self

    @property
    def blocks(self) -> list[Any]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class AnthropicThinking(Body):
    type: Literal["adaptive", "disabled"]
    display: Literal["summarized", "omitted"] | None = optional("`summarized`: all of the thinking is shown.")


class AnthropicSchemaFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = optional(
        "How much the model thinks, if its chat template supports it; 'high' is the same as none."
    )
    format: AnthropicSchemaFormat | None = None


ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]


class AnthropicTool(Body):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: fields.ArgumentsSchema
    strict: bool | None = optional("true: a grammar enforces the schema on every call, also on optional ones.")
    cache_control: CacheControl = None
    eager_input_streaming: Annotated[bool | None, Ignored("arguments are always streamed as they are generated")] = None
    defer_loading: Annotated[bool | None, Ignored("the prompt always has every tool")] = None

    @property
    def tool(self) -> Tool:
        return Tool(self.name, self.description or "", self.input_schema, bool(self.strict))


AnyTool = Annotated[
    Annotated[AnthropicTool, Tag("Custom")] | Annotated[ForeignTool, Tag("Foreign")],
    tagged_by_type(NO_SUCH_TOOL, default="custom", foreign=set(TYPES) - {"custom"}),
]


class AnthropicToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = optional("The tool that must be called.")
    disable_parallel_tool_use: bool | None = optional("true: at most one call in an answer.")

    @model_validator(mode="after")
    def _names_one(self) -> AnthropicToolChoice:
        if (self.name is not None) != (self.type == "tool"):
            raise ValueError("'tool' needs the name of a tool; no other choice has one")
        return self


class KeptThoughts(Body):
    """The only edit that is accepted: it keeps everything."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Body):
    edits: Annotated[list[KeptThoughts] | None, Field(max_length=1)] = None


class AnthropicPromptBody(Body):
    """The fields of a prompt."""

    why: ClassVar = {
        "thinking": "a thinking budget cannot be enforced; 'adaptive' is the model's default, 'disabled' turns "
        "thinking off",
        "mcp_servers": "requests fetch nothing from the network",
        "container": "the server runs no code of a request",
        "context_management": "the server removes neither thinking nor results from the messages",
        "thread": "the server keeps no conversations; send all of it",
        "diagnostics": "cache misses are not reported",
        "inference_geo": "the model runs on the server's machine",
        "speed": "the only speed is 'standard'",
    }

    model: fields.ModelName = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=fields.MAX_MESSAGES)]
    system: str | list[TextBlock] | None = None
    thinking: AnthropicThinking | None = None
    output_config: OutputConfig | None = None
    output_format: AnthropicSchemaFormat | None = optional("The older name of output_config.format.")
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    structured_outputs: fields.StructuredField = None
    mcp_servers: fields.Nothing = None
    container: None = None
    context_management: ContextManagement | None = None
    thread: None = None
    diagnostics: None = None
    inference_geo: None = None
    speed: Literal["standard"] | None = None
    cache_control: CacheControl = None
    keep_alive: fields.KeepAlive = None
    user_profile_id: Annotated[fields.Label | None, fields.NOT_KEPT] = None
    workspace_id: Annotated[fields.Label | None, fields.NOT_KEPT] = None


class AnthropicMetadata(Body):
    user_id: fields.Label | None = None


class MessagesBody(AnthropicPromptBody, CompressBody):
    reuse: fields.ReuseField = None
    max_tokens: fields.Count
    stream: bool | None = None
    stop_sequences: Annotated[list[fields.StopText] | None, Field(max_length=fields.MAX_STOPS)] = None
    temperature: fields.Temperature | None = None
    top_p: fields.Share | None = None
    top_k: fields.TopK | None = None
    metadata: Annotated[AnthropicMetadata | None, fields.NOT_KEPT] = None
    service_tier: Annotated[Literal["auto", "standard_only"] | None, Ignored("there is only one tier")] = None


def request_of(body: AnthropicPromptBody) -> GenerationRequest:
    """Return the prompt, whose answer the assistant may have begun. Raises RequestError."""
    _check_calls(body.messages)
    turns = [(role, list(group)) for role, group in groupby(body.messages, lambda message: message.role)]
    said = ""
    if turns[-1][0] == "assistant":
        said = _prefill(turns.pop()[1])
    if not turns:
        raise RequestError(400, "messages: there is nothing to answer", why="all messages are the assistant's")
    parts = [block.text for block in body.system] if isinstance(body.system, list) else [body.system or ""]
    system = [text for part in parts if (text := _BILLING.sub("", part))]
    if turns[0][0] == "system":
        system += _texts(turns.pop(0)[1])
    before = [{"role": "system", "content": "\n".join(system)}] if system else []
    chat = ChatInput([*before, *(turn for role, group in turns for turn in _turns(role, group))])
    config = body.output_config
    grammar, grammar_field = fields.one_grammar(
        **{
            "output_config.format": _form(None if config is None else config.format),
            "output_format": _form(body.output_format),
            "structured_outputs": fields.grammar_of(body.structured_outputs),
        }
    )
    return GenerationRequest(
        chat,
        effort=_effort(body),
        usual_effort=_USUAL_EFFORT,
        said=said,
        tools=_tools(body),
        grammar=grammar,
        effort_field="output_config.effort",
        grammar_field=grammar_field,
    )


def _form(given: AnthropicSchemaFormat | None) -> Grammar | None:
    return None if given is None else fields.json_grammar(given.schema_)


def _tools(body: AnthropicPromptBody) -> Toolset | None:
    """Return the tools that may be called; None for none. Raises RequestError."""
    known = [each.tool for each in body.tools or () if isinstance(each, AnthropicTool)]
    choice = body.tool_choice
    if choice is None:
        return toolset(known)
    found = toolset(
        known,
        must_call=choice.type in ("any", "tool"),
        only=None if choice.name is None else [choice.name],
        one_call=bool(choice.disable_parallel_tool_use) or choice.type == "tool",
        param="tool_choice.name" if choice.type == "tool" else "tool_choice",
    )
    return None if choice.type == "none" else found


def _check_calls(messages: Sequence[AnthropicMessage]) -> None:
    """Raises RequestError for the result of a call that never was, and for a call without a result."""
    calls = OpenCalls()
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        for number, block in enumerate(message.blocks):
            if isinstance(block, ToolResultBlock):
                calls.answered(f"{where}.content.{number}", block.tool_use_id)
        if message.role != "assistant" or not _of([message], ToolUseBlock):
            calls.settled(where)
        for number, block in enumerate(message.blocks):
            if isinstance(block, ToolUseBlock):
                calls.made(f"{where}.content.{number}", block.id, block.name)
    calls.settled(f"messages.{len(messages) - 1}")


B = TypeVar("B", bound=Body)


def _of(group: Sequence[AnthropicMessage], kind: type[B]) -> list[B]:
    """Return the blocks of that kind."""
    return [block for message in group for block in message.blocks if isinstance(block, kind)]


def _texts(group: Sequence[AnthropicMessage]) -> list[str]:
    return [block.text for block in _of(group, TextBlock)]


def _turns(role: str, group: Sequence[AnthropicMessage]) -> Iterator[dict[str, Any]]:
    """Yield the turns of consecutive messages of one role: one turn, as templates want roles to alternate. Results are
    turns of their own, in front of the user's text."""
    texts, results = _texts(group), _of(group, ToolResultBlock)
    for result in results:
        yield {"role": "tool", "content": result.text, "tool_call_id": result.tool_use_id}
    if results and not texts:
        return
    turn: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if thoughts := [block.thinking for block in _of(group, ThinkingBlock)]:
        turn["reasoning_content"] = "\n".join(thoughts)
    if calls := _of(group, ToolUseBlock):
        turn["tool_calls"] = [call_of(call.id, call.name, call.input) for call in calls]
    yield turn


def _prefill(group: Sequence[AnthropicMessage]) -> str:
    if _of(group, ThinkingBlock):
        why = "thinking in a begun answer cannot be continued"
        raise RequestError(400, "messages: final assistant content cannot have thinking", why=why, param="messages")
    said = "\n".join(_texts(group))
    if said != said.rstrip():
        what = "messages: final assistant content cannot end with trailing whitespace"
        raise RequestError(400, what, param="messages")
    return said


def _effort(body: AnthropicPromptBody) -> str | None:
    level = body.output_config.effort if body.output_config else None
    if body.thinking is None or body.thinking.type == "adaptive":
        return level
    if level not in (None, _USUAL_EFFORT):
        what, param = "'output_config.effort' cannot be honoured", "output_config.effort"
        raise RequestError(400, what, why="it sets how much the model thinks, and thinking is disabled", param=param)
    return "none"
