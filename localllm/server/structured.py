"""What an answer has to look like, as requests of every dialect say it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, StringConstraints, model_validator

from localllm.server.bodies import Body
from localllm.server.failures import RequestError
from localllm.text.grammar.gbnf import is_gbnf
from localllm.text.grammar.grammar import Grammar

MAX_CHOICES = 1000

Pattern = Annotated[str, StringConstraints(min_length=1, max_length=256 << 10)]

ANY_OBJECT = Grammar("json_schema", '{"type": "object"}')


class StructuredOutputs(Body):
    """As vLLM has it, in every dialect."""

    json_schema: Annotated[
        dict[str, Any] | None, Field(alias="json", description="A JSON Schema that the answer has to fit.")
    ] = None
    regex: Annotated[Pattern | None, Field(description="A regular expression, of the whole answer.")] = None
    choice: Annotated[
        list[Annotated[str, StringConstraints(min_length=1)]] | None,
        Field(min_length=1, max_length=MAX_CHOICES, description="Texts, one of which is the answer."),
    ] = None
    grammar: Annotated[Pattern | None, Field(description="A grammar in Lark, or in GBNF where it has `::=`.")] = None

    @model_validator(mode="after")
    def _says_one_thing(self) -> StructuredOutputs:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError("one of json, regex, choice and grammar has to be given")
        return self


def grammar_of(given: StructuredOutputs | None) -> Grammar | None:
    if given is None:
        return None
    if given.json_schema is not None:
        return json_grammar(given.json_schema)
    if given.regex is not None:
        return Grammar("regex", given.regex)
    return _choice_grammar(given.choice) if given.choice is not None else text_grammar(given.grammar or "")


def json_grammar(schema: Mapping[str, Any]) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


def text_grammar(source: str) -> Grammar:
    return Grammar("gbnf" if is_gbnf(source) else "lark", source)


def _choice_grammar(choices: Sequence[str]) -> Grammar:
    """Control characters are escaped: Lark takes none of them as they are."""
    return Grammar("lark", "start: " + " | ".join(map(json.dumps, choices)) + "\n")


def one_grammar(**given: Grammar | None) -> tuple[Grammar | None, str]:
    """(the grammar, the field that asks for it) of several fields, of which one may. Raises RequestError for two."""
    found = {name: grammar for name, grammar in given.items() if grammar is not None}
    if len(found) > 1:
        first, second = list(found)[:2]
        why = "an answer can have one form"
        raise RequestError(400, f"{first!r} and {second!r} cannot go together", why=why, param=second)
    return next(((grammar, name) for name, grammar in found.items()), (None, ""))
