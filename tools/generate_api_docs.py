"""Writes two parts of docs/using/api.md, from the endpoints and from the tests: `python -m tools.generate_api_docs`.

A test keeps them equal to what this would write. The rest of the page is written by hand.
"""

from __future__ import annotations

import json
import sys
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, product
from pathlib import Path
from typing import Any

from localllm.server import anthropic, ollama, openai, system_routes
from localllm.server.bodies import NO_EFFECT, Body
from localllm.server.endpoint import OPENAPI_PATH, Endpoint
from tests.server.claims import Claim, all_claims, requirements

Schema = Mapping[str, Any]

REPOSITORY = Path(__file__).parent.parent
TARGET = REPOSITORY / "docs" / "using" / "api.md"
DIALECTS: Mapping[str, Sequence[Endpoint]] = {
    "OpenAI's": openai.ENDPOINTS,
    "Anthropic's": anthropic.ENDPOINTS,
    "Ollama's": ollama.ENDPOINTS,
    "llama.cpp's, and others": system_routes.ENDPOINTS,
}
_DOCUMENT = f"| GET | `{OPENAPI_PATH}` | The OpenAPI document of these endpoints | |"
_WIDTH = 120
_MOST_VALUES = 3  # shown of a field that is refused but for them
_SHORT = 100  # characters that may be said again


def generate(page: str) -> str:
    """The page with its two parts written anew."""
    for name, lines in (("endpoints", endpoint_lines()), ("clients", client_lines(all_claims()))):
        before, begin, rest = page.partition(f"<!-- generated: {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        page = before + begin + "\n" + "\n".join(lines).strip() + "\n\n" + end + after
    return page


def endpoint_lines() -> Iterator[str]:
    """A table for each dialect, and what each body of it may say."""
    said: dict[str, str] = {}
    for dialect, endpoints in DIALECTS.items():
        yield from ("", f"### {dialect}", "", "| | | | streamed as |", "|---|---|---|---|")
        yield from map(_row, endpoints)
        if endpoints is system_routes.ENDPOINTS:
            yield _DOCUMENT
        for each in endpoints:
            if each.body is not None:
                lists = field_lists(each.body, _Once(said, each.path))
                yield from ("", f"`{each.method} {each.path}`", "")
                yield from (line for title, text in lists.items() if text for line in _filled(f"- {title}: {text}"))


def _row(endpoint: Endpoint) -> str:
    streamed = f"`{endpoint.stream_type}`" if endpoint.stream else ""
    summary = endpoint.summary + (" (deprecated)" if endpoint.deprecated else "")
    return f"| {endpoint.method} | `{_shown(endpoint.path)}` | {summary} | {streamed} |"


def _shown(path: str) -> str:
    """Without the type of what stands in it."""
    return path.replace(":path}", "}")


def _filled(text: str) -> list[str]:
    """Lines of a list's item, or of a paragraph."""
    indent = "  " if text.startswith("- ") else ""
    return textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


class _Once:
    """Says a long text once, then where it was said."""

    def __init__(self, said: dict[str, str], path: str) -> None:
        self._said = said
        self._path = path

    def say(self, text: str) -> str:
        where = self._said.setdefault(text, self._path)
        return text if len(text) <= _SHORT or where == self._path else f"as in `{where}`"


def field_lists(body: type[Body], once: _Once) -> dict[str, str]:
    """The fields of a request that are honoured, ignored and refused, and why."""
    schema = body.model_json_schema()
    fields = _Fields(schema["properties"], schema.get("$defs", {}), once)
    without = [name for name in fields.names if fields.has_no_effect(name)]
    ignored: dict[str | None, list[str]] = {}
    values = ((f"{name}.{value}", why) for name, known in body.ignored_values.items() for value, why in known.items())
    for path, why in dict.fromkeys(chain(fields.ignored(), values)):
        ignored.setdefault(why, []).append(f"`{path}`")
    honoured = [name for name in fields.names if name not in without and fields.says_something(name)]
    reasons = {**dict.fromkeys(name for name in fields.names if name not in (*without, *honoured)), **body.why}
    refused: dict[str | None, list[str]] = {}
    for name, reason in reasons.items():
        refused.setdefault(reason, []).append(fields.but_for(name))
    return {
        "honoured": ", ".join(map(fields.described, honoured)),
        "ignored": _by_reason({why: [once.say(", ".join(names))] for why, names in ignored.items()}),
        "refused": once.say(_by_reason(refused)),
    }


def _by_reason(fields: Mapping[str | None, Sequence[str]]) -> str:
    return "; ".join(", ".join(names) + (f" ({why})" if why else "") for why, names in fields.items())


def _why_ignored(schema: Schema) -> str | None:
    """None: it is not."""
    start, _, why = str(schema.get("description", "")).partition(": ")
    return why.rstrip(".") if start == NO_EFFECT else None


class _Fields:
    """The fields of an object. definitions: of the types that they refer to."""

    def __init__(self, properties: Mapping[str, Schema], definitions: Mapping[str, Schema], once: _Once) -> None:
        self.names = list(properties)
        self._properties = properties
        self._definitions = definitions
        self._once = once

    def has_no_effect(self, name: str) -> bool:
        """Return whether the field, or all that is in it, is marked so."""
        field = self._properties[name]
        inner = list(self._inner(field))
        is_nothing = bool(inner) and all(each.has_no_effect(one) for each in inner for one in each.names)
        return is_nothing or _why_ignored(field) is not None

    def ignored(self, where: str = "") -> Iterator[tuple[str, str]]:
        """(field, why) of each that has no effect, with those that are within others. where: this is, and a dot."""
        for name in self.names:
            reason = _why_ignored(self._properties[name])
            if reason is not None:
                yield where + name, reason
                continue
            for schema in self._objects_in(self._properties[name]):
                why = _why_ignored(schema)
                if why is None:
                    yield from _Fields(schema["properties"], self._definitions, self._once).ignored(f"{where}{name}.")
                    continue
                kinds = schema["properties"]["type"]["examples"]
                yield from ((f"{where}{name}.{kind}", why) for kind in kinds)

    def says_something(self, name: str) -> bool:
        """Return whether it has more than one value."""
        values = self._values(self._properties[name])
        return values is None or len(values) > 1

    def described(self, name: str) -> str:
        """The field with the fields in it."""
        field = self._properties[name]
        inner = list(self._inner(field))
        if not inner:
            return f"`{name}`"
        inner_fields = (each.described(one) for each in inner for one in each.names if each._is_honoured(one))
        text = ", ".join(dict.fromkeys(inner_fields))
        neutral = [f"`{one}`" for each in inner for one in each.names if each._is_neutral(one)]
        text = self._once.say("; not ".join(filter(None, (text, ", ".join(neutral)))))
        more = str(field.get("description", "")).rstrip(".")
        return f"`{name}` ({'; '.join(filter(None, (text, more[:1].lower() + more[1:])))})"

    def but_for(self, name: str) -> str:
        """The field with the values that it may have all the same, where they are few."""
        values = self._values(self._properties[name]) if name in self._properties else None
        few = [f"`{json.dumps(value)}`" for value in values or ()][: _MOST_VALUES + 1]
        return f"`{name}`" + (f" except {', '.join(few)}" if 0 < len(few) <= _MOST_VALUES else "")

    def _is_honoured(self, name: str) -> bool:
        return self.says_something(name) and not self.has_no_effect(name)

    def _is_neutral(self, name: str) -> bool:
        """Return whether it can say nothing. A text with one value distinguishes types."""
        values = self._values(self._properties[name])
        return values is not None and len(values) <= 1 and not (values and isinstance(values[0], str) and values[0])

    def _values(self, schema: Schema) -> list[Any] | None:
        """All that it may have, but for null; None: more than can be listed."""
        match self._resolved(schema):
            case {"anyOf": list(choices)}:
                found = [self._values(choice) for choice in choices]
                return None if None in found else [value for values in found for value in values or ()]
            case {"const": value}:
                return [value]
            case {"enum": list(enumerated)}:
                return enumerated
            case {"type": "null"}:
                return []
            case {"minimum": low, "maximum": high} if low == high:
                return [low]
            case {"maxItems": 0}:
                return [[]]
            case {"maxItems": 1, "items": items}:
                values = self._values(items)
                return None if values is None else [[value] for value in values]
            case {"properties": properties}:
                return _Fields(properties, self._definitions, self._once)._objects()
        return None

    def _objects(self) -> list[Any] | None:
        """All that have what has an effect."""
        fields = {name: self._values(self._properties[name]) for name in self.names if not self.has_no_effect(name)}
        if None in fields.values():
            return None
        known = {name: values for name, values in fields.items() if values}
        return [dict(zip(known, values, strict=True)) for values in product(*known.values())]

    def _inner(self, schema: Schema) -> Iterator[_Fields]:
        """The fields of the objects that it may be, or may be a list of, but for those that have no effect."""
        for found in self._objects_in(schema):
            if _why_ignored(found) is None:
                yield _Fields(found["properties"], self._definitions, self._once)

    def _objects_in(self, schema: Schema) -> Iterator[Schema]:
        resolved = self._resolved(schema)
        if "properties" in resolved:
            yield resolved
        for choice in (*resolved.get("anyOf", ()), *resolved.get("oneOf", ()), resolved.get("items")):
            if choice:
                yield from self._objects_in(choice)

    def _resolved(self, schema: Schema) -> Schema:
        name = str(schema.get("$ref", "")).rpartition("/")[2]
        return self._definitions[name] if name else schema


def client_lines(claims: Sequence[Claim]) -> Iterator[str]:
    """A table for each dialect: rows are what tests do, columns the clients by which they do it."""
    clients = _each_once(claim.client for claim in claims)
    installed = {**_from_the_project(), **requirements()}
    yield from _filled(
        f"{', '.join(f'`{installed[client]}`' for client in clients)}. An empty cell means that no test covers it."
    )
    for dialect, endpoints in DIALECTS.items():
        paths = _each_once(each.path for each in endpoints)
        own = sorted((claim for claim in claims if claim.path in paths), key=lambda claim: paths.index(claim.path))
        if own:
            yield from ("", f"### {dialect} dialect", "", *_table(own, clients))


def _table(claims: Sequence[Claim], clients: Sequence[str]) -> Iterator[str]:
    columns = [client for client in clients if any(claim.client == client for claim in claims)]
    yield f"| | | {' | '.join(columns)} |"
    yield f"|---|---|{'---|' * len(columns)}"
    for path, group in groupby(claims, key=lambda claim: claim.path):
        own = list(group)
        first = f"`{_shown(path)}`"
        for what in sorted(_each_once(claim.what for claim in own), key=lambda what: what.startswith("refused")):
            by = {claim.client for claim in own if claim.what == what}
            yield f"| {first} | {what} | {' | '.join('✓' if client in by else '' for client in columns)} |"
            first = ""


def _each_once(names: Iterable[str]) -> list[str]:
    """In the order in which they came."""
    return list(dict.fromkeys(names))


def _from_the_project() -> dict[str, str]:
    """The requirements of the clients that fit beside our own dependencies."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {line.partition(">")[0]: line for line in project["optional-dependencies"]["dev"]}


if __name__ == "__main__":
    TARGET.write_text(generate(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stderr.write(f"wrote {TARGET}\n")
