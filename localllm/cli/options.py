"""The parameters of commands: those of the table of settings, those that several commands share, and how one is made.

A flag that was not typed is None: what stands in config.toml, the registry or the checkpoint is then used.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeVar

import typer

from localllm.cli import names
from localllm.config import flag_fix
from localllm.errors import Fix, UsageError
from localllm.settings import SETTINGS, Accepts, Settings

Command = TypeVar("Command", bound=Callable[..., Any])
Completion = Callable[[str], list[str]]

# A sequence has its KV cache reserved for the longest answer that it may give: with the rest of the context for each,
# few prompts of a job would have room at once.
DEFAULT_MAX_TOKENS = 512
_KINDS: Mapping[str, Any] = {"integer": int, "number": float, "switch": bool, "texts": list[str]}
PARALLEL = Accepts("integer", 1, 1024, usual="8")  # answers at once
_MOST_BIAS = Accepts("number", -1e6, 1e6)


def _name_of(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


@dataclass(frozen=True)
class CommandParameter:
    """A flag or a positional of a command.

    kind: its type; a switch that is no setting is False where it is not typed, all else None.
    info: how typer is told of it.
    accepts: the values that are checked while the line is read; None: all that typer can read.
    """

    name: str
    kind: Any
    info: Any
    accepts: Accepts | None = None
    default: Any = None

    @property
    def for_typer(self) -> inspect.Parameter:
        kind: Any = self.kind if self.default is not None else self.kind | None
        annotated: Any = Annotated
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=self.default, annotation=annotated[kind, self.info]
        )


def option(
    flags: str,
    about: str,
    metavar: str | None = None,
    kind: Any = str,
    *,
    accepts: Accepts | None = None,
    completion: Completion | None = None,
    default: Any = None,
    name: str = "",
    required: bool = False,
) -> CommandParameter:
    """A flag. flags: as it is typed, with blanks between; the last one names it, unless `name` does.

    kind: without a metavar it is a switch.
    """
    spelled = flags.split()
    kind, default = (bool, False) if metavar is None else (kind, inspect.Parameter.empty if required else default)
    info = typer.Option(*spelled, metavar=metavar, autocompletion=completion, help=about)
    return CommandParameter(name or _name_of(spelled[-1]), kind, info, accepts, default)


def argument(
    name: str,
    metavar: str,
    about: str,
    kind: Any = str,
    *,
    completion: Completion | None = None,
    required: bool = False,
) -> CommandParameter:
    """A positional."""
    info = typer.Argument(metavar=metavar, show_default=False, autocompletion=completion, help=about)
    return CommandParameter(name, kind, info, default=inspect.Parameter.empty if required else None)


_NAMED = "A name of `localllm list --all`, ORG/REPOSITORY, or a folder."
MODEL = argument("model", "MODEL", f"{_NAMED} Default: the setting `model` (tiny).", completion=names.complete_models)
REQUIRED_MODEL = argument("model", "MODEL", _NAMED, completion=names.complete_models, required=True)
INSTALLED_MODEL = argument(
    "model", "MODEL", "A name of `localllm list`.", completion=names.complete_installed, required=True
)
AS_JSON = option("--json", "Print one JSON object.", name="as_json")
NO_ATTACH = option("--no-attach", "Load the model here also where `localllm serve` runs and would answer.")
# For functions that write their few parameters down themselves.
Model = Annotated[str | None, MODEL.info]
RequiredModel = Annotated[str, REQUIRED_MODEL.info]
InstalledModel = Annotated[str, INSTALLED_MODEL.info]
AsJson = Annotated[bool, AS_JSON.info]

DRY = (
    option(
        "--dry-multiplier",
        "0 to 100: how much a token is held back that would go on repeating a passage (DRY). Default: 0, off.",
        "X",
        float,
        accepts=Accepts("number", 0, 100, usual="0.8"),
    ),
    option(
        "--dry-base",
        "1 to 100: growth of the DRY penalty with each repeated token. Default: 1.75.",
        "X",
        float,
        accepts=Accepts("number", 1, 100, usual="1.75"),
    ),
    option(
        "--dry-allowed-length",
        "From 1: length of a repetition that costs nothing of the DRY penalty. Default: 2.",
        "N",
        int,
        accepts=Accepts("integer", 1, 2**31, usual="2"),
    ),
)
LOGIT_BIAS = option(
    "--logit-bias",
    "Added to the score of the token ID, as `tokenize` prints it; -100 rules it out. May be repeated.",
    "ID=X",
    list[str],
)
LOGPROBS = option(
    "--logprobs",
    "With --json, --jsonl or --batch: log-probabilities of each token and of the N likeliest there.",
    "N",
    int,
    accepts=Accepts("integer", 0, 100, usual="3"),
)
# Of a request, beside the settings.
SAMPLING_OPTIONS = (*DRY, LOGPROBS)


def takes(*entries: CommandParameter | str | type) -> Callable[[Command], Command]:
    """Gives a function of `**flags` the parameters of its command, in the order of its help.

    entries: a parameter; the name of a setting; or a class of settings, for those of it that the command takes and
    that are not named. Settings that no entry stands for come last.
    """

    def decorate(function: Command) -> Command:
        command = function.__name__.rpartition("_")[0]
        named = {entry if isinstance(entry, str) else getattr(entry, "name", "") for entry in entries}
        left = [name for name, row in SETTINGS.items() if command in row.taken_by and name not in named]
        parameters: list[CommandParameter] = []
        for entry in (*entries, Settings):
            if isinstance(entry, CommandParameter):
                parameters.append(entry)
            elif isinstance(entry, str):
                parameters.append(setting_option(entry))
            else:
                inside = {each.name for each in fields(entry)} & set(left)
                parameters += [setting_option(name) for name in left if name in inside]
                left = [name for name in left if name not in inside]
        own = inspect.signature(function, eval_str=True).parameters.values()
        kept = [each for each in own if each.kind is not inspect.Parameter.VAR_KEYWORD]
        shown: Any = function
        shown.__signature__ = inspect.Signature([*kept, *(each.for_typer for each in parameters)])
        shown.accepted = {each.name: each.accepts for each in parameters if each.accepts is not None}
        return function

    return decorate


def setting_option(name: str) -> CommandParameter:
    """The flag of a setting. What is completed by a function is checked when the settings are read."""
    row = SETTINGS[name]
    accepts = row.accepts
    kind: Any = _KINDS.get(accepts.kind, str)
    choices: Any = Literal
    if accepts.choices and not row.completion:
        kind = choices[accepts.choices]
    completion = getattr(names, row.completion) if row.completion else None
    flags = row.flags or (f"--{name.replace('_', '-')}",)
    info = typer.Option(*flags, metavar=row.metavar, autocompletion=completion, help=row.help)
    return CommandParameter(name, kind, info, accepts if accepts.kind in ("integer", "number") else None)


def setting_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of a command that are settings, as `load_settings` takes them: None where one was not typed."""
    chosen = {name: flags.get(name) for name, row in SETTINGS.items() if row.taken_by}
    return {name: (tuple(value) or None) if isinstance(value, list) else value for name, value in chosen.items()}


def require_accepted(flag: str, text: str, accepts: Accepts) -> None:
    """Raises UsageError naming what was typed, what may be, and an example, where `text` is none of it."""
    value: object = text
    with contextlib.suppress(ValueError):
        value = {"integer": int, "number": float}.get(accepts.kind, str)(text)
    if not accepts.allows(value):
        shown = text if text.lstrip("-").isdecimal() or text != value else repr(text)
        why, fix = f"it must be {accepts.describe()}", flag_fix(flag, text, accepts)
        raise UsageError(f"{flag} is {shown[:80]}", why=why, fix=fix)


def extra_sampling(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters of a command line that are no settings. Raises UsageError for one without effect."""
    typed = [each.name for each in DRY if flags.get(each.name) is not None]
    if typed and typed != ["dry_multiplier"] and not flags["dry_multiplier"]:
        why = "it shapes the DRY penalty, which is off"
        raise UsageError(
            f"{_flag_of(typed[-1])} needs --dry-multiplier above 0", why=why, fix=Fix.flag("--dry-multiplier", "0.8")
        )
    extra = {name: flags[name] for name in (*typed, "logprobs") if flags.get(name) is not None}
    if flags.get("logit_bias"):
        extra["logit_bias"] = parse_logit_bias(flags["logit_bias"])
    return extra


def parse_logit_bias(pairs: Sequence[str]) -> dict[int, float]:
    """`["13=-100"]` -> `{13: -100.0}`. Raises UsageError."""
    biases = {}
    for pair in pairs:
        token_id, equals, value = pair.partition("=")
        try:
            if not equals or not token_id.strip().isdigit():
                raise ValueError
            biases[int(token_id)] = float(value)
            if not _MOST_BIAS.allows(biases[int(token_id)]):
                raise ValueError
        except ValueError:
            why = "it must be a token id, as `tokenize` prints them, and a number from -1000000 to 1000000: 13=-100"
            fix = Fix.flag("--logit-bias", "13=-100")
            raise UsageError(f"--logit-bias is {pair[:80]!r}", why=why, fix=fix) from None
    return biases


def refuse_together(flags: Mapping[str, Any], exclusive: Mapping[str, str]) -> None:
    """Raises UsageError for two flags that contradict each other.

    exclusive: why, by the flags: "--raw --think --stop" says that --raw goes with neither of the other two.
    """
    for line, why in exclusive.items():
        first, *others = line.split()
        for other in others if flags.get(_name_of(first)) else ():
            value = flags.get(_name_of(other))
            if value is not None and value is not False and value != []:
                raise UsageError(f"{first} and {other} cannot go together", why=why)


def _flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"
