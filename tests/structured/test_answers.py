"""Grammars in the engine: drafted or not, alone or in a batch, an answer is the same and ends with its grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from localllm import Engine, FinishedEvent, Request, SamplingParams, TokenEvent
from localllm.errors import GrammarError, LocalLLMError, UsageError
from localllm.text.grammar.grammar import Grammar
from tests.speculative.support import Said, answers, draft_with, said
from tests.structured.support import json_schema, wish
from tests.thinning import every_other

SCHEMA = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["first_name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": json_schema(SCHEMA),
    "any object": json_schema({"type": "object"}),
    "regex": Grammar("regex", r"[a-z]{2,6} (fox|owl)[.!]"),
    "lark": Grammar("lark", 'start: word (", " word){0,3} "."\nword: "the owl" | "a fox" | /[0-9]{1,3}/'),
    "gbnf": Grammar("gbnf", 'root ::= "yes" [!?]* | "no, " [a-z]+ "."'),
    "thought": Grammar("json_schema", json.dumps({"enum": ["a", "b"]}), (("<think>", "</think>"),), is_thinking=True),
    "thinks": Grammar("regex", "[0-9]{3}", (("<think>", "</think>"), ("[THINK]", "[/THINK]"))),
    "boolean": json_schema({"type": "boolean"}),
}
SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "plain": {"temperature": 1.2},
    "nucleus": {"temperature": 0.9, "top_p": 0.9, "min_p": 0.02, "logit_bias": {93: 3.0}},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.2, "dry_multiplier": 0.8},
}
pytestmark = pytest.mark.usefixtures("tried_here")


def finished(engine: Engine, request: Request) -> FinishedEvent:
    ((*_, last),) = answers(engine, [request])
    assert isinstance(last, FinishedEvent)
    return last


@pytest.mark.parametrize("drafter", every_other(["ngram", "skip", "ngram+skip"]))
def test_the_text_is_the_same_with_drafts_and_without(engine: Engine, drafter: str) -> None:
    wishes = [
        wish(engine, grammar, seed=seed, max_tokens=24, **SAMPLERS[sampler])
        for grammar in (GRAMMARS["schema"], GRAMMARS["gbnf"], GRAMMARS["thinks"])
        for seed, sampler in enumerate(SAMPLERS)
    ]
    draft_with(engine, "", 0)
    expected = [said(engine, each)[0] for each in wishes]
    draft_with(engine, drafter, 6)
    assert [said(engine, each)[0] for each in wishes] == expected


def test_what_is_forced_is_drafted_and_always_right(engine: Engine) -> None:
    draft_with(engine, "ngram", 8)
    schema = {"type": "object", "properties": {"the_only_name": {"const": 7}}, "required": ["the_only_name"]}
    last = finished(engine, wish(engine, json_schema({**schema, "additionalProperties": False}), temperature=1.5))
    assert last.speculation is not None and last.finish_reason == "stop"
    assert last.speculation.drafted == last.speculation.accepted >= 6
    assert last.speculation.rounds < last.usage.completion_tokens / 2


def test_eight_answers_at_once_are_those_of_each_alone(engine: Engine) -> None:
    draft_with(engine, "ngram", 4)
    wishes = [wish(engine, grammar, seed=3, max_tokens=20) for grammar in GRAMMARS.values()]
    assert len(wishes) == 8 and said(engine, *wishes) == [said(engine, each)[0] for each in wishes]


def test_answers_to_one_request_are_held_each_by_itself(engine: Engine) -> None:
    draft_with(engine, "", 0)
    grammar = Grammar("regex", "[a-z]{4,8}")
    texts = [each.text for each in said(engine, *(wish(engine, grammar, seed=seed) for seed in range(4)))]
    assert len(set(texts)) == 4 and all(4 <= len(text) <= 8 and text.isalpha() for text in texts)


@pytest.mark.parametrize("name", ["schema", "regex", "lark", "boolean"])
def test_an_answer_that_is_whole_says_so_and_one_that_was_cut_too(engine: Engine, name: str) -> None:
    whole = finished(engine, wish(engine, GRAMMARS[name], max_tokens=200))
    assert (whole.finish_reason, whole.meets_grammar) == ("stop", True)
    cut = finished(engine, wish(engine, GRAMMARS[name], max_tokens=1))
    assert (cut.finish_reason, cut.meets_grammar) == ("length", False)
    assert finished(engine, wish(engine, None, max_tokens=1)).meets_grammar is None


def test_an_answer_ends_with_its_grammar_and_takes_no_step_more(engine: Engine) -> None:
    draft_with(engine, "", 0)
    last = finished(engine, wish(engine, Grammar("regex", "a"), max_tokens=1))
    assert (last.finish_reason, last.meets_grammar, last.usage.completion_tokens) == ("stop", True, 1)


def test_a_bias_decides_among_what_is_allowed_and_allows_nothing_else(engine: Engine) -> None:
    yes, no = engine.tokenizer.encode("yes")[0], engine.tokenizer.encode("no")[0]
    grammar = Grammar("lark", 'start: "yes" | "no"')
    for bias, texts in (({yes: 50.0}, ("yes",)), ({no: 50.0, 5: 1e6}, ("no",)), ({yes: -1e6, no: -1e6}, ("yes", "no"))):
        (answer,) = said(engine, wish(engine, grammar, temperature=0.0, logit_bias=bias))
        assert answer.text in texts


def test_log_probabilities_are_those_of_the_model(engine: Engine) -> None:
    (events,) = answers(engine, [wish(engine, Grammar("regex", "q"), logprobs=2)])
    (token,) = (event for event in events if isinstance(event, TokenEvent))
    assert token.logprob is not None and token.logprob.logprob < token.logprob.top[0].logprob


def test_a_stop_string_ends_an_answer_before_it_is_whole(engine: Engine) -> None:
    last = finished(engine, wish(engine, GRAMMARS["schema"], stop=("first",), max_tokens=100))
    assert (last.finish_reason, last.stop_text, last.meets_grammar) == ("stop", "first", False)


def test_what_contradicts_a_grammar_is_refused_by_name(engine: Engine) -> None:
    with pytest.raises(UsageError, match="ignore_eos"):
        engine.submit(wish(engine, GRAMMARS["regex"], ignore_eos=True))
    with pytest.raises(UsageError, match="pooling"):
        engine.submit(Request((5,), grammar=GRAMMARS["regex"], pooling="mean"))
    with pytest.raises(GrammarError, match="cannot be held to"):
        engine.submit(wish(engine, json_schema({"contains": {}})))


def test_a_limit_that_is_met_on_the_way_ends_the_one_answer(engine: Engine) -> None:
    """What only the tokens of an answer make large is not found before: 3,000 rules to choose from behind the first."""
    draft_with(engine, "ngram", 4)
    rules = " | ".join(f'"{number:04}"' for number in range(3000))
    late = Grammar("lark", f'start: /[a-z]{{90}}/ "!" late\nlate: {rules}')
    wishes = [wish(engine, late, max_tokens=120), wish(engine, GRAMMARS["lark"], seed=1)]
    broken, whole = answers(engine, wishes)
    last = broken[-1]
    assert isinstance(last, FinishedEvent) and isinstance(last.error, LocalLLMError)
    assert "too complex" in last.error.what and "2000" in last.error.why
    assert Said.of(whole) == said(engine, wishes[1])[0]


def test_from_python_a_grammar_is_an_argument(engine: Engine) -> None:
    *events, last = engine.generate("An owl is", SamplingParams(seed=1, max_tokens=9), grammar=GRAMMARS["boolean"])
    text = "".join(event.text for event in events if isinstance(event, TokenEvent))
    assert json.loads(text) in (True, False) and isinstance(last, FinishedEvent) and last.meets_grammar


@pytest.mark.slow
def test_a_thousand_answers_of_the_model_validate(engine: Engine) -> None:
    draft_with(engine, "ngram", 4)
    schemas = [
        SCHEMA,
        {"type": "array", "items": {"type": "number", "minimum": -1, "exclusiveMaximum": 5}, "maxItems": 3},
        {"type": "string", "pattern": "^[a-f]{2}-[0-9]+$", "maxLength": 9},
        {"anyOf": [{"type": "string", "format": "date"}, {"type": "integer", "multipleOf": 7}, {"const": None}]},
    ]
    count = 0
    for schema in schemas:
        wishes = [wish(engine, json_schema(schema), seed=seed, temperature=2.0, max_tokens=80) for seed in range(310)]
        for answer in said(engine, *wishes):
            if answer.finish_reason == "stop":
                Draft202012Validator(schema).validate(json.loads(answer.text))
                count += 1
    assert count >= 1000
