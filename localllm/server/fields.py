"""Fields that several dialects share: sampling, the form of an answer, how long the model stays, what is ignored."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator

from localllm.engine.request import SamplingParams
from localllm.errors import UsageError
from localllm.server.bodies import Body, Ignored
from localllm.server.errors import RequestError
from localllm.text.grammar.gbnf import is_gbnf
from localllm.text.grammar.grammar import Grammar

DURATION = re.compile(r"[+-]?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|μs|ms|s|m|h))+|[+-]?\d+(?:\.\d*)?")
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
MAX_STOPS = 64
MAX_BIASES = 1024
MAX_MESSAGES = 10_000
MAX_TOP_LOGPROBS = 20

NUM_CTX = "Tokens of context; more than the server has is refused where prompt and answer would need them."
TEXT_ONLY = "text is all that is read here: no images, no sound, no files"


def optional(description: str, **limits: Any) -> Any:
    """Return a field that may be left out."""
    return Field(default=None, description=description, **limits)


ModelName = Annotated[str | None, Field(description="A name of GET /v1/models; without one, the model that is served.")]
Temperature = Annotated[float, Field(ge=0, le=100, description="0: always the likeliest token.")]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-100, le=100)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
TopK = Annotated[int, Field(ge=-1, le=2**31 - 1, description="-1, 0: all."), AfterValidator(lambda k: max(k, 0))]
LastN = Annotated[
    int, Field(ge=-1, le=2**31 - 1, description="Penalties look at so many of the last tokens; 0: none, -1: all.")
]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Stop = StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)]
NonEmptyText = Annotated[str, StringConstraints(min_length=1)]
Ids = Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(min_length=1, max_length=1 << 20)]
TokenBias = Annotated[float, Field(ge=-100, le=100)]
TokenName = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
LogitBias = Annotated[dict[TokenName, TokenBias], Field(max_length=MAX_BIASES)]


def _of_an_object(schema: object) -> object:
    """Raises ValueError for a schema of anything but an object."""
    if isinstance(schema, dict) and schema.get("type", "object") != "object":
        raise ValueError("a tool's arguments are an object, and so has to be their schema's type")
    return schema


ArgumentsSchema = Annotated[dict[str, Any], BeforeValidator(_of_an_object)]

# The arguments of a call that was made.
CallText = Annotated[
    str | None, Field(description="JSON of an object; null and an empty text are one without members.")
]
CallObject = dict[str, Any] | Literal[""] | None

# An empty list, in a field for what is not served.
Nothing = Annotated[list[Any], Field(max_length=0)] | None
Label = Annotated[str, Field(max_length=10_000)]
Labels = Annotated[dict[str, str], Field(max_length=64)]
Number = Annotated[int, Field(ge=0, le=2**31 - 1)]
Objects = Annotated[list[dict[str, Any]], Field(max_length=1000)]

# Why fields that several requests have change no answer.
NOT_KEPT = Ignored("nothing is kept of a request, or of who sends it")
CACHES_ITSELF = Ignored("what is known of earlier prompts is found and used without being told")
OF_A_REPLY = Ignored("it came with an answer, and says nothing to the model")


def refuse_top_logprobs(most: int | None, *, wanted: bool | None) -> None:
    """Raises RequestError where alternatives are wanted without log-probabilities."""
    if most and not wanted:
        what, why = "'top_logprobs' needs 'logprobs'", "no log-probabilities are asked for"
        raise RequestError(400, what, why=why, param="top_logprobs", name="invalid_value")


def _is_duration(keep_alive: float | str | None) -> float | str | None:
    if isinstance(keep_alive, str) and not DURATION.fullmatch(keep_alive):
        raise ValueError('it must be a number of seconds, or a duration: "5m", "1h30m", "-1"')
    return keep_alive


KeepAlive = Annotated[
    float | Annotated[str, Field(max_length=64)] | None,
    AfterValidator(_is_duration),
    Field(description="How long the model stays loaded behind this request; 0: it is unloaded, -1: it stays."),
]


def keep_seconds(keep_alive: float | str | None) -> float | None:
    """Return seconds; below 0 is for good."""
    if not isinstance(keep_alive, str):
        return keep_alive
    parts = _PART.findall(keep_alive)
    sign = -1 if keep_alive.startswith("-") else 1
    return sign * (sum(float(number) * _SECONDS[unit] for number, unit in parts) if parts else abs(float(keep_alive)))


def overlaid(base: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """Return `base` with what a request sets, where it is not None. Raises RequestError for what is out of range."""
    known = {name: value for name, value in given.items() if value is not None}
    if "seed" in known:
        known["seed"] %= 2**63  # any whole number names one
    if "stop" in known:
        stops = (known["stop"],) if isinstance(known["stop"], str) else known["stop"]
        known["stop"] = tuple(dict.fromkeys((*base.stop, *stops)))  # without its own, a model runs past its turn
    if "logit_bias" in known:
        known["logit_bias"] = {int(name): bias for name, bias in known["logit_bias"].items()}
    try:
        return replace(base, **known)
    except UsageError as error:
        raise RequestError(400, error.what, why=error.why, name="invalid_value") from None


# The form of an answer

MAX_CHOICES = 1000

Pattern = Annotated[str, StringConstraints(min_length=1, max_length=256 << 10)]

ANY_OBJECT = Grammar("json_schema", '{"type": "object"}')


class StructuredOutputs(Body):
    """The form of an answer, as vLLM has it, in every dialect."""

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


StructuredField = Annotated[StructuredOutputs | None, Field(description="What the answer has to look like.")]


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
    """Escape control characters, which Lark does not take as they are."""
    return Grammar("lark", "start: " + " | ".join(map(json.dumps, choices)) + "\n")


def one_grammar(**given: Grammar | None) -> tuple[Grammar | None, str]:
    """Return (the grammar, the field that asks for it). Raises RequestError where two fields ask for one."""
    found = {name: grammar for name, grammar in given.items() if grammar is not None}
    if len(found) > 1:
        first, second = list(found)[:2]
        why = "an answer can have one form"
        raise RequestError(400, f"{first!r} and {second!r} cannot go together", why=why, param=second)
    return next(((grammar, name) for name, grammar in found.items()), (None, ""))
