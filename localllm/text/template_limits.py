"""What a chat template may use up while it renders: time, characters, items, depth. Knows sizes, not templates."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from string import Formatter
from typing import Any

import jinja2

TIME_LIMIT_S = 2.0  # of the processor, for one rendering: a thread that waits for a busy machine has used none of it
MAX_VALUE = 8 << 20  # characters of one value, or of the whole output; 2 M tokens are about as long
MAX_TOTAL = 96 << 20  # characters of all values together that one rendering makes
MAX_ITEMS = 100_000  # of one list: what jinja2's sandbox allows a range
MAX_DEPTH = 100  # of lists and mappings within one another
MAX_INT_BITS = 1 << 16
ITEM = 8  # what a value costs beside its characters

_VIEWS: tuple[type[Collection[Any]], ...] = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS: tuple[type[Collection[Any]], ...] = (list, tuple, dict, set, frozenset, *_VIEWS)
_LONG_WIDTH = re.compile(r"\d{4}|[*{}]")
_PERCENT = re.compile(r"%%|%(?:\([^()]*\))?([^a-zA-Z%(]*).?", re.DOTALL)
_NESTED_KEY = re.compile(r"%\([^)]*\(")


class LimitError(jinja2.TemplateRuntimeError):
    """The template asks for more than a rendering may use."""


class Budget:
    """The account of one rendering, made in the thread that renders."""

    def __init__(self) -> None:
        self._used_up_at = time.thread_time() + TIME_LIMIT_S
        self._look_at = time.monotonic() + TIME_LIMIT_S  # not before: a thread has no more of the processor than passes
        self._left = MAX_TOTAL
        # Keeps what it has weighed alive, so that an id stays one object's. Values never change in the sandbox.
        self._weighed: dict[int, tuple[Any, int, int]] = {}

    def tick(self) -> None:
        """One step of the template. Raises LimitError once the processor time is used up."""
        self.charge(ITEM)
        if time.monotonic() > self._look_at:
            left_s = self._used_up_at - time.thread_time()  # a system call, which takes much longer than to look above
            if left_s <= 0:
                raise LimitError(f"it ran longer than {TIME_LIMIT_S:g} s")
            self._look_at = time.monotonic() + left_s

    def charge(self, size: int) -> None:
        """Pay for `size` characters before they are made."""
        if size > MAX_VALUE:
            raise LimitError(f"a value of {size} characters; at most {MAX_VALUE}")
        self._left -= size
        if self._left < 0:
            raise LimitError(f"more than {MAX_TOTAL} characters made on the way")

    def made(self, value: Any) -> Any:
        """Pay for a value that the template has just made, and return it."""
        if isinstance(value, str):
            self.charge(len(value) + ITEM)
        elif isinstance(value, int):
            if value.bit_length() > MAX_INT_BITS:
                raise LimitError(f"a number of {value.bit_length()} bits; at most {MAX_INT_BITS}")
        elif isinstance(value, (bytes, bytearray)):
            raise LimitError("bytes are of no use in a chat template")
        elif isinstance(value, _CONTAINERS):
            self.require_items(len(value))
            self.charge(3 * ITEM * (len(value) + ITEM))  # an item can be a small object of its own
            self.weigh(value)
        return value

    def listed(self, values: Iterable[Any]) -> list[Any]:
        """All of an iterator, unless it is too long."""
        items: list[Any] = []
        for value in values:
            self.tick()
            items.append(value)
            self.require_items(len(items))
        return items

    def require_items(self, count: int) -> None:
        if count > MAX_ITEMS:
            raise LimitError(f"a list of {count} items; at most {MAX_ITEMS}")

    def weigh(self, value: Any) -> tuple[int, int]:
        """(characters, depth) of a value written out in full, where shared parts count each time they appear."""
        if isinstance(value, str):
            return len(value) + ITEM, 0
        if not isinstance(value, _CONTAINERS):
            return ITEM, 0
        if known := self._weighed.get(id(value)):
            return known[1], known[2]
        size, depth = ITEM, 0
        for part in _parts(value):
            part_size, part_depth = self.weigh(part)
            size += part_size
            depth = max(depth, part_depth)
            if size > MAX_VALUE:
                raise LimitError(f"a value of more than {MAX_VALUE} characters")
        if depth >= MAX_DEPTH:
            raise LimitError(f"values more than {MAX_DEPTH} deep in one another")
        self._weighed[id(value)] = (value, size, depth + 1)
        return size, depth + 1

    def operate(self, operator: str, function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        """left `operator` right, priced before it is computed."""
        self.tick()
        if operator == "*":
            self._price_product(left, right)
        elif operator == "+" and isinstance(left, str) and isinstance(right, str):
            self.charge(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            self.price_format(left, percent_specs(left), right)
        elif operator == "**":
            self._price_power(left, right)
        return self.made(function(left, right))

    def price_format(self, text: str, specs: list[str], values: Any) -> None:
        """Pay for formatting `values` into `text`, which has one place for each of `specs`."""
        if any(_LONG_WIDTH.search(spec) for spec in specs):
            raise LimitError("a format with a width of more than 999, or with a width from outside")
        padding = 1000 if any(char.isdigit() for spec in specs for char in spec) else 0
        self.charge(len(text) + len(specs) * (self.weigh(values)[0] + padding))

    def _price_product(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > MAX_INT_BITS:
                raise LimitError(f"a product of more than {MAX_INT_BITS} bits")
            return
        repeated, count = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(count, int) and hasattr(repeated, "__len__"):
            size = len(repeated) if isinstance(repeated, str) else self.weigh(repeated)[0]
            self.charge(size * max(count, 0))

    def _price_power(self, base: Any, exponent: Any) -> None:
        if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > MAX_INT_BITS:
            raise LimitError(f"a power of more than {MAX_INT_BITS} bits")


def format_specs(text: str) -> list[str]:
    """The format specifications in a str.format text."""
    return [spec or "" for _, field, spec, _ in Formatter().parse(text) if field is not None]


def percent_specs(text: str) -> list[str]:
    """What stands between % and the conversion letter in a printf text: "-10" of "%-10s", "5.2" of "%(name)5.2f"."""
    if _NESTED_KEY.search(text):
        raise LimitError("a format key with parentheses in it")
    return [found[1] for found in _PERCENT.finditer(text) if found[1] is not None]


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield item
    else:
        yield from value
