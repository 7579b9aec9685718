"""Make numbers end: llguidance lets the digits of one go on for ever, and so does a small model that repeats itself.

Ranges and multiples bound them in llguidance. Both are met together with any other keyword, and leave no way to write
an exponent.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from math import lcm
from typing import Any

from localllm.text.grammar.keywords import BOUNDS, TYPES, all_parts, mapped
from localllm.text.grammar.keywords import parts as schemas
from localllm.text.grammar.recursion import leading_to_themselves
from localllm.text.grammar.references import pointer

# The largest of 16 digits that is a double: llguidance computes bounds as doubles.
_MOST = 9_999_999_999_999_998
# In units of the last digit behind the point: llguidance counts multiples of several keywords so.
_MOST_MULTIPLE = 2**32 - 1
_ELSEWHERE = ("$ref", "allOf", "anyOf", "oneOf", "enum", "const")  # these say what is met
_OF_NUMBERS = {"type", "multipleOf", *BOUNDS}
_HOLDS = ("properties", "patternProperties", "additionalProperties", "items", "prefixItems")


def with_ends(schema: dict[str, Any], multiples: Iterable[int], others: Iterable[float]) -> dict[str, Any]:
    """Return a schema where every number ends, also in what it says nothing of, unless parts of it are met together.

    multiples: all of its `multipleOf`.
    others: its other numbers. Where one of them is finer than the last digit that would be left, fractions stay.
    """
    num_behind = len(str(_MOST_MULTIPLE // lcm(*multiples))) - 1  # the point
    is_coarse = num_behind > 0 and all(round(number, num_behind) == number for number in others)
    fraction = {"multipleOf": 10.0**-num_behind} if is_coarse else {}
    parts = [part for _, part in all_parts(schema) if isinstance(part, Mapping)]
    prefix = "_"
    while any(name.startswith(prefix) for name in schema.get("$defs", ())):
        prefix += "_"
    # Anything holds anything: met together, two of that would be looked at without end. Then it is bounded by itself,
    # and not in what it holds; where it may be met with a schema that holds itself, llguidance takes nothing beside.
    is_met = any(map(_meets_others, parts))
    by_itself = {} if is_met and _holds_itself(schema) else _bounded({}, TYPES, fraction)
    anything = by_itself if is_met else {"$ref": pointer(("$defs", f"{prefix}any"))}
    # A range of 16 digits takes a millisecond: one for all. Of a reference it is not known what it has in common.
    is_shared = not any("oneOf" in part for part in parts)
    names, shared = dict[str, str](), dict[str, dict[str, Any]]()

    def ended(part: dict[str, Any]) -> dict[str, Any]:
        found = _ended(part, fraction, anything)
        if not is_shared or not found.keys() <= _OF_NUMBERS or found.keys() == {"type"}:
            return found
        name = names.setdefault(json.dumps(found, sort_keys=True), f"{prefix}{len(names)}")
        shared[name] = found
        return {"$ref": pointer(("$defs", name))}

    found = mapped(schema, ended)
    if not is_met:
        shared[f"{prefix}any"] = _ended({"type": sorted(TYPES - {"integer"})}, fraction, anything)
    return {**found, "$defs": {**found.get("$defs", {}), **shared}} if shared else dict(found)


def _holds_itself(schema: Mapping[str, Any]) -> bool:
    """Tell if a schema, or a part of it, leads back to itself."""
    places = {pointer(steps): (steps, part) for steps, part in all_parts(schema) if isinstance(part, Mapping)}
    held = {
        place: {part.get("$ref", ""), *(pointer((*steps, *way)) for way, _ in schemas(part))} & places.keys()
        for place, (steps, part) in places.items()
    }
    return bool(leading_to_themselves(held))


def _meets_others(part: Mapping[str, Any]) -> bool:
    num_led = len(part.get("allOf", ())) + sum(key in part for key in ("$ref", "anyOf", "oneOf"))
    return num_led + any(key in part for key in _HOLDS) > 1 or {"properties", "patternProperties"} <= part.keys()


def _ended(part: dict[str, Any], fraction: Mapping[str, float], anything: dict[str, Any]) -> dict[str, Any]:
    """Return a part where numbers end. fraction: of numbers. anything: for what it says nothing of."""
    if not part:
        return anything
    if any(key in part for key in _ELSEWHERE):
        return part
    given = part.get("type", TYPES)
    types = {given} if isinstance(given, str) else set(given)
    found = _bounded(part, types, fraction)
    if "array" in types and anything:
        found.setdefault("items", anything)
    if "object" in types and anything:
        found.setdefault("additionalProperties", anything)
    return found


def _bounded(part: Mapping[str, Any], types: Collection[str], fraction: Mapping[str, float]) -> dict[str, Any]:
    """Return a part with bounds for a number that it is itself."""
    found = dict(part)
    if not {"integer", "number"}.isdisjoint(types):
        if part.keys().isdisjoint(("minimum", "exclusiveMinimum")):
            found["minimum"] = -_MOST
        if part.keys().isdisjoint(("maximum", "exclusiveMaximum")):
            found["maximum"] = _MOST
    if "number" in types and "multipleOf" not in part:
        found |= fraction
    return found
