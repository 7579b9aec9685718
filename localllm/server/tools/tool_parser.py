"""Tells calls apart from text while an answer is being written.

What may still turn out to be no call is held back until it is certain: a broken call stays text. Where a grammar makes
sure that a call is one, its arguments are emitted as they come.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from localllm.chat.tool_words import arguments_of
from localllm.server.tools.deltas import Part, Says
from localllm.server.tools.json_text import NAME, ToolCallText, ValueEnd, calls_of, dumped
from localllm.server.tools.tool_formats import ToolFormat

_MOST_BLANKS = 256  # held back because a call might follow
_BETWEEN = " \n;"  # between two calls: no text
_KEYS = frozenset({"name", "function", "type", "id", "arguments", "parameters"})
# The beginning of a call, as far as it tells that it is one: {"name" ..., [{"name" ..., or name[ARGS]{
_OBJECT = re.compile(r'\s*(?:\[\s*)?\{\s*"([^"\\]{0,40})"')
_NAMED = re.compile(rf"\s*({NAME})(?:\[CALL_ID\][\w-]*)?\[ARGS\]\s*(?=\{{)")
# A call without arguments: name[ARGS]null, or the next one right behind it, or the end.
_ALONE = re.compile(rf'\s*({NAME})(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\]\s*(?:null|"")|(?:\[ARGS\])?\s*(?=\[TOOL_CALLS\]))')
_LAST_ALONE = re.compile(rf"\s*({NAME})(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*")
_UNDECIDED = re.compile(
    r'\s{0,64}(?:(?:\[\s{0,64})?(?:\{\s{0,64}(?:"[^"\\]{0,40})?)?'
    r"|[a-zA-Z0-9_.-]{1,128}(?:\[CALL_ID\][\w-]{0,64})?(?:\[[A-Z_]{0,10}\]?)?\s{0,64}(?:\[[A-Z_]{0,10}|nu?l?l?|\")?)"
)
# All that stands in front of the arguments.
_HEAD = re.compile(
    rf'\s*(?P<list>\[\s*)?\{{\s*"name"\s*:\s*"(?P<of_object>{NAME})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
    rf"|\s*(?P<alone>{NAME})(?:\[CALL_ID\][\w-]*)?\[ARGS\]\s*(?=\{{)"
)


class ToolCallParser:
    """Parses an answer in which calls stand between marks."""

    is_thinking = False

    def __init__(self, form: ToolFormat, names: Collection[str], *, streams: bool, says: Says) -> None:
        """names: of the tools; a call of another one stays text.
        streams: a grammar makes sure that calls are calls.
        says: what may stand beside them.
        """
        self._form = form
        self._names = names
        self._streams = streams
        self._says = says
        self._pending = ""
        self._body: _CallBody | None = None
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
        if self._body is None:
            return self._rest()
        # Where JSON has to stand, a call that is not whole has met a stop text, if not the end of the context.
        return self._allowed(self._body.end(is_cut=is_cut or self._says == "json"))

    def _allowed(self, parts: list[Part]) -> list[Part]:
        """Drop text where there are only calls: it is a piece of one that was cut, or a blank in front of it."""
        return parts if self._says != "nothing" else [part for part in parts if part[0] != "text"]

    def _rest(self) -> list[Part]:
        rest, self._pending = self._pending, ""
        if self._says != "anything":
            return []
        if self._has_called and not self._has_spoken:
            rest = rest.strip(_BETWEEN)
            rest = "" if self._closes and self._form.closes.startswith(rest) else rest
        return [("text", rest)] if rest else []

    def _step(self, parts: list[Part]) -> bool:
        """Take what is certain off the pending text. Return False where more has to come."""
        if self._body is not None:
            return self._read_body(parts, self._body)
        if self._closes:
            return self._close()
        return self._read_text(parts) if self._says == "anything" else self._read_json(parts)

    def _read_body(self, parts: list[Part], body: _CallBody) -> bool:
        text, self._pending = self._pending, ""
        found, rest = body.feed(text)
        parts += found
        if rest is None:
            return False
        self._body, self._pending = None, rest
        self._closes = body.has_called and bool(self._form.closes)
        self._has_called |= body.has_called
        self._has_spoken = not body.has_called
        return True

    def _close(self) -> bool:
        text, closes = self._pending.lstrip(), self._form.closes
        if closes.startswith(text) and text != closes:
            if len(self._pending) <= _MOST_BLANKS:
                return False
        else:
            text = text.removeprefix(closes)
        self._closes, self._pending = False, text
        return True

    def _read_text(self, parts: list[Part]) -> bool:
        text = self._pending
        if self._has_called and not self._has_spoken:
            text = text.lstrip(_BETWEEN)
        if self._form.is_bare and not self._has_spoken and (bare := text.lstrip())[:1] in ("{", "["):
            self._begin(text[: len(text) - len(bare)], bare)
            return True
        at, mark = min(((text.find(mark), mark) for mark in self._form.opens if mark in text), default=(-1, ""))
        if at >= 0:
            said = text[:at].rstrip()
            self._say(parts, said)
            self._begin(text[len(said) : at] + mark, text[at + len(mark) :])
            return True
        said = self._certain(text)
        self._say(parts, said)
        self._pending = text[len(said) :]
        return False

    def _read_json(self, parts: list[Part]) -> bool:
        """Read a value, or calls; how it begins shows which. No text within a value is a call."""
        if not self._has_spoken:
            self._pending = text = self._pending.lstrip(_BETWEEN)
            mark = next((mark for mark in self._form.opens if text.startswith(mark)), "")
            if mark or (self._form.is_bare and text[:1] in ("{", "[")):
                self._begin(mark, text[len(mark) :])
                return True
            if any(mark.startswith(text) for mark in self._form.opens):
                return False
        self._say(parts, self._pending)
        self._pending = ""
        return False

    def _begin(self, before: str, rest: str) -> None:
        """Begin what seems to be a call. before: text all the same if it is none."""
        self._body, self._pending = _CallBody(before, self._names, hold=not self._streams), rest

    def _say(self, parts: list[Part], text: str) -> None:
        if text:
            self._has_spoken = True
            parts.append(("text", text))

    def _certain(self, text: str) -> str:
        """Return the text without what may be the beginning of a mark, and without the blanks in front of that."""
        held = max((n for mark in self._form.opens for n in range(len(mark)) if text.endswith(mark[:n])), default=0)
        said = text[: len(text) - held]
        blanks = len(said) - len(said.rstrip())
        return said if blanks > _MOST_BLANKS else said[: len(said) - blanks]


class _CallBody:
    """Parses what stands between the marks: one call, or a list of them.

    hold: emit it once it is whole and proves to be a call, else as text; otherwise emit arguments as they come.
    """

    def __init__(self, before: str, names: Collection[str], *, hold: bool) -> None:
        self._before = before
        self._names = names
        self._hold = hold
        self.has_called = False
        self._pending = ""
        self._held: list[str] = []  # of a value that is held, what came so far
        self._value: ValueEnd | None = None  # the value that is being written
        self._closings = ""  # brackets that are still to come behind the arguments
        self._wants_head = True

    def feed(self, text: str) -> tuple[list[Part], str | None]:
        """Return (parts, what follows the body; None as long as it goes on)."""
        if self._hold:
            return self._feed_held(text)
        self._pending += text
        parts: list[Part] = []
        while self._pending and not self._has_ended and self._step(parts):
            pass
        return parts, (self._pending if self._has_ended else None)

    def end(self, *, is_cut: bool) -> list[Part]:
        if self._hold:
            return self._end_held(is_cut=is_cut)
        if self.has_called or (is_cut and self._before.strip()):  # a mark that is there would have become a call
            return []
        return [("text", self._before + self._pending)]

    def _feed_held(self, text: str) -> tuple[list[Part], str | None]:
        if self._value is None:
            head = "".join(self._held) + text
            if (alone := _ALONE.match(head)) and alone[1] in self._names:
                self.has_called = True
                return _parts_of((alone[1], "{}")), head[alone.end() :]
            start = _value_start(head)
            if start is None:
                self._held = [head]
                return [], None
            if start < 0:
                return [("text", self._before + head[:1])], head[1:]
            self._held, text, self._value = [head[:start]], head[start:], ValueEnd()
        at = self._value.feed(text)
        self._held.append(text[:at])
        if at is None:
            return [], None
        calls = self._calls(whole := "".join(self._held))
        if calls is None:
            return [("text", self._before + whole)], text[at:]
        self.has_called = True
        return [part for call in calls for part in _parts_of(call)], text[at:]

    def _end_held(self, *, is_cut: bool) -> list[Part]:
        whole = "".join(self._held)
        if is_cut:
            parts, _ = _CallBody("", self._names, hold=False).feed(whole)
            if parts:
                return parts
        elif self._value is None and (alone := _LAST_ALONE.fullmatch(whole)) and alone[1] in self._names:
            return _parts_of((alone[1], "{}"))
        return [("text", self._before + whole)]

    def _calls(self, text: str) -> list[ToolCallText] | None:
        named = _NAMED.match(text)
        if named is None:
            return calls_of(text, self._names)
        arguments = arguments_of(text[named.end() :])
        return None if arguments is None or named[1] not in self._names else [(named[1], dumped(arguments))]

    @property
    def _has_ended(self) -> bool:
        return not self._wants_head and self._value is None and not self._closings

    def _step(self, parts: list[Part]) -> bool:
        if self._wants_head:
            return self._read_head(parts)
        if self._value is not None:
            return self._read_arguments(parts, self._value)
        text = self._pending.lstrip()
        if text[:1] == self._closings[0]:
            text, self._closings = text[1:], self._closings[1:]
        elif text[:1] == "," and self._closings == "]":
            text, self._wants_head = text[1:], True
        elif text:
            self._closings = ""
        self._pending = text
        return bool(text)

    def _read_head(self, parts: list[Part]) -> bool:
        head = _HEAD.match(self._pending)
        name = head and (head["of_object"] or head["alone"])
        if head is None or not name or name not in self._names:
            if self.has_called or _value_start(self._pending) != -1:
                return False
            # An answer in JSON, that only began like a call.
            parts.append(("text", self._before + self._pending[:1]))
            self._pending, self._wants_head = self._pending[1:], False
            return True
        parts.append(("call", name))
        if head["of_object"]:
            self._closings = "}]" if head["list"] or self._closings else "}"
        self.has_called, self._wants_head = True, False
        self._pending, self._value = self._pending[head.end() :], ValueEnd()
        return True

    def _read_arguments(self, parts: list[Part], value: ValueEnd) -> bool:
        at = value.feed(self._pending)
        parts.append(("arguments", self._pending[:at]))
        self._pending = "" if at is None else self._pending[at:]
        if at is not None:
            self._value = None
        return at is not None


def _value_start(head: str) -> int | None:
    """Where the object or list begins whose end is the call's; None: not known yet; -1: it is no call."""
    if found := _OBJECT.match(head):
        return len(head) - len(head.lstrip()) if found[1] in _KEYS else -1
    if found := _NAMED.match(head):
        return found.end()
    return None if _UNDECIDED.fullmatch(head) else -1


def _parts_of(call: ToolCallText) -> list[Part]:
    return [("call", call[0]), ("arguments", call[1])]
