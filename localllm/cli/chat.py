"""`localllm chat`: a conversation, line by line."""

from __future__ import annotations

import contextlib
import shlex
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localllm.cli import dialogue, options
from localllm.cli.answer import Answer, statistics
from localllm.cli.config import shown_setting
from localllm.cli.dialogue import Dialogue
from localllm.cli.front import Front, front_of
from localllm.cli.generate import Printing, can_be_longer, is_cut_by_context, print_answer
from localllm.cli.interrupts import Interrupted
from localllm.cli.lines import LineReader
from localllm.cli.origins import with_origins
from localllm.cli.prompt import argument_text, has_blanks, read_text_file
from localllm.cli.selection import Selection, named, select
from localllm.config import user_directories
from localllm.errors import (
    ContextOverflowError,
    LocalLLMError,
    ModelNotFoundError,
    SettingsError,
    TemplateError,
    UsageError,
)

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.engine.service import EngineService

EXAMPLES = """Examples:

\b
  localllm chat --plain
  localllm chat mistral-7b --plain -s "You are a patient teacher." --temperature 0.5

Inside: /help lists the commands; a line that ends in a backslash goes on, three double quotes open and close a block;
Ctrl-C stops an answer, Ctrl-D leaves."""


def chat_command(
    context: typer.Context,
    model: options.Model = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Line by line; also for screen readers, ssh and pipes.")
    ] = False,
    system: options.System = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print tokens, rates and times after each answer.")] = False,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    typical_p: options.TypicalP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    dry_multiplier: options.DryMultiplier = None,
    dry_base: options.DryBase = None,
    dry_allowed_length: options.DryAllowedLength = None,
    logit_bias: options.LogitBias = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ctx: options.Ctx = None,
    ram: options.Ram = None,
    vram: options.Vram = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    weights: options.Weights = None,
    threads: options.Threads = None,
) -> None:
    """Talk with a model, line by line.

    What was said before is part of each question.
    """
    flags = dict(locals())  # by name: they are passed on as one
    from localllm.cli.opening import loading

    front = front_of(context)
    if not plain:
        front.output.note("there is no full-screen chat yet: this is the line mode, `chat --plain`")
    if system is not None:
        flags["system"] = argument_text(system, "--system")
    selection = _select(front, model, flags)
    selection.sampling(flags)  # what is wrong with it is said before the model is loaded
    reader = LineReader(front.output, user_directories().data / "history")
    with loading(front, selection) as load, contextlib.ExitStack() as stack:
        stack.callback(reader.save_history)
        engine = load.wait()
        Chat(front, selection, load.service, engine, reader, flags).run()


def _select(front: Front, word: str | None, flags: Mapping[str, Any]) -> Selection:
    try:
        return select(front, word, flags)
    except ModelNotFoundError as error:
        if word is not None and has_blanks(word):
            error.fix += f", or if it is a prompt: localllm run -p {shlex.quote(word)}"
        raise


class Chat:
    """The loop: a message or a command in, an answer out; an error is told and the conversation goes on."""

    def __init__(
        self,
        front: Front,
        selection: Selection,
        service: EngineService,
        engine: Engine,
        reader: LineReader,
        flags: dict[str, Any],
    ) -> None:
        _ = engine.template  # raises TemplateError where there is none to talk through
        self._front = front
        self._output = front.output
        self._selection = selection
        self._service = service
        self._engine = engine
        self._reader = reader
        self._flags = flags
        self._shows_statistics = bool(flags["stats"])
        self._last: Answer | None = None
        self._leaving = False
        self._exit_code = 0
        self.dialogue = Dialogue(selection.resolved, selection.settings.system)

    def run(self) -> None:
        if self._reader.interactive:
            self._output.note(f"{self._selection.files.name}, context {self._engine.ctx} tokens; /help, /bye")
        hinted = False
        while not self._leaving:
            try:
                self._turn()
                hinted = False
            except Interrupted:
                cleared = self._reader.has_begun()
                if (hinted and not cleared) or not self._reader.interactive or self._terminated:
                    raise
                hinted = not cleared
                self._front.interrupts.settle()
                self._output.note("")  # ends the line that ^C stands on
                if hinted:
                    self._output.note("Ctrl-C again leaves; so do /bye and Ctrl-D")
            except LocalLLMError as error:
                error = named(error, self._selection.files)
                with_origins(error, self.dialogue.resolved)
                self._output.error(_mended_here(error))
                self._exit_code = error.exit_code
            if self._terminated:
                raise typer.Exit(self._front.interrupts.exit_code or 0)
        if not self._reader.interactive:  # a script wants to know; a person has read it
            raise typer.Exit(self._exit_code)

    @property
    def _terminated(self) -> bool:
        """SIGTERM came: unlike Ctrl-C it does not mean the answer alone."""
        return self._front.interrupts.exit_code == 128 + signal.SIGTERM

    def _turn(self) -> None:
        message = self._reader.message()
        if message is None:
            self._leaving = True
        else:
            self._take(message)

    def _take(self, message: str) -> None:
        if message.startswith("/"):
            name, rest = dialogue.split_command(message)
            getattr(self, f"_do_{name}")(rest)
        elif message.strip():
            self.dialogue.ask(argument_text(message, "the message").strip())
            self._reply()

    def _reply(self) -> None:
        """Answers the last question; one that cannot be answered is taken back, and the conversation kept."""
        from localllm.engine.request import Request

        before = len(self.dialogue.turns)
        try:
            ids = self._prompt_ids()
            selection = Selection(self._selection.files, self.dialogue.resolved)
            request = Request(tuple(ids), selection.sampling(self._flags))
            stream = self._service.submit(request)
            printing = Printing(statistics=self._shows_statistics)
            answer = print_answer(self._front, self._selection.files, stream, request, printing)
        except LocalLLMError:
            if len(self.dialogue.turns) == before:
                self.dialogue.take_back_question()
            raise
        self._last = answer
        self.dialogue.answer(answer.text)
        if answer.finished is not None and is_cut_by_context(answer.finished, self._engine.ctx):
            larger = ", or start with a larger --ctx" if can_be_longer(self._engine) else ""
            self._output.warn(f"the context of {self._engine.ctx} tokens is full: /undo, /clear{larger}")

    def _prompt_ids(self) -> list[int]:
        return self._engine.encode(self.dialogue.messages)

    # Slash commands

    def _do_help(self, _: str) -> None:
        for line in dialogue.command_list():
            self._output.note(line)

    def _do_system(self, text: str) -> None:
        if text:
            self.dialogue.system = None if text == "-" else text
        self._output.note(f"system message: {self.dialogue.system or 'none'}")

    def _do_regen(self, _: str) -> None:
        if not self.dialogue.take_back_answer():
            self._output.note("there is no answer yet")
            return
        self._reply()

    def _do_undo(self, _: str) -> None:
        done = self.dialogue.take_back_question()
        self._output.note("took the last question back" if done else "there is nothing to take back")

    def _do_clear(self, _: str) -> None:
        self.dialogue.clear()
        self._output.note("a new conversation")

    def _do_file(self, path: str) -> None:
        count = self.dialogue.attach(Path(path).expanduser())
        self._output.note(f"{count} characters go before the next question")

    def _do_save(self, path: str) -> None:
        target = Path(path or "chat.json").expanduser()
        try:
            self.dialogue.save(target, overwrite=False)
        except FileExistsError:
            if not self._confirms(f"{target} is there already. Overwrite it? [y/N] "):
                self._output.note("nothing was written")
                return
            self.dialogue.save(target, overwrite=True)
        self._output.note(f"wrote {target}")

    def _do_load(self, path: str) -> None:
        from localllm.engine.chat_template import parse_messages_file

        text = read_text_file(Path(path).expanduser(), "/load")
        self.dialogue.load(list(parse_messages_file(text).messages))
        self._output.note(f"{len(self.dialogue.turns)} messages")

    def _do_set(self, text: str) -> None:
        key, _, value = text.partition(" ")
        if key and value.strip():
            self._output.note(f"{key} = {self.dialogue.set(key, value.strip())}")
            return
        for name in dialogue.SETTABLE:
            if not key or name == key:
                self._output.note(f"{name} = {shown_setting(getattr(self.dialogue.resolved.settings, name))}")

    def _do_show(self, _: str) -> None:
        self._output.note(f"model {self._selection.files.name} in {self._selection.files.directory}")
        self._do_tokens("")
        self._do_system("")
        self._do_set("")

    def _do_stats(self, switch: str) -> None:
        if not switch:
            self._output.note(statistics(self._last) if self._last else "there is no answer yet")
            return
        if switch not in ("on", "off"):
            why = "on: statistics after each answer; off: none; nothing behind it: of the last answer"
            raise UsageError(f"/stats is followed by {switch!r}", why=why, fix="/stats on")
        self._shows_statistics = switch == "on"
        self._output.note(f"statistics after each answer: {switch}")

    def _do_tokens(self, _: str) -> None:
        count = len(self._prompt_ids()) if self.dialogue.messages else 0
        self._output.note(f"{count} of {self._engine.ctx} tokens of the context are used")

    def _do_bye(self, _: str) -> None:
        self._leaving = True

    def _confirms(self, question: str) -> bool:
        if not self._reader.interactive:
            return False
        return (self._reader.line(question) or "").strip().lower() in ("y", "yes")


def _mended_here(error: LocalLLMError) -> LocalLLMError:
    """The error with a fix that can be typed in a chat."""
    if error.fix.startswith("--"):
        error.fix = f"start again with {error.fix}"
    match error:
        case ContextOverflowError():
            error.fix = f"/undo, /clear, or {error.fix}"
        case SettingsError():
            error.fix = "/set shows every setting"
        case TemplateError():
            error.fix = "/undo, /clear, or /system -"
        case UsageError() if not error.fix:
            error.fix = "/help"
    return error
