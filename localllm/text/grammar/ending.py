"""Whether a JSON Schema can be met by an answer that ends: one that has to hold itself cannot.

What has to be met together is looked at together: a schema, its `allOf`, what its `$ref` points at and one each of its
`anyOf` and `oneOf`; then what all of these make of a property. Such a set ends where one of the ways to meet it needs
nothing that does not end. A schema that comes back to itself by these alone, in the same place of an answer, means
nothing, whatever else may be chosen there: validators do not end with it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.text.grammar.circles import holding_themselves
from localllm.text.grammar.keywords import TYPES, all_parts
from localllm.text.grammar.references import pointer

Schema = Mapping[str, Any]
_Together = frozenset[int]  # schemas that have to be met together, by `id`
_NEVER: _Together = frozenset({0})  # false is one of them: no way to meet it
# Schemas and names that are looked at, each about a microsecond. What is not looked at then counts as ended.
_MOST_LOOKS = 200_000
_SAYS = frozenset({
    "type", "enum", "const", "properties", "patternProperties", "additionalProperties", "required", "minProperties",
    "items", "prefixItems", "minItems",
})  # fmt: skip
_PREFIX = re.compile(r"\^([\w -]*)(?![\w -])([?*{]?)")


def endless(schema: Schema) -> str | None:
    """The place of a schema that only an endless answer would meet; None where there is none.

    Its references have to be pointers as `references.pointer` writes them, with a target each.
    """
    return _Document(schema).endless()


@dataclass(frozen=True)
class _Way:
    """needed: what all has to end. one_of: of which one has to, where there are any. possible: what may be there."""

    needed: tuple[_Together, ...] = ()
    one_of: tuple[_Together, ...] = ()
    possible: tuple[_Together, ...] = ()

    @property
    def asked(self) -> tuple[_Together, ...]:
        return (*self.needed, *self.one_of)


class _Document:
    def __init__(self, schema: Schema) -> None:
        self._places = {pointer(steps): part for steps, part in all_parts(schema) if isinstance(part, Mapping)}
        self._by_id = {id(part): part for part in self._places.values()}
        self._num_looks = 0

    def endless(self) -> str | None:
        if (place := self._circular()) is not None:
            return place
        seen: dict[_Together, str] = {}
        ways: dict[_Together, list[_Way]] = {}
        rest = [(frozenset({id(part)}), place) for place, part in reversed(self._places.items())]
        while rest:
            together, place = rest.pop()
            if together not in seen and self._num_looks < _MOST_LOOKS:
                seen[together] = place
                ways[together] = [] if together == _NEVER else list(self._ways(together))
                rest += ((each, place) for way in ways[together] for each in (*way.asked, *way.possible))
        left = ways.keys() - _ended(ways)  # what nothing meets, too, which is for the library to say
        held_by = {each: left & {other for way in ways[each] for other in way.asked} for each in left}
        circular = holding_themselves(held_by)
        return next((place for together, place in seen.items() if together in circular), None)

    def _circular(self) -> str | None:
        """The first schema that leads to one which comes back to itself in its own place; None where there is none."""
        brought = {id(part): {id(each) for each in self._brought(part)} for part in self._places.values()}
        circular = holding_themselves(brought)
        return next((place for place, part in self._places.items() if id(part) in circular), None)

    def _brought(self, schema: Schema) -> Iterator[Schema]:
        """What holds, or may hold, of whatever the schema holds of."""
        parts = [each for key in ("allOf", "anyOf", "oneOf") for each in schema.get(key, ())]
        parts.append(self._places.get(schema.get("$ref", "")))
        return (each for each in parts if isinstance(each, Mapping))

    def _ways(self, together: _Together) -> Iterator[_Way]:
        for met in self._selections(together):
            said = [schema for schema in met if not _SAYS.isdisjoint(schema)]
            self._num_looks += _num_looks(said)
            if self._num_looks < _MOST_LOOKS:
                yield from _ways(said)
        if self._num_looks >= _MOST_LOOKS:  # not all of them were looked at
            yield _Way()

    def _selections(self, together: _Together) -> Iterator[list[Schema]]:
        """Schemas that are all met, one list for each choice there is."""
        rest = [_Selection(self._by_id[each] for each in together)]
        while rest and self._num_looks < _MOST_LOOKS:
            selection = rest.pop()
            choice = selection.grown(self._target)
            self._num_looks += 8 + len(selection.schemas)
            if selection.is_void:
                continue
            if choice is None:
                yield list(selection.schemas.values())
            else:
                rest += (selection.with_branch(branch) for branch in choice)

    def _target(self, reference: str) -> Schema | None:
        return self._places.get(reference)


class _Selection:
    """Schemas that are met together, as far as it has been chosen."""

    def __init__(self, schemas: Iterable[Any]) -> None:
        self.schemas: dict[int, Schema] = {}
        self.is_void = False  # one of them is false
        self._choices: list[Sequence[Any]] = []
        self._open: list[Schema] = []
        self._take_in(schemas)

    def grown(self, target: Callable[[str], Schema | None]) -> Sequence[Any] | None:
        """Takes in all that has to be met too, and returns the branches of a choice that is left; None for none."""
        while self._open:
            schema = self._open.pop()
            self._take_in(schema.get("allOf", ()))
            self._take_in([target(schema["$ref"])] if "$ref" in schema else ())
            self._choices += (schema[key] for key in ("anyOf", "oneOf") if schema.get(key))
        return self._choices.pop() if self._choices else None

    def with_branch(self, branch: Any) -> _Selection:
        other = _Selection(())
        other.schemas, other.is_void, other._choices = dict(self.schemas), self.is_void, list(self._choices)
        other._take_in([branch])
        return other

    def _take_in(self, schemas: Iterable[Any]) -> None:
        for schema in schemas:
            self.is_void |= schema is False
            if isinstance(schema, Mapping) and id(schema) not in self.schemas:
                self.schemas[id(schema)] = schema
                self._open.append(schema)


def _num_looks(schemas: Sequence[Schema]) -> int:
    """That `_ways` takes."""
    named = {name for schema in schemas for key in ("properties", "required") for name in schema.get(key, ())}
    num_patterns = sum(len(schema.get("patternProperties", ())) for schema in schemas)
    num_items = max((len(_tuple_items(schema)[0]) for schema in schemas), default=0)
    return (len(named) + num_items) * (len(schemas) + num_patterns)


def _ways(schemas: Sequence[Schema]) -> Iterator[_Way]:
    """To meet all of them, which refer to nothing and leave no choice any more."""
    types = set(TYPES)
    for schema in schemas:
        given = schema.get("type", TYPES)
        types &= {given} if isinstance(given, str) else set(given)
    if types - {"object", "array"} or (types and any("enum" in schema or "const" in schema for schema in schemas)):
        yield _Way()
    if "array" in types:
        yield _array(schemas)
    if "object" in types:
        yield _object(schemas)


def _array(schemas: Sequence[Schema]) -> _Way:
    least = max((schema.get("minItems", 0) for schema in schemas), default=0)
    tuples = [_tuple_items(schema) for schema in schemas]
    length = max(map(len, (items for items, _ in tuples)), default=0)
    at = [_together(items[i] if i < len(items) else rest for items, rest in tuples) for i in range(length + 1)]
    return _Way(tuple(at[:least]), possible=tuple(at[least:]))


def _tuple_items(schema: Schema) -> tuple[Sequence[Any], Any]:
    """(its first items, all others)."""
    items, first = schema.get("items"), schema.get("prefixItems", ())
    return (items, None) if isinstance(items, list) else (first, items)


def _object(schemas: Sequence[Schema]) -> _Way:
    required = {name for schema in schemas for name in schema.get("required", ())}
    named = dict.fromkeys(name for schema in schemas for name in schema.get("properties", ()))
    optional = [_together(_values(schemas, name)) for name in named if name not in required]
    patterns = [each for schema in schemas for each in schema.get("patternProperties", {}).values()]
    others = [_together([each]) for each in patterns]
    others.append(_together(schema.get("additionalProperties") for schema in schemas))
    least = max((schema.get("minProperties", 0) for schema in schemas), default=0)
    return _Way(
        needed=tuple(_together(_values(schemas, name)) for name in sorted(required)),
        one_of=(*optional, *others) if least > len(required) else (),
        possible=(*optional, *others),
    )


def _values(schemas: Sequence[Schema], name: str) -> Iterator[Any]:
    """All that holds for a property."""
    for schema in schemas:
        patterns = schema.get("patternProperties", {})
        found = [schema["properties"][name]] if name in schema.get("properties", ()) else []
        found += (each for pattern, each in patterns.items() if _may_match(pattern, name))
        yield from found or [schema.get("additionalProperties")]


def _may_match(pattern: str, name: str) -> bool:
    """Whether it is not known to fail: by how it begins, for Python's own engine may take for ever."""
    begins = _PREFIX.match(pattern)
    if begins is None or "|" in pattern:
        return True
    return name.startswith(begins[1][:-1] if begins[2] else begins[1])


def _together(schemas: Iterable[Any]) -> _Together:
    found = list(schemas)
    return (
        _NEVER
        if any(each is False for each in found)
        else frozenset(id(schema) for schema in found if isinstance(schema, Mapping))
    )


def _ended(ways: Mapping[_Together, Sequence[_Way]]) -> set[_Together]:
    """Which of them can be met. What was not looked at counts as one that can."""
    holders = defaultdict[_Together, list[_Together]](list)
    for together, found in ways.items():
        for each in (each for way in found for each in way.asked):
            holders[each].append(together)
    ended: set[_Together] = set()

    def ends(way: _Way) -> bool:
        def is_met(each: _Together) -> bool:
            return each in ended or each not in ways

        return all(map(is_met, way.needed)) and (not way.one_of or any(map(is_met, way.one_of)))

    rest = list(ways)
    while rest:
        together = rest.pop()
        if together not in ended and together in ways and any(map(ends, ways[together])):
            ended.add(together)
            rest += holders[together]
    return ended
