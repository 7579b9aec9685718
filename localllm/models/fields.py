"""Typed, bounded reads of single keys from an untrusted JSON object; every refusal names the file and the key.

Only keys that are asked for are read. Knows no family and no meaning of a key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from localllm.errors import FETCH_ANEW, CheckpointError


@dataclass(frozen=True)
class Fields:
    """One JSON object. `defaults` stand in for absent keys; a key that is null is null, not absent."""

    raw: Mapping[str, object]
    source: str
    path: str = ""
    defaults: Mapping[str, object] = field(default_factory=dict)

    def get(self, key: str) -> object:
        return self.raw[key] if key in self.raw else self.defaults.get(key)

    def integer(self, key: str, low: int, high: int) -> int:
        value = self.optional_integer(key, low, high)
        if value is None:
            raise self.refuse(key, f"an integer from {low} to {high}")
        return value

    def optional_integer(self, key: str, low: int, high: int) -> int | None:
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refuse(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float) -> float:
        value = self.optional_number(key, low, high)
        if value is None:
            raise self.refuse(key, f"a number from {low:g} to {high:g}")
        return value

    def optional_number(self, key: str, low: float, high: float) -> float | None:
        value = self.get(key)
        if value is None:
            return None
        if not _is_number(value) or not low <= value <= high:  # type: ignore[operator]
            raise self.refuse(key, f"a number from {low:g} to {high:g}")
        return float(value)  # type: ignore[arg-type]

    def flag(self, key: str, if_null: bool = False) -> bool:
        value = self.get(key)
        if value is None:
            return if_null
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def optional_text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.refuse(key, "a string")
        return value

    def items(self, key: str, most: int) -> list[object] | None:
        value = self.get(key)
        if value is not None and not isinstance(value, list):
            raise self.refuse(key, "a list")
        if value is not None and len(value) > most:
            raise self.refuse(key, f"a list of at most {most}")
        return value

    def numbers(self, key: str, count: int, low: float, high: float) -> tuple[float, ...]:
        value = self.items(key, most=max(count, 1))
        if value is None or len(value) != count or not all(_is_number(x) and low <= x <= high for x in value):  # type: ignore[operator]
            raise self.refuse(key, f"{count} numbers from {low:g} to {high:g}")
        return tuple(float(x) for x in value)  # type: ignore[arg-type]

    def section(self, key: str) -> Fields | None:
        """The object under `key`, None where it is absent or null."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refuse(key, "an object")
        return Fields(value, self.source, f"{self.path}{key}.")

    def refuse(self, key: str, wanted: str) -> CheckpointError:
        value = self.get(key)
        found = "it is absent" if value is None and key not in self.raw else f"it is {show(value)}"
        return CheckpointError(
            f"{self.source}: {self.path}{key} is not usable",
            why=f"{found}; {wanted} is needed",
            fix=FETCH_ANEW,
        )


def show(value: object) -> str:
    """At most 60 printable characters of an untrusted value."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
