"""A conversation that has outgrown its context: what leaves it, what is told, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, log2
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.chat.context import ContextMeter, evicted_text
from localllm.errors import TemplateError
from localllm.text.chat_template import ChatTemplate
from localllm.text.eviction import Evicted, answer_room, fit_turns, num_in_front, turn_starts, turns_too_many
from tests.thinning import examples

Messages = list[dict[str, Any]]
SYSTEM = {"role": "system", "content": "be brief"}


def turn(number: int, words: int = 10) -> Messages:
    return [
        {"role": "user", "content": f"question {number}" + " x" * (words - 2)},
        {"role": "assistant", "content": "y " * words},
    ]


def asked(*turns: Messages, system: bool = True) -> Messages:
    """A conversation whose last question is not answered yet."""
    said = [message for one in turns for message in one]
    return [*([SYSTEM] if system else []), *said[:-1]]


def words(messages: Sequence[dict[str, Any]]) -> list[int]:
    """A token a word, and one for each message."""
    return [0] * sum(1 + len(str(message["content"]).split()) for message in messages)


class Counted:
    """Encodes, and remembers how often."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        self.times += 1
        return words(messages)


@pytest.mark.parametrize(
    ("turns", "ctx", "floor", "expected"),
    [
        ([10, 10], 1000, 0, (0, 0, 36)),
        ([10], 200, 12, (0, 0, 14)),  # where no turn begins any more counts for nothing
        ([4, 4, 141], 200, 0, (2, 1, 155)),
        ([10, 300], 200, 0, (2, 1, 304)),  # for the engine to refuse
    ],
    ids=["fits", "a floor that is none", "what has room beside a long question", "a question too long alone"],
)
def test_turns_stay_where_they_have_room_and_the_last_question_always(
    turns: list[int], ctx: int, floor: int, expected: tuple[int, int, int]
) -> None:
    fitted = fit_turns(asked(*(turn(number, words=size) for number, size in enumerate(turns))), words, ctx, 40, floor)
    assert (fitted.floor, fitted.evicted.turns, len(fitted.prompt_ids)) == expected


def test_the_oldest_turns_leave_so_many_that_as_many_quarters_of_the_prompts_room_are_gone_as_have_to_be() -> None:
    talk = asked(*(turn(number) for number in range(10)))  # 3 of the system message, 22 of each turn: 212
    fitted = fit_turns(talk, words, 200, 40)  # 160 for the prompt, 40 a quarter of that: two have to go
    assert (fitted.floor, fitted.evicted.turns, fitted.evicted.tokens) == (8, 4, 88)
    assert len(fitted.prompt_ids) == 212 - 88
    assert evicted_text(fitted.evicted).startswith("4 turns left the context (88 of 212 tokens), from 'question 0 x")


def test_what_has_left_stays_out_and_the_next_few_prompts_find_their_beginning_computed() -> None:
    talk = asked(*(turn(number) for number in range(7)))
    floor, floors, told = 0, [], []
    for number in range(7, 17):
        fitted = fit_turns(talk, words, 200, 40, floor)
        floor = fitted.floor
        floors.append(floor)
        told.append(fitted.evicted.turns)
        talk = [*talk, turn(0)[1], turn(number)[0]]
    assert floors == [0, 4, 4, 8, 8, 12, 12, 16, 16, 20]
    assert told == [0, 2, 0, 2, 0, 2, 0, 2, 0, 2]


def test_a_process_that_was_told_of_nothing_leaves_out_the_same_turns() -> None:
    lengths = range(70, 140)  # in turns of 22 tokens, of which 68 have room
    floors = [fit_turns(asked(*(turn(n) for n in range(count))), words, 2000, None).floor for count in lengths]
    assert sorted(set(floors)) == [36, 70, 104, 138, 172] and floors == sorted(floors)


def test_what_was_taken_back_lets_turns_return_where_there_is_room() -> None:
    talk = asked(*(turn(number) for number in range(4)))
    assert fit_turns(talk, words, 200, 40, 4).floor == 4
    assert fit_turns(talk, words, 200, 40, 4, looks=True).floor == 0
    longer = asked(*(turn(number) for number in range(9)))
    returned = fit_turns(longer, words, 200, 40, 12, looks=True)
    assert 0 < returned.floor < 12 and returned.evicted == Evicted()


def test_a_long_conversation_is_encoded_as_often_as_a_bisection_does() -> None:
    encode = Counted()
    fit_turns(asked(*(turn(number) for number in range(1000))), encode, 500, None)
    assert encode.times <= 3 + ceil(log2(1000))


def test_tool_calls_and_their_results_leave_with_their_question() -> None:
    calls: Messages = [
        {"role": "user", "content": "look " * 50},
        {"role": "assistant", "content": "", "tool_calls": []},
        {"role": "tool", "content": "seen " * 50},
        {"role": "assistant", "content": "it is there"},
    ]
    talk = [SYSTEM, *calls, *turn(2)[:1]]
    assert turn_starts(talk) == [1, 5]
    assert fit_turns(talk, words, 100, 20).floor == 4


def test_the_answers_room_is_what_was_asked_for_and_at_most_a_quarter() -> None:
    assert [answer_room(800, most) for most in (None, 50, 500)] == [200, 50, 200]


def test_it_is_known_how_many_turns_are_too_many() -> None:
    talk = asked(*(turn(number) for number in range(10)))
    assert turns_too_many(talk, words, 150) == (3, 10)
    assert turns_too_many(asked(turn(1), turn(2, words=300)), words, 150) == (0, 2)
    assert turns_too_many(asked(turn(2, words=300)), words, 150) == (0, 1)


def test_a_template_that_refuses_a_beginning_loses_one_more_turn() -> None:
    def encode(messages: Sequence[dict[str, Any]]) -> list[int]:
        if "question 5" in messages[1]["content"]:
            raise TemplateError("it does not begin like that")
        return words(messages)

    talk = asked(*(turn(number) for number in range(12)))
    assert fit_turns(talk, encode, 240, 40).evicted.turns == 6


ROLES = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 60)), min_size=1, max_size=14)


@given(
    sizes=ROLES,
    system=st.booleans(),
    ctx=st.integers(8, 400),
    most=st.none() | st.integers(1, 500),
    unanswered=st.sets(st.integers(0, 13)),
)
def test_what_stays_is_whole_turns_behind_the_system_message_and_it_fits_where_anything_does(
    sizes: list[tuple[int, int]], system: bool, ctx: int, most: int | None, unanswered: set[int]
) -> None:
    talk: Messages = [SYSTEM] if system else []
    for index, (question, answer) in enumerate(sizes):
        talk.append({"role": "user", "content": "q " * question})
        if index not in unanswered and index < len(sizes) - 1:
            talk.append({"role": "assistant", "content": "a " * answer})
    fitted = fit_turns(talk, words, ctx, most)
    front, room = num_in_front(talk), answer_room(ctx, most)
    assert front + fitted.floor in turn_starts(talk)
    kept = [*talk[:front], *talk[front + fitted.floor :]]
    assert fitted.prompt_ids == tuple(words(kept)) and kept[-1] is talk[-1]
    last_alone = [*talk[:front], *talk[turn_starts(talk)[-1] :]]
    if len(words(last_alone)) <= ctx - room:
        assert len(fitted.prompt_ids) <= ctx - room
    else:
        assert kept == last_alone
    assert fitted.evicted.tokens == len(words(talk)) - len(fitted.prompt_ids)
    again = fit_turns(talk, words, ctx, most, fitted.floor)
    assert (again.prompt_ids, again.floor, again.evicted.turns) == (fitted.prompt_ids, fitted.floor, 0)


@pytest.fixture(scope="module")
def templates(shared_data: Callable[[str], Path]) -> list[ChatTemplate]:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    folder = shared_data("chat_templates/jinja")
    sources = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))]
    return [ChatTemplate(source, special_tokens=special) for source in sources]


@settings(max_examples=examples(12), deadline=None)
@given(sizes=ROLES, system=st.booleans(), share=st.floats(0.05, 1.2))
def test_every_real_template_accepts_what_stays(
    templates: list[ChatTemplate], sizes: list[tuple[int, int]], system: bool, share: float
) -> None:
    talk = asked(*([turn(i, q)[0], turn(i, a)[1]] for i, (q, a) in enumerate(sizes)), system=system)
    for template in templates:

        def encode(messages: Sequence[dict[str, Any]], template: ChatTemplate = template) -> list[int]:
            return [0] * len(template.render(messages))

        try:
            whole = len(encode(talk))
        except TemplateError:  # it knows no system message
            continue
        ctx = max(4, int(share * whole))
        fitted = fit_turns(talk, encode, ctx, None)
        kept = [*talk[: num_in_front(talk)], *talk[num_in_front(talk) + fitted.floor :]]
        assert fitted.prompt_ids == tuple(encode(kept))
        alone = len(encode([*talk[: num_in_front(talk)], talk[-1]]))
        assert len(fitted.prompt_ids) <= max(ctx - answer_room(ctx, None), alone)


def test_the_meter_tells_when_four_fifths_are_reached_and_again_at_95_percent() -> None:
    meter = ContextMeter()
    told = [meter.note(used, 100, "stop") for used in (10, 79, 81, 83, 94, 95, 99, 40, 80)]
    assert [note is not None for note in told] == [False, False, True, False, False, True, False, False, True]
    assert told[2] == (
        "the context is 81% full (81 of 100 tokens); once it is full, answers are cut and questions refused: "
        "/undo, /clear, or /set overflow evict"
    )
