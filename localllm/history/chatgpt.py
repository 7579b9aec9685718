"""Conversations out of the data that ChatGPT exports: conversations.json, alone or in the archive that was mailed.

What is no text (an image, a file, a tool at work) becomes a note in brackets. What a person never saw is left out.
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
    """Whether a JSON value looks like conversations.json, or one conversation of it."""
    first = data[0] if isinstance(data, list) and data else data
    return isinstance(first, dict) and "mapping" in first


def conversations(data: object) -> list[Conversation]:
    """The conversations of an export, the one gone on with last at the end. Raises UsageError for a malformed one."""
    found = _each(data if isinstance(data, list) else [data])
    return sorted(found, key=lambda conversation: conversation.updated)


def _each(items: list[Any]) -> Iterator[Conversation]:
    for index, item in enumerate(items):
        mapping = item.get("mapping") if isinstance(item, dict) else None
        if not isinstance(mapping, dict):
            why = f"it has no `mapping` of messages, but is a {type(item).__name__}"
            raise UsageError(f"conversation {index} of the export is malformed", why=why, fix="export it anew")
        yield _conversation(item, mapping, index)


def _conversation(item: Mapping[str, Any], mapping: Mapping[str, Any], index: int) -> Conversation:
    said: list[Said] = []
    shown_by: dict[str, str | None] = {}  # node -> the message that it is, or the nearest before it
    system = None
    for node_id, behind in _in_order(mapping, index):
        node = mapping[node_id]
        parent = shown_by.get(behind or "")
        message = node.get("message") or {}
        content = _text(message) if isinstance(message, dict) else ""
        shown_by[node_id] = parent
        if not content:
            continue
        if _role(message) == "system":
            system = content if parent is None else system
            continue
        shown_by[node_id] = _PREFIX + node_id
        said.append(_said(_PREFIX + node_id, parent, message, content))
    first = next((one.content for one in said if one.role == "user"), "")
    current = item.get("current_node")
    head = shown_by.get(current) if isinstance(current, str) else None
    key = item.get("conversation_id") or item.get("id") or f"{item.get('create_time')}-{item.get('title')}"
    if key == "None-None":
        key = next(iter(mapping), "empty")
    return Conversation(
        uid=f"{_PREFIX}{key}",
        id="",
        title=title_of(_text_or(item.get("title"), first)),
        model=None,  # one of this machine is to go on with it
        system=system,
        created=seconds_of(item.get("create_time")),
        updated=seconds_of(item.get("update_time")),
        head=head or (said[-1].uid if said else None),
        messages=tuple(said),
        facts={"imported_from": "chatgpt"},
    )


def _in_order(mapping: Mapping[str, Any], index: int) -> Iterator[tuple[str, str | None]]:
    """Every node with the one that it hangs on, and behind that. A circle is cut somewhere."""
    for node in mapping.values():
        if not isinstance(node, dict):
            what = f"a message of conversation {index} of the export is malformed"
            raise UsageError(what, why=f"a node of its mapping is a {type(node).__name__}", fix="export it anew")
    parents: dict[str, str | None] = {}
    children: dict[str, dict[str, None]] = {key: {} for key in mapping}
    for key, node in mapping.items():  # either may be missing: who hangs on whom is said twice
        listed = node.get("children")
        for child in listed if isinstance(listed, list) else ():
            if isinstance(child, str) and child in mapping and _parent(mapping, child) in (None, key):
                parents.setdefault(child, key)
                children[key][child] = None
    for key in mapping:
        parent = _parent(mapping, key)
        if parent is not None and parents.setdefault(key, parent) == parent:
            children[parent][key] = None
    seen: set[str] = set()
    for first in (*(key for key in mapping if key not in parents), *mapping):
        waiting = [first]
        while waiting:
            key = waiting.pop()
            if key in seen:
                continue
            seen.add(key)
            yield key, parents.get(key)
            waiting += reversed(children[key])


def _parent(mapping: Mapping[str, Any], key: str) -> str | None:
    """That the node names, where it is there."""
    parent = mapping[key].get("parent")
    return parent if isinstance(parent, str) and parent in mapping else None


def _said(uid: str, parent: str | None, message: Mapping[str, Any], content: str) -> Said:
    role = _role(message)
    metadata = message.get("metadata")
    model = metadata.get("model_slug") if isinstance(metadata, dict) else None
    is_cut = message.get("status") not in (None, "finished_successfully")
    return Said(
        uid=uid,
        parent=parent,
        role="user" if role == "user" else "assistant",  # a tool's output stands in the answer that asked for it
        content=content,
        state="interrupted" if is_cut else "complete",
        model=model if isinstance(model, str) else None,
        created=seconds_of(message.get("create_time")),
    )


def _role(message: Mapping[str, Any]) -> str:
    author = message.get("author")
    role = author.get("role") if isinstance(author, dict) else None
    return role if isinstance(role, str) else "assistant"


def _text(message: Mapping[str, Any]) -> str:
    """What a person read of the message; "" where that is nothing."""
    metadata, content = message.get("metadata"), message.get("content")
    if isinstance(metadata, dict) and metadata.get("is_visually_hidden_from_conversation"):
        return ""
    if not isinstance(content, dict) or _text_or(content.get("content_type"), "") in _UNSAID:
        return ""
    parts = content.get("parts")
    texts = [_part(part) for part in parts] if isinstance(parts, list) else [_text_or(content.get("text"), "")]
    text = "\n\n".join(part for part in texts if part.strip())
    if not text:
        return ""
    author = message.get("author")
    name = author.get("name") if isinstance(author, dict) else None
    recipient = message.get("recipient")
    if _role(message) == "tool":
        return f"[output of {_text_or(name, 'a tool')}]\n{text}"
    if isinstance(recipient, str) and recipient != "all":
        return f"[to {recipient}]\n{text}"
    return text


def _part(part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        return ""
    kind = _text_or(part.get("content_type"), "attachment")
    if isinstance(part.get("text"), str):  # what was said aloud
        return str(part["text"])
    pointer = _text_or(part.get("asset_pointer"), "").rpartition("/")[2]
    return f"[{_NOTES.get(kind, kind)}{': ' if pointer else ''}{pointer}]"


def _text_or(value: object, otherwise: str) -> str:
    return value if isinstance(value, str) and value.strip() else otherwise
