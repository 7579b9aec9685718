"""The keywords of JSON Schema, the parts of a schema, and the targets of its `$ref`s.

Our checks and the library that compiles a schema find targets by one rule.

Source of the rules: https://json-schema.org/draft/2020-12/json-schema-core#section-8.2, and of draft 4 to 7 that `$id`
is `id`, may be an anchor, and counts for nothing beside `$ref`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin

ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment",
    "$schema", "$id", "id", "$anchor", "contentEncoding", "contentMediaType", "contentSchema", "discriminator",
    "externalDocs", "xml", "markdownDescription",
})  # fmt: skip
ONE = ("additionalProperties", "items")
SEVERAL = ("prefixItems", "items", "anyOf", "allOf", "oneOf")
DEFINITIONS = ("$defs", "definitions")
NAMED = ("properties", "patternProperties", *DEFINITIONS)
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
SUPPORTED = frozenset({*ONE, *SEVERAL, *NAMED, *COUNTS, *BOUNDS,
                       "type", "enum", "const", "required", "multipleOf", "pattern", "format", "$ref",
                       "nullable"})  # fmt: skip
TYPES = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})
_LEGACY = ("draft-04", "draft-06", "draft-07")

Steps = tuple[str, ...]


def parts(schema: Mapping[str, Any]) -> Iterator[tuple[Steps, Any]]:
    """Yield the way to each schema that one is made of, and that schema; true and false are schemas."""
    for key, value in schema.items():
        if key in NAMED and isinstance(value, Mapping):
            for name, each in value.items():
                yield (key, name), each
        elif key in SEVERAL and isinstance(value, list):
            for index, each in enumerate(value):
                yield (key, str(index)), each
        elif key in ONE and isinstance(value, Mapping | bool):
            yield (key,), value


def all_parts(schema: Any, steps: Steps = ()) -> Iterator[tuple[Steps, Any]]:
    """Yield the way from the root and the schema, for one and all that it is made of, each behind what holds it."""
    rest = [(steps, schema)]
    while rest:
        at, part = rest.pop()
        yield at, part
        if isinstance(part, Mapping):
            rest += reversed([((*at, *way), each) for way, each in parts(part)])


def mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a schema of changed parts. Each is changed after all that it is made of."""
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in NAMED:
            found[key] = {name: mapped(each, change) for name, each in value.items()}
        elif key in SEVERAL and isinstance(value, list):
            found[key] = [mapped(each, change) for each in value]
        else:
            found[key] = mapped(value, change) if key in ONE else value
    return change(found)


def pointer(steps: Steps) -> str:
    """Return the JSON pointer to a place, as a reference is written."""
    return "#" + "".join("/" + quote(step.replace("~", "~0").replace("/", "~1"), safe="$") for step in steps)


class References:
    """The references of one document, however much of it is wrong."""

    def __init__(self, schema: Any) -> None:
        draft = str(schema.get("$schema", "")) if isinstance(schema, Mapping) else ""
        self._is_legacy = any(each in draft for each in _LEGACY)
        self._id_key = "id" if "draft-04" in draft else "$id"
        self._bases: dict[Steps, str] = {}
        self._roots: dict[str, Steps] = {"": ()}
        self._anchors: dict[tuple[str, str], Steps] = {}
        self._parts: dict[Steps, Any] = {}
        rest: list[tuple[Steps, Any, str]] = [((), schema, "")]
        while rest:
            steps, part, base = rest.pop()
            if isinstance(part, Mapping):
                base = self._noted(steps, part, base)
                rest += [((*steps, *way), each, base) for way, each in parts(part)]
            self._bases[steps] = base
            self._parts[steps] = part

    def used(self) -> set[Steps]:
        """Return the ways to the definitions that the document leads to, and to what holds them."""
        seen, rest = set[Steps](), list[Steps]([()])
        while rest:
            steps = rest.pop()
            if steps not in seen:
                seen.add(steps)
                rest += self._led_to(steps, self._parts[steps])
        at = ((steps, index) for steps in seen for index, step in enumerate(steps) if step in DEFINITIONS)
        return {steps[: index + 2] for steps, index in at}

    def _led_to(self, steps: Steps, part: Any) -> Iterator[Steps]:
        if isinstance(part, Mapping):
            yield from ((*steps, *way) for way, _ in parts(part) if way[0] not in DEFINITIONS)
            reference = part.get("$ref")
            target = self.target(steps, reference) if isinstance(reference, str) else None
            if target is not None:
                yield target

    def target(self, steps: Steps, reference: str) -> Steps | None:
        """Return the way to the schema that one at `steps` refers to; None where the document has none there."""
        address, fragment = _resolved(self._bases[steps], reference)
        root = self._roots.get(address)
        if root is None:
            return None
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self._anchors.get((address, fragment))
        way = [step.replace("~1", "/").replace("~0", "~") for step in fragment.split("/")[1:]]
        found = (*root, *way)
        return found if found in self._bases else None

    def _noted(self, steps: Steps, part: Mapping[str, Any], base: str) -> str:
        """Note the names of a schema, and return the base of references in it."""
        given = part.get(self._id_key)
        if isinstance(given, str) and not (self._is_legacy and "$ref" in part):
            address, fragment = _resolved(base, given)
            if fragment:  # of the older drafts
                self._anchors.setdefault((address, fragment), steps)
            elif address:
                base = address
                self._roots.setdefault(address, steps)
        if not steps:
            self._roots[base] = ()
        if isinstance(anchor := part.get("$anchor"), str):
            self._anchors.setdefault((base, anchor), steps)
        return base


def _resolved(base: str, reference: str) -> tuple[str, str]:
    """Return (address, fragment); what is not an address stands for itself."""
    try:  # `urljoin` knows no urn:
        address, fragment = urldefrag(base + reference if reference.startswith("#") else urljoin(base, reference))
    except ValueError:
        return reference, ""
    return address, fragment
