"""Conversations out of the data that ChatGPT exports: conversations.json, alone or in the archive that was mailed.

What is not text (an image, a file, a tool at work) becomes a note in brackets. What a person never saw is left out.
Branches are kept. The uids are those of the export, so that a later one adds only what is new.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from localllm.errors import UsageError
from localllm.history.records import Conversation, Said, seconds_of, title_of

_PREFIX = "chatgpt:"
# Contexts that are put in front of every conversation, and what the model thought: no part of what was said.
_UNSAID = frozenset(
    {"user_editable_context", "model_editable_context", "thoughts", "reasoning_recap", "tether_browsing_display"}
)
_NOTES = {"image_asset_pointer": "image", "audio_asset_pointer": "audio", "video_container_asset_pointer": "video"}


def is_export(data: object) -> bool:
    """Return whether a JSON value looks like conversations.json, or one conversation of it."""
    first = data[0] if isinstance(data, list) and data else data
    return isinstance(first, dict) and "mapping" in first


def conversations(data: object) -> list[Conversation]:
    """Return the conversations of an export, the latest at the end. Raises UsageError for a malformed one."""
    found = []
    for index, item in enumerate(data if isinstance(data, list) else [data]):
        mapping = item.get("mapping") if isinstance(item, dict) else None
        if not isinstance(mapping, dict):
            why = f"it has no `mapping` of messages, but is a {type(item).__name__}"
            raise UsageError(f"conversation {index} of the export is malformed", why=why, fix="export it anew")
        for node in mapping.values():
            if not isinstance(node, dict):
                what = f"a message of conversation {index} of the export is malformed"
                raise UsageError(what, why=f"a node of its mapping is a {type(node).__name__}", fix="export it anew")
        found.append(_conversation(item, mapping))
    return sorted(found, key=lambda conversation: conversation.updated)


def _conversation(item: Mapping[str, Any], mapping: Mapping[str, dict[str, Any]]) -> Conversation:
    said: list[Said] = []
    shown_by: dict[str, str | None] = {}  # node -> the message that it is, or the nearest before it
    system = None
    for node_id, before in _in_order(mapping):
        parent = shown_by[node_id] = shown_by.get(before or "")
        message = _mapping(mapping[node_id].get("message"))
        if not (content := _text(message)):
            continue
        if _role(message) == "system":
            system = content if parent is None else system
        else:
            shown_by[node_id] = _PREFIX + node_id
            said.append(_said(_PREFIX + node_id, parent, message, content))
    first = next((one.content for one in said if one.role == "user"), "")
    head = shown_by.get(_str(item.get("current_node")))
    key = item.get("conversation_id") or item.get("id") or f"{item.get('create_time')}-{item.get('title')}"
    if key == "None-None":
        key = next(iter(mapping), "empty")
    return Conversation(
        uid=f"{_PREFIX}{key}",
        id="",
        title=title_of(_str(item.get("title"), first)),
        model=None,  # one of this machine is to go on with it
        system=system,
        created=seconds_of(item.get("create_time")),
        updated=seconds_of(item.get("update_time")),
        head=head or (said[-1].uid if said else None),
        messages=tuple(said),
        facts={"imported_from": "chatgpt"},
    )


def _in_order(mapping: Mapping[str, dict[str, Any]]) -> Iterator[tuple[str, str | None]]:
    """Every node with its parent, and behind that. A circle is cut somewhere."""
    named = {key: parent for key, node in mapping.items() if (parent := _str(node.get("parent"))) in mapping}
    parents: dict[str, str] = {}
    children: dict[str, dict[str, None]] = {key: {} for key in mapping}
    for key, node in mapping.items():  # either may be missing: both parents and children name the other
        listed = node.get("children")
        for child in listed if isinstance(listed, list) else ():
            if isinstance(child, str) and child in mapping and named.get(child, key) == key:
                parents.setdefault(child, key)
                children[key][child] = None
    for key, parent in named.items():
        if parents.setdefault(key, parent) == parent:
            children[parent][key] = None
    seen: set[str] = set()
    for first in (*(key for key in mapping if key not in parents), *mapping):
        waiting = [first]
        while waiting:
            if (key := waiting.pop()) not in seen:
                seen.add(key)
                yield key, parents.get(key)
                waiting += reversed(children[key])


def _said(uid: str, parent: str | None, message: Mapping[str, Any], content: str) -> Said:
    return Said(
        uid=uid,
        parent=parent,
        role="user" if _role(message) == "user" else "assistant",  # a tool's output stands in the answer that wanted it
        content=content,
        state="complete" if message.get("status") in (None, "finished_successfully") else "interrupted",
        model=_str(_mapping(message.get("metadata")).get("model_slug")) or None,
        created=seconds_of(message.get("create_time")),
    )


def _role(message: Mapping[str, Any]) -> str:
    return _str(_mapping(message.get("author")).get("role"), "assistant")


def _text(message: Mapping[str, Any]) -> str:
    """The text of the message that a person read; "" for none."""
    content = _mapping(message.get("content"))
    if _mapping(message.get("metadata")).get("is_visually_hidden_from_conversation"):
        return ""
    if _str(content.get("content_type")) in _UNSAID:
        return ""
    parts = content.get("parts")
    texts = [_part(part) for part in parts] if isinstance(parts, list) else [_str(content.get("text"))]
    text = "\n\n".join(part for part in texts if part.strip())
    recipient = _str(message.get("recipient"), "all")
    if text and _role(message) == "tool":
        return f"[output of {_str(_mapping(message.get('author')).get('name'), 'a tool')}]\n{text}"
    return f"[to {recipient}]\n{text}" if text and recipient != "all" else text


def _part(part: object) -> str:
    if not isinstance(part, dict):
        return part if isinstance(part, str) else ""
    if isinstance(part.get("text"), str):  # what was said aloud
        return str(part["text"])
    kind = _str(part.get("content_type"), "attachment")
    pointer = _str(part.get("asset_pointer")).rpartition("/")[2]
    return f"[{_NOTES.get(kind, kind)}{': ' if pointer else ''}{pointer}]"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _str(value: object, otherwise: str = "") -> str:
    return value if isinstance(value, str) and value.strip() else otherwise
