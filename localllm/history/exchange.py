"""Conversations as text: our own JSON, which comes back as it went, Markdown to read, and the imports of files.

Knows no terminal. `Apart` takes (text, is_thinking=...) and returns (thought, answer).
"""

from __future__ import annotations

import json
import lzma
import math
import re
import shlex
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from localllm.config import format_bytes, format_time
from localllm.errors import Fix, UsageError
from localllm.history import chatgpt
from localllm.history.records import IN_THOUGHT, Conversation, Message, Said, Session, is_time, used_adapters

FORMAT = "localllm-chats"
FORMAT_VERSION = 1
MOST_BYTES = 1 << 30  # of one file, unpacked: a decade of chats
_THOUGHT, _MARKS = "reasoning_content", "thought_marks"  # of an exported message
_USUAL_MARKS = ["<think>\n", "</think>\n\n"]
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
_MEMBER = re.compile(r"(?:^|/)conversations[^/]*\.json$")
_BAD_ARCHIVES = (zipfile.BadZipFile, zlib.error, lzma.LZMAError)
_FIX = "localllm sessions export --all -o chats.json"

Apart = Callable[..., tuple[str, str]]


def told_apart(message: Message | Said, apart: Apart) -> tuple[str, str]:
    """Return (thought, answer) of a message; of one that is not an answer all of it is said."""
    if message.role != "assistant" or "content" in message.fields:
        return "", message.content
    return apart(message.content, is_thinking=message.facts.get(IN_THOUGHT) is True)


def as_json(conversations: Iterable[Conversation], apart: Apart) -> dict[str, Any]:
    """Return the object that `from_json` reads back; every branch is in it."""
    sessions = [
        {**asdict(conversation), "messages": [_exported(said, apart) for said in conversation.messages]}
        for conversation in conversations
    ]
    return {"format": FORMAT, "format_version": FORMAT_VERSION, "sessions": sessions}


def _exported(said: Said, apart: Apart) -> dict[str, Any]:
    """The message with its thought beside the answer, and the marks between which that was written."""
    thought, answer = told_apart(said, apart)
    if answer == said.content:
        return asdict(said)
    front = said.content.removesuffix(answer)
    marks = front.split(thought, 1) if thought else [front]  # a single one: of several thoughts, or an empty one
    return {**asdict(said), "content": answer, _THOUGHT: thought, _MARKS: marks}


def from_json(data: Mapping[str, Any]) -> list[Conversation]:
    """Return the conversations of an `as_json`. Raises UsageError that names what is malformed."""
    version = data.get("format_version")
    if version != FORMAT_VERSION:
        why = f"its format_version is {version!r}; this localllm reads {FORMAT_VERSION}"
        raise UsageError("the export cannot be read", why=why, fix="pip install --upgrade localllm")
    sessions = data.get("sessions")
    if not isinstance(sessions, list):
        raise UsageError("the export has no list of sessions", why=f"its keys: {', '.join(data)[:200]}", fix=_FIX)
    return [_conversation(session, f"session {index}") for index, session in enumerate(sessions)]


def _conversation(data: object, where: str) -> Conversation:
    values = _values(data, Conversation, where)
    said: dict[str, Said] = {}
    for index, message in enumerate(values.pop("messages")):
        place = f"message {index} of {where}"
        one = Said(**_values(_whole(message, place), Said, place))
        if one.uid in said or (one.parent is not None and one.parent not in said):
            raise _malformed(place, "parent", "a message before it, and its uid its own")
        said[one.uid] = one
    if values["head"] is not None and values["head"] not in said:
        raise _malformed(where, "head", "one of its messages")
    return Conversation(**values, messages=tuple(said.values()))


def _whole(data: object, where: str) -> object:
    """The message as it is kept: its thought in front of the answer."""
    if not isinstance(data, dict) or _THOUGHT not in data:
        return data
    thought, marks, answer = data[_THOUGHT], data.get(_MARKS, _USUAL_MARKS), data.get("content")
    if not (isinstance(thought, str) and isinstance(answer, str)):
        raise _malformed(where, _THOUGHT if isinstance(answer, str) else "content", "a text")
    if not (isinstance(marks, list) and all(isinstance(mark, str) for mark in marks)):
        raise _malformed(where, _MARKS, "a list of texts")
    rest = {name: value for name, value in data.items() if name not in (_THOUGHT, _MARKS)}
    return {**rest, "content": thought.join(marks) + answer}


# Of each type of a field: whether a value is one, and what it must be.
_TYPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "str": (lambda value: isinstance(value, str), "a text"),
    "str | None": (lambda value: value is None or isinstance(value, str), "a text or null"),
    "float": (is_time, "seconds since 1970"),
    "State": (lambda value: value in ("complete", "interrupted", "writing"), "complete or interrupted"),
    "tuple[Said, ...]": (lambda value: isinstance(value, list), "a list"),
    "Mapping[str, Any]": (lambda value: isinstance(value, dict), "an object"),
}


def _values(data: object, kind: type[Conversation] | type[Said], where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise UsageError(f"{where} is not an object", why=f"it is a {type(data).__name__}", fix=_FIX)
    types = {field.name: str(field.type) for field in fields(kind)}
    if odd := sorted(types.keys() ^ data.keys()):
        verb = "lacks" if odd[0] in types else "has"
        raise UsageError(f"{where} {verb} {odd[0][:80]!r}", why=f"its keys are {', '.join(sorted(types))}", fix=_FIX)
    for name, value in data.items():
        is_one, wanted = _TYPES[types[name]]
        if not is_one(value):
            raise _malformed(where, name, wanted)
    return dict(data)


def _malformed(where: str, name: str, wanted: str) -> UsageError:
    return UsageError(f"{name} of {where} is malformed", why=f"it must be {wanted}", fix=_FIX)


def as_markdown(session: Session, path: Sequence[Message], apart: Apart) -> str:
    """Return what the session shows, to be read: a thought is a quotation."""
    about = (f"`{session.id}`", format_time(session.created), session.model)
    parts = [f"# {session.title}", " · ".join(text for text in about if text)]
    if session.system:
        parts += ["## System", session.system]
    for message in path:
        thought, answer = told_apart(message, apart)
        by_whom = {"user": "You", "assistant": "Model"}.get(message.role, message.role.capitalize())
        adapters = " + ".join(each.shown for each in used_adapters(message.facts))
        parts.append(f"## {by_whom} + {adapters}" if adapters else f"## {by_whom}")
        if thought.strip():
            parts.append("\n".join(f"> {line}".rstrip() for line in thought.strip("\n").splitlines()))
        if answer.strip("\n") or not thought.strip():
            parts.append(_closed(answer.strip("\n")))
        if message.state != "complete":
            parts.append("*(interrupted)*")
    return "\n\n".join(parts) + "\n"


def _closed(text: str) -> str:
    """The text with the end of a code block that an answer was cut in."""
    opened = ""
    for fence in filter(None, map(_FENCE.match, text.splitlines())):
        if not opened:
            opened = fence[1]
        elif fence[1].startswith(opened) and not fence[2].strip():
            opened = ""
    return f"{text}\n{opened}" if opened else text


def read_conversations(path: Path) -> list[Conversation]:
    """Return all conversations of an export: our own, or ChatGPT's, also as its archive.

    Raises UsageError naming what is wrong with the file.
    """
    try:
        return [conversation for name, data in _files(path) for conversation in _imported(data, name)]
    except (OSError, ValueError, NotImplementedError, RuntimeError, EOFError, *_BAD_ARCHIVES) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        fix = f"ls -l {shlex.quote(str(path))}"
        raise UsageError(f"{str(path)!r} cannot be imported", why=why, fix=fix) from error


def _files(path: Path) -> Iterator[tuple[str, bytes]]:
    """The name and the bytes of the file, or of each one in the archive that it is."""
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            file.seek(0)
            yield str(path), file.read(MOST_BYTES + 1)
            return
        with zipfile.ZipFile(file) as archive:
            names = sorted(name for name in archive.namelist() if _MEMBER.search(name))
            if not names:
                why = f"it has no conversations.json among its {len(archive.namelist())} files"
                fix = Fix.command("sessions", "import", "conversations.json")
                raise UsageError(f"{str(path)!r} is not an export of chats", why=why, fix=fix)
            for name in names:
                with archive.open(name) as member:
                    yield f"{path}/{name}", member.read(MOST_BYTES + 1)


def _imported(data: bytes, name: str) -> list[Conversation]:
    if len(data) > MOST_BYTES:
        why = f"it has more than {format_bytes(MOST_BYTES)}"
        raise UsageError(f"{name!r} is too large", why=why, fix="import it in parts")
    value = _parsed(data.decode("utf-8-sig"), name)
    if isinstance(value, dict) and value.get("format") == FORMAT:
        return from_json(value)
    if chatgpt.is_export(value) or value == []:
        return chatgpt.conversations(value)
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        why = "it is a single conversation without a history, as `/save` writes it and `/load` reads it"
        raise UsageError(f"{name!r} is not an export of chats", why=why, fix=f"localllm chat, and there: /load {name}")
    why = "neither what `localllm sessions export` writes, nor ChatGPT's conversations.json"
    raise UsageError(f"{name!r} is not an export of chats", why=why, fix=Fix.command("sessions", "import", "--help"))


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refused, parse_float=_finite)
    except RecursionError:
        raise UsageError(f"{name!r} is nested too deeply", why="hundreds of levels", fix=_FIX) from None
    except ValueError as error:
        raise UsageError(f"{name!r} is not JSON", why=str(error)[:200], fix=_FIX) from None


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refused(text)


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
