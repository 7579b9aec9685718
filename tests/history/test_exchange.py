"""Conversations on their way: our own export, Markdown, and what ChatGPT exports."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from localllm.chat.thoughts import kept_apart
from localllm.errors import UsageError
from localllm.history import History, Session, exchange
from localllm.history.exchange import read_conversations
from localllm.history.records import IN_THOUGHT, Conversation
from tests.history_support import ask, said

# On its way between files


def read(folder: Path, content: Any) -> list[Conversation]:
    """What is read of a file with these bytes, or of what is no bytes, as JSON."""
    file = folder / "conversations.json"
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return list(read_conversations(file))


def exported(*conversations: Conversation) -> Any:
    return json.loads(json.dumps(exchange.as_json(conversations, kept_apart)))


def a_tree(history: History) -> Session:
    """Two answers to one question, one of them cut, a second wording of it, and a message that is not a text."""
    session, question = ask(history, "Wohin ging der Fuchs? \x1b[31m")
    facts = {"seed": 7, "completion_tokens": 3}
    history.append(session, question, "assistant", "Nach 北京.", model="tiny", facts=facts)
    history.append(session, question, "assistant", "Nach", state="interrupted")
    other = history.append(session, None, "user", "Where to?", fields={"name": "me"})
    history.append(session, other, "tool", "a\nb", fields={"content": [{"type": "text", "text": "a"}]})
    history.update(session, title="Füchse", model="tiny", system="Be brief.")
    return history.refresh(session)


def test_an_export_comes_back_as_it_went(history: History, other: History, tmp_path: Path) -> None:
    conversations = [history.conversation(each) for each in (a_tree(history), ask(history)[0])]
    found = read(tmp_path, exported(*conversations))
    added = [other.add(conversation) for conversation in found]
    assert [count for _, count in added] == [5, 1]
    assert [other.conversation(session) for session, _ in added] == conversations
    assert [other.add(conversation)[1] for conversation in found] == [0, 0] and other.count() == 2


THOUGHTS = [
    ("<think>\nHm.\n</think>\n\nSo.", False, "Hm.\n", "So."),
    ("[THINK]Hm </think>[/THINK]So.", False, "Hm </think>", "So."),
    ("Hm.</think>\n\nSo.", True, "Hm.", "So."),
    ("Hm.", True, "Hm.", ""),
    ("<think>\n\n</think>\n\nSo.", False, "", "So."),
    ("<think>a</think>\n<think>b</think>So.", False, "ab", "So."),
    ("<think>aaa</think>a", False, "aaa", "a"),
]
WHOLE = ["\n\n So. ", "The mark </think> ends it.", " <", ""]


@pytest.mark.parametrize(("content", "begins", "thought", "answer"), THOUGHTS)
def test_thoughts_are_exported_beside_the_answer_and_come_back(
    history: History, content: str, begins: bool, thought: str, answer: str
) -> None:
    session, question = ask(history)
    history.append(session, question, "assistant", content, facts={IN_THOUGHT: True} if begins else {})
    conversation = history.conversation(history.refresh(session))
    data = exported(conversation)
    message = data["sessions"][0]["messages"][-1]
    assert (message["content"], message["reasoning_content"]) == (answer, thought)
    assert exchange.from_json(data) == [conversation]
    del message["thought_marks"]
    assert exchange.from_json(data)[0].messages[-1].content == f"<think>\n{thought}</think>\n\n{answer}"


@pytest.mark.parametrize("content", WHOLE)
@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
def test_what_has_no_thought_is_exported_as_it_stands(history: History, content: str, role: str) -> None:
    session, question = ask(history, "<think>a</think>b")
    history.append(session, question, role, content)
    conversation = history.conversation(history.refresh(session))
    assert "> " not in exchange.as_markdown(session, history.path(session), kept_apart).replace("think> ", "")
    (found,) = exchange.as_json([conversation], kept_apart)["sessions"]
    assert found == {**asdict(conversation), "messages": list(map(asdict, conversation.messages))}


def test_a_thought_is_quoted_in_markdown_and_a_code_block_in_it_ends_with_it(history: History) -> None:
    session, question = ask(history)
    history.append(session, question, "assistant", "<think>\nHm.\n\n```\nx\n</think>\n\nSo.")
    text = exchange.as_markdown(session, history.path(history.refresh(session)), kept_apart)
    assert text.endswith("## Model\n\n> Hm.\n>\n> ```\n> x\n\nSo.\n")


def test_a_chat_that_has_grown_gets_what_is_new_and_what_grew_here_stays_shown(
    history: History, other: History
) -> None:
    session, question = ask(history)
    copy, _ = other.add(history.conversation(session))
    history.append(session, question, "assistant", "There.")
    assert other.add(history.conversation(session))[1] == 1
    assert [role for role, _, _ in said(other, copy)] == ["user", "assistant"]
    other.append(copy, other.refresh(copy).head, "user", "and here?")
    head = history.refresh(session).head
    history.append(session, head, "user", "and there?")
    assert other.add(history.conversation(history.refresh(session)))[1] == 1
    assert [content for _, content, _ in said(other, copy)][-1] == "and here?"
    assert len(other.tree(copy)) == 4


def test_an_id_that_is_taken_here_is_not_taken_by_an_import(history: History, other: History) -> None:
    session, _ = ask(history)
    conversation = history.conversation(session)
    taken, _ = ask(other)
    for wanted in (taken.id, "last", "--all", "../x y"):
        uid = f"uid of {wanted}"
        added, _ = other.add(type(conversation)(**{**vars(conversation), "id": wanted, "uid": uid}))
        assert added.id != wanted or wanted == "--all"
        assert other.find(added.id).uid == uid


def changed(**fields: Any) -> Callable[[Any], None]:
    return lambda data: data["sessions"][0].update(fields)


def changed_message(**fields: Any) -> Callable[[Any], None]:
    return lambda data: data["sessions"][0]["messages"][0].update(fields)


BROKEN: dict[str, Callable[[Any], object]] = {
    "a version": lambda data: data.update(format_version=2),
    "no sessions": lambda data: data.pop("sessions"),
    "a session that is none": lambda data: data.update(sessions=[3]),
    "a key too many": changed(colour="red"),
    "a key too few": lambda data: data["sessions"][0].pop("title"),
    "a title that is none": changed(title=None),
    "a time that is none": changed(created=10**400),
    "a head that is nowhere": changed(head="nowhere"),
    "a parent that comes later": lambda data: data["sessions"][0]["messages"].reverse(),
    "a uid twice": lambda data: data["sessions"][0]["messages"].append(data["sessions"][0]["messages"][0]),
    "a state": changed_message(state="odd"),
    "a thought that is none": changed_message(reasoning_content=3),
    "an answer that is none": changed_message(reasoning_content="", content=None),
    "marks that are none": changed_message(reasoning_content="", thought_marks=["", 3]),
    "marks of no thought": changed_message(thought_marks=["", ""]),
    "fields that are none": changed_message(fields=[]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_export_changed_by_hand_is_refused_by_what_is_wrong(history: History, tmp_path: Path, name: str) -> None:
    data = exported(history.conversation(a_tree(history)))
    BROKEN[name](data)
    with pytest.raises(UsageError) as caught:
        read(tmp_path, data)
    assert caught.value.why and caught.value.fix


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "cannot be imported"),
        (b"[" * 100_000, "nested too deeply"),
        (b"3", "not an export of chats"),
        (b'{"a": NaN}', "not JSON"),
        (b'{"a": 1e400}', "not JSON"),
        (b'[{"mapping": 3}]', "malformed"),
        (b'[{"mapping": {"a": 3}}]', "malformed"),
        (b'[{"mapping": {}}, 3]', "malformed"),
        (b"PK\x05\x06" + bytes(18), "not an export of chats"),
        (b"PK\x03\x04" + b"x" * 50, "not JSON|cannot be imported"),
    ],
)
def test_a_file_that_is_no_export_is_refused_by_name(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        read(tmp_path, content)
    assert "conversation" in caught.value.what


def test_markdown_has_what_is_shown_and_says_what_was_interrupted(history: History) -> None:
    session, question = ask(history, "Where to?")
    history.append(session, question, "assistant", "Not this one.")
    history.append(session, question, "assistant", "To the", state="interrupted")
    session = history.refresh(session)
    text = exchange.as_markdown(session, history.path(session), kept_apart)
    assert text.startswith(f"# Where to?\n\n`{session.id}` · ")
    assert text.endswith("## You\n\nWhere to?\n\n## Model\n\nTo the\n\n*(interrupted)*\n")


# ChatGPT


def node(key: str, parent: str | None, role: str, *parts: Any, **more: Any) -> dict[str, Any]:
    content = more.pop("content", {"content_type": "text", "parts": list(parts)})
    author = {"role": role, "name": more.pop("name", None)}
    status = more.pop("status", "finished_successfully")
    message = {"id": key, "author": author, "content": content, "create_time": 1.7e9, "status": status, **more}
    return {"id": key, "parent": parent, "children": [], "message": message}


def chatgpt_export() -> list[dict[str, Any]]:
    image = {"content_type": "image_asset_pointer", "asset_pointer": "file-service://file-abc"}
    nodes = [
        {"id": "root", "parent": None, "children": [], "message": None},
        node("sys", "root", "system", ""),
        node("ctx", "sys", "user", content={"content_type": "user_editable_context", "user_profile": "secret"}),
        node("q", "ctx", "user", image, "What is this?"),
        node("a1", "q", "assistant", "A fox.", metadata={"model_slug": "gpt-4o"}),
        node("a2", "q", "assistant", content={"content_type": "code", "text": "look()"}, recipient="python"),
        node("t", "a2", "tool", content={"content_type": "execution_output", "text": "owl"}, name="python"),
        node("th", "t", "assistant", content={"content_type": "thoughts", "thoughts": []}),
        node("a3", "th", "assistant", "An", status="in_progress"),
        node("h", "a3", "user", "hidden", metadata={"is_visually_hidden_from_conversation": True}),
    ]  # fmt: skip
    mapping = {each["id"]: each for each in nodes}
    for each in nodes:
        if each["parent"]:
            mapping[each["parent"]]["children"].append(each["id"])
    return [
        {"title": "Animals", "create_time": 1.7e9, "update_time": 1.8e9, "mapping": mapping, "current_node": "h",
         "conversation_id": "c-1"},
        {"title": None, "create_time": None, "update_time": None, "mapping": {}, "current_node": None, "id": "c-2"},
    ]  # fmt: skip


def archive(data: Any) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("user.json", "{}")
        file.writestr("export/conversations.json", json.dumps(data))
    return buffer.getvalue()


@pytest.mark.parametrize("packed", [False, True])
def test_an_export_of_chatgpt_has_branches_and_notes_what_is_no_text(
    history: History, tmp_path: Path, packed: bool
) -> None:
    data = chatgpt_export()
    file = tmp_path / ("export.zip" if packed else "conversations.json")
    file.write_bytes(archive(data) if packed else json.dumps(data).encode())
    added = [history.add(conversation) for conversation in read_conversations(file)]
    assert [count for _, count in added] == [0, 5]
    session = added[1][0]
    assert (session.title, session.model, session.created, session.updated) == ("Animals", None, 1.7e9, 1.8e9)
    assert said(history, session) == [
        ("user", "[image: file-abc]\n\nWhat is this?", "complete"),
        ("assistant", "[to python]\nlook()", "complete"),
        ("assistant", "[output of python]\nowl", "complete"),
        ("assistant", "An", "interrupted"),
    ]
    assert [message.model for message in history.tree(session) if message.content == "A fox."] == ["gpt-4o"]
    assert [history.add(conversation)[1] for conversation in read_conversations(file)] == [0, 0]
    data[0]["mapping"]["n"] = node("n", "h", "assistant", "Later.")
    data[0]["mapping"]["h"]["children"].append("n")
    data[0]["current_node"] = "n"
    file.write_bytes(archive(data) if packed else json.dumps(data).encode())
    assert [history.add(conversation)[1] for conversation in read_conversations(file)] == [0, 1]
    assert said(history, session)[-1] == ("assistant", "Later.", "complete")


def test_an_export_whose_messages_go_round_in_a_circle_ends(history: History, tmp_path: Path) -> None:
    mapping = {"r": node("r", None, "user", "hi"), "a": node("a", "b", "user", "x"), "b": node("b", "a", "user", "y")}
    mapping["r"]["children"] = ["r", "a", "gone"]
    mapping["a"]["children"], mapping["b"]["children"] = ["b"], ["a"]
    (conversation,) = read(tmp_path, [{"mapping": mapping, "current_node": "b", "id": "c"}])
    assert history.add(conversation)[1] == len(conversation.messages) >= 1


def chatgpt(**nodes: Any) -> list[dict[str, Any]]:
    """An export of one conversation; of each node its text, and its parent and children as far as they are given."""
    mapping = {}
    for name, (text, links) in nodes.items():
        message = {"author": {"role": "user"}, "content": {"content_type": "text", "parts": [text]}}
        mapping[name] = {"id": name, **links, "message": message}
    return [{"mapping": mapping, "current_node": next(reversed(nodes))}]


@pytest.mark.parametrize(
    "links",
    [
        ({}, {"parent": "a"}, {"parent": "b"}),
        ({"children": ["b"]}, {"children": ["c"]}, {}),
        ({"parent": "c"}, {"parent": "a"}, {"parent": "b"}),
        ({"parent": {}, "children": [[], "b"]}, {}, {"parent": "b"}),
    ],
    ids=["parents alone", "children alone", "a circle", "odd values"],
)
def test_no_message_of_an_odd_export_is_lost(history: History, tmp_path: Path, links: tuple[Any, ...]) -> None:
    texts = ["one", "two", "three"]
    (conversation,) = read(tmp_path, chatgpt(**dict(zip("abc", zip(texts, links, strict=True), strict=True))))
    session, count = history.add(conversation)
    assert count == 3 and [content for _, content, _ in said(history, session)] == texts


def test_conversations_without_a_name_are_not_taken_for_one(history: History, tmp_path: Path) -> None:
    found = read(tmp_path, chatgpt(a=("one", {})) + chatgpt(b=("two", {})))
    assert [history.add(conversation)[1] for conversation in found] == [1, 1]
    assert history.count() == 2


def test_an_answer_that_was_exported_half_is_whole_after_the_next_import(history: History, other: History) -> None:
    session, question = ask(history)
    answer = history.append(session, question, "assistant", "half", state="writing")
    copy, _ = other.add(history.conversation(session))
    history.finish(answer, "half and half", "complete", {"seed": 1})
    assert other.add(history.conversation(session))[1] == 1
    assert said(other, copy)[-1] == ("assistant", "half and half", "complete")
    assert other.add(history.conversation(session))[1] == 0


def test_half_a_character_in_an_id_is_no_bug(history: History) -> None:
    conversation = history.conversation(ask(history)[0])
    (message,) = conversation.messages
    uid = "\ud800" + message.uid
    odd = replace(conversation, uid="\udfff", head=uid, messages=(replace(message, uid=uid),))
    assert [history.add(odd)[1] for _ in range(2)] == [1, 0]


def test_an_archive_whose_bytes_are_damaged_is_a_usage_error(tmp_path: Path) -> None:
    file = tmp_path / "export.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("conversations.json", json.dumps(chatgpt(a=("one " * 500, {}))))
    content = bytearray(file.read_bytes())
    for place in range(48, 60):
        content[place] ^= 0xFF
    file.write_bytes(content)
    with pytest.raises(UsageError, match="cannot be imported"):
        read_conversations(file)


def test_what_follows_an_answer_that_was_cut_in_a_code_block_is_not_in_it(history: History, path: Path) -> None:
    session, question = ask(history)
    answer = history.append(
        session, question, "assistant", "So:\n```python\nprint(1)\n````` no\n~~~", state="interrupted"
    )
    history.append(session, answer, "user", "~~~~\na\n~~~\n~~~~~")
    session = history.refresh(session)
    text = exchange.as_markdown(session, history.path(session), kept_apart)
    assert text.endswith("~~~\n```\n\n*(interrupted)*\n\n## You\n\n~~~~\na\n~~~\n~~~~~\n")
