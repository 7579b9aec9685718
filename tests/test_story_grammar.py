"""The story grammar that the tiny model is trained on."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"
sys.path.insert(0, str(TOOLS))

from story_chat import Conversations  # noqa: E402
from story_grammar import Cast, Figure, Item, Teller, load_plots, with_article  # noqa: E402

PLOTS = load_plots()
CAST = Cast(
    Figure("fox", "she", "little", "Quillara"),
    Figure("owl", "he"),
    Figure("ogre", "he"),
    Item("umbrella"),
    Item("forest", preposition="in"),
)


@pytest.mark.parametrize(
    ("phrase", "expected"),
    [("fox", "a fox"), ("owl", "an owl"), ("honest hen", "an honest hen"), ("unicorn", "a unicorn"),
     ("hour", "an hour"), ("umbrella", "an umbrella"), ("old key", "an old key")],
)  # fmt: skip
def test_the_article_follows_the_sound(phrase: str, expected: str) -> None:
    assert with_article(phrase) == expected


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.name)
def test_a_tale_names_every_role_of_its_plot(plot) -> None:
    text = Teller().tell(random.Random(3), plot, CAST).text
    words = {"h": "Quillara", "o": "owl", "v": "ogre", "t": "umbrella", "p": "forest"}
    assert [word for role, word in words.items() if role in plot.roles() and word not in text] == []


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.name)
def test_a_tale_is_finished_text_of_fitting_length(plot) -> None:
    text = Teller().tell(random.Random(4), plot).text
    assert 80 <= len(text.split()) <= 330
    assert not re.search(r"[\[\]{}<>|]|  |\ba [aeio]|\ban [^aeiouh]", text)
    assert text[0].isupper()
    assert text[-1] in '.!?"'


def test_the_same_seed_tells_the_same_tale() -> None:
    assert Teller().tell(random.Random(5)).text == Teller().tell(random.Random(5)).text


def test_a_thousand_tales_have_many_first_sentences() -> None:
    teller, rng = Teller(), random.Random(6)
    firsts = {teller.tell(rng).text.split(".")[0] for _ in range(1000)}
    assert len(firsts) > 900


def test_a_chat_alternates_and_ends_with_the_assistant() -> None:
    rng, conversations = random.Random(7), Conversations(Teller())
    roles = [[role for role, _ in conversations.chat(rng) if role != "system"] for _ in range(200)]
    assert all(turn == ["user", "assistant"] * (len(turn) // 2) for turn in roles)


def test_what_the_user_names_is_in_the_tale() -> None:
    rng, conversations = random.Random(8), Conversations(Teller())
    tale = conversations.teller.tell(rng, PLOTS[0], CAST)
    requests = {conversations.request(rng, tale) for _ in range(200)}
    assert any("Quillara" in request for request in requests)
    assert "Quillara" in tale.text
