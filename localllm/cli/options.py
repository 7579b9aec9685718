"""The parameters of commands: those of the table of settings, those that several commands share, and how one is made.

A flag that was not typed is None: what stands in config.toml, the registry or the checkpoint is then used. What a word
is completed with is imported when it is asked for.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from typing import Annotated, Any, TypeVar

import typer

from localllm.config import flag_fix
from localllm.errors import Fix, Fixes, UsageError
from localllm.settings import MACHINE, OUTPUT, SAMPLING, SETTINGS, Accepts, Settings

Command = TypeVar("Command", bound=Callable[..., Any])
Completion = Callable[..., list[str]]

# A sequence has its KV cache reserved for the longest answer that it may give: with the rest of the context for each,
# few prompts of a job would have room at once.
DEFAULT_MAX_TOKENS = 512
_KINDS: Mapping[str, Any] = {"integer": int, "number": float, "switch": bool, "texts": list[str]}
_MOST_BIAS = Accepts("number", -1e6, 1e6)

# Headings in the help: of positionals, of options in a command that has few, and of what shows the help.
ARGUMENTS, OPTIONS, HELP = "Arguments", "Options", "Help"
MOST_OPTIONS = 12  # of a command whose help shows all at once; with more it is longer than a screen


# Completions


def complete_models(incomplete: str) -> list[str]:
    """Return the names of presets, of the registry and of installed models that begin so."""
    from localllm.registry import load_registry
    from localllm.runtime.presets import preset_names

    known = [name for entry in load_registry().entries for name in (entry.name, *entry.aliases)]
    return _beginning(incomplete, [*preset_names(), *known, *_installed()])


def complete_presets(incomplete: str) -> list[str]:
    """Return the names of presets that begin so."""
    from localllm.runtime.presets import preset_names

    return _beginning(incomplete, preset_names())


def complete_installed(incomplete: str) -> list[str]:
    """Return the names of installed models that begin so."""
    return _beginning(incomplete, _installed())


def complete_sessions(incomplete: str) -> list[str]:
    """Return the ids of saved chats that begin so."""
    from localllm.errors import HistoryError
    from localllm.history import History, history_file, nothing_is_kept

    try:
        if nothing_is_kept():
            return []
        with History.peek(history_file()) as history:
            return _beginning(incomplete, (session.id for session, _ in history.sessions()))
    except HistoryError:
        return []


def complete_adapters(incomplete: str) -> list[str]:
    """Return the names of adapters on this disk that begin so, and can be used."""
    from localllm.hub.adapters import list_adapters

    return _beginning(incomplete, (adapter.name for adapter in list_adapters() if adapter.is_usable))


def complete_removable(incomplete: str) -> list[str]:
    """Return the names of installed models and adapters that begin so, as `rm` takes them."""
    from localllm.hub.adapters import list_adapters

    return _beginning(incomplete, [*_installed(), *(adapter.name for adapter in list_adapters())])


def complete_connections(incomplete: str) -> list[str]:
    """Return the programs that begin so."""
    from localllm.runtime.client_configs import names

    return _beginning(incomplete, names())


def complete_setting(incomplete: str) -> list[str]:
    """Return the settings that begin so."""
    return _beginning(incomplete.replace("-", "_"), SETTINGS)


def complete_setting_values(context: typer.Context, incomplete: str) -> list[str]:
    """Return the values that begin so, of the setting that the line names before."""
    key = str(context.params.get("key") or "").replace("-", "_")
    if key in ("model", "adapter"):
        return (complete_models if key == "model" else complete_adapters)(incomplete)
    if key not in SETTINGS:
        return []
    accepts = SETTINGS[key].accepts
    if accepts.kind == "switch":
        return _beginning(incomplete, ("true", "false"))
    completion = completion_of(accepts)
    return completion(incomplete) if completion is not None else []


def completion_of(accepts: Accepts) -> Completion | None:
    """The choices that begin so, and installed models behind the prefix of those that name one."""
    if not accepts.choices:
        return None

    def complete(incomplete: str) -> list[str]:
        models = [f"{accepts.prefix}{name}" for name in _installed()] if accepts.prefix else []
        return _beginning(incomplete, [*accepts.choices, *models])

    return complete


def _installed() -> list[str]:
    from localllm import hub

    return [model.name for model in hub.list_models()]


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if name.casefold().startswith(incomplete.casefold())]


# Parameters


@dataclass(frozen=True)
class CommandParameter:
    """A flag or a positional of a command, as typer takes it.

    accepts: the values that are checked while the line is read; None: all that typer can read.
    group: the heading in the help under which it stands.
    is_basic: on the short page of a command with many options too.
    """

    for_typer: inspect.Parameter
    accepts: Accepts | None = None
    group: str = OPTIONS
    is_basic: bool = False

    @property
    def name(self) -> str:
        return self.for_typer.name


def _parameter(
    name: str, kind: Any, info: Any, default: Any = None, *, required: bool = False, **row: Any
) -> CommandParameter:
    annotated: Any = Annotated
    annotation = annotated[kind if required or default is not None else kind | None, info]
    value = inspect.Parameter.empty if required else default
    parameter = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=annotation)
    return CommandParameter(parameter, **row)


def _name_of(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def option(
    flags: str,
    about: str,
    metavar: str | None = None,
    kind: Any = str,
    *,
    completion: Completion | None = None,
    default: Any = None,
    name: str = "",
    required: bool = False,
    **row: Any,
) -> CommandParameter:
    """A flag.

    flags: as it is typed, with blanks between; the last one names it, unless `name` does.
    about: its help, of which a short page shows the first line.
    kind: without a metavar it is a switch.
    row: accepts, group and is_basic, as a CommandParameter has them.
    """
    spelled = flags.split()
    kind, default = (bool, False) if metavar is None else (kind, default)
    info = typer.Option(*spelled, metavar=metavar, autocompletion=completion, help=about)
    return _parameter(name or _name_of(spelled[-1]), kind, info, default, required=required, **row)


def choice(flags: str, about: str, *choices: str, **more: Any) -> CommandParameter:
    """A flag that takes one of a few words. more: as of `option`."""
    accepts = Accepts("text", choices=choices)
    return option(flags, about, "|".join(choices), accepts=accepts, completion=completion_of(accepts), **more)


def number(
    flags: str, about: str, low: float, high: float, usual: str, metavar: str = "N", kind: Any = int, **more: Any
) -> CommandParameter:
    """A flag that takes a number from `low` to `high`.

    kind: int, float, or a list of one where it may be repeated.
    more: as of `option`.
    """
    accepts = Accepts("number" if kind is float else "integer", low, high, usual=usual)
    return option(flags, about, metavar, kind, accepts=accepts, **more)


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
    return _parameter(name, kind, info, required=required, group=ARGUMENTS, is_basic=True)


_NAMED = "A name, ORG/REPO[:QUANT], GGUF file, folder or preset."
_NAMES = "\nNames: those of `localllm list --all`, and ollama:NAME."
_USUAL = " Default: the setting `model`, which is tiny."
MODEL = argument("model", "MODEL", f"{_NAMED}{_NAMES}{_USUAL}", completion=complete_models)
REQUIRED_MODEL = argument("model", "MODEL", f"{_NAMED}{_NAMES}", completion=complete_models, required=True)
MODEL_FLAG = option(
    "-m --model",
    "The same as MODEL.",
    "MODEL",
    completion=complete_models,
    name="named_model",
    group=ARGUMENTS,
)
AS_JSON = option("--json", "Print one JSON object.", name="as_json", group=OUTPUT, is_basic=True)
UNASKED = option("-y --yes", "Do not ask.")
NO_ATTACH = option(
    "--no-attach", "Load the model in this process even if a running `localllm serve` has it.", group=MACHINE
)
DRY = (
    number(
        "--dry-multiplier",
        "DRY penalty on tokens that would continue a repetition, 0 to 100. Default: 0, off.",
        0, 100, "0.8", "X", float, group=SAMPLING,
    ),
    number(
        "--dry-base", "Factor by which the DRY penalty grows with each repeated token, 1 to 100. Default: 1.75.",
        1, 100, "1.75", "X", float, group=SAMPLING,
    ),
    number(
        "--dry-allowed-length", "Longest repetition without a DRY penalty, in tokens, from 1. Default: 2.",
        1, 2**31, "2", group=SAMPLING,
    ),
)  # fmt: skip
LOGIT_BIAS = option(
    "--logit-bias",
    "Add X to the logit of the token with this ID (see `tokenize`); -100 excludes it. May be repeated.",
    "ID=X",
    list[str],
    group=SAMPLING,
)
LOGPROBS = number(
    "--logprobs",
    "With --json, --jsonl or --batch: log-probabilities of each token and of the N likeliest ones there.",
    0, 100, "3", group=OUTPUT,
)  # fmt: skip
# Of a request, beside the settings.
SAMPLING_OPTIONS = (*DRY, LOGPROBS)


def takes(*entries: CommandParameter | str | type) -> Callable[[Command], Command]:
    """Gives a function the parameters of its command, in the order of its help.

    entries: a parameter; the name of a setting; or a class of settings, for those of it that the command takes and
    that are not named. Settings that no entry stands for come last. With MODEL comes the flag that says the same.
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
        if MODEL in parameters:
            parameters.append(MODEL_FLAG)
        parameters.append(_help_all(parameters))
        positionals = [each.name for each in parameters if each.group == ARGUMENTS and each is not MODEL_FLAG]

        @wraps(function)
        def called(context: typer.Context, **values: Any) -> Any:
            del values["help_all"]
            if (model := values.pop(MODEL_FLAG.name, None)) is not None:
                _name_model(values, model, positionals)
            return function(context, **values)

        context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        shown: Any = called
        shown.__signature__ = inspect.Signature([context, *(each.for_typer for each in parameters)])
        shown.parameters = {each.name: each for each in parameters}
        return shown  # type: ignore[no-any-return]

    return decorate


def _help_all(parameters: Sequence[CommandParameter]) -> CommandParameter:
    """The flag that shows all options of a command. Where --help does too, it is there, but not in the help."""
    count = sum(each.group != ARGUMENTS or each is MODEL_FLAG for each in parameters)
    info = typer.Option(
        "--help-all",
        is_eager=True,
        hidden=count <= MOST_OPTIONS,
        help=f"Show all {count} options, with more about each.",
    )
    return _parameter("help_all", bool, info, default=False, group=HELP, is_basic=True)


def setting_option(name: str) -> CommandParameter:
    """The flag of a setting."""
    row = SETTINGS[name]
    accepts, flags = row.accepts, row.flags or (flag_of(name),)
    choices = completion_of(accepts)
    completion = complete_adapters if name == "adapter" else choices
    info = typer.Option(*flags, metavar=row.metavar, autocompletion=completion, help=row.help)
    is_checked = accepts.kind in ("integer", "number") or choices is not None
    kind, checked = _KINDS.get(accepts.kind, str), accepts if is_checked else None
    return _parameter(name, kind, info, accepts=checked, group=row.group, is_basic=row.is_basic)


# Values


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
            f"{flag_of(typed[-1])} needs --dry-multiplier above 0", why=why, fix=Fix.flag("--dry-multiplier", "0.8")
        )
    extra = {name: flags[name] for name in (*typed, "logprobs") if flags.get(name) is not None}
    if flags.get("logit_bias"):
        extra["logit_bias"] = parse_logit_bias(flags["logit_bias"])
    return extra


def parse_logit_bias(pairs: Sequence[str]) -> dict[int, float]:
    """`["13=-100"]` -> `{13: -100.0}`. Raises UsageError."""
    biases = {}
    for pair in pairs:
        token_id, _, value = pair.partition("=")
        try:
            bias = float(value)
        except ValueError:
            bias = float("nan")
        if not token_id.strip().isdecimal() or not _MOST_BIAS.allows(bias):
            why = "it must be a token id, as `tokenize` prints them, and a number from -1000000 to 1000000: 13=-100"
            raise UsageError(f"--logit-bias is {pair[:80]!r}", why=why, fix=Fix.flag("--logit-bias", "13=-100"))
        biases[int(token_id)] = bias
    return biases


def refuse_together(flags: Mapping[str, Any], exclusive: Mapping[str, str], fix: Fixes = "") -> None:
    """Raises UsageError for two flags that contradict each other.

    exclusive: why, by the flags: "--raw --think --stop" says that --raw goes with neither of the other two.
    fix: what helps against all of them; "": the command's help.
    """
    for line, why in exclusive.items():
        first, *others = line.split()
        for other in others if flags.get(_name_of(first)) else ():
            value = flags.get(_name_of(other))
            if value is not None and value is not False and value != []:
                raise UsageError(f"{first} and {other} cannot go together", why=why, fix=fix)


def _name_model(flags: dict[str, Any], model: str, positionals: Sequence[str]) -> None:
    """Takes the model of -m as MODEL, the first of the positionals, and moves the others on by one.

    Raises UsageError where there is none for the last of them.
    """
    from localllm.runtime.selection import is_model

    if any(map(str.isspace, model)) and not is_model(model):  # a lone MODEL that has blanks would be taken as a prompt
        why = "a model's name has no blanks, and there is no such folder or file"
        raise UsageError(f"there is no model {model[:80]!r}", why=why, fix=Fix.command("list", "--all"))
    words = [model, *(flags[name] for name in positionals if flags[name] is not None)]
    if len(words) > len(positionals):
        why = f"-m/--model names the model: {model[:80]}"
        raise UsageError(f"there is one word too many: {words[-1][:80]!r}", why=why, fix="leave out one of the two")
    flags.update(zip(positionals, words, strict=False))
