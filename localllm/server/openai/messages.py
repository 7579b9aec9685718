"""The messages of a chat, as OpenAI has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from localllm.server.bodies import Body
from localllm.server.fields import TEXT_ONLY, Nothing

_OTHER_PARTS = ("image_url", "input_audio", "file", "input_image", "input_file")


def refuse_other_parts(kind: object) -> object:
    """Raises ValueError for what OpenAI's models read beside text."""
    if kind in _OTHER_PARTS:
        raise ValueError(TEXT_ONLY)
    return kind


class TextPart(Body):
    type: Annotated[Literal["text"], BeforeValidator(refuse_other_parts)]
    text: str


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    tool_calls: Nothing = None
    function_call: None = None
    audio: None = None
    annotations: Nothing = None
    parsed: None = None  # which openai's library adds to what it has parsed


def chat_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """As templates want them: text in one piece, and no fields that nobody set."""
    return [
        {
            "role": message.role,
            "content": joined_text(message.content),
            **{name: value for name in ("name", "reasoning_content") if (value := getattr(message, name)) is not None},
        }
        for message in messages
    ]


def joined_text(content: str | list[TextPart] | None) -> str:
    if isinstance(content, list):
        return "\n".join(part.text for part in content)
    return content or ""
