"""Tools whose arguments are bounded, so that any model that is held to them ends soon; calls as models write them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

UNITS = ("C", "F")
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"unit": {"enum": [*UNITS]}},
    "required": ["unit"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["owl", "fox"]}, "number": {"enum": [1, 2]}},
    "required": ["kind", "number"],
    "additionalProperties": False,
}


class Animal(BaseModel):
    """What `ANSWER` describes."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["owl", "fox"]
    number: Literal[1, 2]


ROOM = 120  # tokens, for a call

OPENAI_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Of today.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "clock", "parameters": NOTHING}},
]
FUNCTIONS: list[Any] = [{"type": "function", "strict": None, **tool["function"]} for tool in OPENAI_TOOLS]
ANTHROPIC_TOOLS: list[Any] = [
    {"name": "weather", "description": "Of today.", "input_schema": WEATHER},
    {"name": "clock", "input_schema": NOTHING},
]

CALLED = '<tool_call>\n{"name": "weather", "arguments": {"unit": "C"}}\n</tool_call>'
CALLED_TWICE = f'{CALLED}\n<tool_call>\n{{"name": "clock", "arguments": {{}}}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "weather", "arguments": {"unit": }}\n</tool_call>'
