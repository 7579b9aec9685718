"""The messages and settings of a chat.

Knows no model, no history and no terminal.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localllm.chat.attachments import Attachment
from localllm.chat.text_file import replace_file, write_new
from localllm.chat.thoughts import kept_apart, with_thought
from localllm.config import Origin, ResolvedSettings, accepted, nearest_key, unknown_key
from localllm.errors import MODEL, Fix, SettingsError, UsageError
from localllm.settings import SETTINGS, taken_by

Message = dict[str, Any]

IN_CHAT = Origin("flag", "/set")  # of a setting that was changed in the chat
_THOUGHT = "reasoning_content"  # of a message in a file
# The settings that `/set` can change while a model is loaded.
SETTABLE = taken_by("/set")


@dataclass
class Dialogue:
    """Messages in order, the system message apart, and files that wait for the next question.

    opening: the first question without the files in front of it.
    thinking: the answers that begin in a thought, which the template has opened.
    num_out: messages that have left the model's context, counted behind the system message.
    has_room: messages were taken back since some left.
    """

    resolved: ResolvedSettings
    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    attached: list[Attachment] = field(default_factory=list)
    opening: str = ""
    thinking: list[Message] = field(default_factory=list)
    num_out: int = 0
    has_room: bool = False

    def __post_init__(self) -> None:
        self._begun_with = self.resolved

    @property
    def messages(self) -> list[Message]:
        """All messages, with the thoughts in front of answers."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    @property
    def for_template(self) -> list[Message]:
        """All messages as the chat template is given them."""
        return self.given(self.messages)

    def given(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages as the template is given them; it has the thoughts of earlier answers, or leaves them out."""
        return joined(list(map(self._saved, messages)))

    def _saved(self, message: Message) -> Message:
        """Return a message with the thought in a field of its own."""
        if not _is_answer(message):
            return message
        thought, answer = self._apart(message)
        return {**message, "content": answer, **({_THOUGHT: thought} if thought else {})}

    def _apart(self, answer: Message) -> tuple[str, str]:
        return kept_apart(answer["content"], is_thinking=self.begins_in_thought(answer))

    def begins_in_thought(self, turn: Message) -> bool:
        return any(turn is each for each in self.thinking)

    def cut(self, length: int) -> None:
        """Take back all but the first `length` turns."""
        del self.turns[length:]
        self.num_out, self.has_room = self.num_out if self.num_out < length else 0, True

    def leave(self, num_out: int) -> None:
        """Note that so many messages are out of the context from now on."""
        self.num_out, self.has_room = num_out, False

    def ask(self, text: str) -> None:
        """Add a question, with the attached files in front of it."""
        self.opening = self.opening or text
        parts = [*(file.quoted for file in self.attached), text]
        self.attached.clear()
        self.turns.append({"role": "user", "content": "\n\n".join(parts)})

    def answer(self, text: str, *, is_thinking: bool = False) -> None:
        """Add an answer. is_thinking: it begins in a thought, which the template has opened."""
        self.turns.append({"role": "assistant", "content": text})
        if is_thinking:
            self.thinking.append(self.turns[-1])

    @property
    def is_asked(self) -> bool:
        """True where a question waits for its answer."""
        return bool(self.turns) and self.turns[-1]["role"] == "user"

    @property
    def is_answered(self) -> bool:
        """True where the last turn is an answer."""
        return bool(self.turns) and self.turns[-1]["role"] == "assistant"

    def take_back_question(self) -> bool:
        """Remove the last question and everything after it; False where there is none."""
        for index in range(len(self.turns) - 1, -1, -1):
            if self.turns[index]["role"] == "user":
                self.cut(index)
                if not any(turn["role"] == "user" for turn in self.turns):
                    self.opening = ""
                return True
        return False

    def clear(self) -> None:
        self.turns.clear()
        self.attached.clear()
        self.opening = ""
        self.leave(0)

    def settable(self, key: str, text: str = "") -> Sequence[str]:
        """Return the setting that `/set KEY` names, or all settable ones for "". text: its wanted value.

        Raises SettingsError for an unknown key, UsageError for one that is fixed once a chat has begun.
        """
        if key in SETTINGS and key not in (*SETTABLE, "model", "system", "theme", "keys"):
            flag = f"--{key.replace('_', '-')}"
            why = f"{key} is decided when a chat begins; /set changes {', '.join(SETTABLE)}"
            raise UsageError(
                f"/set {key}: it cannot be changed now",
                why=why,
                fix=Fix.command("chat", MODEL, flag, text or key.upper()),
            )
        if key and key not in SETTABLE:
            nearest = nearest_key(key, SETTABLE)
            fix = f"/set {nearest} {text}".strip() if nearest else "/set shows every setting"
            raise unknown_key(key, "/set", SETTABLE, fix=fix)
        return [key] if key else SETTABLE

    def set(self, key: str, text: str) -> object:
        """Change a setting and return its new value; "-" restores the first one.

        Raises SettingsError for a bad value, and as `settable`.
        """
        self.settable(key, text)
        if text.strip() == "-":
            self.resolved = self.resolved.overlaid(
                {key: (getattr(self._begun_with.settings, key), self._begun_with.origins[key])}
            )
            return getattr(self.resolved.settings, key)
        try:
            value = accepted(key, _parsed(key, text), "/set")
        except SettingsError as error:
            error.fix = f"/set {key} {SETTINGS[key].accepts.likeliest(text) or '-'}"
            raise
        self.resolved = self.resolved.overlaid({key: (value, IN_CHAT)})
        return value

    def use(self, resolved: ResolvedSettings) -> None:
        """Take another model's settings; those that `set` has changed stay."""
        self._begun_with = resolved
        changed = [name for name, origin in self.resolved.origins.items() if origin == IN_CHAT]
        self.resolved = resolved.overlaid({name: (getattr(self.resolved.settings, name), IN_CHAT) for name in changed})

    def save(self, path: Path, *, overwrite: bool) -> None:
        """Write the messages in the form of `run --messages`. Raises UsageError, ExistsError."""
        if not self.messages:
            why = "a file without messages is one that /load refuses"
            raise UsageError("there is nothing to save: no message stands", why=why, fix="ask first, then /save")
        content = {"messages": list(map(self._saved, self.messages)), "add_generation_prompt": True}
        (replace_file if overwrite else write_new)(path, json.dumps(content, ensure_ascii=False, indent=1) + "\n")

    def load(self, messages: list[Message]) -> None:
        """Put these messages in place of the present ones. Raises UsageError for a system message that is not text."""
        has_system = bool(messages) and messages[0].get("role") == "system"
        system = messages[0].get("content") if has_system else None
        if has_system and not isinstance(system, str):
            raise UsageError("the system message is not text", why="its content must be one string", fix="/load FILE")
        self.clear()
        self.system = system
        self.turns = list(map(_loaded, messages[1:] if has_system else messages))


def joined(messages: Sequence[Message]) -> list[Message]:
    """Join neighbours of one role, such as a question without an answer and the next question."""
    found: list[Message] = []
    for message in messages:
        if found and _is_text(message) and _is_text(found[-1]) and found[-1]["role"] == message["role"]:
            found[-1] = {**message, "content": f"{found[-1]['content']}\n\n{message['content']}"}
        else:
            found.append(message)
    return found


def _is_answer(message: Message) -> bool:
    return message["role"] == "assistant" and isinstance(message.get("content"), str)


def _loaded(message: Message) -> Message:
    """Return a file's message with the thought in front of the answer; one that calls tools stays as it is."""
    thought = message.get(_THOUGHT)
    if not _is_answer(message) or not isinstance(thought, str) or not thought or message.get("tool_calls"):
        return message
    rest = {name: value for name, value in message.items() if name != _THOUGHT}
    return {**rest, "content": with_thought(thought, message["content"])}


def _is_text(message: Message) -> bool:
    return message.keys() == {"role", "content"} and isinstance(message["content"], str)


def _parsed(key: str, text: str) -> object:
    kind = SETTINGS[key].accepts.kind
    try:
        return {"integer": int, "number": float}.get(kind, str)(text) if kind != "texts" else [text]
    except ValueError:
        return text
