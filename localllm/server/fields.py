"""Fields that several dialects share: sampling, the form of an answer, how long the model stays, what is ignored."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator

from localllm.chat.answer import MAX_ANSWERS, best
from localllm.engine.request import MAX_BEAMS, MAX_LENGTH_PENALTY, EarlyStopping, Reuse, SamplingParams
from localllm.errors import UsageError
from localllm.server.bodies import Body, Ignored
from localllm.server.errors import RequestError
from localllm.server.tools.deltas import Delta
from localllm.text.grammar.gbnf import is_gbnf
from localllm.text.grammar.grammar import Grammar

DURATION = re.compile(r"[+-]?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|μs|ms|s|m|h))+|[+-]?\d+(?:\.\d*)?")
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
MAX_STOPS = 64
MAX_BIASES = 1024
MAX_MESSAGES = 10_000
MAX_TOP_LOGPROBS = 20

NUM_CTX = "The context length. A value above the server's is refused if prompt and answer would need it."
TEXT_ONLY = "this server reads only text: no images, no sound, no files"


def optional(description: str, **limits: Any) -> Any:
    """Return a field that may be left out."""
    return Field(default=None, description=description, **limits)


ModelName = Annotated[
    str | None,
    Field(description="A name from GET /v1/models; the default is the model that the server was started with."),
]
Temperature = Annotated[float, Field(ge=0, le=100, description="0 always picks the likeliest token.")]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-100, le=100)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
TopK = Annotated[
    int, Field(ge=-1, le=2**31 - 1, description="-1 and 0: all tokens."), AfterValidator(lambda k: max(k, 0))
]
LastN = Annotated[
    int, Field(ge=-1, le=2**31 - 1, description="The number of last tokens that penalties consider; 0: none, -1: all.")
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
        raise ValueError("a tool's arguments are an object, so their schema's type must be 'object'")
    return schema


ArgumentsSchema = Annotated[dict[str, Any], BeforeValidator(_of_an_object)]

# The arguments of a call that was made.
CallText = Annotated[str | None, Field(description="A JSON object as text; null and an empty text count as `{}`.")]
CallObject = dict[str, Any] | Literal[""] | None

# An empty list, in a field for what is not served.
Nothing = Annotated[list[Any], Field(max_length=0)] | None
Label = Annotated[str, Field(max_length=10_000)]
Labels = Annotated[dict[str, str], Field(max_length=64)]
Number = Annotated[int, Field(ge=0, le=2**31 - 1)]
Objects = Annotated[list[dict[str, Any]], Field(max_length=1000)]

# Why fields that several requests have change no answer.
NOT_KEPT = Ignored("the server keeps no record of requests or their senders")
CACHES_ITSELF = Ignored("the prefix cache needs no hints")
OF_A_REPLY = Ignored("part of an earlier response that the model does not see")


ReuseField = Annotated[
    Reuse | None,
    Field(
        description="chunks: what of the prompt stood in earlier ones is taken from there at any position, "
        "approximately; prefix: only its beginning. The default is the server's `--reuse`."
    ),
]


def refuse_top_logprobs(most: int | None, *, wanted: bool | None) -> None:
    """Raises RequestError where alternatives are wanted without log-probabilities."""
    if most and not wanted:
        what, why = "'top_logprobs' needs 'logprobs'", "log-probabilities are not requested"
        raise RequestError(400, what, why=why, param="top_logprobs", name="invalid_value")


def _is_duration(keep_alive: float | str | None) -> float | str | None:
    if isinstance(keep_alive, str) and not DURATION.fullmatch(keep_alive):
        raise ValueError('it must be a number of seconds, or a duration: "5m", "1h30m", "-1"')
    return keep_alive


KeepAlive = Annotated[
    float | Annotated[str, Field(max_length=64)] | None,
    AfterValidator(_is_duration),
    Field(description="How long the model stays loaded after this request; 0 unloads it, -1 keeps it."),
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

    json_schema: dict[str, Any] | None = optional("A JSON Schema for the answer.", alias="json")
    regex: Pattern | None = optional("A regular expression that the whole answer matches.")
    choice: list[NonEmptyText] | None = optional(
        "The answer is one of these texts.", min_length=1, max_length=MAX_CHOICES
    )
    grammar: Pattern | None = optional("A grammar: GBNF if it contains `::=`, otherwise Lark.")

    @model_validator(mode="after")
    def _says_one_thing(self) -> StructuredOutputs:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError("exactly one of json, regex, choice and grammar must be given")
        return self


StructuredField = Annotated[StructuredOutputs | None, Field(description="The form of the answer.")]


def grammar_of(given: StructuredOutputs | None) -> Grammar | None:
    if given is None:
        return None
    if given.json_schema is not None:
        return json_grammar(given.json_schema)
    if given.regex is not None:
        return Grammar("regex", given.regex)
    if given.choice is not None:  # escaped, as Lark takes no control characters as they are
        return Grammar("lark", "start: " + " | ".join(map(json.dumps, given.choice)) + "\n")
    return text_grammar(given.grammar or "")


def json_grammar(schema: Mapping[str, Any]) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


def text_grammar(source: str) -> Grammar:
    return Grammar("gbnf" if is_gbnf(source) else "lark", source)


def one_grammar(**given: Grammar | None) -> tuple[Grammar | None, str]:
    """Return (the grammar, the field that asks for it). Raises RequestError where two fields ask for one."""
    found = {name: grammar for name, grammar in given.items() if grammar is not None}
    if len(found) > 1:
        first, second = list(found)[:2]
        why = "an answer can have only one form"
        raise RequestError(400, f"{first!r} and {second!r} cannot go together", why=why, param=second)
    return next(((grammar, name) for name, grammar in found.items()), (None, ""))


# How many answers there are, and which are given

# Settings of greedy decoding.
_NEUTRAL: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}


class BestOfBody(Body):
    """Fields of requests for several answers, or the best of several."""

    n: int | None = Field(default=None, ge=1, le=MAX_ANSWERS)
    best_of: int | None = optional(
        "The number of answers computed; the `n` likeliest per token are returned. 0: `n`.", ge=0, le=MAX_ANSWERS
    )
    beam_width: int | None = optional(
        "Beam search with that many beams instead of sampling; returns the `n` best.", ge=1, le=MAX_BEAMS
    )
    length_penalty: float | None = optional(
        "Beam search: score = sum / tokens ** this.", ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY
    )
    early_stopping: EarlyStopping | None = optional(
        'Beam search: whether the first complete answers end it. "never": only when no open beam can win.'
    )
    stream: bool | None = None


@dataclass(frozen=True)
class BestOf:
    """The choice of n answers to each prompt.

    best_of: so many are computed; 0: no more than n
    beams: more than 1 has the n best found by a beam search
    """

    best_of: int = 0
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def num_requests(self, n: int) -> int:
        """Return the number of the engine's requests for each prompt."""
        return 1 if self.beams > 1 else self.best_of or n

    def rows(self, n: int) -> int:
        """Return the rows of a step for each prompt."""
        return max(self.num_requests(n), self.beams)

    def chosen(self, answers: Sequence[Delta], n: int) -> list[list[Delta]]:
        """Return the answers that are given, by prompt; a beam search may have found fewer than n."""
        if self.beams > 1:
            return [[answer, *answer.others] for answer in answers]
        count = self.num_requests(n)
        groups = [answers[first : first + count] for first in range(0, len(answers), count)]
        return [best(group, n, operator.attrgetter("end")) if count > n else list(group) for group in groups]


NO_BEST_OF = BestOf()


def requested_best_of(body: BestOfBody, sampling: SamplingParams) -> tuple[BestOf, SamplingParams]:
    """Return how answers are chosen, and the sampling that goes with it. Raises RequestError for contradictions."""
    n, beams = body.n or 1, body.beam_width or 1
    if beams == 1:
        for field in ("length_penalty", "early_stopping"):
            if getattr(body, field) is not None:
                raise _refused(field, "it configures beam search, which needs a 'beam_width' of 2 or more")
        count = body.best_of or n
        if count < n:
            raise _refused("best_of", f"it is {count}, and 'n' is {n}: it must be at least 'n'")
        if body.stream and count > n:
            why = "the best answers are known only when all are complete, so they cannot be streamed"
            raise _refused("best_of", why)
        return BestOf(count), sampling
    if body.best_of:
        raise _refused("best_of", "beam search ('beam_width') already returns the best answers")
    if n > beams:
        raise _refused("n", f"it is {n}, and 'beam_width' is {beams}: each beam gives at most one answer")
    if body.stream and n > 1:
        raise _refused("stream", "beam search knows its answers only at its end, so it streams only with 'n' of 1")
    for field, neutral in _NEUTRAL.items():
        if getattr(body, field) not in (None, neutral):
            raise _refused(field, f"beam search ('beam_width') does not sample: leave it out, or send {neutral:g}")
    searched = {field: getattr(body, field) for field in ("length_penalty", "early_stopping")}
    searched = {field: value for field, value in searched.items() if value is not None}
    return BestOf(beams=beams, **searched), replace(sampling, **_NEUTRAL)


def _refused(param: str, why: str) -> RequestError:
    return RequestError(400, f"{param!r} cannot be honoured", why=why, param=param, name="invalid_value")
