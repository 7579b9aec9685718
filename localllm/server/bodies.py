"""Models of requests and replies, and how a request's body is read: its size, its type, and what is wrong with it."""

from __future__ import annotations

import asyncio
import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
)
from pydantic_core import CoreSchema, ErrorDetails
from starlette.requests import Request

from localllm.server.errors import RequestError

# A prompt of 131,072 tokens of English has half a megabyte. The loop waits while a body is parsed: 1 ms for the largest
# that is text, 0.3 s for one of nothing but the smallest parts.
MAX_BODY_BYTES = 4 << 20
# A body that is too large is read so far, as long as it comes without a pause, and dropped: a client that is still
# sending would not see the reply.
_MOST_READ_BYTES = 64 << 20
_BODY_S = 30.0  # for a body to arrive, and as many more as it has of these bytes
_LEAST_BYTES_S = 16 << 10
_PAUSE_S = 0.25
# A body of four MiB can have two million. To describe each takes 7 s and a GiB, while the loop waits.
_MOST_MISTAKES = 1000
_INVALID = "invalid_value"  # as OpenAI names the error
_MOST_NAMED = 200  # characters of a field's name
_JSON = "application/json"
# One of these comes with whatever a page sends. A program without them means JSON where it says nothing of its type, as
# LiteLLM does, or what `curl -d` says by itself, as in Ollama's own examples.
_OF_PAGES = frozenset({"origin", "referer", "cookie", "sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest"})
_OF_PROGRAMS = frozenset({"", "application/x-www-form-urlencoded"})
NO_EFFECT = "Without effect"  # begins the description of a field that changes no answer
_DATE = re.compile(r"_\d{4}_?\d{2}_?\d{2}$")  # with which types of tools end
_WHOLE = "a whole number"  # the name of a choice
_CHOICES = frozenset({"str", "int", "float", "bool", "none", _WHOLE})  # of a union, as pydantic calls them


def _as_json_has_it(schema: Any) -> None:
    """Change the schema in place: lists fail at their first wrong item, and 1.0 is an integer, as in JSON Schema.

    No function is called for an integer that is written as such: a list of ids may have a million."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        if schema.get("type") == "int":
            plain = dict(schema)
            written = {"type": "function-before", "function": {"type": "no-info", "function": _whole}, "schema": plain}
            schema.clear()
            schema.update(type="union", mode="left_to_right", choices=[plain, (written, _WHOLE)])
            return
        choices = schema["choices"] if schema.get("type") == "union" else ()
        if any(isinstance(each, tuple) and _WHOLE in each for each in choices):
            return  # of a body within this one
        for part in schema.values():
            _as_json_has_it(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _as_json_has_it(part)


def _whole(given: object) -> object:
    return int(given) if isinstance(given, float) and given.is_integer() else given


def _no_number(given: object) -> object:
    """Keep 0 and 1 from passing for false and true, which they equal in Python."""
    return repr(given) if type(given) in (int, float) else given


OnlyFalse = Annotated[Literal[False], BeforeValidator(_no_number)]
OnlyTrue = Annotated[Literal[True], BeforeValidator(_no_number)]


@dataclass(frozen=True)
class Ignored:
    """Marks a field that is accepted although it changes no answer: `ignored_fields` names it.

    why: the reason that docs/using/api.md and the OpenAPI document give
    """

    why: str

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "description": f"{NO_EFFECT}: {self.why}."}


class Body(BaseModel):
    """The fields of a request. Any other field is refused by name; a field that is accepted and changes no answer is
    marked as `Ignored`, and named in the reply: nothing is ignored in silence.

    why: reasons for refused fields
    elsewhere: where a misplaced field belongs
    ignored_values: values, or items, of honoured fields that change no answer, with the reason
    named_by: the field that names the whole body, where all of it is ignored
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())
    why: ClassVar[Mapping[str, str]] = {}
    elsewhere: ClassVar[Mapping[str, str]] = {}
    ignored_values: ClassVar[Mapping[str, Mapping[str, str]]] = {}  # value -> why, by field
    named_by: ClassVar[str | None] = None
    _ignored: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **_more: Any) -> None:
        marks = {name: field.metadata for name, field in cls.model_fields.items()}
        cls._ignored = frozenset(name for name, found in marks.items() if any(type(each) is Ignored for each in found))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _as_json_has_it(schema)
        return schema


@dataclass(frozen=True)
class _LeftOut:
    """Marks a field of a reply that is left out where it is None."""

    may_be_null: bool = False  # it may also be written

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        found = handler(schema)
        choices = [each for each in found.get("anyOf", ()) if self.may_be_null or each != {"type": "null"}]
        return choices[0] if len(choices) == 1 else {**found, "anyOf": choices} if choices else found


T = TypeVar("T")
Absent = Annotated[T | None, _LeftOut()]  # left out where it is None
NullOrAbsent = Annotated[T | None, _LeftOut(may_be_null=True)]


class ReplyBody(BaseModel):
    """A reply, or a part of one, written in the order of its fields; those of `Absent` may be left out."""

    model_config = ConfigDict(protected_namespaces=())
    _optional: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def __pydantic_init_subclass__(cls, **_more: Any) -> None:
        marks = {name: field.metadata for name, field in cls.model_fields.items()}
        cls._optional = tuple(name for name, found in marks.items() if any(type(each) is _LeftOut for each in found))

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        found = handler(schema)
        written = handler.resolve_ref_schema(found)
        written["required"] = [name for name in cls.model_fields if name not in cls._optional]
        for each in written.get("properties", {}).values():
            each.pop("default", None)
        return found

    @property
    def written(self) -> dict[str, Any]:
        """Its fields as they are written."""
        if not self._optional:
            return self.__dict__
        found = self.__dict__.copy()
        for name in self._optional:
            if found[name] is None:
                del found[name]
        return found


def tagged_by_type(otherwise: str, *, default: str | None = None, foreign: Collection[str] = ()) -> Discriminator:
    """Return what tells the bodies of a union apart by their types: errors are then those of the one meant. The tag of
    a body is its type with a capital letter, which `_path` leaves out.

    otherwise: the error for any other type
    default: the type where there is none
    foreign: types of the body with the tag "Foreign"
    """

    def tag_of(given: object) -> str | None:
        kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", "")
        kind = default if kind is None else kind
        if not isinstance(kind, str) or kind[:1] != kind[:1].lower() or kind == "foreign":
            return None
        return "Foreign" if undated(kind) in foreign else kind[:1].upper() + kind[1:]

    return Discriminator(tag_of, custom_error_type="kind", custom_error_message=otherwise)


def undated(kind: str) -> str:
    """Return a type's name without the day of its version."""
    return _DATE.sub("", kind)


def ignored_fields(body: Body) -> list[str]:
    """Return the names of what the body has that changes no answer: "options.num_thread", "tools.web_search". They are
    names of fields and of known values: nothing that a client has made up."""
    return list(dict.fromkeys(_ignored_in(body, "")))


def _ignored_in(body: Body, where: str) -> Iterator[str]:
    """where: its place, with a dot behind it."""
    for name, value in body.__dict__.items():
        if value is None or value == "" or value == [] or value == {}:
            continue
        shown = where + (type(body).model_fields[name].alias or name)
        if name in body._ignored:
            yield shown
            continue
        known = body.ignored_values.get(name, ())
        items = value if isinstance(value, list) else (value,)
        yield from (f"{shown}.{item}" for item in items if known and item in known)
        for item in items:
            if not isinstance(item, Body):
                break  # a list of ids may have a million, and none of its items is a body where the first is not
            if item.named_by is None:
                yield from _ignored_in(item, f"{shown}.")
            else:
                yield f"{shown}.{undated(getattr(item, item.named_by))}"


B = TypeVar("B", bound=Body)


async def read_body(request: Request, of: type[B]) -> B:
    """Raises RequestError; ClientDisconnect where the client has gone."""
    headers = request.headers
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    is_program = _OF_PAGES.isdisjoint(headers) and (kind in _OF_PROGRAMS)
    if kind != _JSON and not is_program:
        why = f"it is {kind!r}" if kind else "there is none"
        fix = f"send the header Content-Type: {_JSON}"
        raise RequestError(415, f"the content type must be {_JSON}", why=why, fix=fix)
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        fix = "send it as it is, without the header Content-Encoding"
        raise RequestError(415, "the body must not be compressed", why=f"its coding is {coding!r}", fix=fix)
    return validated(of, await read_bytes(request))


async def read_bytes(request: Request) -> bytes:
    """Raises RequestError where the body is too large or does not arrive; ClientDisconnect as `read_body`."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > _MOST_READ_BYTES:
        raise _too_large()
    data, num_bytes, loop = bytearray(), 0, asyncio.get_running_loop()
    until = loop.time() + _BODY_S
    try:
        async with asyncio.timeout_at(until) as limit:
            async for piece in request.stream():
                num_bytes += len(piece)
                ends = until + num_bytes / _LEAST_BYTES_S
                if num_bytes <= MAX_BODY_BYTES:
                    data += piece
                    limit.reschedule(ends)
                elif num_bytes > _MOST_READ_BYTES:
                    break
                else:
                    limit.reschedule(min(ends, loop.time() + _PAUSE_S))
    except TimeoutError:
        if num_bytes > MAX_BODY_BYTES:
            raise _too_large() from None
        why = f"{num_bytes} bytes came in {_BODY_S + num_bytes / _LEAST_BYTES_S:.0f} s"
        raise RequestError(408, "the body did not arrive", why=why, headers={"connection": "close"}) from None
    if num_bytes > MAX_BODY_BYTES:
        raise _too_large()
    return bytes(data)


def _too_large() -> RequestError:
    why = f"at most {MAX_BODY_BYTES} bytes are read"
    return RequestError(413, "the body is too large", why=why, headers={"connection": "close"})


def validated(of: type[B], data: bytes) -> B:
    """Parse and check the body. Raises RequestError naming the first field that is wrong."""
    try:
        return of.model_validate_json(data)
    except ValidationError as error:
        raise _refusal(of, error) from None


def _refusal(of: type[Body], error: ValidationError) -> RequestError:
    if error.error_count() > _MOST_MISTAKES:
        return RequestError(400, "the body is invalid", why=f"{error.error_count()} fields are wrong", name=_INVALID)
    # Each choice of a union reports what it misses; the one that came furthest is the one meant.
    found: ErrorDetails = max(error.errors(include_url=False, include_input=False), key=lambda each: len(_path(each)))
    if found["type"] == "json_invalid":
        return RequestError(400, "the body is not JSON", why=found["msg"].removeprefix("Invalid JSON: "))
    path = _path(found)
    places = [".".join(map(str, path[:end])) for end in (None, 2, 1)]
    param = places[0][:_MOST_NAMED]
    if (known := next((place for place in places[1:] if place in of.why), None)) is not None:
        what, why, fix, name = f"{param!r} cannot be honoured", of.why[known], "", "unsupported_value"
    elif found["type"] == "extra_forbidden":
        near = difflib.get_close_matches(param, of.model_fields.keys() - of.why.keys(), n=1) if len(path) == 1 else []
        fix = of.elsewhere.get(param) or (f"{near[0]!r} is a known field" if near else "leave it out")
        what, why, name = f"unknown parameter {param!r}", "", "unknown_parameter"
    elif found["type"] == "missing":
        what, why, fix, name = f"{param}: Field required", "", "", "missing_required_parameter"
    else:
        why = found["msg"].removeprefix("Value error, ").replace(" after validation", "")
        what, fix, name = f"{param or 'the body'} is invalid", "", _INVALID
    return RequestError(400, what, why=why, fix=fix, param=param or None, name=name)


def _path(error: ErrorDetails) -> tuple[Any, ...]:
    """Return the place of an error, without pydantic's names of a union's choices."""

    def is_choice(part: str) -> bool:
        return part in _CHOICES or part.startswith("constrained-") or "[" in part or part[:1].isupper()

    return tuple(part for part in error["loc"] if isinstance(part, int) or not is_choice(part))
