"""Find out if a JSON Schema can be met by an answer that ends: one that has to hold itself cannot.

What has to be met together is looked at together: a schema, its `allOf`, the target of its `$ref` and one each of its
`anyOf` and `oneOf`; then what all of these make of a property. Such a set ends where one of the ways to meet it needs
nothing that does not end. A schema that comes back to itself by these alone, in the same place of an answer, means
nothing, whatever else may be chosen there: validators do not end with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from localllm.text.grammar.keywords import TYPES, all_parts
from localllm.text.grammar.recursion import grounded, leading_to_themselves
from localllm.text.grammar.references import pointer

Schema = Mapping[str, Any]
_Together = frozenset[int]  # schemas that have to be met together, by `id`
_Way = tuple[_Together, ...]  # what has to end for it
_NEVER: _Together = frozenset({0})  # false is one of them: no way to meet it
_MOST_LOOKS = 200_000  # at schemas and names, each about a microsecond. What is not looked at counts as ended
_LEADING = frozenset({"$ref", "allOf", "anyOf", "oneOf", "$schema", "$defs", "definitions"})
_PREFIX = re.compile(r"\^([\w -]*)(?![\w -])([?*{]?)")


def endless(schema: Schema) -> str | None:
    """Return the place of a schema that only an endless answer would meet; None where there is none.

    Its references have to be pointers as `references.pointer` writes them, with a target each.
    """
    return _Document(schema).endless()


class _ExhaustedError(Exception):
    """Raised behind the most looks that are taken."""


class _Document:
    def __init__(self, schema: Schema) -> None:
        self._places = {pointer(steps): part for steps, part in all_parts(schema) if isinstance(part, Mapping)}
        self._by_id = {id(part): part for part in self._places.values()}
        self._num_looks = 0

    def endless(self) -> str | None:
        circular = leading_to_themselves({id(part): self._in_place(part) for part in self._places.values()})
        if circular:
            return next(place for place, part in self._places.items() if id(part) in circular)
        places: dict[_Together, str] = {}
        ways: dict[_Together, list[_Way]] = {}
        rest = [(frozenset({id(part)}), place) for place, part in reversed(self._places.items())]
        with suppress(_ExhaustedError):
            while rest:
                together, place = rest.pop()
                if together not in places:
                    places[together] = place
                    ways[together], possible = self._ways(together)
                    rest += ((each, place) for way in (*ways[together], possible) for each in way)
        left = ways.keys() - grounded(ways)  # also what nothing meets, which is for the library to say
        endless = leading_to_themselves({each: left & set(chain.from_iterable(ways[each])) for each in left})
        return next((place for together, place in places.items() if together in endless), None)

    def _in_place(self, schema: Schema) -> set[int]:
        """Return what holds, or may hold, of whatever a schema holds of."""
        parts = [each for key in ("allOf", "anyOf", "oneOf") for each in schema.get(key, ())]
        parts.append(self._places.get(schema.get("$ref", "")))
        return {id(each) for each in parts if isinstance(each, Mapping)}

    def _ways(self, together: _Together) -> tuple[list[_Way], _Way]:
        """Return the ways to meet schemas together, and what may be in an answer beside."""
        ways, possible = list[_Way](), list[_Together]()
        for schemas in self._selections(together) if together != _NEVER else ():
            types = set(TYPES)
            for schema in schemas:
                given = schema.get("type", TYPES)
                types &= {given} if isinstance(given, str) else set(given)
            has_values = any("enum" in schema or "const" in schema for schema in schemas)
            if types - {"object", "array"} or (types and has_values):
                ways.append(())
            if "array" in types:
                least = max((schema.get("minItems", 0) for schema in schemas), default=0)
                items = self._items(schemas)
                ways.append(items[:least])
                possible += items[least:]
            if "object" in types:
                needed, others = self._properties(schemas)
                least = max((schema.get("minProperties", 0) for schema in schemas), default=0)
                is_enough = least <= len(needed)
                self._look(len(needed) * len(others))
                ways += [needed] if is_enough else [(*needed, each) for each in others]
                possible += others
        return ways, tuple(possible)

    def _selections(self, together: _Together) -> Iterator[list[Schema]]:
        """Yield schemas that are all met and lead to no others, one list for each choice there is."""
        rest: list[tuple[list[Any], dict[int, Schema], list[Sequence[Any]]]]
        rest = [([self._by_id[each] for each in together], {}, [])]
        while rest:
            new, met, choices = rest.pop()
            while new and new[-1] is not False:
                schema = new.pop()
                if isinstance(schema, Mapping) and id(schema) not in met:
                    met[id(schema)] = schema
                    new += schema.get("allOf", ())
                    new.append(self._places.get(schema.get("$ref", "")))
                    choices += (schema[key] for key in ("anyOf", "oneOf") if schema.get(key))
            self._look(8 + len(met))
            if not new and choices:
                *others, branches = choices
                rest += (([branch], dict(met), list(others)) for branch in branches)
            elif not new:
                yield [schema for schema in met.values() if not schema.keys() <= _LEADING]

    def _items(self, schemas: Sequence[Schema]) -> _Way:
        """Return what holds of each item that some schema has a place for, and of all others."""
        tuples = [_tuple_items(schema) for schema in schemas]
        length = max(map(len, (items for items, _ in tuples)), default=0)
        return tuple(
            self._together([items[i] if i < len(items) else rest for items, rest in tuples]) for i in range(length + 1)
        )

    def _properties(self, schemas: Sequence[Schema]) -> tuple[_Way, _Way]:
        """Return what holds of each property that is required, and of all others."""
        required = dict.fromkeys(name for schema in schemas for name in schema.get("required", ()))
        named = dict.fromkeys(name for schema in schemas for name in schema.get("properties", ()))
        others = [self._values(schemas, name) for name in named if name not in required]
        for schema in schemas:
            others += (self._together([each]) for each in schema.get("patternProperties", {}).values())
        others.append(self._together([schema.get("additionalProperties") for schema in schemas]))
        return tuple(self._values(schemas, name) for name in required), tuple(others)

    def _values(self, schemas: Sequence[Schema], name: str) -> _Together:
        """Return all that holds of a property."""
        found = list[Any]()
        for schema in schemas:
            patterns = schema.get("patternProperties", {})
            self._look(len(patterns))
            own = [schema["properties"][name]] if name in schema.get("properties", ()) else []
            own += (each for pattern, each in patterns.items() if _may_match(pattern, name))
            found += own or [schema.get("additionalProperties")]
        return self._together(found)

    def _together(self, schemas: list[Any]) -> _Together:
        self._look(len(schemas))
        return _NEVER if False in schemas else frozenset(id(each) for each in schemas if isinstance(each, Mapping))

    def _look(self, count: int) -> None:
        self._num_looks += count
        if self._num_looks > _MOST_LOOKS:
            raise _ExhaustedError


def _tuple_items(schema: Schema) -> tuple[Sequence[Any], Any]:
    """Return (the first items, all others)."""
    items, first = schema.get("items"), schema.get("prefixItems", ())
    return (items, None) if isinstance(items, list) else (first, items)


def _may_match(pattern: str, name: str) -> bool:
    """Tell if a pattern is not known to fail, by how it begins: Python's own engine may take for ever."""
    begins = _PREFIX.match(pattern)
    if begins is None or "|" in pattern:
        return True
    return name.startswith(begins[1][:-1] if begins[2] else begins[1])
