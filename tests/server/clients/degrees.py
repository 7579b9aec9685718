"""A tool and an answer's type, for the clients that are told of them by pydantic."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class Degrees(BaseModel):
    """What the weather is told in."""

    unit: Literal["C", "F"]


def weather(unit: Literal["C", "F"]) -> str:
    """The weather of today."""
    return f"21 {unit}"
