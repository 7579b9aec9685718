"""The replies of /v1/messages: a message of blocks, and the events by which one is streamed."""

from __future__ import annotations

from typing import Any, Literal

from localllm.server.bodies import ReplyBody

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnthropicUsage(ReplyBody):
    """input_tokens: of the prompt, those that were computed; the others were in the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    service_tier: Literal["standard"] = "standard"


class ReplyText(ReplyBody):
    type: Literal["text"] = "text"
    text: str = ""


class ReplyThinking(ReplyBody):
    type: Literal["thinking"] = "thinking"
    thinking: str = ""
    signature: str = ""


class ReplyToolUse(ReplyBody):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


ReplyBlock = ReplyText | ReplyThinking | ReplyToolUse


class StopDelta(ReplyBody):
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None


class MessageReply(ReplyBody):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ReplyBlock]
    usage: AnthropicUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None


class MessageStart(ReplyBody):
    type: Literal["message_start"] = "message_start"
    message: MessageReply


class BlockStart(ReplyBody):
    type: Literal["content_block_start"] = "content_block_start"
    index: int
    content_block: ReplyBlock


class TextDelta(ReplyBody):
    type: Literal["text_delta"] = "text_delta"
    text: str


class ThinkingDelta(ReplyBody):
    type: Literal["thinking_delta"] = "thinking_delta"
    thinking: str


class SignatureDelta(ReplyBody):
    type: Literal["signature_delta"] = "signature_delta"
    signature: str = ""


class InputDelta(ReplyBody):
    """More of a call's input, as JSON."""

    type: Literal["input_json_delta"] = "input_json_delta"
    partial_json: str


BlockDeltaPart = TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockDelta(ReplyBody):
    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: BlockDeltaPart


class BlockStop(ReplyBody):
    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


class MessageDelta(ReplyBody):
    type: Literal["message_delta"] = "message_delta"
    delta: StopDelta
    usage: AnthropicUsage


class MessageStop(ReplyBody):
    type: Literal["message_stop"] = "message_stop"


class Ping(ReplyBody):
    type: Literal["ping"] = "ping"


StreamEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping


class TokenCount(ReplyBody):
    input_tokens: int
