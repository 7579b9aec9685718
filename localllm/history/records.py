"""Sessions, messages, and conversations on their way between machines, as values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, Literal, TypeGuard

State = Literal["writing", "complete", "interrupted"]
TITLE_CHARACTERS = 60
PINNED = "pinned"  # among a session's facts
IN_THOUGHT = "begins_in_thought"  # among a message's
ADAPTERS = "adapters"  # among an answer's: with which it was computed


@dataclass(frozen=True)
class UsedAdapter:
    """An adapter that an answer is computed with. name: by which it is found from any folder; a path or a name."""

    name: str
    scale: float = 1.0

    @property
    def text(self) -> str:
        """Return it as the setting `adapter` names it."""
        number = f"{self.scale:g}"
        return self.name if self.scale == 1 else f"{self.name}:{number if float(number) == self.scale else self.scale}"

    @property
    def shown(self) -> str:
        """Return it for people: of a path the last part."""
        path = PurePath(self.name)
        name = (path.stem if path.suffix == ".gguf" else path.name) if path.is_absolute() else self.name
        return replace(self, name=name).text


def adapter_facts(adapters: Sequence[UsedAdapter]) -> dict[str, Any]:
    """Return the facts of an answer that was computed with these."""
    return {ADAPTERS: [{"name": each.name, "scale": each.scale} for each in adapters]} if adapters else {}


def used_adapters(facts: Mapping[str, Any]) -> tuple[UsedAdapter, ...]:
    """Return the adapters that the facts of an answer name; of an import they may be anything."""
    rows = facts.get(ADAPTERS)
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    pairs = [(row.get("name"), row.get("scale", 1.0)) for row in rows]
    return tuple(UsedAdapter(name, scale) for name, scale in pairs if isinstance(name, str) and is_time(scale))


@dataclass(frozen=True)
class Session:
    """One conversation. number: in this file alone. uid: the same wherever it is exported to.

    head: the message that is shown last, None where none is. created, updated: seconds since 1970, to be shown.
    """

    number: int
    id: str
    uid: str
    title: str
    model: str | None
    system: str | None
    created: float
    updated: float
    head: int | None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_pinned(self) -> bool:
        return self.facts.get(PINNED) is True


@dataclass(frozen=True)
class Message:
    """A message of a session. parent: the number of the one that it follows.

    fields: what a chat template is given beside role and content (or in the place of a content that is not text).
    facts: what is known about it: token counts, why it ended.
    """

    number: int
    parent: int | None
    uid: str
    role: str
    content: str
    state: State
    model: str | None
    created: float
    fields: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def begins_in_thought(self) -> bool:
        """Return whether the prompt had opened the thought of which the content has at most the end."""
        return self.facts.get(IN_THOUGHT) is True

    @property
    def as_turn(self) -> dict[str, Any]:
        """The message as a chat template takes it."""
        return {"role": self.role, "content": self.content, **self.fields}


@dataclass(frozen=True)
class Hit:
    """A message in which words were found; None for the session's title."""

    session: Session
    message: Message | None


@dataclass(frozen=True)
class Said:
    """A message of a conversation on its way: it names its parent by uid, and comes behind it."""

    uid: str
    parent: str | None
    role: str
    content: str
    state: State = "complete"
    model: str | None = None
    created: float = 0.0
    fields: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Conversation:
    """A whole session on its way between two files, every branch of it. head: a uid of its messages."""

    uid: str
    id: str
    title: str
    model: str | None
    system: str | None
    created: float
    updated: float
    head: str | None
    messages: tuple[Said, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)


def clean(text: str | None) -> str | None:
    """Return the text without half surrogates, which no file can hold."""
    return None if text is None else text.encode("utf-8", "replace").decode("utf-8")


def is_time(value: object) -> TypeGuard[float]:
    """Return whether it is a count of seconds that any clock could show."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15


def seconds_of(value: object) -> float:
    """Return the value as a time; 0 where it is none."""
    return float(value) if is_time(value) else 0.0


def title_of(text: str) -> str:
    """Return the title of a chat that begins with this question: its first line, cut between words."""
    line = next((" ".join(line.split()) for line in text.splitlines() if line.strip()), "")
    if len(line) <= TITLE_CHARACTERS:
        return line or "untitled"
    cut = line[:TITLE_CHARACTERS]
    return (cut.rpartition(" ")[0] if " " in cut[TITLE_CHARACTERS // 2 :] else cut) + "…"


def content_of(turn: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the text of a message, and the fields that `Message.as_turn` needs to make it again."""
    fields = {key: value for key, value in turn.items() if key not in ("role", "content")}
    content = turn.get("content")
    if isinstance(content, str):
        return content, fields
    if "content" in turn:
        fields["content"] = content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "\n".join(text for text in texts if isinstance(text, str)), fields
