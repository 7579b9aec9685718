"""Close the objects of a JSON Schema: they hold what it names and nothing else, unless it says that they may.

OpenAI, Ollama and llama.cpp close them too, and their clients mean it so: by the letter anything may stand beside, and
a small model that may go on writing properties does not end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from localllm.text.grammar.keywords import all_parts
from localllm.text.grammar.references import pointer

Schema = Mapping[str, Any]
_OF_OBJECTS = ("properties", "required", "patternProperties", "additionalProperties", "minProperties", "maxProperties")
_OPENED = ("additionalProperties", "patternProperties", "minProperties")
_MOST_MET = 100_000  # schemas that are met together with others


def close(schema: Schema) -> None:
    """Close the objects of a schema in place.

    Of several schemas that are met together, by `allOf` or beside `$ref`, `anyOf` and `oneOf`, one is closed where it
    names all: otherwise none would let the others stand. References have to be as `references.pointer` writes them.
    """
    places = {pointer(steps): part for steps, part in all_parts(schema) if isinstance(part, dict)}
    left_open, met, num_met = set[int](), set[int](), 0
    for part in places.values():
        if id(part) not in met and _is_composed(part) and num_met < _MOST_MET:
            together = list(_met_together(part, places))
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


def _met_together(schema: Schema, places: Mapping[str, Schema]) -> Iterator[Schema]:
    """Yield a schema and all that it asks for, whichever its choices."""
    seen, rest = set[int](), list[Any]([schema])
    while rest:
        each = rest.pop()
        if isinstance(each, Mapping) and id(each) not in seen:
            seen.add(id(each))
            yield each
            rest += (part for key in ("allOf", "anyOf", "oneOf") for part in each.get(key, ()))
            rest.append(places.get(each.get("$ref", "")))


def _names(schema: Schema) -> set[str]:
    return {*schema.get("properties", ()), *schema.get("required", ())}


def _can_be_closed(schema: Schema) -> bool:
    """Tell if a schema names what it holds, and all that it has to, and says nothing of others."""
    is_said = any(key in schema for key in _OPENED)
    return "properties" in schema and not is_said and _names(schema) <= schema["properties"].keys()
