"""Runs one command line: every error becomes a few lines on stderr and an exit code, every signal an exit code."""

from __future__ import annotations

import os
import re
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from localllm.cli.context import CliContext
from localllm.cli.interrupts import Interrupts
from localllm.cli.output import Output, ReaderGoneError
from localllm.errors import BugError, Fix, LocalLLMError, UsageError
from localllm.runtime.error_origins import named, with_origins

if TYPE_CHECKING:
    from localllm.hub import ModelFiles

DEBUG_FLAG = "--debug"
_EXTRA = re.compile(r"got unexpected extra argument\(s\) \((.*)\)")
LONGEST_COMMAND = 200  # characters that are worth repeating in an error
_RAW = "--raw"  # of `run` alone: continues a text where there is no template
_WITH_ADAPTERS = ("run", "chat", "serve")
_WITH_TEMPLATE = (_RAW, "--messages", "--system", "-s", "--continue", "-c", "--session")


# Flags that the other command calls otherwise: (command, flag) -> what goes on with a chat there.
_OTHER_NAMES = {
    ("run", "--resume"): "--session last", ("chat", "-c"): "--resume", ("chat", "--continue"): "--resume",
    ("chat", "--session"): "--resume",
}  # fmt: skip


# What llama.cpp, Ollama and LM Studio call a flag.
_ELSEWHERE = {
    "--temp": "--temperature", "--verbose": "--stats", "--n-predict": "--max-tokens", "--predict": "--max-tokens",
    "--ctx-size": "--ctx", "--context-length": "--ctx", "--repeat-penalty": "--repetition-penalty",
    "--num-predict": "--max-tokens", "-n": "--max-tokens", "--num-ctx": "--ctx", "--lora": "--adapter",
    "--lora-scaled": "--adapter",
}  # fmt: skip
# What they have a flag for, and is planned here.
_PLANNED = ("-ngl", "--n-gpu-layers", "--gpu-layers", "--num-gpu")
_NEAR = 0.75  # of letters in common: "--temprature" has 0.95 of --temperature


def dispatch(arguments: Sequence[str], interrupts: Interrupts) -> int:
    """The exit code of one command line. 0 too where the reader of stdout went away: it had what it wanted."""
    output = Output.of_process()
    arguments, debug = _without_debug(arguments)
    cli = CliContext(output, interrupts)
    try:
        return _run(arguments, cli)
    except KeyboardInterrupt:
        return _interrupted(output, interrupts)
    except ReaderGoneError:
        output.abandon_stdout()
        return 0
    except Exception as error:
        if debug:
            output.traceback(traceback.format_exc())
        known = _as_known(error, arguments, cli.model)
        if cli.resolved is not None:
            with_origins(known, cli.resolved)
        known = _with_command(known, arguments)
        output.error(known)
        return known.exit_code


def end_process(code: int) -> NoReturn:
    """Ends at once where torch is loaded, in the usual way elsewhere. Everything is flushed as it is written.

    Torch takes half a second to be torn down, and a thread that still computes (an answer that nobody reads) would turn
    that into a crash: "terminate called without an active exception".
    """
    if "torch" in sys.modules:
        os._exit(code)
    sys.exit(code)


def _run(arguments: Sequence[str], cli: CliContext) -> int:
    from localllm.cli.app import root_command

    result = root_command().main(args=list(arguments), prog_name="localllm", standalone_mode=False, obj=cli)
    if cli.interrupts.exit_code is not None and result == 130:  # typer's own reading of KeyboardInterrupt
        return _interrupted(cli.output, cli.interrupts)
    return result if isinstance(result, int) else 0


def _interrupted(output: Output, interrupts: Interrupts) -> int:
    output.note(interrupts.farewell or "interrupted")
    return interrupts.exit_code or 130


def _without_debug(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """--debug may stand anywhere before `--`: whoever needs it adds it to the end of the line that failed."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [argument for argument in arguments[:end] if argument != DEBUG_FLAG]
    return [*kept, *arguments[end:]], len(kept) < end


def _as_known(error: Exception, arguments: Sequence[str], model: ModelFiles | None) -> LocalLLMError:
    if isinstance(error, LocalLLMError):
        return named(error, model)
    if isinstance(error, typer.TyperException):
        return _as_usage_error(error)
    if isinstance(error, typer.Abort):
        return UsageError(
            "a question was left without an answer", why="standard input ended", fix=Fix.command("--help")
        )
    if isinstance(error, MemoryError):
        return LocalLLMError("the memory ran out", why=str(error) or "an allocation failed", fix=Fix.command("doctor"))
    repeat = shlex.join(["localllm", DEBUG_FLAG, *arguments])
    return BugError(f"this is a bug in localllm: {type(error).__name__}", why=str(error), fix=repeat)


def _with_command(error: LocalLLMError, arguments: Sequence[str]) -> LocalLLMError:
    """The error with a fix to paste: who raised it knows what helps, not which line was typed."""
    kept = list(arguments)
    if error.code == "template" and kept[:1] == ["run"] and not any(word.startswith(_WITH_TEMPLATE) for word in kept):
        error.fix = Fix.flag(_RAW)
    elif error.what.startswith("no such option: ") and (other := _other_name(kept)) is not None:
        error.fix = Fix.command(*other)
    elif error.what.startswith("no such option: ") and (flag := next(filter(_is_planned, kept), None)) is not None:
        error.what, error.fix = f"{flag} is not needed", Fix.without(flag.partition("=")[0])
        error.why = "what the GPU holds is planned; --vram limits how much of its memory that takes"
    elif kept[:1] == ["serve"] and (more := _EXTRA.fullmatch(error.what)) is not None:
        error.fix = Fix.command(*_with_others(kept, more[1].split()))
    elif type(error) is UsageError and not error.fixes:
        error.fix = Fix.command(*_command(kept), "--help")
    error.fix = [_to_paste(fix, kept) for fix in error.fixes]
    return error


def _is_planned(word: str) -> bool:
    return word.partition("=")[0] in _PLANNED


def _with_others(arguments: list[str], models: Sequence[str]) -> list[str]:
    """A line of `serve` that names several models, as it takes them: each behind the first by --also."""
    kept = [word for word in arguments if word not in models]
    return [*kept, *(word for model in models for word in ("--also", model))]


def _other_name(arguments: Sequence[str]) -> list[str] | None:
    """The line with a flag as this command calls it; None where it has none of those that are confused."""
    for place, word in enumerate(arguments):
        if (other := _OTHER_NAMES.get((arguments[0], word))) is not None:
            return [*arguments[:place], *other.split(), *arguments[place + 1 :]]
    return None


_LONG_FLAG = re.compile(r"--[a-z]")
# Flags that a fix leaves out, and that take no value.
_SWITCHES = frozenset({"--new-key", "--also-ollama-port", "--metrics", "--ray", "--raw", "--show-prompt"})


def _without_flag(arguments: list[str], flag: str) -> list[str]:
    """The line without a flag and its value, if it takes one, however often and in either spelling it stands there.
    What looks like another flag is no value: `--speculate --max-tokens 6` has forgotten one."""
    kept, is_value = [], False
    for argument in arguments:
        is_value = is_value and _LONG_FLAG.match(argument) is None
        if not is_value and argument != flag and not argument.startswith(f"{flag}="):
            kept.append(argument)
        is_value = not is_value and argument == flag and flag not in _SWITCHES
    return kept


def _to_paste(fix: Fix, arguments: list[str]) -> Fix:
    """Return the fix as the whole line to type, where it changes the line that was typed."""
    match fix.kind:
        case "again":
            return Fix.advice(str(_line(arguments, "this command")).join(fix.words))
        case "model" | "word":
            word, instead = fix.words
            if (place := _place_of(word, arguments)) is not None:
                changed = _with_word(arguments, place, _replaced(arguments[place], word, instead))
                return _line(changed, f"the same command with {instead}")
        case "adapter":
            word, base, adapter = fix.words
            place = _place_of(word, arguments)
            if place is not None and arguments[0] in _WITH_ADAPTERS:
                changed = _with_word(arguments, place, _replaced(arguments[place], word, base))
                added = ("--adapter", adapter)
                return _line(_with_flags(changed, added), f"the same command with {base} {' '.join(added)}")
        case "without":
            kept = arguments
            for flag in fix.words:
                kept = _without_flag(kept, flag)
            return _line(kept, f"the same command without {' and '.join(fix.words)}")
        case "flag":
            kept = arguments
            if fix.words == ("--device", "cpu"):  # where a limit of a GPU's memory is refused
                kept = _without_flag(kept, "--vram")
            for flag in (word for word in fix.words if word.startswith("-")):
                kept = _without_flag(kept, flag)
            return _line(_with_flags(kept, fix.words), f"the same command with {fix}")
    return fix


def _with_flags(arguments: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return a line with more flags, in front of `--`, behind which none is one."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [*arguments[:end], *flags, *arguments[end:]]


def _place_of(word: str, arguments: Sequence[str]) -> int | None:
    """Return where a word stands behind the command: as a model, as an argument or a flag, or as a flag's value."""

    def rank(place: int) -> int:
        argument, before = arguments[place], arguments[place - 1]
        if before in ("-m", "--model") or argument.startswith("--model="):
            return 0
        return 1 if before == "--" or not before.startswith("-") else 2

    places = [place for place in range(1, len(arguments)) if _replaced(arguments[place], word, "") != arguments[place]]
    return min(places, key=rank, default=None)


def _with_word(arguments: Sequence[str], place: int, instead: str) -> list[str]:
    """Return a line with another word at a place of it; a flag goes in front of `--`."""
    before, behind = list(arguments[:place]), list(arguments[place + 1 :])
    if "--" not in before or not instead.startswith("-"):
        return [*before, instead, *behind]
    kept = _with_flags([*before, *behind], [instead])
    return kept[:-1] if kept[-1] == "--" else kept


def _replaced(argument: str, word: str, instead: str) -> str:
    """Return an argument with another word in place of this one: the whole of it, or a side of its "="."""
    if argument == word:
        return instead
    flag, _, value = argument.partition("=")
    if flag.startswith("--") and word in (flag, value):
        return f"{instead if flag == word else flag}={instead if value == word else value}"
    return argument


def _line(arguments: Sequence[str], otherwise: str) -> Fix:
    """Return the line to paste, or where it is too long to be repeated, what says the same."""
    command = Fix.command(*arguments)
    return command if len(str(command)) <= LONGEST_COMMAND else Fix.advice(otherwise)


def _command(arguments: Sequence[str]) -> list[str]:
    """The command that a line names, as a list of one; none where it names none."""
    from localllm.cli.app import ALIASES, COMMANDS

    return [word for word in (ALIASES.get(word, word) for word in arguments[:1]) if word in COMMANDS]


def _flag_meant(flag: str, context: Any) -> str | None:
    """Return the flag of a command that a word was meant for; None where none is near."""
    import difflib  # which a line that is right does without

    flags = [name for each in context.command.params for name in each.opts if name.startswith("--")]
    if (named := _ELSEWHERE.get(flag)) in flags:
        return named
    if not flag.startswith("--"):
        return None
    front = "--no-" if flag.startswith("--no-") else "--"  # never the opposite
    names = [name for name in flags if name.startswith("--no-") == (front == "--no-")]
    near = {f"--{name.removeprefix(front)}": name for name in names}
    found = difflib.get_close_matches(f"--{flag.removeprefix(front)}", near, n=1, cutoff=_NEAR)
    return near[found[0]] if found else None


def _as_usage_error(error: typer.TyperException) -> UsageError:
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "localllm"
    usage = context.get_usage().removeprefix("Usage: ") if context else "localllm COMMAND"
    what = error.format_message().replace("Value error, ", "").partition(" (Possible options: ")[0]
    if context is not None and (flag := getattr(error, "option_name", None)) and (meant := _flag_meant(flag, context)):
        return UsageError(f"no such option: {flag}", why=f"the nearest is {meant}", fix=Fix.word(flag, meant))
    return UsageError(
        what[:1].lower() + what[1:], why=f"usage: {' '.join(usage.split())}", fix=f"{path} --help" if context else ""
    )
