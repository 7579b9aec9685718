"""The prompts of a job: lines of JSON, each understood, or refused by its number, before any is answered.

Defines the keys and the values that a line may have. Knows no engine.
"""

from __future__ import annotations

import re
import shlex
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

from localllm.chat.text_file import MAX_INPUT_BYTES
from localllm.cli.options import SAMPLING_OPTIONS
from localllm.cli.output import Output
from localllm.cli.prompt import patience
from localllm.cli.source import Source, asked
from localllm.config import format_bytes, nearest_key
from localllm.engine.request import MAX_BIAS, SamplingParams
from localllm.errors import CheckpointError, Fix, LocalLLMError, UsageError
from localllm.models.strict_json import JsonLimits, parse_json
from localllm.settings import SETTINGS, Accepts, SamplingSettings
from localllm.text.chat_template import as_chat_input
from localllm.text.grammar.grammar import Grammar

_LIMITS = JsonLimits(containers=300_000, elements=2_000_000)  # of one line; braces in its texts count as well
TOLD = 5  # bad lines that an error describes
_BOM = b"\xef\xbb\xbf"

_SAMPLING: Mapping[str, Accepts] = {
    **{each.name: SETTINGS[each.name].accepts for each in fields(SamplingSettings)},
    **{each.name: each.accepts for each in SAMPLING_OPTIONS if each.accepts},
}
_BIAS = Accepts("number", -MAX_BIAS, MAX_BIAS)
_KEYS = ("id", "prompt", "messages", "tools", "system", "logit_bias", *_SAMPLING)
_OPENAI_KEYS = ("custom_id", "method", "url", "body")
_OPENAI_BODY_KEYS = ("model", "messages", "tools", "max_completion_tokens", "logit_bias", *_SAMPLING)
_OPENAI_URL = "/v1/chat/completions"


@dataclass(frozen=True)
class LineRules:
    """What the command line sets for every line. system: typed where `system_is_typed`, else the setting."""

    model: str
    sampling: SamplingParams
    raw: bool = False
    system: str | None = None
    system_is_typed: bool = False
    grammar: Grammar | None = None


@dataclass(frozen=True)
class BatchLine:
    """One prompt; its sampling has a seed only where the line, or the command line, names one."""

    source: Source
    sampling: SamplingParams
    id: str | int | None = None


@dataclass
class Problems:
    """Lines that cannot be used: how many, and the first of them with what is wrong."""

    count: int = 0
    first: list[tuple[int, str]] = field(default_factory=list)

    def add(self, number: int, error: LocalLLMError) -> None:
        self.count += 1
        if self.count <= TOLD:
            self.first.append((number, f"{error.what[:200]}{f': {error.why[:200]}' if error.why else ''}"))


@dataclass
class Prompts:
    """The lines of a job that are not blank, by their index, in memory. numbers: of the lines in the file, from 1."""

    name: str
    rules: LineRules
    numbers: array[int] = field(default_factory=lambda: array("q"))
    lines: list[bytes] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> BatchLine:
        return parse_line(self.lines[index], self.rules)

    def refuse(self, problems: Problems) -> None:
        """Raises UsageError where there are lines that cannot be used; of many only the first are told."""
        if problems.count:
            told = [f"line {number}: {text}" for number, text in problems.first]
            told += [f"and {problems.count - TOLD} more"] if problems.count > TOLD else []
            numbers = shlex.quote(";".join(f"{number}p" for number, _ in problems.first))
            path = "FILE" if self.name == _STDIN else shlex.quote(self.name)
            raise UsageError(
                f"{problems.count} of {len(self)} lines of {self.name} cannot be used",
                why="; ".join(told),
                fix=f"mend what this prints: sed -n {numbers} {path}",
            )


_STDIN = "standard input"


def read_prompts(path: Path, rules: LineRules, output: Output) -> Prompts:
    """Every prompt of a file, `-` being standard input, each checked. Raises UsageError that names the bad ones."""
    prompts, problems = Prompts(_STDIN if str(path) == "-" else str(path), rules), Problems()
    with _opened(path, output) as stream:
        for number, data in _lines(stream, prompts.name):
            try:
                parse_line(data, rules)
            except UsageError as error:
                problems.add(number, error)
            prompts.numbers.append(number)
            prompts.lines.append(data)
    prompts.refuse(problems)
    if not prompts.lines:
        prompt = "echo '\"A tale about an owl, please.\"'"
        is_stdin = prompts.name == _STDIN
        fix = f"{prompt} | localllm run --batch -" if is_stdin else f"{prompt} >> {shlex.quote(prompts.name)}"
        raise UsageError(f"{prompts.name} has no prompts", why="no line of it says anything", fix=fix)
    return prompts


@contextmanager
def _opened(path: Path, output: Output) -> Iterator[BinaryIO]:
    if str(path) == "-":
        if sys.stdin is None or sys.stdin.isatty():
            why = "standard input is a terminal" if sys.stdin else "standard input is closed"
            raise UsageError("--batch - has nothing to read", why=why, fix=Fix.flag("--batch", "FILE"))
        with patience(sys.stdin, output):
            yield sys.stdin.buffer
        return
    try:
        with path.open("rb") as stream:
            yield stream
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = getattr(error, "strerror", None) or str(error)
        fix = shlex.join(["ls", "-l", str(path.parent)])
        raise UsageError(f"--batch cannot read {str(path)!r}", why=why, fix=fix) from error


def _lines(stream: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, without what ends them, and their numbers."""
    number = 0
    while line := stream.readline(MAX_INPUT_BYTES + 1):
        number += 1
        if len(line) > MAX_INPUT_BYTES:
            why = f"it has more than {format_bytes(MAX_INPUT_BYTES)}; no context holds that"
            raise UsageError(f"line {number} of {name} is too long", why=why, fix=f"wc -L {shlex.quote(name)}")
        data = (line.removeprefix(_BOM) if number == 1 else line).strip(b" \t\r\n")
        if data:
            yield number, data


def parse_line(data: bytes, rules: LineRules) -> BatchLine:
    """The prompt that a line is. Raises UsageError."""
    try:
        value: object = parse_json(data, "it", _LIMITS)
    except CheckpointError as error:  # a line has no lines
        why = re.sub(r": line 1 column (\d+) \(char \d+\)$", r" at column \1", error.why)
        raise UsageError(error.what, why=why) from error
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        why = "the elements of an array go on lines of their own: jq -c '.[]' FILE" if isinstance(value, list) else ""
        raise UsageError("it is neither a text nor an object", why=why)
    if "body" in value or "custom_id" in value:
        value = _from_openai(value, rules.model)
    else:
        _refuse_unknown(value, _KEYS)
    given = {key: item for key, item in value.items() if item is not None}
    line_id = given.get("id")
    if line_id is not None and (isinstance(line_id, bool) or not isinstance(line_id, str | int)):
        raise UsageError("its id is neither a text nor a whole number")
    return BatchLine(_source(given, rules), _sampling(given, rules.sampling), line_id)


def _from_openai(value: Mapping[str, Any], model: str) -> dict[str, Any]:
    """A line of OpenAI's batch format as one of ours. Raises UsageError for what cannot be honoured."""
    _refuse_unknown(value, _OPENAI_KEYS)
    body = value.get("body")
    if not isinstance(body, dict):
        raise UsageError("it has no body", why='the object with the messages: "body": {"messages": [...]}')
    _refuse_unknown(body, _OPENAI_BODY_KEYS)
    for key, asked_for, served in (
        ("method", value.get("method"), "POST"),
        ("url", value.get("url"), _OPENAI_URL),
        ("model", body.get("model"), model),
    ):
        if asked_for is not None and asked_for != served:
            raise UsageError(f"its {key} is {str(asked_for)[:80]!r}", why=f"this job serves {served!r} alone")
    line = {key: item for key, item in body.items() if key not in ("model", "max_completion_tokens")}
    longest = body.get("max_completion_tokens")
    if longest is not None:
        if line.get("max_tokens") is not None:
            raise UsageError("max_tokens and max_completion_tokens cannot go together", why="they are the same")
        line["max_tokens"] = longest
    return {**line, "id": value.get("custom_id")}


def _refuse_unknown(value: Mapping[str, Any], known: Iterable[str]) -> None:
    names = list(known)
    for key in value:
        if key not in names:
            nearest = nearest_key(key, names)
            why = f"the nearest is {nearest!r}" if nearest else f"known are {', '.join(names)}"
            raise UsageError(f"unknown key {key[:80]!r}", why=why)


def _source(given: Mapping[str, Any], rules: LineRules) -> Source:
    if ("prompt" in given) == ("messages" in given):
        both = "prompt" in given
        raise UsageError("it has prompt and messages" if both else "it has no prompt", why="a line has one of the two")
    if rules.raw:
        templated = [key for key in ("messages", "system") if key in given]
        if templated:
            raise UsageError(f"--raw and {templated[0]} cannot go together", why="--raw knows no chat template")
    if "messages" in given:
        if "system" in given or rules.system_is_typed:
            raise UsageError("messages and a system message cannot go together", why="write it into the messages")
        return Source(chat=as_chat_input({"messages": given["messages"], "tools": given.get("tools")}))
    if "tools" in given:
        raise UsageError("tools without messages", why="a prompt is a text alone")
    prompt, system = given["prompt"], given.get("system", rules.system)
    for name, text in (("prompt", prompt), ("system", system)):
        if text is not None and not isinstance(text, str):
            raise UsageError(f"its {name} is not text")
    if not (prompt if rules.raw else prompt.strip()):
        raise UsageError("its prompt is blank")
    return Source(raw=prompt) if rules.raw else asked(prompt, system)


def _sampling(given: Mapping[str, Any], base: SamplingParams) -> SamplingParams:
    values: dict[str, Any] = {}
    for name, accepts in _SAMPLING.items():
        if name not in given:
            continue
        value: Any = [given[name]] if name == "stop" and isinstance(given[name], str) else given[name]
        if not accepts.allows(value):
            raise UsageError(f"{name} is {repr(value)[:80]}", why=f"it must be {accepts.describe()}")
        values[name] = float(value) if accepts.kind == "number" else tuple(value) if accepts.kind == "texts" else value
    if "logit_bias" in given:
        values["logit_bias"] = _logit_bias(given["logit_bias"])
    sampling = replace(base, **values)
    idle = [name for name in ("dry_base", "dry_allowed_length") if name in values]
    if idle and not sampling.dry_multiplier:
        raise UsageError(f"{idle[0]} without dry_multiplier above 0", why="it shapes the DRY penalty, which is off")
    return sampling


def _logit_bias(value: Any) -> dict[int, float]:
    """`{"13": -100}` -> `{13: -100.0}`."""
    pairs = value.items() if isinstance(value, dict) else [("", value)]
    if not all(_BIAS.allows(bias) and re.fullmatch(r"[0-9]{1,9}", token_id) for token_id, bias in pairs):
        why = 'it must be an object of token ids and numbers: {"13": -100}'
        raise UsageError(f"logit_bias is {repr(value)[:80]}", why=why)
    return {int(token_id): float(bias) for token_id, bias in pairs}
