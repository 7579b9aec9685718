"""What Anthropic's replies are made of: a message of blocks, and the events by which one is streamed."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class Usage(TypedDict):
    """input_tokens: of the prompt, that were computed; the others were in the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    service_tier: Literal["standard"]


class ReplyText(TypedDict):
    type: Literal["text"]
    text: str


class ReplyThinking(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ReplyToolUse(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


ReplyBlock = ReplyText | ReplyThinking | ReplyToolUse


class Ending(TypedDict):
    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageReply(Ending):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ReplyBlock]
    usage: Usage


class MessageStart(TypedDict):
    type: Literal["message_start"]
    message: MessageReply


class BlockStart(TypedDict):
    type: Literal["content_block_start"]
    index: int
    content_block: ReplyBlock


class TextDelta(TypedDict):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(TypedDict):
    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(TypedDict):
    type: Literal["signature_delta"]
    signature: str


class InputDelta(TypedDict):
    """More of a call's input, as JSON."""

    type: Literal["input_json_delta"]
    partial_json: str


BlockDeltaPart = TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockDelta(TypedDict):
    type: Literal["content_block_delta"]
    index: int
    delta: BlockDeltaPart


class BlockStop(TypedDict):
    type: Literal["content_block_stop"]
    index: int


class MessageDelta(TypedDict):
    type: Literal["message_delta"]
    delta: Ending
    usage: Usage


class MessageStop(TypedDict):
    type: Literal["message_stop"]


class Ping(TypedDict):
    type: Literal["ping"]


StreamEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping


class TokenCount(TypedDict):
    input_tokens: int
