"""One answer's state: whatever was said, drafted and taken back, it allows what a fresh one would."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.errors import GrammarError
from localllm.text.grammar.compiled import MAX_CACHED, Grammars
from localllm.text.grammar.grammar import Grammar
from localllm.text.tokenizer import Tokenizer
from tests.structured.support import accepts, allowed, drawn, json_schema
from tests.thinning import examples

PERSON = json_schema({
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "ages": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "ages"],
    "additionalProperties": False,
})  # fmt: skip
THOUGHT = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
OWL = '{"name": "owl", "ages": [3, 12]}'
SIZE = 4096 + 5  # as a model pads its logits
REAL = ("phi", pytest.param("qwen", marks=pytest.mark.slow))


@pytest.fixture(scope="module")
def shared(tokenizer: Tokenizer) -> Iterator[Grammars]:
    """That looks ahead, as beside a GPU."""
    grammars = Grammars(tokenizer, {2}, SIZE, looks_ahead=True)
    yield grammars
    grammars.close()


# Some may end where they can go on in one way alone: that is not forced.
WALKED = (
    *(Grammar(PERSON.kind, PERSON.source, thoughts) for thoughts in ((), THOUGHT)),
    *(Grammar("regex", source) for source in ("a(bcd)?", "owl( and fox)*", "(the owl )+", "yes|no|yesterday")),
    Grammar("gbnf", 'root ::= "x" | "x" root "yz"'),
    Grammar("lark", 'start: "a" more?\nmore: "bcd" more?'),
    json_schema({"enum": [1, 12, None, "twelve"]}),
)


@pytest.mark.parametrize("grammar", WALKED)
def test_a_token_is_forced_or_allowed_where_a_mask_allows_it(shared: Grammars, grammar: Grammar) -> None:
    for seed in range(3):
        constraint, said, choose = shared.constraint(grammar), list[int](), random.Random(seed)
        while len(said) < 20 and not constraint.has_ended(said):
            mask = allowed(constraint, said, SIZE).tolist()[:4096]
            forced = constraint.forced(said)[:1]
            allows = [each in forced if forced else constraint.allows(said, each) for each in range(4096)]
            assert mask == allows, said
            said.append(choose.choice([token_id for token_id, may in enumerate(mask) if may]))
            if said[-1] == 2:  # the end of a sequence, which is never forced
                assert not forced
                break


def test_nothing_is_allowed_behind_what_the_grammar_forbids(shared: Grammars) -> None:
    constraint = shared.constraint(PERSON)
    assert not constraint.allows([5, 5], 5) and constraint.forced([5, 5]) == ()


@pytest.mark.parametrize("thoughts", [(), THOUGHT])
@settings(max_examples=examples(25), deadline=None)
@given(moves=st.lists(st.tuples(st.sampled_from(["say", "back", "ask", "draft"]), st.integers(0, 10**6)), max_size=40))
def test_any_order_of_saying_and_taking_back_equals_a_fresh_state(
    shared: Grammars, thoughts: tuple[tuple[str, str], ...], moves: list[tuple[str, int]]
) -> None:
    grammar = Grammar(PERSON.kind, PERSON.source, thoughts)
    constraint, said = shared.constraint(grammar), list[int]()
    for move, number in moves:
        if move == "back":
            del said[number % (len(said) + 1) :]
        elif move == "draft":
            drafts = [number % 4096, number % 7]
            assert constraint.cut(said, drafts) == shared.constraint(grammar).cut(said, drafts)
        elif not constraint.has_ended(said):
            mask = allowed(constraint, said, SIZE)
            if move == "say":
                choices = mask.nonzero().squeeze(1)
                token_id = int(choices[number % len(choices)])
                if token_id != 2:  # the end
                    said.append(token_id)
                    constraint.look_ahead([*said])
    fresh = shared.constraint(grammar)
    assert constraint.has_ended(said) == fresh.has_ended(said)
    assert constraint.is_met(said) == fresh.is_met(said)
    assert constraint.forced(said) == fresh.forced(said)
    if not fresh.has_ended(said):
        assert torch.equal(allowed(constraint, said, SIZE), allowed(fresh, said, SIZE))


def test_the_end_is_allowed_exactly_where_the_grammar_may_end(shared: Grammars, tokenizer: Tokenizer) -> None:
    constraint = shared.constraint(Grammar("regex", "[0-9]{1,3}"))
    one, three = tokenizer.encode("7"), tokenizer.encode("7") * 3
    assert [bool(allowed(constraint, ids, SIZE)[2]) for ids in ([], one)] == [False, True]
    assert [constraint.has_ended(ids) for ids in ([], one, three)] == [False, False, True]
    assert not allowed(constraint, one, SIZE)[4096:].any(), "ids that the tokenizer lacks are never allowed"


def test_what_is_forced_is_what_the_tokenizer_makes_of_it(shared: Grammars, tokenizer: Tokenizer) -> None:
    forced = shared.constraint(PERSON).forced([*tokenizer.encode('{"')])
    assert tokenizer.decode(forced).startswith("name")
    assert list(forced) == tokenizer.encode('name":')[: len(forced)] or tokenizer.decode(forced) in 'name":'


def test_drafts_are_cut_where_the_grammar_forbids_one(shared: Grammars, tokenizer: Tokenizer) -> None:
    constraint, said = shared.constraint(PERSON), tokenizer.encode('{"name": "owl", "ages": [')
    good, bad = tokenizer.encode("3, 4]"), tokenizer.encode("x")
    assert constraint.cut(said, [*good, *bad, *good]) == tuple(good)
    assert constraint.cut(said, bad) == constraint.cut([*said, *bad], good) == ()


def test_a_mask_behind_what_is_forbidden_is_refused_and_harms_nothing(shared: Grammars, tokenizer: Tokenizer) -> None:
    constraint, said = shared.constraint(PERSON), tokenizer.encode('{"name": "owl"')
    expected = allowed(constraint, said, SIZE)
    for forbidden in (tokenizer.encode("x"), [2], [4098]):
        with pytest.raises(GrammarError, match="cannot go on"):
            allowed(constraint, [*said, *forbidden], SIZE)
        assert torch.equal(allowed(constraint, said, SIZE), expected)


@pytest.mark.parametrize("is_thinking", [False, True])
def test_all_may_be_thought_and_the_grammar_holds_behind(
    shared: Grammars, tokenizer: Tokenizer, is_thinking: bool
) -> None:
    constraint = shared.constraint(Grammar(PERSON.kind, PERSON.source, THOUGHT, is_thinking))
    opening = "" if is_thinking else "<think>"
    thought = opening + 'Hm: {"name": 3}. </thin> {é\n'
    assert accepts(constraint, tokenizer, f"{thought}</think>\n\n{OWL}")
    assert accepts(constraint, tokenizer, f"{thought}</think>{OWL}")
    assert accepts(constraint, tokenizer, OWL) == (not is_thinking)
    assert not accepts(constraint, tokenizer, f"{thought}</think> no {OWL}")
    assert not accepts(constraint, tokenizer, thought + OWL)
    assert not allowed(constraint, tokenizer.encode(thought), SIZE)[2], "no answer ends in its thought"


@pytest.mark.parametrize("name", REAL)
def test_real_tokenizers_write_what_the_grammar_says(
    request: pytest.FixtureRequest, tried_here: None, name: str
) -> None:
    tokenizer = request.getfixturevalue(name)
    assert tokenizer.eos_token_id is not None
    size = tokenizer.vocab_size + 100
    grammars = Grammars(tokenizer, {tokenizer.eos_token_id}, size)
    constraint = grammars.constraint(PERSON, tokenizer.leading_spaces)
    said = list(constraint.forced([]))
    assert tokenizer.decode(said).startswith('{"') or said == []
    assert accepts(constraint, tokenizer, OWL), "also with the blank that the tokenizer puts in front"
    texts = [text for seed in range(6) if (text := drawn(constraint, tokenizer, seed, size)) is not None]
    assert texts and all(set(json.loads(text)) == {"name", "ages"} for text in texts)
    mask = allowed(constraint, tokenizer.encode('{"name": "'), size)
    assert not mask[tokenizer.vocab_size :].any()
    assert not any(bool(mask[token_id]) for token_id in tokenizer.special_ids)


def test_a_text_that_begins_with_a_blank_keeps_it(phi: Tokenizer, tried_here: None) -> None:
    """Some tokenizers drop one when they decode: there the tokens have it twice."""
    grammars, said = Grammars(phi, {0}, phi.vocab_size), list[int]()
    constraint = grammars.constraint(Grammar("regex", " a"), phi.leading_spaces)
    while not constraint.has_ended(said):
        said.append(int(allowed(constraint, said, phi.vocab_size).nonzero()[0]))
    assert phi.decode(said) == " a"


def test_a_model_without_an_end_of_its_own_ends_with_the_grammar(tokenizer: Tokenizer) -> None:
    constraint = Grammars(tokenizer, frozenset(), tokenizer.vocab_size).constraint(Grammar("regex", "[ab]"))
    said = tokenizer.encode("a")
    assert constraint.has_ended(said) and constraint.is_met(said)
    with pytest.raises(GrammarError, match="cannot go on"):
        allowed(constraint, said, tokenizer.vocab_size)


def test_as_many_are_kept_as_may_be_and_refusals_too(tokenizer: Tokenizer, tried_here: None) -> None:
    grammars = Grammars(tokenizer, {2}, tokenizer.vocab_size)
    for number in range(MAX_CACHED + 5):
        grammars.check(Grammar("regex", f"a{number}"))
    assert len(grammars) == MAX_CACHED
    for _ in range(2):
        with pytest.raises(GrammarError, match="cannot be used"):
            grammars.check(Grammar("regex", "("))
    grammars.check(Grammar("lark", "start: " + " | ".join(f'"{number:060}"' for number in range(900))))
    assert len(grammars) <= MAX_CACHED


def test_answers_that_share_what_was_learnt_do_not_share_their_state(shared: Grammars, tokenizer: Tokenizer) -> None:
    one, other = shared.constraint(PERSON), shared.constraint(PERSON)
    assert accepts(one, tokenizer, OWL) and one.has_ended(tokenizer.encode(OWL))
    fresh = allowed(shared.constraint(PERSON), [], SIZE)
    assert not other.has_ended([]) and torch.equal(allowed(other, [], SIZE), fresh)
