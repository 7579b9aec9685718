"""Rewrite a JSON Schema for llguidance: formats become patterns, objects are closed, numbers end.

Dates, times and durations have patterns of their own: llguidance's take the 29th of February of any year and a 60th
second at any time, which a validator refuses, and digits without end.

Objects hold what they name and nothing else, unless they say that they may. OpenAI, Ollama and llama.cpp close them
too, and their clients mean it so: by the letter anything may stand beside, and a small model that may go on writing
properties does not end.

llguidance lets the digits of a number go on for ever, and so does a small model that repeats itself. Ranges and
multiples bound them in llguidance. Both are met together with any other keyword, and leave no way to write an exponent.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from math import lcm
from typing import Any

from localllm.text.grammar.schema_parts import BOUNDS, TYPES, all_parts, mapped, parts, pointer
from localllm.text.grammar.termination import leading_to_themselves, met_together

Schema = Mapping[str, Any]

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")

_YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_DAY = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = f"({_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_COUNT = "[0-9]{1,16}"
_CLOCK = f"T({_COUNT}H({_COUNT}M({_COUNT}S)?)?|{_COUNT}M({_COUNT}S)?|{_COUNT}S)"
_DAYS = f"({_COUNT}Y({_COUNT}M({_COUNT}D)?)?|{_COUNT}M({_COUNT}D)?|{_COUNT}D)"
_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": f"^P({_DAYS}({_CLOCK})?|{_CLOCK}|{_COUNT}W)$",
}
# Characters: of RFC 5321 and 1035, and what browsers and servers take of an address.
_LONGEST = {"email": 254, "hostname": 253, "uri": 2048}
_OF_OBJECTS = ("properties", "required", "patternProperties", "additionalProperties", "minProperties", "maxProperties")
_OPENED = ("additionalProperties", "patternProperties", "minProperties")
_MOST_MET = 100_000  # schemas that are met together with others
# The largest of 16 digits that is a double: llguidance computes bounds as doubles.
_MOST = 9_999_999_999_999_998
# In units of the last digit behind the point: llguidance counts multiples of several keywords so.
_MOST_MULTIPLE = 2**32 - 1
_ELSEWHERE = ("$ref", "allOf", "anyOf", "oneOf", "enum", "const")  # these say what is met
_OF_NUMBERS = {"type", "multipleOf", *BOUNDS}
_HOLDS = ("properties", "patternProperties", "additionalProperties", "items", "prefixItems")


def with_pattern(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with a pattern in place of its format, or with the most characters of that format."""
    name = schema.get("format", "")
    if name in _LONGEST:
        return {**schema, "maxLength": min(schema.get("maxLength", _LONGEST[name]), _LONGEST[name])}
    pattern = _PATTERNS.get(name)
    if pattern is None:
        return schema
    without = without_format(schema)
    if "pattern" not in schema:
        return {**without, "pattern": pattern}
    return {**without, "allOf": [*schema.get("allOf", ()), {"pattern": pattern}]}


def without_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != "format"}


def close(schema: Schema) -> None:
    """Close the objects of a schema in place.

    Of several schemas that are met together, by `allOf` or beside `$ref`, `anyOf` and `oneOf`, one is closed where it
    names all: otherwise none would let the others stand. References have to be as `pointer` writes them.
    """
    places = {pointer(steps): part for steps, part in all_parts(schema) if isinstance(part, dict)}
    left_open, met, num_met = set[int](), set[int](), 0
    for part in places.values():
        if id(part) not in met and _is_composed(part) and num_met < _MOST_MET:
            together = list(met_together(part, places, ("allOf", "anyOf", "oneOf")))
            names = set[str]().union(*(_names(each) for each in together))
            left_open |= {id(each) for each in together if not names <= each.get("properties", {}).keys()}
            met |= set(map(id, together))
            num_met += len(together)
    for part in places.values():
        if num_met < _MOST_MET and id(part) not in left_open and _can_be_closed(part):
            part["additionalProperties"] = False


def _is_composed(schema: Schema) -> bool:
    """Tell if a schema makes several meet together."""
    num_own = any(key in schema for key in _OF_OBJECTS)
    return num_own + len(schema.get("allOf", ())) + sum(key in schema for key in ("$ref", "anyOf", "oneOf")) > 1


def _names(schema: Schema) -> set[str]:
    return {*schema.get("properties", ()), *schema.get("required", ())}


def _can_be_closed(schema: Schema) -> bool:
    """Tell if a schema names what it holds, and all that it has to, and says nothing of others."""
    is_said = any(key in schema for key in _OPENED)
    return "properties" in schema and not is_said and _names(schema) <= schema["properties"].keys()


def with_ends(schema: dict[str, Any], multiples: Iterable[int], others: Iterable[float]) -> dict[str, Any]:
    """Return a schema where every number ends, also in what it says nothing of, unless parts of it are met together.

    multiples: all of its `multipleOf`.
    others: its other numbers. Where one of them is finer than the last digit that would be left, fractions stay.
    """
    num_behind = len(str(_MOST_MULTIPLE // lcm(*multiples))) - 1  # the point
    is_coarse = num_behind > 0 and all(round(number, num_behind) == number for number in others)
    fraction = {"multipleOf": 10.0**-num_behind} if is_coarse else {}
    schemas = [part for _, part in all_parts(schema) if isinstance(part, Mapping)]
    prefix = "_"
    while any(name.startswith(prefix) for name in schema.get("$defs", ())):
        prefix += "_"
    # Anything holds anything: met together, two of that would be looked at without end. Then it is bounded by itself,
    # and not in what it holds; where it may be met with a schema that holds itself, llguidance takes nothing beside.
    is_met = any(map(_meets_others, schemas))
    by_itself = {} if is_met and _holds_itself(schema) else _bounded({}, TYPES, fraction)
    anything = by_itself if is_met else {"$ref": pointer(("$defs", f"{prefix}any"))}
    # A range of 16 digits takes a millisecond: one for all. Of a reference it is not known what it has in common.
    is_shared = not any("oneOf" in part for part in schemas)
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
        place: {part.get("$ref", ""), *(pointer((*steps, *way)) for way, _ in parts(part))} & places.keys()
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
