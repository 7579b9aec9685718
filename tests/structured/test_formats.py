"""Formats of texts: dates that there are, and times with 60 seconds a minute."""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.hub.names import TINY_DIRECTORY
from localllm.text.grammar.compiled import Grammars
from localllm.text.grammar.rewriting import with_pattern
from localllm.text.tokenizer import Tokenizer
from tests.structured.support import accepts, drawn, json_schema

READ: dict[str, Callable[[str], Any]] = {
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "date-time": datetime.datetime.fromisoformat,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
}


def matches(name: str, text: str) -> bool:
    return re.search(with_pattern({"format": name})["pattern"], text) is not None


def is_date(text: str) -> bool:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True


@settings(deadline=None)
@given(year=st.integers(0, 9999), month=st.integers(0, 13), day=st.integers(0, 32))
def test_a_date_is_a_day_of_the_calendar(year: int, month: int, day: int) -> None:
    text = f"{year:04}-{month:02}-{day:02}"
    assert matches("date", text) == is_date(text)


@pytest.mark.parametrize("year", [4, 96, 100, 400, 1900, 1904, 2000, 2023, 2024, 2100, 9996])
def test_the_last_of_february(year: int) -> None:
    assert matches("date", f"{year:04}-02-29") == is_date(f"{year:04}-02-29")


@pytest.mark.parametrize(
    ("name", "taken", "refused"),
    [
        ("date", ["2024-02-29"], ["2023-02-29", "2024-02-30", "24-02-28"]),
        ("time", ["23:59:59Z", "00:00:00.5+14:00"], ["23:59:60Z", "24:00:00Z", "12:00:00"]),
        ("date-time", ["2024-02-29T01:02:03Z"], ["2023-02-29T01:02:03Z", "2024-02-28 01:02:03Z"]),
    ],
)
@pytest.mark.usefixtures("tried_here")
def test_an_answer_is_held_to_it(grammars: Grammars, name: str, taken: list[str], refused: list[str]) -> None:
    tokenizer = Tokenizer.load(TINY_DIRECTORY)
    constraint = grammars.constraint(json_schema({"type": "string", "format": name}))
    assert all(accepts(constraint, tokenizer, json.dumps(text)) for text in taken)
    assert not any(accepts(constraint, tokenizer, json.dumps(text)) for text in refused)


@pytest.mark.usefixtures("tried_here")
def test_a_pattern_and_a_format_are_both_held(grammars: Grammars) -> None:
    tokenizer = Tokenizer.load(TINY_DIRECTORY)
    schema = {"type": "string", "format": "date", "pattern": "^2024", "allOf": [{"pattern": "29$"}]}
    constraint = grammars.constraint(json_schema(schema))
    assert accepts(constraint, tokenizer, '"2024-02-29"')
    assert not any(accepts(constraint, tokenizer, f'"{text}"') for text in ("2024-02-28", "2023-03-29", "2024-29"))


@pytest.mark.usefixtures("tried_here")
@pytest.mark.parametrize("name", READ)
def test_what_is_drawn_is_read_by_others(grammars: Grammars, name: str) -> None:
    tokenizer = Tokenizer.load(TINY_DIRECTORY)
    constraint = grammars.constraint(json_schema({"type": "string", "format": name}))
    texts = [text for seed in range(20) if (text := drawn(constraint, tokenizer, seed)) is not None]
    assert len(texts) > 10
    for text in texts:
        READ[name](json.loads(text))
