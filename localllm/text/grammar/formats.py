"""Formats of texts that an answer can be held to.

Dates, times and durations have patterns of their own: llguidance's take the 29th of February of any year and a 60th
second at any time, which a validator refuses, and digits without end.
"""

from __future__ import annotations

from typing import Any

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
