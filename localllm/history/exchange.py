"""Conversations as text: our own JSON, which comes back as it went, and Markdown, which is for reading.

Knows no file and no terminal.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, Protocol

from localllm.errors import UsageError
from localllm.history.records import IN_THOUGHT, Conversation, Message, Said, Session, is_time

FORMAT = "localllm-chats"
FORMAT_VERSION = 1
_ROLES = {"user": "You", "assistant": "Model"}
_TEXTS = ("uid", "role", "content", "id", "title")
_NULLABLE = ("parent", "model", "system", "head")
_THOUGHT, _MARKS = "reasoning_content", "thought_marks"  # of an exported message
_USUAL_MARKS = ["<think>\n", "</think>\n\n"]
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
_FIX = "localllm sessions export --all -o chats.json"


class Apart(Protocol):
    """(thought, answer) of what is kept of an answer. is_thinking: it begins in the thought."""

    def __call__(self, text: str, *, is_thinking: bool) -> tuple[str, str]: ...


def told_apart(message: Message | Said, apart: Apart) -> tuple[str, str]:
    """(thought, answer) of a message; of one that is no answer all of it is said."""
    if message.role != "assistant" or "content" in message.fields:
        return "", message.content
    return apart(message.content, is_thinking=message.facts.get(IN_THOUGHT) is True)


def as_json(conversations: Iterable[Conversation], apart: Apart) -> dict[str, Any]:
    """The object that `from_json` reads back; every branch is in it."""
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "sessions": [
            {**asdict(conversation), "messages": [_exported(said, apart) for said in conversation.messages]}
            for conversation in conversations
        ],
    }


def _exported(said: Said, apart: Apart) -> dict[str, Any]:
    """With what was thought beside the answer, and the marks between which it was written."""
    thought, answer = told_apart(said, apart)
    if answer == said.content:
        return asdict(said)
    front = said.content.removesuffix(answer)
    marks = front.split(thought, 1) if thought else [front]  # a single one: of several thoughts, or an empty one
    return {**asdict(said), "content": answer, _THOUGHT: thought, _MARKS: marks}


def from_json(data: Mapping[str, Any]) -> list[Conversation]:
    """What `as_json` made. Raises UsageError that names what is malformed."""
    version = data.get("format_version")
    if version != FORMAT_VERSION:
        why = f"its format_version is {version!r}; this localllm reads {FORMAT_VERSION}"
        raise UsageError("the export cannot be read", why=why, fix="pip install --upgrade localllm")
    sessions = data.get("sessions")
    if not isinstance(sessions, list):
        raise UsageError("the export has no list of sessions", why=f"its keys: {', '.join(data)[:200]}", fix=_FIX)
    return [_conversation(session, f"session {index}") for index, session in enumerate(sessions)]


def as_markdown(session: Session, path: Sequence[Message], apart: Apart) -> str:
    """What the session shows, to be read: what was thought is a quotation."""
    about = (f"`{session.id}`", format_time(session.created), session.model)
    parts = [f"# {session.title}", " · ".join(text for text in about if text)]
    if session.system:
        parts += ["## System", session.system]
    for message in path:
        role = _ROLES.get(message.role, message.role.capitalize())
        thought, answer = told_apart(message, apart)
        parts.append(f"## {role}")
        if thought.strip():
            parts.append(_quoted(thought.strip("\n")))
        if answer.strip("\n") or not thought.strip():
            parts.append(_closed(answer.strip("\n")))
        if message.state != "complete":
            parts.append("*(interrupted)*")
    return "\n\n".join(parts) + "\n"


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())


def _closed(text: str) -> str:
    """With the end of a code block that an answer was cut in: what follows is none of it."""
    opened = ""
    for line in text.splitlines():
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if not opened:
            opened = fence[1]
        elif fence[1].startswith(opened) and not fence[2].strip():
            opened = ""
    return f"{text}\n{opened}" if opened else text


def parsed(text: str, source: str) -> Any:
    """The JSON value of a text. Raises UsageError naming `source`."""
    try:
        return json.loads(text.removeprefix("\ufeff"), parse_constant=_refused, parse_float=_finite)
    except RecursionError:
        raise UsageError(f"{source} is nested too deeply", why="hundreds of levels", fix=_FIX) from None
    except ValueError as error:
        raise UsageError(f"{source} is no JSON", why=str(error)[:200], fix=_FIX) from None


def _conversation(data: object, where: str) -> Conversation:
    values = _values(data, Conversation, where)
    messages = values.pop("messages")
    if not isinstance(messages, list):
        raise _malformed(where, "messages", "a list")
    said: list[Said] = []
    known: set[str] = set()
    for index, message in enumerate(messages):
        place = f"message {index} of {where}"
        one = Said(**_values(_whole(message, place), Said, place))
        if one.state not in ("complete", "interrupted", "writing"):
            raise _malformed(place, "state", "complete or interrupted")
        if one.uid in known or (one.parent is not None and one.parent not in known):
            raise _malformed(place, "parent", "a message before it, and its uid its own")
        known.add(one.uid)
        said.append(one)
    if values.get("head") is not None and values["head"] not in known:
        raise _malformed(where, "head", "one of its messages")
    return Conversation(**values, messages=tuple(said))


def _whole(data: object, where: str) -> object:
    """A message as it is kept: what was thought in front of the answer."""
    if not isinstance(data, dict) or _THOUGHT not in data:
        return data
    thought, marks, answer = data[_THOUGHT], data.get(_MARKS, _USUAL_MARKS), data.get("content")
    if not (isinstance(thought, str) and isinstance(answer, str)):
        raise _malformed(where, _THOUGHT if isinstance(answer, str) else "content", "a text")
    if not (isinstance(marks, list) and all(isinstance(mark, str) for mark in marks)):
        raise _malformed(where, _MARKS, "a list of texts")
    rest = {name: value for name, value in data.items() if name not in (_THOUGHT, _MARKS)}
    return {**rest, "content": thought.join(marks) + answer}


def _values(data: object, kind: type[Conversation] | type[Said], where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise UsageError(f"{where} is no object", why=f"it is a {type(data).__name__}", fix=_FIX)
    names = {field.name for field in fields(kind)}
    if odd := sorted(names ^ data.keys()):
        verb = "lacks" if odd[0] in names else "has"
        raise UsageError(f"{where} {verb} {odd[0][:80]!r}", why=f"its keys are {', '.join(sorted(names))}", fix=_FIX)
    for name, value in data.items():
        if name in _TEXTS and not isinstance(value, str):
            raise _malformed(where, name, "a text")
        if name in _NULLABLE and not (value is None or isinstance(value, str)):
            raise _malformed(where, name, "a text or null")
        if name in ("created", "updated") and not is_time(value):
            raise _malformed(where, name, "seconds since 1970")
        if name in ("fields", "facts") and not isinstance(value, dict):
            raise _malformed(where, name, "an object")
    return dict(data)


def _malformed(where: str, name: str, wanted: str) -> UsageError:
    return UsageError(f"{name} of {where} is malformed", why=f"it must be {wanted}", fix=_FIX)


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refused(text)


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def format_time(seconds: float) -> str:
    """ "2026-11-21 22:09" here; "" for 0, which is not known, and for what no clock shows."""
    if not seconds:
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return ""
