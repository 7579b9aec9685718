"""Tells calls apart from text while an answer is being written.

What may still turn out to be no call is held back until it is certain: a broken call stays text. Where a grammar makes
sure that a call is one, its arguments are emitted as they come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

from pydantic_core import from_json

from localllm.chat.harmony import Messages, Step, is_thought
from localllm.chat.tool_words import arguments_of, loaded
from localllm.server.tools.argument_readers import ArgumentsReader, Schema, ValueEnd
from localllm.server.tools.deltas import Kind, Part, Says
from localllm.server.tools.tool_formats import ToolFormat
from localllm.text.tokenizer import valid_unicode

_NAME = r"[a-zA-Z0-9_.-]{1,128}"
_MOST_BLANKS = 256  # held back because a call might follow
_MOST_HEAD = 400  # characters in front of the arguments of a call
_BETWEEN = " \n;"  # between two calls: no text
# Behind a mark: the value that a call is, {"name" ..., [{"name" ...; and what may still become one.
_OBJECT = re.compile(r"\s*(?:\{|\[\s*[{\]])")
_BEGUN_OBJECT = re.compile(r"\s*(?:\[\s*)?")
# All that stands in front of the arguments of a call, which may be the next one of a list.
_HEAD = re.compile(rf'[\s\[\]}},]*\{{\s*"name"\s*:\s*"({_NAME})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)')
_CALLED = re.compile(rf"to=(?:functions\.)?({_NAME})")  # in the header of a message of harmony


class ToolCallParser:
    """Parses an answer in which calls stand between marks."""

    is_thinking = False

    def __init__(self, form: ToolFormat, tools: Mapping[str, Schema], *, streams: bool, says: Says) -> None:
        """tools: the schemas of their arguments by their names; a call of another one stays text.
        streams: a grammar makes sure that calls are calls, written exactly as the format has them.
        says: what may stand beside them.
        """
        self._form = form
        self._forms = {mark: each for each in (form.also, form) if each is not None for mark in each.opens}
        self._tools = tools
        self._streams = streams
        self._says = says
        self._pending = ""
        self._body: _HeldCall | _NamedCalls | None = None
        self._closings: tuple[str, ...] = ()  # marks that may come
        self._has_called = False
        self._has_spoken = False  # since the last call

    def feed(self, text: str) -> list[Part]:
        self._pending += text
        parts: list[Part] = []
        while self._pending and self._step(parts):
            pass
        return self._allowed(parts)

    def end(self, *, is_cut: bool) -> list[Part]:
        if self._body is not None:
            # Where JSON has to stand, a call that is not whole has met a stop text, if not the end of the context.
            return self._allowed(self._body.end(is_cut=is_cut or self._says == "json"))
        rest, self._pending = self._pending, ""
        if self._has_called and not self._has_spoken:
            rest = rest.strip(_BETWEEN)
            rest = "" if any(mark.startswith(rest) for mark in self._closings) else rest
        return [("text", rest)] if rest and self._says == "anything" else []

    def _allowed(self, parts: list[Part]) -> list[Part]:
        """Drop text where there are only calls: it is a piece of one that was cut, or a blank in front of it."""
        return parts if self._says != "nothing" else [part for part in parts if part[0] != "text"]

    def _step(self, parts: list[Part]) -> bool:
        """Take what is certain off the pending text. Return False where more has to come."""
        text = self._pending
        if self._body is not None:
            found, rest = self._body.feed(text)
            parts += found
            self._pending = rest or ""
            if rest is None:
                return False
            has_called = self._body.has_called
            self._closings = self._body.closings if has_called else ()
            self._has_called |= has_called
            self._has_spoken = not has_called
            self._body = None
            return True
        if self._closings:
            mark, begun = self._closings[0], text.lstrip()
            if mark.startswith(begun) and begun != mark and len(text) <= _MOST_BLANKS:
                return False
            self._closings, self._pending = self._closings[1:], begun.removeprefix(mark)
            return True
        return self._read_text(parts) if self._says == "anything" else self._read_json(parts)

    def _read_text(self, parts: list[Part]) -> bool:
        text = self._pending
        if self._has_called and not self._has_spoken:
            text = text.lstrip(_BETWEEN)
        if self._form.is_bare and not self._has_spoken and (bare := text.lstrip())[:1] in ("{", "["):
            return self._begin(text[: len(text) - len(bare)], "", bare)
        at, mark = min(((text.find(mark), mark) for mark in self._forms if mark in text), default=(-1, ""))
        if at >= 0:
            said = text[:at].rstrip()
            self._say(parts, said)
            return self._begin(text[len(said) : at], mark, text[at + len(mark) :])
        # What may be the beginning of a mark waits, and the blanks in front of it.
        held = max((n for mark in self._forms for n in range(len(mark)) if text.endswith(mark[:n])), default=0)
        said = text[: len(text) - held]
        blanks = len(said) - len(said.rstrip())
        said = said if blanks > _MOST_BLANKS else said[: len(said) - blanks]
        self._say(parts, said)
        self._pending = text[len(said) :]
        return False

    def _read_json(self, parts: list[Part]) -> bool:
        """Read a value, or calls; how it begins shows which. No text within a value is a call."""
        if not self._has_spoken:
            self._pending = text = self._pending.lstrip(_BETWEEN)
            mark = next((mark for mark in self._forms if text.startswith(mark)), "")
            if mark or (self._form.is_bare and text[:1] in ("{", "[")):
                return self._begin("", mark, text[len(mark) :])
            if any(mark.startswith(text) for mark in self._forms):
                return False
        self._say(parts, self._pending)
        self._pending = ""
        return False

    def _begin(self, blanks: str, mark: str, rest: str) -> bool:
        """Begin what seems to be a call. blanks, mark: in front of it; text all the same if it is none."""
        self._pending = rest
        form = self._forms.get(mark, self._form)
        named = _NamedCalls(blanks, mark, form, self._tools, streams=self._streams)
        self._body = named if self._streams else _HeldCall(blanks + mark, named, self._tools)
        return True

    def _say(self, parts: list[Part], text: str) -> None:
        if text:
            self._has_spoken = True
            parts.append(("text", text))


class _HeldCall:
    """Holds what stands behind a mark until it is whole, and proves to be a call, a list of calls, or text."""

    def __init__(self, before: str, named: _NamedCalls, names: Collection[str]) -> None:
        """before: text that it is if it is no call. named: reads calls that are not objects."""
        self._body: _HeldObject | _NamedCalls | None = None
        self._named = named
        self._object = _HeldObject(before, names)
        self._head = ""

    @property
    def has_called(self) -> bool:
        return self._body is not None and self._body.has_called

    @property
    def closings(self) -> tuple[str, ...]:
        return self._named.closings

    def feed(self, text: str) -> tuple[list[Part], str | None]:
        """Return (parts, what follows the calls; None as long as they go on)."""
        if self._body is None:
            self._head += text
            if _OBJECT.match(self._head):
                self._body = self._object
            elif len(self._head) < _MOST_HEAD and _BEGUN_OBJECT.fullmatch(self._head):
                return [], None
            else:
                self._body = self._named
            text = self._head
        return self._body.feed(text)

    def end(self, *, is_cut: bool) -> list[Part]:
        if self._body is None:
            self._object.feed(self._head)
        return (self._body or self._object).end(is_cut=is_cut)


class _HeldObject:
    """Reads a call that is an object {name, arguments}, or a list of those, whatever the order of its properties."""

    def __init__(self, before: str, names: Collection[str]) -> None:
        self._before = before
        self._names = names
        self._held: list[str] = []
        self._end = ValueEnd()
        self.has_called = False

    def feed(self, text: str) -> tuple[list[Part], str | None]:
        """As `_HeldCall` has it."""
        at = self._end.feed(text)
        self._held.append(text[:at])
        if at is None:
            return [], None
        whole = "".join(self._held)
        calls = self._calls(whole)
        self.has_called = bool(calls)
        return _parts_of(calls) if calls else [("text", self._before + whole)], text[at:]

    def end(self, *, is_cut: bool) -> list[Part]:
        whole = "".join(self._held)
        if is_cut and (parts := list(self._cut(whole))):
            return parts
        return [("text", self._before + whole)]

    def _calls(self, text: str) -> list[tuple[str, dict[str, Any]]]:
        """Return the calls of an object, or of a list; none where one is not a call."""
        value = loaded(text)
        found: list[tuple[str, dict[str, Any]]] = []
        for each in value if isinstance(value, list) else [value]:
            if not isinstance(each, dict):
                return []
            # Some models write the function as an object of its own, some the arguments as a text.
            said: dict[str, Any] = each["function"] if isinstance(each.get("function"), dict) else each
            name = said.get("name")
            arguments = arguments_of(said.get("arguments", said.get("parameters")))
            if not (isinstance(name, str) and name in self._names and arguments is not None):
                return []
            found.append((name, arguments))
        return found

    def _cut(self, whole: str) -> Iterator[Part]:
        """Yield the calls as far as they go."""
        at = 0
        while (head := _HEAD.match(whole, at)) and head[1] in self._names:
            length = ValueEnd().feed(rest := whole[head.end() :])
            yield from (("call", head[1]), ("arguments", rest[:length]))
            at = head.end() + len(rest[:length])


class _NamedCalls:
    """Reads a call whose name stands in front of its arguments, or a list of such calls.

    Where a grammar holds them to what their format has, they are emitted as they come; else once they are whole.
    """

    def __init__(self, blanks: str, mark: str, form: ToolFormat, tools: Mapping[str, Schema], *, streams: bool) -> None:
        """blanks, mark: in front of it; text all the same if it is none."""
        self._before = blanks + mark
        self._form = form
        self.closings = form.closings
        self._tools = tools
        self._streams = streams
        first = form.first + form.begins
        self._begins = (first.partition(mark)[2] if mark and mark in first else first).lstrip()  # the next call
        self._is_in_list = False
        self._held: list[str] = []  # all of it
        self._pending = ""
        self._parts: list[Part] = []
        self._arguments: ArgumentsReader | None = None  # that are being written
        self._closings = ""  # brackets behind them
        self._state: Literal["head", "arguments", "behind", "ended", "broken"] = "head"
        self.has_called = False

    def feed(self, text: str) -> tuple[list[Part], str | None]:
        """As `_HeldCall` has it."""
        self._held.append(text)
        self._pending += text
        while self._pending and self._step():
            pass
        is_open = self._state not in ("ended", "broken")
        if self._streams and (self.has_called or self._parts or is_open):
            parts, self._parts = self._parts, []
            self.has_called |= bool(parts)
            return parts, None if is_open else self._pending
        if is_open:
            return [], None
        calls = self._calls() if self._state == "ended" else []
        self.has_called = bool(calls)
        whole = "".join(self._held)
        said = self._before + whole[: len(whole) - len(self._pending)]
        return _parts_of(calls) if calls else [("text", said)], self._pending

    def end(self, *, is_cut: bool) -> list[Part]:
        if self._streams and (self.has_called or (is_cut and self._before.strip())):
            return []  # a mark that is there would have become a call
        if is_cut and self._parts:
            return self._parts
        if not (self._streams or is_cut or self._parts) and (
            alone := self._alone(rf"(?:{_loose(self._form.middle)})?\s*$", self._pending)
        ):
            return _parts_of([(alone["name"], {})])
        return [("text", self._before + "".join(self._held))]

    def _step(self) -> bool:
        """Take something off the pending text. Return False where more has to come."""
        match self._state:
            case "head":
                return self._read_head()
            case "arguments":
                return self._read_arguments()
            case "behind":
                return self._read_behind()
        return False

    def _read_head(self) -> bool:
        head, middle = self._pending[:_MOST_HEAD], _loose(self._form.middle)
        found = re.match(self._pattern(rf"{middle}\s*(?={self._form.notation.starts})"), head)
        if found is not None and found["name"] in self._tools:
            self._arguments = self._form.notation.reader(self._tools[found["name"]])
            self._take_head(found, "arguments")
            return True
        marks = "|".join(re.escape(mark) for mark in (*self._form.opens, *self._form.closings) if mark != "```")
        alone = self._alone(rf'(?:{middle}\s*(?:null|"")|(?:{middle})?\s*(?={marks}))', head)
        if alone is not None and not self._streams:
            self._take_head(alone, "behind")
            self._settle()
            return True
        begun, begins = ("".join(text.split()).removeprefix("[") for text in (head, self._begins))
        may_begin = begins.startswith(begun) or begun.startswith(begins)
        if found is not None or len(head) == _MOST_HEAD or not may_begin:
            self._state, self._pending = "broken", self._pending[1:]
        return False

    def _pattern(self, behind: str) -> str:
        """Return a regular expression of a call's name, all that stands in front of it, and what is behind."""
        begins, mark = self._begins, self._form.call_id[0]
        opens = r"(?P<list>\[)?\s*" if begins.startswith("[") else "(?P<list>(?!))?"
        call_id = rf"(?:{re.escape(mark)}[\w-]*)?" if mark else ""
        return rf"\s*{opens}{_loose(begins.removeprefix('['))}\s*(?P<name>{_NAME}){call_id}{behind}"

    def _alone(self, behind: str, text: str) -> re.Match[str] | None:
        """Return a call of a tool that has no arguments, in a format where nothing has to be written for none."""
        found = re.match(self._pattern(behind), text) if self._form.names_stand_alone else None
        return found if found is not None and found["name"] in self._tools else None

    def _take_head(self, found: re.Match[str], state: Literal["arguments", "behind"]) -> None:
        self._parts.append(("call", found["name"]))
        self._is_in_list |= found["list"] is not None or self._form.has_lines
        self._closings = "}" if self._form.ends.startswith("}") else ""
        self._state, self._pending = state, self._pending[found.end() :]

    def _read_arguments(self) -> bool:
        assert self._arguments is not None
        read = self._arguments.feed(self._pending)
        self._parts += [("arguments", read.json)] if read.json else []
        self._pending = read.rest or ""
        if read.rest is not None:
            self._state = "broken" if read.is_broken else "behind"
            self._settle()
        return read.rest is not None

    def _settle(self) -> None:
        """End where nothing has to come any more."""
        if self._state == "behind" and not self._closings and not self._is_in_list:
            self._state = "ended"

    def _read_behind(self) -> bool:
        text = self._pending = self._pending.lstrip()
        if not text:
            return False
        if self._closings:
            self._closings, self._pending = "", text.removeprefix(self._closings)
            self._settle()
        elif self._form.has_lines:
            mark = self.closings[0]
            if mark.startswith(text) and text != mark:
                return False
            self._begins, self._state = "", "ended" if text.startswith(mark) else "head"
        elif text[0] == ",":
            self._begins, self._state, self._pending = self._form.begins, "head", text[1:]
        else:
            self._state, self._pending = ("ended", text[1:]) if text[0] == "]" else ("broken", text)
        return True

    def _calls(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the calls; none where the arguments of one are not an object."""
        found: list[tuple[str, dict[str, Any]]] = []
        told: list[tuple[str, list[str]]] = []
        for kind, text in self._parts:
            if kind == "call":
                told.append((text, []))
            else:
                told[-1][1].append(text)
        for name, pieces in told:
            arguments = arguments_of("".join(pieces))
            if arguments is None:
                return []
            found.append((name, arguments))
        return found


def _loose(text: str) -> str:
    """Return a regular expression of a text with any blanks where it has some."""
    return re.sub(r"(?:\\?\s)+", r"\\s*", re.escape(text))


def _parts_of(calls: Iterable[tuple[str, dict[str, Any]]]) -> list[Part]:
    return [part for name, arguments in calls for part in (("call", name), ("arguments", _dumped(arguments)))]


def _dumped(arguments: dict[str, Any]) -> str:
    return valid_unicode(json.dumps(arguments, ensure_ascii=False))


class HarmonyParser:
    """Parses an answer in harmony, the format of gpt-oss, where a call is one of its messages. It begins in the header
    of the first: <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}"""

    def __init__(self, names: Collection[str], *, streams: bool, is_final: bool = False) -> None:
        """names, streams: as `ToolCallParser` has them. is_final: the prompt ends within the final message."""
        self._names = names
        self._streams = streams
        self._messages = Messages(is_open=is_final)
        self._kind: Kind | None = "text" if is_final else None  # of the open message; "call": it is held
        self._name = ""  # of the tool that is called
        self._held: list[str] = []  # arguments of a call that may still prove to be none
        self._said: set[Kind] = set()  # of which there was a message before

    @property
    def is_thinking(self) -> bool:
        return self._kind == "thought"

    def feed(self, text: str) -> list[Part]:
        return self._read(self._messages.feed(text), is_cut=False)

    def end(self, *, is_cut: bool) -> list[Part]:
        return self._read(self._messages.end(), is_cut=is_cut)

    def _read(self, steps: Iterable[Step], *, is_cut: bool) -> list[Part]:
        parts: list[Part] = []
        for step, text in steps:
            if step == "header":
                self._open(parts, text)
            elif step == "text" and self._kind == "call":
                self._held.append(text)
            elif step == "text" and text and self._kind is not None:
                parts.append((self._kind, text))
            elif step == "end":
                if self._kind == "call":
                    arguments = arguments_of(held := "".join(self._held))
                    if arguments is None and not is_cut:
                        parts.append(("text", held))
                    else:
                        written = held if arguments is None else _dumped(arguments)
                        parts += [("call", self._name), ("arguments", written)]
                self._kind = None
        return parts

    def _open(self, parts: list[Part], header: str) -> None:
        called = _CALLED.search(header)
        if called is not None and called[1] in self._names:
            self._kind, self._name, self._held = "call", called[1], []
            if self._streams:
                self._kind = "arguments"
                parts.append(("call", self._name))
            return
        self._kind = "thought" if is_thought(header) else "text"
        if header and self._kind in self._said:
            parts.append((self._kind, "\n\n"))
        if header:
            self._said.add(self._kind)


def partial_object(text: str) -> dict[str, Any]:
    """Return as much of an object as its text has, which may have been cut."""
    try:
        value = from_json(text, allow_partial=True, allow_inf_nan=False)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
