"""What undoing a removal brings back: everything, where it was."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from localllm.chat.thoughts import kept_apart
from localllm.history import GoneError, History, Session, exchange, search
from tests.history_support import ask, said, tables, titles


def branched(history: History, title: str) -> Session:
    """A chat with two answers and two wordings; the first wording is shown."""
    session = history.begin(title, "tiny", "Be brief.")
    asked = history.append(session, None, "user", f"{title}?")
    first = history.append(session, asked, "assistant", "It went home.", model="tiny", facts={"seed": 1})
    history.append(session, asked, "assistant", "It stayed.", state="interrupted")
    other = history.append(session, None, "user", "Said anew", fields={"name": "Ann"})
    history.append(session, other, "assistant", "Anew.")
    history.show(session, first)
    return history.refresh(session)


def test_what_is_put_back_is_as_if_it_had_never_been_gone(history: History, path: Path) -> None:
    sessions = [branched(history, f"The fox {number}") for number in range(3)]
    history.pin(sessions[1], True)
    before, order = tables(path), [session.id for session, _ in history.sessions()]
    removed = [history.take_out(session) for session in sessions[1:]]
    assert [session.id for session, _ in history.sessions()] == [sessions[0].id]
    assert not [hit for hit in history.search("anew", 9) if hit.session.id != sessions[0].id]
    for one in reversed(removed):
        history.put_back(one)
    assert tables(path) == before and [session.id for session, _ in history.sessions()] == order
    assert len(history.search("home", 9)) == 3


def test_a_chat_that_was_gone_on_with_meanwhile_stays_in_front_of_one_that_is_put_back(history: History) -> None:
    old, latest = ask(history, "old")[0], ask(history, "latest")[0]
    removed = history.take_out(latest)
    history.append(old, None, "user", "and now?")
    history.put_back(removed)
    assert titles(history) == ["old", "latest"]


def test_a_chat_that_was_imported_meanwhile_is_not_there_twice(history: History) -> None:
    session = branched(history, "The fox")
    conversation = history.conversation(session)
    removed = history.take_out(session)
    history.add(conversation)
    history.put_back(removed)
    ((found, _),) = history.sessions()
    assert history.conversation(found) == conversation


def test_a_removed_chat_is_put_back_into_a_file_in_which_its_numbers_are_taken(
    history: History, other: History
) -> None:
    session = branched(history, "The fox")
    conversation = history.conversation(session)
    removed = history.take_out(session)
    own, _ = ask(other, "mine")
    assert other.conversation(other.put_back(removed)) == conversation
    assert said(other, own) == [("user", "mine", "complete")]


def test_a_chat_that_is_gone_cannot_be_taken_out_pinned_or_renamed(history: History) -> None:
    session, _ = ask(history)
    history.remove([session])
    for act in (history.take_out, partial(history.pin, is_pinned=True), partial(history.rename, title="anew")):
        with pytest.raises(GoneError):
            act(session)


def test_a_pin_stays_through_export_and_import_and_moves_nothing(history: History, other: History) -> None:
    first, second = ask(history, "first")[0], ask(history, "second")[0]
    assert history.pin(first, True).is_pinned and titles(history) == ["second", "first"]
    assert not history.pin(history.pin(second, True), False).is_pinned
    exported = json.dumps(exchange.as_json([history.conversation(first)], kept_apart))
    (conversation,) = exchange.from_json(json.loads(exported))
    assert other.add(conversation)[0].is_pinned


def test_a_rename_changes_the_title_alone_and_the_new_one_is_found(history: History) -> None:
    first, _ = ask(history, "first")
    ask(history, "second")
    kept = history.pin(first, True)
    renamed = history.rename(first, "a lantern")
    assert (renamed.title, renamed.is_pinned, renamed.updated) == ("a lantern", True, kept.updated)
    assert titles(history) == ["second", "a lantern"]
    assert [hit.session.id for hit in history.search("lantern", 9)] == [first.id]


@pytest.mark.parametrize(
    ("text", "query", "found"),
    [
        ("A Lantern, lanterns", "lantern", ["Lantern", "lantern"]),
        ("the café's Füchse", "CAFE fuchse", ["café", "Füchse"]),
        ("a red lantern, a red fox", '"red lantern"', ["red lantern"]),
        ("각 and 간", "간", ["간"]),
        ("100% [b]", "100% [b]", ["100%", "[b]"]),
    ],
)
def test_the_places_of_words_are_found_whatever_their_accents_and_case(text: str, query: str, found: list[str]) -> None:
    assert [text[begin:end] for begin, end in search.places(text, query)] == found
