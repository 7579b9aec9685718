"""Find out if a JSON Schema can be met by an answer that ends: one that has to hold itself cannot.

A schema is met together with its `allOf` and the target of its `$ref`; of `anyOf` and `oneOf`, and of what several of
these make of one property, each is looked at alone. A schema that comes back to itself by these keywords alone, in the
same place of an answer, means nothing, whatever else may be chosen there: validators do not end with it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

from localllm.text.grammar.schema_parts import TYPES, all_parts, pointer

K = TypeVar("K")
Schema = Mapping[str, Any]
_NEVER = 0  # stands for false, as `id` does for other schemas
# Schemas that are looked at beside others, about a microsecond each. Behind them all counts as ended.
_MOST_MET = 200_000
_PREFIX = re.compile(r"\^([\w -]*)(?![\w -])([?*{]?)")


def grounded(ways: Mapping[K, Collection[Collection[K]]]) -> set[K]:
    """Return those with a way that needs nothing but grounded ones.

    ways: for each the ways to meet it, and what each of them needs. What has no entry counts as grounded.
    """
    waiting = defaultdict[K, list[tuple[K, set[K]]]](list)  # for each the ways that miss it: (whose, all they miss)
    met, ready = set[K](), list[K]()
    for key, found in ways.items():
        for way in found:
            missing = {each for each in way if each in ways}
            for each in missing:
                waiting[each].append((key, missing))
            if not missing:
                ready.append(key)
    while ready:
        done = ready.pop()
        if done not in met:
            met.add(done)
            for key, missing in waiting[done]:
                missing.discard(done)
                if not missing:
                    ready.append(key)
    return met


def leading_to_themselves(held: Mapping[K, Collection[K]]) -> set[K]:
    """Return those that hold themselves, or one that does. held: by each the others, all of which have an entry."""
    return held.keys() - grounded({key: [others] for key, others in held.items()})


def endless(schema: Schema) -> str | None:
    """Return the place of a schema that only an endless answer would meet; None where there is none.

    Its references have to be pointers as `pointer` writes them, with a target each.
    """
    places = {pointer(steps): part for steps, part in all_parts(schema) if isinstance(part, Mapping)}
    circular = leading_to_themselves({id(part): _in_place(part, places) for part in places.values()})
    if not circular:
        ways: dict[int, list[list[int]]] = {_NEVER: []}
        num_met = 0
        for part in places.values():
            schemas = list(met_together(part, places, ("allOf",))) if num_met < _MOST_MET else []
            num_met += len(schemas)
            choices = [each[key] for each in schemas for key in ("anyOf", "oneOf") if each.get(key)]
            ways |= {id(branches): [_needed([branch]) for branch in branches] for branches in choices}
            ways[id(part)] = [[*way, *map(id, choices)] for way in _ways(schemas)]
        left = ways.keys() - grounded(ways)  # also what nothing meets, which is for the library to say
        circular = leading_to_themselves({each: left & set(chain.from_iterable(ways[each])) for each in left})
    return next((place for place, part in places.items() if id(part) in circular), None)


def _in_place(schema: Schema, places: Mapping[str, Schema]) -> list[int]:
    """Return what holds, or may hold, of whatever a schema holds of."""
    parts = [each for key in ("allOf", "anyOf", "oneOf") for each in schema.get(key, ())]
    return [id(each) for each in (*parts, places.get(schema.get("$ref", ""))) if isinstance(each, Mapping)]


def met_together(schema: Schema, places: Mapping[str, Schema], keys: Sequence[str]) -> Iterator[Schema]:
    """Yield a schema, the target of its `$ref`, what it has at these keys, and so on. places: by their pointers."""
    seen, rest = set[int](), list[Any]([schema])
    while rest:
        each = rest.pop()
        if each is False:
            yield {"type": []}
        if isinstance(each, Mapping) and id(each) not in seen:
            seen.add(id(each))
            yield each
            rest += (part for key in keys for part in each.get(key, ()))
            rest.append(places.get(each.get("$ref", "")))


def _ways(schemas: Sequence[Schema]) -> Iterator[list[int]]:
    """Yield the ways to meet schemas together: what has to end for each."""
    types = set(TYPES)
    for schema in schemas:
        given = schema.get("type", TYPES)
        types &= {given} if isinstance(given, str) else set(given)
    if types - {"object", "array"} or (types and any("enum" in schema or "const" in schema for schema in schemas)):
        yield []
    if "array" in types:
        least = max((schema.get("minItems", 0) for schema in schemas), default=0)
        yield _needed([item for schema in schemas for item in _first_items(schema, least)])
    if "object" in types:
        required = {name for schema in schemas for name in schema.get("required", ())}
        needed = _needed([value for name in required for schema in schemas for value in _values(schema, name)])
        if max((schema.get("minProperties", 0) for schema in schemas), default=0) <= len(required):
            yield needed
        else:
            kinds = [schema.get(key, {}) for key in ("properties", "patternProperties") for schema in schemas]
            others = [[each] for named in kinds for each in named.values()]
            others.append([schema.get("additionalProperties") for schema in schemas])
            yield from ([*needed, *_needed(each)] for each in others)


def _needed(schemas: Collection[Any]) -> list[int]:
    return [_NEVER if each is False else id(each) for each in schemas if isinstance(each, Mapping) or each is False]


def _first_items(schema: Schema, count: int) -> list[Any]:
    """Return what holds of so many items, and what of each behind those that have a place."""
    items = schema.get("items")
    first, others = (items, None) if isinstance(items, list) else (schema.get("prefixItems", []), items)
    return [*first[:count], others] if len(first) < count else first[:count]


def _values(schema: Schema, name: str) -> list[Any]:
    """Return all that holds of a property."""
    own = [schema["properties"][name]] if name in schema.get("properties", ()) else []
    own += (each for pattern, each in schema.get("patternProperties", {}).items() if _may_match(pattern, name))
    return own or [schema.get("additionalProperties")]


def _may_match(pattern: str, name: str) -> bool:
    """Tell if a pattern is not known to fail, by how it begins: Python's own engine may take for ever."""
    begins = _PREFIX.match(pattern)
    if begins is None or "|" in pattern:
        return True
    return name.startswith(begins[1][:-1] if begins[2] else begins[1])
