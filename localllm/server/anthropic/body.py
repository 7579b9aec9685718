"""What Anthropic's requests have, and the prompt that they come to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from localllm.engine.chat_template import ChatInput
from localllm.server.asking import Ask
from localllm.server.bodies import Body
from localllm.server.failures import RequestError
from localllm.server.fields import (
    MAX_MESSAGES,
    MAX_STOPS,
    NOT_YET,
    Count,
    IgnoredFlag,
    IgnoredText,
    IgnoredTexts,
    KeepAlive,
    Nothing,
    Share,
    StopText,
    Temperature,
)

_BLOCKS = {"text": "TextBlock", "thinking": "ThinkingBlock", "redacted_thinking": "RedactedThinkingBlock"}
_OTHER_BLOCKS = "text is all that is read here: no images, no documents, and no tools yet"

# Claude Code has another one in each request, which would be the end of what the prefix cache knows.
_BILLING = re.compile(r"(?:x-anthropic-billing-header[^\n]*\n?)+")

# What only its author can read.
Opaque = Annotated[str | None, Field(description="Without effect.")]


class TextBlock(Body):
    type: Literal["text"]
    text: str
    citations: Nothing = None
    cache_control: IgnoredTexts = None


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str
    signature: Opaque = None


class RedactedThinkingBlock(Body):
    type: Literal["redacted_thinking"]
    data: Opaque = None


def _kind_of(block: object) -> str | None:
    kind = block.get("type") if isinstance(block, dict) else None
    return _BLOCKS.get(kind) if isinstance(kind, str) else None


Block = Annotated[
    Annotated[TextBlock, Tag("TextBlock")]
    | Annotated[ThinkingBlock, Tag("ThinkingBlock")]
    | Annotated[RedactedThinkingBlock, Tag("RedactedThinkingBlock")],
    Discriminator(_kind_of, custom_error_type="block", custom_error_message=_OTHER_BLOCKS),
]


class Message(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    @model_validator(mode="after")
    def _thinks_as_assistant(self) -> Message:
        blocks = self.content if isinstance(self.content, list) else []
        if self.role != "assistant" and not all(isinstance(block, TextBlock) for block in blocks):
            raise ValueError("thinking is the assistant's")
        return self

    @property
    def texts(self) -> list[str]:
        if isinstance(self.content, str):
            return [self.content]
        return [block.text for block in self.content if isinstance(block, TextBlock)]

    @property
    def thoughts(self) -> list[str]:
        if isinstance(self.content, str):
            return []
        return [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]


class Thinking(Body):
    type: Literal["adaptive", "disabled"]
    display: Annotated[
        Literal["summarized", "omitted"] | None,
        Field(description="`summarized`: what was thought is shown, all of it."),
    ] = None


def _no_format(value: object) -> object:
    if value is not None:
        raise ValueError(NOT_YET)
    return value


class OutputConfig(Body):
    effort: Annotated[
        Literal["low", "medium", "high", "xhigh", "max"] | None,
        Field(description="How much is thought, where the model's chat template knows it."),
    ] = None
    format: Annotated[None, BeforeValidator(_no_format)] = None


class ToolChoice(Body):
    type: Literal["auto", "none"]
    disable_parallel_tool_use: IgnoredFlag = None


class PromptBody(Body):
    """What a prompt is made of."""

    why: ClassVar = {
        "thinking": "a budget of thinking cannot be held to, and there are no tools to think between; 'adaptive' is to "
        "think as the model does, 'disabled' is not to think",
        "tools": NOT_YET,
        "tool_choice": NOT_YET,
        "mcp_servers": "nothing is fetched from the network, and " + NOT_YET,
        "container": "nothing is run here, and " + NOT_YET,
        "context_management": "nothing leaves the messages but whole turns, where the server was started to have it so",
        "output_format": NOT_YET,
        "diagnostics": "it is not told what the prefix cache has missed",
        "inference_geo": "the model runs where this server is",
        "speed": "there is one speed here, 'standard'",
    }

    model: Annotated[
        str | None, Field(description="A name of GET /v1/models; without one, the model that is served.")
    ] = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[TextBlock] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    tools: Nothing = None
    tool_choice: ToolChoice | None = None
    mcp_servers: Nothing = None
    container: None = None
    context_management: None = None
    diagnostics: None = None
    inference_geo: None = None
    speed: Literal["standard"] | None = None
    cache_control: IgnoredTexts = None
    keep_alive: KeepAlive = None
    user_profile_id: IgnoredText = None
    workspace_id: IgnoredText = None


class Metadata(Body):
    user_id: IgnoredText = None


class MessagesBody(PromptBody):
    max_tokens: Count
    stream: bool | None = None
    stop_sequences: Annotated[list[StopText] | None, Field(max_length=MAX_STOPS)] = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Annotated[int | None, Field(ge=0, le=2**31 - 1)] = None
    metadata: Metadata | None = None
    service_tier: Annotated[
        Literal["auto", "standard_only"] | None, Field(description="Accepted; there is one tier here.")
    ] = None


def ask_of(body: PromptBody) -> Ask:
    """The prompt, which the assistant may have begun to answer. Raises RequestError."""
    turns = [(role, list(group)) for role, group in groupby(body.messages, lambda message: message.role)]
    said = ""
    if turns[-1][0] == "assistant":
        said = _prefill(turns.pop()[1])
    if not turns:
        raise RequestError(400, "messages: there is nothing to answer", why="all of them are the assistant's")
    system = [text for text in map(_without_billing, _system_texts(body.system)) if text]
    if turns[0][0] == "system":
        system += _texts(turns.pop(0)[1])
    before = [{"role": "system", "content": "\n".join(system)}] if system else []
    chat = ChatInput([*before, *(_turn(role, group) for role, group in turns)])
    return Ask(chat, effort=_effort(body), said=said, effort_field="output_config.effort")


def _system_texts(system: str | list[TextBlock] | None) -> list[str]:
    if isinstance(system, list):
        return [block.text for block in system]
    return [system or ""]


def _without_billing(text: str) -> str:
    found = _BILLING.match(text)
    return text[found.end() :] if found else text


def _texts(group: Iterable[Message]) -> list[str]:
    return [text for message in group for text in message.texts]


def _turn(role: str, group: Sequence[Message]) -> dict[str, Any]:
    """Messages of one role behind each other are one turn: templates want roles to alternate."""
    turn = {"role": role, "content": "\n".join(_texts(group))}
    thoughts = [thought for message in group for thought in message.thoughts]
    return {**turn, "reasoning_content": "\n".join(thoughts)} if thoughts else turn


def _prefill(group: Sequence[Message]) -> str:
    if any(message.thoughts for message in group):
        why = "of an answer that has begun, what was thought cannot be taken up"
        raise RequestError(400, "messages: final assistant content cannot have thinking", why=why, param="messages")
    said = "\n".join(_texts(group))
    if said != said.rstrip():
        what = "messages: final assistant content cannot end with trailing whitespace"
        raise RequestError(400, what, param="messages")
    return said


def _effort(body: PromptBody) -> str | None:
    level = body.output_config.effort if body.output_config else None
    if body.thinking is None or body.thinking.type == "adaptive":
        return level
    if level is not None:
        what, param = "'output_config.effort' cannot be honoured", "output_config.effort"
        raise RequestError(400, what, why="it is of thinking, which is disabled", param=param)
    return "none"
