"""The notations in which models write the arguments of a call.

There are three: JSON; a tag for each argument, with its value as bare text; and literals, such as Python's. Knows no
family of models and no marks around a call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from localllm.server.tools.argument_readers import (
    ArgumentsReader,
    JsonReader,
    LiteralReader,
    Schema,
    TaggedReader,
    dumped,
)


class Notation(Protocol):
    @property
    def starts(self) -> str:
        """A regular expression of what arguments begin with."""
        ...

    def reader(self, schema: Schema) -> ArgumentsReader:
        """schema: of the arguments; a bare text has its type from there."""
        ...

    def written(self, arguments: Mapping[str, Any]) -> str: ...

    @property
    def marks(self) -> tuple[str, ...]:
        """What has marks that may be tokens of their own."""
        ...


@dataclass(frozen=True)
class JsonNotation:
    """{"city": "Rome", "days": 2}"""

    starts: ClassVar = r"\{"
    marks: ClassVar = ()

    def reader(self, schema: Schema) -> ArgumentsReader:  # noqa: ARG002 (JSON has types of its own)
        return JsonReader()

    def written(self, arguments: Mapping[str, Any]) -> str:
        return dumped(arguments)


@dataclass(frozen=True)
class TaggedNotation:
    """Values between tags: a text as it is, and anything else in JSON.

    begins: in front of an argument's name. middle: between name and value. ends: behind the value. last: behind all.
    """

    begins: str
    middle: str
    ends: str
    last: str

    @property
    def starts(self) -> str:
        return f"{re.escape(self.begins)}|{re.escape(self.last)}"

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.begins, self.middle, self.ends, self.last)

    def reader(self, schema: Schema) -> ArgumentsReader:
        return TaggedReader(self.begins, self.middle, self.ends, self.last, schema)

    def written(self, arguments: Mapping[str, Any]) -> str:
        values = {name: value if isinstance(value, str) else dumped(value) for name, value in arguments.items()}
        said = (f"{self.begins}{name}{self.middle}{value}{self.ends}" for name, value in values.items())
        return "".join([*said, self.last])


@dataclass(frozen=True)
class LiteralNotation:
    """Names and literals: (city="Rome", days=[1, 2]), or {city:<|"|>Rome<|"|>,days:[1,2]}.

    opens, closes: around all arguments
    equals: between name and value
    between: between two arguments
    quote: around a text; one of several characters ends it wherever it comes
    constants: for true, false and null
    has_bare_names: also within a value, where they come in the order of the alphabet
    """

    opens: str
    closes: str
    equals: str
    between: str
    quote: str
    constants: tuple[str, str, str]
    has_bare_names: bool = False

    @property
    def starts(self) -> str:
        return re.escape(self.opens)

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.quote,)

    def reader(self, schema: Schema) -> ArgumentsReader:  # noqa: ARG002 (literals have types of their own)
        return LiteralReader(self.quote, self.opens)

    def written(self, arguments: Mapping[str, Any]) -> str:
        return self.opens + self._pairs(arguments, is_bare=True) + self.closes

    def _pairs(self, values: Mapping[str, Any], *, is_bare: bool) -> str:
        equals = self.equals if is_bare else ": "
        names = sorted(values, key=str.lower) if self.has_bare_names else values
        said = ((name if is_bare else dumped(name), self.value(values[name])) for name in names)
        return self.between.join(f"{name}{equals}{value}" for name, value in said)

    def value(self, value: Any) -> str:
        if value is None or isinstance(value, bool):
            return self.constants[2 if value is None else int(not value)]
        if isinstance(value, list):
            return f"[{self.between.join(map(self.value, value))}]"
        if isinstance(value, Mapping):
            return f"{{{self._pairs(value, is_bare=self.has_bare_names)}}}"
        is_raw = isinstance(value, str) and len(self.quote) > 1
        return f"{self.quote}{value}{self.quote}" if is_raw else dumped(value)
