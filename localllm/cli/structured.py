"""The form of an answer on a command line: --schema, --regex, --grammar; and --strict, for one that was cut before it
had it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.cli.context import CliContext
from localllm.cli.options import option
from localllm.cli.output import Output
from localllm.cli.prompt import argument_text, read_input
from localllm.errors import Fix, GrammarError, SchemaError, UsageError
from localllm.text.grammar.gbnf import is_gbnf
from localllm.text.grammar.grammar import Grammar

if TYPE_CHECKING:
    from localllm.engine.events import FinishedEvent

FORMS = ("--schema", "--regex", "--grammar")
_STDIN = Path("-")
# What is no name of a file, as a rule, but what should stand in one.
_READS_LIKE = {
    "--schema": ("a JSON Schema", re.compile(r"\s*[\[{]")),
    "--grammar": ("a grammar", re.compile(r"\s*[\w?!.-]+\s*:")),
}


FORM_OPTIONS = (
    option("--schema", "The answer is JSON that this JSON Schema allows. -: stdin.", "FILE", Path),
    option("--regex", "The answer is a text that this regular expression matches whole.", "PATTERN"),
    option(
        "--grammar",
        "The answer is a text of this grammar, in Lark or llama.cpp's GBNF: by its ending, or by its rules. -: stdin.",
        "FILE",
        Path,
    ),
    option("--strict", "Exit code 7 where an answer was cut before it had the form of one of these three."),
)


def refuse_idle_strict(flags: Mapping[str, Any]) -> None:
    """Raises UsageError where --strict has no form to insist on, and for a form and a prompt that are both piped in."""
    if flags["strict"] and all(flags[form.removeprefix("--")] is None for form in FORMS):
        why = "it insists on the form of an answer, and none is given"
        raise UsageError(
            f"--strict needs {', '.join(FORMS[:-1])} or {FORMS[-1]}", why=why, fix=Fix.flag("--schema", "FILE")
        )
    _refuse_two_readers(flags)


def _refuse_two_readers(flags: Mapping[str, Any]) -> None:
    form = form_of_stdin(flags)
    files = (("--file", path) for path in flags["file"] or ())
    for other, path in (("--messages", flags["messages"]), ("--batch", flags["batch"]), *files):
        if form is not None and path == _STDIN:
            why = "standard input is read once"
            raise UsageError(f"{form} - and {other} - cannot go together", why=why, fix=Fix.flag(form, "FILE"))


def form_of_stdin(flags: Mapping[str, Any]) -> str | None:
    """The flag whose form is piped in, if one is."""
    return next((flag for flag in ("--schema", "--grammar") if flags[flag.removeprefix("--")] == _STDIN), None)


def typed_grammar(flags: Mapping[str, Any], output: Output) -> Grammar | None:
    """The form that is typed, found good before a model is loaded. Raises UsageError, and GrammarError naming the flag
    and what of the form cannot be honoured."""
    from localllm.text.grammar.definition import defined

    if flags["schema"] is not None:
        named = f"--schema {flags['schema']}"
        grammar = Grammar("json_schema", _read_form(flags["schema"], "--schema", output))
    elif flags["regex"] is not None:
        if not flags["regex"]:
            raise UsageError(
                "--regex is empty", why="it would allow no answer but an empty one", fix=Fix.flag("--regex", "PATTERN")
            )
        named, grammar = "--regex", Grammar("regex", argument_text(flags["regex"], "--regex"))
    elif flags["grammar"] is not None:
        named, grammar = f"--grammar {flags['grammar']}", _grammar_of_file(flags["grammar"], output)
    else:
        return None
    try:
        defined(grammar)
    except GrammarError as error:
        raise GrammarError(
            f"{named}: {error.what}", why=error.why, fix=error.fixes or "mend it, and run the same command again"
        ) from None
    return grammar


def _read_form(path: Path, flag: str, output: Output) -> str:
    try:
        source = read_input(path, flag, output)
    except UsageError as error:
        kind, looks = _READS_LIKE[flag]
        if not isinstance(error.__cause__, OSError) or not looks.match(str(path)):
            raise
        raise UsageError(
            f"{flag} takes a file, and {str(path)[:60]!r} reads like {kind} itself",
            why=f"no file of that name can be read: write it into a file, or pipe it in ({flag} -)",
            fix=Fix.flag(flag, "FILE"),
        ) from error
    if not source.strip():
        why = "nothing was piped in" if path == _STDIN else "the file has nothing but blanks"
        raise UsageError(f"{flag} {path} is empty", why=why, fix=Fix.flag(flag, "FILE"))
    return source


def _grammar_of_file(path: Path, output: Output) -> Grammar:
    """In Lark or GBNF, as its ending says; of another name, by its rules."""
    source = _read_form(path, "--grammar", output)
    if path.suffix in (".lark", ".gbnf"):
        return Grammar("lark" if path.suffix == ".lark" else "gbnf", source)
    return Grammar("gbnf" if is_gbnf(source) else "lark", source)


def require_met(front: CliContext, endings: Sequence[FinishedEvent], *, strict: bool) -> None:
    """Warns of answers that ended before they had their form; `endings`: of those that were printed, in their order.
    Raises SchemaError for them with `strict`."""
    cuts: dict[_Cut, list[int]] = {}
    for place, finished in enumerate(endings, start=1):
        if finished.meets_grammar is False and finished.finish_reason not in ("cancelled", "error"):
            cuts.setdefault(_cut_of(finished), []).append(place)
    if not cuts:
        return
    if len(endings) == 1:
        what = "the answer is not whole, and does not have the form that was asked for"
        why = "; ".join(f"it was {cut.reason}" for cut in cuts)
    else:
        num_cut = sum(map(len, cuts.values()))
        what = f"{num_cut} of {len(endings)} answers are not whole, and do not have the form that was asked for"
        why = "; ".join(f"{_named(places)} {cut.reason}" for cut, places in cuts.items())
    if strict:
        raise SchemaError(what, why=why, fix=list(dict.fromkeys(cut.fix for cut in cuts)))
    front.output.warn(f"{what}: {why}")


@dataclass(frozen=True)
class _Cut:
    """Why an answer ended before its form did."""

    reason: str
    fix: Fix


def _cut_of(finished: FinishedEvent) -> _Cut:
    num_tokens = finished.usage.completion_tokens
    after = f"after {num_tokens} token{'s' * (num_tokens != 1)}"
    if finished.stop_text is not None:
        return _Cut(f"ended by the stop string {finished.stop_text!r} {after}", Fix.without("--stop"))
    if finished.ctx is not None and finished.usage.prompt_tokens + num_tokens >= finished.ctx:
        return _Cut(f"cut {after}: the context of {finished.ctx} tokens is full", Fix.flag("--ctx", 2 * finished.ctx))
    return _Cut(f"cut {after}: the most that one may have", Fix.flag("--max-tokens", max(512, 4 * num_tokens)))


def _named(places: Sequence[int]) -> str:
    *before, last = map(str, places)
    return f"answers {', '.join(before)} and {last} were" if before else f"answer {last} was"
