"""Tells calls apart from text while an answer is being written.

What may still turn out to be no call is held back until it is certain: a broken call stays text. Where a grammar makes
sure that a call is one, its arguments are emitted as they come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from pydantic_core import from_json

from localllm.chat.harmony import Messages, Step, is_thought
from localllm.chat.tool_words import arguments_of, loaded
from localllm.server.tools.deltas import Kind, Part, Says
from localllm.server.tools.tool_formats import ToolFormat
from localllm.text.tokenizer import valid_unicode

_NAME = r"[a-zA-Z0-9_.-]{1,128}"
_NAMED = rf"({_NAME})(?:\[CALL_ID\][\w-]*)?"
_MOST_BLANKS = 256  # held back because a call might follow
_BETWEEN = " \n;"  # between two calls: no text
# What stands in front of the value that a call is, or whose arguments it is: {"name" ..., [{"name" ..., or name[ARGS]{
_VALUE = re.compile(rf"\s*(?:{_NAMED}\[ARGS\]\s*(?=\{{)|(?=[{{\[]))")
# A call without arguments: name[ARGS]null, or the next one right behind it, or the end.
_ALONE = re.compile(rf'\s*{_NAMED}(?:\[ARGS\]\s*(?:null|"")|(?:\[ARGS\])?\s*(?=\[TOOL_CALLS\]))')
_LAST_ALONE = re.compile(rf"\s*{_NAMED}(?:\[ARGS\])?\s*")
_UNDECIDED = re.compile(
    r"\s{0,64}(?:[a-zA-Z0-9_.-]{1,128}(?:\[CALL_ID\][\w-]{0,64})?(?:\[[A-Z_]{0,10}\]?)?\s{0,64}"
    r"(?:\[[A-Z_]{0,10}|nu?l?l?|\")?)?"
)
# All that stands in front of the arguments of a call, which may be the next one of a list.
_HEAD = re.compile(
    rf'[\s\[\]}},]*\{{\s*"name"\s*:\s*"(?P<of_object>{_NAME})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
    rf"|\s*(?P<alone>{_NAME})(?:\[CALL_ID\][\w-]*)?\[ARGS\]\s*(?=\{{)"
)
_BRACKETS = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_CALLED = re.compile(rf"to=(?:functions\.)?({_NAME})")  # in the header of a message of harmony


class ToolCallParser:
    """Parses an answer in which calls stand between marks."""

    is_thinking = False

    def __init__(self, form: ToolFormat, names: Collection[str], *, streams: bool, says: Says) -> None:
        """names: of the tools; a call of another one stays text.
        streams: a grammar makes sure that calls are calls, written exactly as the format has them.
        says: what may stand beside them.
        """
        self._form = form
        self._names = names
        self._streams = streams
        self._says = says
        self._pending = ""
        self._body: _HeldCall | _StreamedCall | None = None
        self._closes = False  # a closing mark may come
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
            rest = "" if self._closes and self._form.closes.startswith(rest) else rest
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
            self._closes = has_called and bool(self._form.closes)
            self._has_called |= has_called
            self._has_spoken = not has_called
            self._body = None
            return True
        if self._closes:
            closes, begun = self._form.closes, text.lstrip()
            if closes.startswith(begun) and begun != closes and len(text) <= _MOST_BLANKS:
                return False
            self._closes, self._pending = False, begun.removeprefix(closes)
            return True
        return self._read_text(parts) if self._says == "anything" else self._read_json(parts)

    def _read_text(self, parts: list[Part]) -> bool:
        text = self._pending
        if self._has_called and not self._has_spoken:
            text = text.lstrip(_BETWEEN)
        if self._form.is_bare and not self._has_spoken and (bare := text.lstrip())[:1] in ("{", "["):
            return self._begin(text[: len(text) - len(bare)], bare)
        at, mark = min(((text.find(mark), mark) for mark in self._form.opens if mark in text), default=(-1, ""))
        if at >= 0:
            said = text[:at].rstrip()
            self._say(parts, said)
            return self._begin(text[len(said) : at] + mark, text[at + len(mark) :])
        # What may be the beginning of a mark waits, and the blanks in front of it.
        held = max((n for mark in self._form.opens for n in range(len(mark)) if text.endswith(mark[:n])), default=0)
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
            mark = next((mark for mark in self._form.opens if text.startswith(mark)), "")
            if mark or (self._form.is_bare and text[:1] in ("{", "[")):
                return self._begin(mark, text[len(mark) :])
            if any(mark.startswith(text) for mark in self._form.opens):
                return False
        self._say(parts, self._pending)
        self._pending = ""
        return False

    def _begin(self, before: str, rest: str) -> bool:
        """Begin what seems to be a call. before: text all the same if it is none."""
        self._pending = rest
        body = _StreamedCall if self._streams else _HeldCall
        self._body = body(before, self._form, self._names)
        return True

    def _say(self, parts: list[Part], text: str) -> None:
        if text:
            self._has_spoken = True
            parts.append(("text", text))


class _HeldCall:
    """Holds what stands behind a mark until it is whole, and proves to be a call, a list of calls, or text."""

    def __init__(self, before: str, _form: ToolFormat, names: Collection[str]) -> None:
        self._before = before
        self._names = names
        self._held: list[str] = []
        self._called: str | None = None  # the name in front of the value
        self._value: ValueEnd | None = None  # that is being written
        self.has_called = False

    def feed(self, text: str) -> tuple[list[Part], str | None]:
        """Return (parts, what follows the calls; None as long as they go on)."""
        if self._value is None:
            head = "".join(self._held) + text
            if (alone := _ALONE.match(head)) and alone[1] in self._names:
                self.has_called = True
                return _parts_of([(alone[1], {})]), head[alone.end() :]
            start = _VALUE.match(head)
            if start is None:
                self._held = [head]
                return ([], None) if _UNDECIDED.fullmatch(head) else ([("text", self._before + head[:1])], head[1:])
            self._called, self._value = start[1], ValueEnd()
            self._held, text = [head[: start.end()], ""], head[start.end() :]
        at = self._value.feed(text)
        self._held.append(text[:at])
        if at is None:
            return [], None
        calls = self._calls("".join(self._held[1:]))
        self.has_called = bool(calls)
        return _parts_of(calls) if calls else [("text", self._before + "".join(self._held))], text[at:]

    def end(self, *, is_cut: bool) -> list[Part]:
        whole = "".join(self._held)
        if is_cut and (parts := list(self._cut(whole))):
            return parts
        if not is_cut and self._value is None and (alone := _LAST_ALONE.fullmatch(whole)) and alone[1] in self._names:
            return _parts_of([(alone[1], {})])
        return [("text", self._before + whole)]

    def _calls(self, text: str) -> list[tuple[str, dict[str, Any]]]:
        """Return the calls of an object {name, arguments}, or of a list of those; none where one is not a call."""
        value = loaded(text) if self._called is None else {"name": self._called, "arguments": text}
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
        while (head := _HEAD.match(whole, at)) and (name := head["of_object"] or head["alone"]) in self._names:
            length = ValueEnd().feed(rest := whole[head.end() :])
            yield from (("call", name), ("arguments", rest[:length]))
            at = head.end() + len(rest[:length])


class _StreamedCall:
    """Emits calls as they come, which a grammar holds to the text that their format has."""

    def __init__(self, before: str, form: ToolFormat, names: Collection[str]) -> None:
        self._before = before
        self._form = form
        self._names = names
        self._pending = ""
        self._begins: str | None = (form.first + form.begins).removeprefix(form.opens[0]).lstrip()  # the next call
        self._value: ValueEnd | None = None  # the arguments that are being written
        self._closings = ""  # brackets that are still to come behind them
        self.has_called = False

    def feed(self, text: str) -> tuple[list[Part], str | None]:
        """As `_HeldCall` has it."""
        self._pending += text
        parts: list[Part] = []
        while self._pending and not self._has_ended:
            if self._begins is not None:
                text = self._pending.lstrip()
                heads = {name: f"{self._begins}{name}{self._form.middle}" for name in self._names}
                name = next((name for name, head in heads.items() if text.startswith(head)), None)
                if name is None:
                    if self.has_called or any(head.startswith(text) for head in heads.values()):
                        break
                    # An answer in JSON, that only began like a call.
                    return [("text", self._before + self._pending[:1])], self._pending[1:]
                parts.append(("call", name))
                self._pending, self._begins, self._value = text[len(heads[name]) :], None, ValueEnd()
                self._closings = self._form.ends[:1] + self._form.last
                self.has_called = True
            elif self._value is not None:
                at = self._value.feed(self._pending)
                parts.append(("arguments", self._pending[:at]))
                self._pending = "" if at is None else self._pending[at:]
                self._value = self._value if at is None else None
            else:
                self._pending = text = self._pending.lstrip()
                if text[:1] == self._closings[0]:
                    self._pending, self._closings = text[1:], self._closings[1:]
                elif text[:1] == "," and self._closings == self._form.last:
                    self._pending, self._begins = text[1:], self._form.begins
                elif text:
                    self._closings = ""
        return parts, (self._pending if self._has_ended else None)

    @property
    def _has_ended(self) -> bool:
        return self._begins is None and self._value is None and not self._closings

    def end(self, *, is_cut: bool) -> list[Part]:
        if self.has_called or (is_cut and self._before.strip()):  # a mark that is there would have become a call
            return []
        return [("text", self._before + self._pending)]


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


class ValueEnd:
    """Follows one object or list to its end, looking at each character once. What is not JSON ends somewhere, too."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> int | None:
        """Return the index behind the value's last character; None where it goes on."""
        at = 0
        while at < len(text):
            if self._is_escaped:
                self._is_escaped, at = False, at + 1
                continue
            found = (_IN_STRING if self._is_in_string else _BRACKETS).search(text, at)
            if found is None:
                return None
            at = found.end()
            match found[0]:
                case "\\":
                    self._is_escaped = True
                case '"':
                    self._is_in_string = not self._is_in_string
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth <= 0:
                        return at
        return None


def partial_object(text: str) -> dict[str, Any]:
    """Return as much of an object as its text has, which may have been cut."""
    try:
        value = from_json(text, allow_partial=True, allow_inf_nan=False)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
