"""The prompt and the form of an answer, as a command line has them: a text or chat messages, as the text and as the ids
that the model is given; --schema, --regex, --grammar, and --strict, for an answer that was cut before it had its form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.chat.file_kinds import is_pipe, text_of_file
from localllm.chat.harmony import FINAL, is_harmony
from localllm.chat.thoughts import AS_IT_DOES, Effort, Thinking, answer_ids, effort_of, thinking_of
from localllm.chat.tool_words import adapted
from localllm.cli.context import CliContext
from localllm.cli.options import option
from localllm.cli.output import Output
from localllm.cli.prompt import argument_text, join_parts, read_input, read_stdin
from localllm.errors import MODEL, Fix, GrammarError, SchemaError, UsageError
from localllm.runtime.selection import Selection
from localllm.settings import ANSWER
from localllm.text.grammar.gbnf import is_gbnf
from localllm.text.grammar.grammar import Grammar

if TYPE_CHECKING:
    from localllm.chat.compression import Compression
    from localllm.config import ResolvedSettings
    from localllm.engine.events import FinishedEvent
    from localllm.text.chat_template import ChatInput, ChatTemplate
    from localllm.text.tokenizer import Tokenizer

_PROSE = ("", ".txt", ".text", ".md", ".markdown", ".rst", ".adoc", ".org", ".pdf")  # what files of it are called


@dataclass(frozen=True)
class Source:
    """Either `raw` or `chat` is set.

    verbatim: the texts of files in it that are no prose, by the files' names.
    compression: what left it.
    """

    raw: str | None = None
    chat: ChatInput | None = None
    verbatim: Mapping[str, str] = field(default_factory=dict)
    compression: Compression | None = None

    @property
    def opens_turn(self) -> bool:
        """The value of `Request.opens_turn`."""
        return self.chat is not None and self.chat.opens_turn

    def render(self, directory: Path, resolved: ResolvedSettings) -> str:
        """The prompt as the model in `directory` is given it, special tokens written out. Raises TemplateError, and
        UsageError where what was typed of --think cannot be had."""
        if self.chat is None:
            return self.raw or ""
        from localllm.text.chat_template import ChatTemplate

        template = ChatTemplate.load(directory)
        effort = effort_of(resolved, template, "--think")
        ends = effort.is_off and self.chat.add_generation_prompt and is_harmony(template)
        return template.render_chat(effort.told(adapted(template, self.chat))) + (FINAL if ends else "")


@dataclass(frozen=True)
class Encoder:
    """Tokenizer and template of one model, loaded once for any number of prompts. has_form: so have their answers."""

    tokenizer: Tokenizer
    template: ChatTemplate | None  # None: for raw prompts
    effort: Effort = AS_IT_DOES
    has_form: bool = False

    @classmethod
    def of(cls, cli: CliContext, selection: Selection, *, is_raw: bool, has_form: bool = False) -> Encoder:
        """Raises TokenizerError, and TemplateError and UsageError (of --think) unless it is for raw prompts."""
        from localllm.text.chat_template import ChatTemplate
        from localllm.text.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(selection.files.directory)
        if is_raw:
            return cls(tokenizer, None)
        template = ChatTemplate.load(selection.files.directory, tokenizer)
        effort = effort_of(selection.resolved, template, "--think")
        if effort.note:
            cli.output.note(effort.note)
        return cls(tokenizer, template, effort, has_form)

    def encode(self, source: Source) -> tuple[int, ...]:
        """The prompt's ids. In a raw prompt special tokens are meant; in a message they are text."""
        from localllm.text.chat_template import encode_chat

        if source.chat is None or self.template is None:
            return tuple(self.tokenizer.encode(source.raw or "", special=True, bos=True))
        chat = self.effort.told(adapted(self.template, source.chat))
        tail = answer_ids(self.template, self.tokenizer, is_final=self.has_form or self.effort.is_off)
        return (*encode_chat(self.template, self.tokenizer, chat), *tail)

    def thinking(self, prompt_ids: Sequence[int]) -> Thinking:
        """Return how the thought and the answer to a prompt are separated."""
        return thinking_of(self.template, self.tokenizer, prompt_ids)


def read_source(output: Output, text: str | None, flags: Mapping[str, Any], system: str | None) -> Source:
    """The prompt of a command line: `--messages`, or what is piped in, the files and the text, in this order.

    Raises UsageError where there is none.
    """
    from localllm.text.chat_template import parse_messages_file

    if flags["messages"] is not None:
        return Source(chat=parse_messages_file(read_input(flags["messages"], "--messages", output)))
    paths = flags["file"] or []
    is_form_piped = _form_of_stdin(flags) is not None
    parts = [] if Path("-") in paths or is_form_piped else [read_stdin(output)]
    files = [(path, _read_file(path, output, is_raw=flags["raw"])) for path in paths]
    parts += [content for _, content in files]
    parts.append(None if text is None else argument_text(text, "the prompt"))
    prompt = join_parts([part for part in parts if part])
    if not (prompt if flags["raw"] else prompt.strip()):
        raise _no_prompt(flags, is_form_piped=is_form_piped, is_blank=text is not None or any(parts))
    if flags["raw"]:
        return Source(raw=prompt)
    # A shell or an editor ends a text with a newline that nobody means; a prompt that was typed stays as it is.
    question = prompt if text else prompt.rstrip("\n")
    verbatim = {str(path): content.strip("\n") for path, content in files if path.suffix.lower() not in _PROSE}
    return replace(asked(question, argument_text(system, "--system") if system else None), verbatim=verbatim)


def _no_prompt(flags: Mapping[str, Any], *, is_form_piped: bool, is_blank: bool) -> UsageError:
    what, fox = "there is no prompt", "Tell me a tale about a fox."
    if is_blank and not is_form_piped:
        return UsageError(what, why="it is blank", fix=Fix.command("run", MODEL, fox))
    piped = "what is piped in is the answer's form" if is_form_piped else "nothing is piped in"
    needing = [f"--{name}" for name in ("cascade", "compress") if flags[name] is not None]
    needed = f"; {' and '.join(needing)} cannot do without one" if needing else ""
    why = "it is blank" if is_blank else f"none on the command line, and {piped}{needed}"
    return UsageError(what, why=why, fix=Fix.flag("-p", "TEXT" if is_form_piped else fox))


def _read_file(path: Path, output: Output, *, is_raw: bool) -> str:
    """The text of a file of the prompt, as one before a question of a chat is read. A pipe is read to its end, and a
    text of a raw prompt stays as it is. Raises UsageError."""
    if str(path) == "-" or is_pipe(path) or (is_raw and path.suffix.lower() != ".pdf"):
        return read_input(path, "--file", output)
    text, remark = text_of_file(path)
    if remark:
        output.note(f"{path}: {remark}")
    return text


def asked(question: str, system: str | None) -> Source:
    """A question as chat messages."""
    from localllm.text.chat_template import ChatInput

    messages = [{"role": "system", "content": system}] if system else []
    return Source(chat=ChatInput([*messages, {"role": "user", "content": question}]))


# The form

_FORMS = ("--schema", "--regex", "--grammar")
_STDIN = Path("-")
# What is not a name of a file, as a rule, but what should stand in one.
_READS_LIKE = {
    "--schema": ("a JSON Schema", re.compile(r"\s*[\[{]")),
    "--grammar": ("a grammar", re.compile(r"\s*[\w?!.-]+\s*:")),
}
FORM_OPTIONS = (
    option(
        "--schema",
        "Answer in JSON that matches this JSON Schema.\n-: stdin.",
        "FILE",
        Path,
        group=ANSWER,
        is_basic=True,
    ),
    option(
        "--regex",
        "Constrain the answer to text that this regular expression matches as a whole.",
        "PATTERN",
        group=ANSWER,
    ),
    option(
        "--grammar",
        "Constrain the answer to this grammar: Lark, or llama.cpp's GBNF. -: stdin.",
        "FILE",
        Path,
        group=ANSWER,
    ),
    option(
        "--strict",
        "With --schema, --regex or --grammar: exit with code 7 if the answer was cut off before it was complete.",
        group=ANSWER,
    ),
)


def refuse_idle_strict(flags: Mapping[str, Any]) -> None:
    """Raises UsageError where --strict has no form to insist on, and for a form and a prompt that are both piped in."""
    if flags["strict"] and all(flags[form.removeprefix("--")] is None for form in _FORMS):
        why = "it insists on the form of an answer, and none is given"
        raise UsageError(
            f"--strict needs {', '.join(_FORMS[:-1])} or {_FORMS[-1]}", why=why, fix=Fix.flag("--schema", "FILE")
        )
    form = _form_of_stdin(flags)
    files = (("--file", path) for path in flags["file"] or ())
    for other, path in (("--messages", flags["messages"]), ("--batch", flags["batch"]), *files):
        if form is not None and path == _STDIN:
            why = "standard input is read once"
            raise UsageError(f"{form} - and {other} - cannot go together", why=why, fix=Fix.flag(form, "FILE"))


def _form_of_stdin(flags: Mapping[str, Any]) -> str | None:
    """The flag whose form is piped in, if one is."""
    return next((flag for flag in ("--schema", "--grammar") if flags[flag.removeprefix("--")] == _STDIN), None)


def typed_grammar(flags: Mapping[str, Any], output: Output) -> Grammar | None:
    """The form that is typed, found good before a model is loaded. Raises UsageError, and GrammarError naming the flag
    and what of the form cannot be honoured."""
    from localllm.text.grammar.definition import defined

    flag = next((each for each in _FORMS if flags[each.removeprefix("--")] is not None), None)
    if flag is None:
        return None
    value = flags[flag.removeprefix("--")]
    if flag == "--regex":
        if not value:
            raise UsageError(
                "--regex is empty", why="it would allow no answer but an empty one", fix=Fix.flag("--regex", "PATTERN")
            )
        named, grammar = flag, Grammar("regex", argument_text(value, flag))
    else:
        named, source = f"{flag} {value}", _read_form(value, flag, output)
        # A grammar is in Lark or GBNF as its ending says; of another name, by its rules.
        is_lark = value.suffix == ".lark" or (value.suffix != ".gbnf" and not is_gbnf(source))
        grammar = Grammar("json_schema" if flag == "--schema" else "lark" if is_lark else "gbnf", source)
    try:
        defined(grammar)
    except GrammarError as error:
        fix = error.fixes or "mend it, and run the same command again"
        raise GrammarError(f"{named}: {error.what}", why=error.why, fix=fix) from None
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


def require_met(cli: CliContext, endings: Sequence[FinishedEvent], *, strict: bool) -> None:
    """Warns of answers that ended before they had their form; `endings`: of those that were printed, in their order.
    Raises SchemaError for them with `strict`."""
    cuts: dict[tuple[str, Fix], list[int]] = {}
    for place, finished in enumerate(endings, start=1):
        if finished.meets_grammar is False and finished.finish_reason not in ("cancelled", "error"):
            cuts.setdefault(_cut_of(finished), []).append(place)
    if not cuts:
        return
    if len(endings) == 1:
        what = "the answer is not whole, and does not have the form that was asked for"
        why = "; ".join(f"it was {reason}" for reason, _ in cuts)
    else:
        num_cut = sum(map(len, cuts.values()))
        what = f"{num_cut} of {len(endings)} answers are not whole, and do not have the form that was asked for"
        why = "; ".join(f"{_named(places)} {reason}" for (reason, _), places in cuts.items())
    if strict:
        raise SchemaError(what, why=why, fix=list(dict.fromkeys(fix for _, fix in cuts)))
    cli.output.warn(f"{what}: {why}")


def _cut_of(finished: FinishedEvent) -> tuple[str, Fix]:
    """Why an answer ended before its form did, and what helps."""
    num_tokens = finished.usage.completion_tokens
    after = f"after {num_tokens} token{'s' * (num_tokens != 1)}"
    if finished.stop_text is not None:
        return f"ended by the stop string {finished.stop_text!r} {after}", Fix.without("--stop")
    if finished.ctx is not None and finished.usage.prompt_tokens + num_tokens >= finished.ctx:
        return f"cut {after}: the context of {finished.ctx} tokens is full", Fix.flag("--ctx", 2 * finished.ctx)
    return f"cut {after}: the most that one may have", Fix.flag("--max-tokens", max(512, 4 * num_tokens))


def _named(places: Sequence[int]) -> str:
    *before, last = map(str, places)
    return f"answers {', '.join(before)} and {last} were" if before else f"answer {last} was"
