"""The messages between an engine and front ends in other processes: lines of JSON over a socket.

Dataclasses are written as their fields, those that are as usual left out, and read as the types of these say. Errors
arrive as the classes that they were, or as the nearest of `localllm.errors`. Nothing runs by being read: there are no
pickles.
"""

from __future__ import annotations

import dataclasses
import json
import types
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from localllm import errors
from localllm.engine.events import FinishedEvent, GrownEvent, PrefillEvent, TokenEvent
from localllm.errors import BugError, Fix, LocalLLMError

MOST_BYTES = 64 << 20  # of a line: a prompt of a million tokens has eight
EVENTS: Mapping[str, type] = {each.__name__: each for each in (GrownEvent, PrefillEvent, TokenEvent, FinishedEvent)}

Message = dict[str, Any]


class WireError(Exception):
    """The bytes that came are no message."""


class _Floats:
    """`array[float]` as a type: Python 3.11's array takes no parameters."""

    def __class_getitem__(cls, _item: object) -> type:
        return array


def line(message: Mapping[str, Any]) -> bytes:
    """One message, whose values are `plain`."""
    return json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"


def message(data: bytes) -> Message:
    """Raises WireError."""
    try:
        found = json.loads(data)
    except ValueError as error:
        raise WireError(str(error)) from None
    if not isinstance(found, dict):
        raise WireError("it is not an object")
    return found


def plain(value: Any) -> Any:
    """Return a value as JSON has it. Raises TypeError for what is not plain data."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, tuple | list | array | frozenset):
        return [plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, BaseException):
        return _plain_error(value)
    if dataclasses.is_dataclass(value):
        given = ((each, getattr(value, each.name)) for each in dataclasses.fields(value))
        return {each.name: plain(own) for each, own in given if own != _usual(each)}
    raise TypeError(f"{type(value).__name__} cannot cross to another process")


def read(kind: Any, value: Any) -> Any:
    """Return the value of that type that `plain` was given. Raises WireError."""
    try:
        return _reader(kind)(value)
    except (TypeError, ValueError, KeyError, AttributeError, StopIteration, LocalLLMError) as error:
        raise WireError(f"{kind}: {error}") from None


def _usual(field: dataclasses.Field[Any]) -> Any:
    """Return the default; MISSING where there is none."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _optional(parts)
    if origin is tuple:
        return _tuple(parts)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        key, item = _reader(parts[0]), _reader(parts[1])
        return lambda value: {key(name): item(each) for name, each in value.items()}
    if origin is frozenset:
        item = _reader(parts[0])
        return lambda value: frozenset(map(item, value))
    if kind is array:
        return lambda value: array("f", value)
    if isinstance(kind, type):
        if issubclass(kind, BaseException):
            return _error
        if dataclasses.is_dataclass(kind):
            return _object(kind)
        if kind is int:
            return int  # a key of a table comes as text
    return lambda value: value


def _optional(parts: tuple[Any, ...]) -> Callable[[Any], Any]:
    kinds = [part for part in parts if part is not type(None)]
    if all(dataclasses.is_dataclass(kind) for kind in kinds) and len(kinds) > 1:
        return _either(kinds)
    # Literals beside others are what they are; of other types there is one.
    of = next((kind for kind in kinds if get_origin(kind) is not Literal), kinds[0])
    item = _reader(of)
    return lambda value: None if value is None else item(value)


def _either(kinds: list[Any]) -> Callable[[Any], Any]:
    """Return an instance of the one class, of several, whose fields these are."""
    known = {kind: {each.name for each in dataclasses.fields(kind)} for kind in kinds}
    needed = {
        kind: {each.name for each in dataclasses.fields(kind) if _usual(each) is dataclasses.MISSING} for kind in kinds
    }

    def read_either(value: Any) -> Any:
        names = set(value)
        return _reader(next(kind for kind in kinds if needed[kind] <= names <= known[kind]))(value)

    return read_either


def _tuple(parts: tuple[Any, ...]) -> Callable[[Any], Any]:
    if parts[-1] is Ellipsis:
        item = _reader(parts[0])
        return lambda value: tuple(map(item, value))
    items = [_reader(part) for part in parts]
    return lambda value: tuple(read_one(each) for read_one, each in zip(items, value, strict=True))


def _object(kind: type) -> Callable[[Any], Any]:
    known: dict[str, Callable[[Any], Any]] = {}

    def read_object(value: Any) -> Any:
        if not known:  # when the first comes: a type may name itself
            hints = get_type_hints(kind, localns={"array": _Floats})
            known.update({name: _reader(of) for name, of in hints.items()})
        return kind(**{name: known[name](each) for name, each in value.items()})

    return read_object


def _plain_error(error: BaseException) -> Message:
    if not isinstance(error, LocalLLMError):
        what = f"this is a bug in localllm: {type(error).__name__}"
        if isinstance(error, MemoryError):
            return {"class": "DoesNotFitError", "what": "the memory ran out", "why": str(error), "fixes": []}
        return {"class": "BugError", "what": what, "why": str(error), "fixes": []}
    more = {name: value for name, value in vars(error).items() if name not in ("what", "why", "fixes")}
    numbers = {name: value for name, value in more.items() if isinstance(value, int)}
    name = next(kind.__name__ for kind in type(error).__mro__ if _is_known(kind.__name__))
    return {"class": name, "what": error.what, "why": error.why, "fixes": plain_fixes(error.fixes), "numbers": numbers}


def plain_fixes(fixes: Sequence[Fix]) -> list[Any]:
    return [(fix.kind, fix.words) for fix in fixes]


def read_fixes(value: Sequence[Any]) -> list[Fix]:
    return [Fix(kind, tuple(words)) for kind, words in value]


def _is_known(name: str) -> bool:
    kind = getattr(errors, name, None)
    return isinstance(kind, type) and issubclass(kind, LocalLLMError)


def _error(value: Message) -> LocalLLMError:
    kind = getattr(errors, value["class"]) if _is_known(value["class"]) else BugError
    error: LocalLLMError = kind(value["what"], why=value["why"], fix=read_fixes(value["fixes"]))
    for name, number in value.get("numbers", {}).items():
        setattr(error, name, number)
    return error
