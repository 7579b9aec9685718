"""Typed, bounded reads of single keys from an untrusted JSON object; every refusal names the file and the key.

Only keys that are asked for are read. Knows no family and no meaning of a key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

from localllm.errors import FETCH_ANEW, CheckpointError, show


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
        if value is None or (is_integer(value) and low <= value <= high):
            return value
        raise self.refuse(key, f"an integer from {low} to {high}")

    def number(self, key: str, low: float, high: float) -> float:
        value = self.optional_number(key, low, high)
        if value is None:
            raise self.refuse(key, f"a number from {low:g} to {high:g}")
        return value

    def optional_number(self, key: str, low: float, high: float) -> float | None:
        value = self.get(key)
        if value is None or (is_number(value) and low <= value <= high):
            return None if value is None else float(value)
        raise self.refuse(key, f"a number from {low:g} to {high:g}")

    def flag(self, key: str, if_null: bool = False) -> bool:
        value = self.get(key)
        if value is None or isinstance(value, bool):
            return if_null if value is None else value
        raise self.refuse(key, "true or false")

    def optional_text(self, key: str) -> str | None:
        value = self.get(key)
        if value is None or isinstance(value, str):
            return value
        raise self.refuse(key, "a string")

    def items(self, key: str, most: int) -> list[object] | None:
        value = self.get(key)
        if value is not None and not isinstance(value, list):
            raise self.refuse(key, "a list")
        if value is not None and len(value) > most:
            raise self.refuse(key, f"a list of at most {most}")
        return value

    def numbers(self, key: str, count: int, low: float, high: float) -> tuple[float, ...]:
        value = self.items(key, most=max(count, 1))
        found = [float(x) for x in value or () if is_number(x) and low <= x <= high]
        if value is None or not len(found) == len(value) == count:
            raise self.refuse(key, f"{count} numbers from {low:g} to {high:g}")
        return tuple(found)

    def section(self, key: str) -> Fields | None:
        """Return the object under `key`, None where it is absent or null."""
        value = self.get(key)
        if value is None or isinstance(value, dict):
            return None if value is None else Fields(value, self.source, f"{self.path}{key}.")
        raise self.refuse(key, "an object")

    def refuse(self, key: str, wanted: str) -> CheckpointError:
        value = self.get(key)
        found = "it is absent" if value is None and key not in self.raw else f"it is {show(value)}"
        what = f"{self.source}: {self.path}{key} is not usable"
        return CheckpointError(what, why=f"{found}; {wanted} is needed", fix=FETCH_ANEW)


def is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, float) or is_integer(value)
