"""`localllm chat`: a conversation, line by line."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import typer

from localllm.chat import slash
from localllm.chat.answer import statistics
from localllm.chat.attachments import folded
from localllm.chat.file_references import dropped
from localllm.chat.fixes import mended_in_chat
from localllm.chat.recorder import Resumed, look_up
from localllm.chat.session import ChatSession
from localllm.chat.text_file import ExistsError, typed_path
from localllm.chat.thoughts import effort_of, kept_apart, told_apart
from localllm.cli import options
from localllm.cli.context import CliContext, cli_context
from localllm.cli.generate import AnswerPrinter, Printing
from localllm.cli.interrupts import Interrupted
from localllm.cli.options import complete_sessions, extra_sampling, option, refuse_together, setting_flags, takes
from localllm.cli.output import Output
from localllm.cli.prompt import argument_text, has_blanks
from localllm.cli.pulling import PULL
from localllm.cli.screen import has_screen, run_screen
from localllm.cli.selection import select_resumed
from localllm.config import ResolvedSettings, load_settings, user_directories
from localllm.errors import CardFaultError, Fix, HistoryError, LocalLLMError, ModelNotFoundError, UsageError
from localllm.history import content_of
from localllm.registry import BUILT_IN
from localllm.runtime.engine_loader import Opening, check
from localllm.runtime.error_origins import named, with_origins
from localllm.runtime.selection import Selection, is_model, selected
from localllm.settings import KEPT, OUTPUT, EngineConfig, SamplingSettings

if TYPE_CHECKING:
    from localllm.cli.load_progress import EngineLoad

_LISTED = 10  # by /sessions
_SHOWN_LINES = 12  # of each message that a resumed chat begins with
_HISTORY_LINES = 2000
_FENCE = '"""'
_CONTINUED = "... "

CHAT_EXAMPLES = """Examples:

\b
  localllm chat
  localllm chat mistral-7b -s "You are a patient teacher." --temperature 0.5
  localllm chat --resume
  localllm chat --resume kibaro
  localllm chat --plain

On the screen F1 lists the keys, a slash the commands. Line by line: /help lists the commands; a line that ends in a
backslash goes on, three double quotes open and close a block. Ctrl-C stops an answer, Ctrl-D leaves."""


EXCLUSIVE = {
    "--private --cache-disk": "a private chat stores nothing on the disk",
    "--plain --inline": "one is line by line, the other a screen below the prompt",
}


@takes(
    options.MODEL,
    option("--plain", "Line by line, for screen readers and pipes.", group=OUTPUT, is_basic=True),
    option(
        "--inline",
        "Below the shell's prompt, not on the full screen.",
        group=OUTPUT,
        is_basic=True,
    ),
    "system",
    option(
        "--resume",
        "Continue a saved chat; without ID the latest one.\n"
        "ID: `last`, its id in `localllm sessions list`, the beginning of one, or a part of its title.",
        "[ID]",
        completion=complete_sessions,
        group=KEPT,
        is_basic=True,
    ),
    "private",
    "overflow",
    option("--stats", "Print token counts and speeds after each answer.", group=OUTPUT, is_basic=True),
    SamplingSettings,
    *options.DRY,
    options.LOGIT_BIAS,
    "seed",
    "think",
    "show_thoughts",
    "stop",
    EngineConfig,
    PULL,
    options.NO_ATTACH,
)
def chat_command(context: typer.Context, **flags: Any) -> None:
    """Chat with a model, on the full screen or line by line.

    The chat is saved as it happens, on this disk only.
    """
    cli = cli_context(context)
    refuse_together(flags, EXCLUSIVE)
    if not flags["plain"] and not has_screen():
        cli.output.note("no terminal that shows a screen: this is the line mode, as with --plain")
        flags["plain"] = True
    if flags["system"] is not None:
        flags["system"] = argument_text(flags["system"], "--system")
    resumed = None
    if (chat := flags["resume"]) is not None:
        try:
            resumed = look_up(cli.output, chat)
        except HistoryError as error:
            if is_model(chat):  # which is a positional
                error.fix = Fix.command("chat", chat, "--resume")
            raise
    selection = _select(cli, flags["model"], flags, resumed)
    selection.sampling(extra_sampling(flags))  # what is wrong with it is said before the model is loaded
    selection.adapters()
    own = load_settings(setting_flags(flags))  # without what a preset or a model adds: for models chosen later
    if not flags["plain"]:
        run_screen(cli, selection, own, flags, resumed)
    reader = LineReader(cli.output, user_directories().data / "history")
    with ChatEngine(cli, attaches=not flags["no_attach"]) as engines, contextlib.ExitStack() as stack:
        load = engines.load(selection)
        session = ChatSession(selection, cli.output, extra_sampling(flags), resumed, flags["system"])
        stack.callback(session.close)
        if not selection.private:
            stack.callback(reader.save_history)
        engine = load.wait()
        effort_of(selection.resolved, engine.template, "--think")  # raises UsageError for what cannot be had
        session.use_engine(load.handle, engine)
        if flags["adapter"]:
            session.check_adapters()
        else:
            session.drop_unfit_adapters()
        if resumed is not None:
            _show_resumed(cli.output, resumed)
        LineChat(cli, session, reader, engines, own, shows_statistics=flags["stats"]).run()


def _select(cli: CliContext, word: str | None, flags: Mapping[str, Any], resumed: Resumed | None) -> Selection:
    try:
        again = Fix.command("chat", BUILT_IN, "--resume", resumed.session.id) if resumed else None
        return select_resumed(cli, word, flags, resumed, again)
    except ModelNotFoundError as error:
        if word is not None and has_blanks(word):
            error.fix = [*error.fixes, f"if it is a prompt: {Fix.command('run', '-p', word)}"]
        raise


def _show_resumed(output: Output, resumed: Resumed) -> None:
    """Show which chat it is, and how it ended."""
    output.note(f"going on with {resumed.session.id}: {resumed.session.title}")
    last = [turn for turn, _ in resumed.turns][-2:]
    for turn in last:
        is_thinking = any(turn is each for each in resumed.thinking)
        content = content_of(turn)[0]
        said = told_apart(content, is_thinking=is_thinking)[1] if turn["role"] == "assistant" else folded(content)
        lines = said.strip().splitlines()
        for index, line in enumerate(lines[:_SHOWN_LINES]):
            output.note((">>> " if index == 0 else "... ") + line if turn["role"] == "user" else line)
        if len(lines) > _SHOWN_LINES:
            output.note(f"({len(lines) - _SHOWN_LINES} more lines: localllm sessions show {resumed.session.id})")
    if resumed.is_cut:
        output.note("(interrupted: /regen answers anew)")
    elif last and last[-1]["role"] == "user":
        output.note("(not answered: /regen answers it)")


class ChatEngine:
    """The engine that answers, one at a time: another is loaded once the memory of the one before is free."""

    def __init__(self, cli: CliContext, *, attaches: bool) -> None:
        """attaches: as in `loading`."""
        self._cli = cli
        self._attaches = attaches
        self._loaded = contextlib.ExitStack()

    def __enter__(self) -> ChatEngine:
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._loaded.__exit__(*error)

    def load(self, selection: Selection) -> EngineLoad:
        """Begin to load. Raises at once where it is known that the model cannot run; the one before stays then."""
        from localllm.cli.load_progress import loading

        check(selection)
        self._loaded.close()
        opening = Opening(keeps_pages=True)
        return self._loaded.enter_context(loading(self._cli, selection, opening, attaches=self._attaches))


class LineChat:
    """The chat line by line: a message or a command in, an answer out. Errors are shown, and the chat goes on."""

    def __init__(
        self,
        cli: CliContext,
        session: ChatSession,
        reader: LineReader,
        engines: ChatEngine,
        resolved: ResolvedSettings,
        *,
        shows_statistics: bool,
    ) -> None:
        """resolved: the settings for models chosen later."""
        self._cli = cli
        self._resolved = resolved
        self._engines = engines
        self._output = cli.output
        self._session = session
        self._reader = reader
        self._shows_statistics = shows_statistics
        self._leaving = self._is_over = False
        self._exit_code = 0
        self._own_commands: Mapping[str, Callable[[str], None]] = {
            "help": lambda _: self._note(slash.command_list()),
            "regen": self._regenerate,
            "sessions": self._sessions,
            "save": self._save,
            "copy": self._copy,
            "model": self._model,
            "stats": self._statistics,
            "bye": self._leave,
        }

    def run(self) -> None:
        session = self._session  # whose recorder is another one behind /sessions ID
        if self._reader.interactive and (engine := session.engine) is not None:
            private = "private: nothing is saved; " if session.recorder.is_private else ""
            self._output.note(f"{session.shown_model}, context {engine.ctx} tokens; {private}/help, /bye")
        try:
            self._converse()
        finally:
            session.recorder.catch_up()
        if self._reader.interactive and session.recorder.session_id is not None:
            self._output.note(f"localllm chat --resume {session.recorder.session_id} goes on with this chat")
        if self._is_over or not self._reader.interactive:  # a script wants to know; a person has read it
            raise typer.Exit(self._exit_code)

    def _converse(self) -> None:
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
                self._cli.interrupts.settle()
                self._output.note("")  # ends the line that ^C stands on
                if hinted:
                    self._output.note("Ctrl-C again leaves; so do /bye and Ctrl-D")
            except LocalLLMError as error:
                error = named(error, self._session.selection.files)
                with_origins(error, self._session.dialogue.resolved)
                self._output.error(mended_in_chat(error))
                self._exit_code = error.exit_code
                if isinstance(error, CardFaultError):  # in this process every answer would end so
                    self._leaving = self._is_over = True
            if self._terminated:
                raise typer.Exit(self._cli.interrupts.exit_code or 0)

    @property
    def _terminated(self) -> bool:
        """SIGTERM or SIGHUP came: unlike Ctrl-C it does not mean the answer alone."""
        return self._cli.interrupts.exit_code not in (None, 128 + signal.SIGINT)

    def _turn(self) -> None:
        message = self._reader.message()
        if message is None:
            self._leave()
        elif files := dropped(message):
            self._session.attach(files)
            self._note(slash.run(self._session, "attach", ""))
        elif message.startswith("/"):
            name, rest = slash.split_command(message)
            if name in self._own_commands:
                self._own_commands[name](rest)
            else:
                self._note(slash.run(self._session, name, rest))
            self._session.recorder.sync()
        elif message.strip():
            self._session.put_question(argument_text(message, "the message").strip())
            self._answer()

    def _note(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._output.note(line)

    def _answer(self) -> None:
        """Print the answer to the last question."""
        session = self._session
        pending = session.ask()
        self._note(pending.notices)
        selection = session.selection
        printing = Printing(statistics=self._shows_statistics, shows_thoughts=selection.settings.show_thoughts)
        with session.answering(pending) as record:
            stream = session.submit(pending)
            printer = AnswerPrinter(self._cli, selection.files, pending, printing, record)
            printer.print([stream], stream.events, [record.answer])
        if (fullness := session.fullness()) is not None:
            (self._output.warn if fullness.is_full else self._output.note)(fullness.text)

    # Commands of the line mode alone

    def _leave(self, _rest: str = "") -> None:
        self._leaving = True

    def _regenerate(self, _rest: str) -> None:
        if not (self._session.dialogue.is_answered or self._session.dialogue.is_asked):
            self._output.note("there is no answer yet")
            return
        with self._session.regenerating():
            self._answer()

    def _sessions(self, word: str) -> None:
        """List the latest saved chats, or go on with one of them, with the model that is loaded."""
        if not word:
            from localllm.cli.sessions import listed

            self._note([*listed(_LISTED), "/sessions ID goes on with one of them"])
            return
        resumed = look_up(self._output, word)
        is_another = self._session.open(resumed)
        _show_resumed(self._output, resumed)
        if is_another:
            self._session.resume_adapters(resumed)
        if (before := resumed.session.model) not in (None, self._session.selection.model_name):
            self._output.note(f"this chat was held with {before}: /model {before} goes on with that")
        if (too_long := self._session.too_long()) is not None:
            self._output.warn(too_long)

    def _copy(self, number: str) -> None:
        """Copy the last answer without its thought, or a code block of it; without a terminal it is printed."""
        from localllm.tui.markdown_render import code_blocks  # imports textual: for this command alone

        dialogue = self._session.dialogue
        turn = next((turn for turn in reversed(dialogue.turns) if turn["role"] == "assistant"), None)
        if turn is None:
            self._output.note("there is no answer yet")
            return
        text = kept_apart(content_of(turn)[0], is_thinking=dialogue.begins_in_thought(turn))[1]
        what, blocks = "the answer", code_blocks(text)
        if number:
            if not number.isdecimal() or not 1 <= int(number) <= len(blocks):
                why = f"the last answer has {len(blocks)}"
                raise UsageError(f"there is no code block {number[:20]!r}", why=why, fix="/copy")
            what, text = f"code block {number}", blocks[int(number) - 1].code
        if self._output.copy(text):
            self._output.note(f"copied {what}: {len(text):,} characters")
        else:
            self._output.verbatim(text if text.endswith("\n") else text + "\n")

    def _model(self, name: str) -> None:
        """Show the model, or load another. Where that fails, the one before is loaded again."""
        session = self._session
        before = session.selection
        if not name:
            self._output.note(
                f"model {before.files.name}: /model NAME continues with another, `localllm list` shows them"
            )
            return
        selection = selected(self._resolved, name)
        load = self._engines.load(selection)  # first: where it cannot be, all stays as it is
        try:
            self._use(load, selection)
        except (LocalLLMError, Interrupted):
            self._cli.interrupts.settle()
            self._output.note(f"going on with {before.files.name}")
            self._use(self._engines.load(before), before)
            raise
        assert session.engine is not None
        facts = session.engine.facts()
        self._output.note(f"loaded {session.shown_model}: {facts.weights} weights, {facts.ctx:,} tokens of context")
        if (too_long := session.too_long()) is not None:
            self._output.warn(too_long)

    def _use(self, load: EngineLoad, selection: Selection) -> None:
        engine = load.wait()
        self._session.use_model(selection)
        self._session.use_engine(load.handle, engine)
        self._session.drop_unfit_adapters()
        self._cli.model = selection.files

    def _save(self, path: str) -> None:
        target = typed_path(path or "chat.json")
        try:
            self._session.save(path)
        except ExistsError:
            if not self._reader.interactive:
                why = "nobody can be asked whether to overwrite it"
                raise UsageError(f"{str(target)!r} is there already", why=why, fix="/save other.json") from None
            answer = self._reader.line(f"{target} is there already. Overwrite it? [y/N] ") or ""
            if answer.strip().lower() not in ("y", "yes"):
                self._output.note("nothing was written")
                return
            self._session.save(path, overwrite=True)
        self._output.note(f"wrote {target}")

    def _statistics(self, switch: str) -> None:
        answer = self._session.answer
        if switch in ("on", "off"):
            self._shows_statistics = switch == "on"
            self._output.note(f"statistics after each answer: {switch}")
        elif switch:
            why = "on: statistics after each answer; off: none; nothing behind it: of the last answer"
            raise UsageError(f"/stats is followed by {switch!r}", why=why, fix="/stats on")
        else:
            is_whole = answer is not None and answer.finished is not None
            self._output.note(statistics(answer) if answer is not None and is_whole else "there is no answer yet")


class LineReader:
    """Lines of standard input; with editing and history where both ends are a terminal."""

    def __init__(self, output: Output, history: Path) -> None:
        self._output = output
        self._history = history
        self.interactive = sys.stdin is not None and sys.stdin.isatty()
        # Loaded only here: on a stream that is not a terminal, readline's start-up writes escape codes into it.
        self._readline: ModuleType | None = None
        if self.interactive and output.stdout_is_terminal:
            with contextlib.suppress(ImportError, OSError):
                import readline

                self._readline = readline
                readline.read_history_file(history)
        self._continued = False  # the line that was asked for last belongs to a message begun before it

    def message(self) -> str | None:
        '''The next message, or None at the end of input: a line, lines that end in a backslash, or a block in """.'''
        line = self.line(">>> ")
        if line is None:
            return None
        if line.lstrip().startswith(_FENCE):
            return self._block(line.lstrip().removeprefix(_FENCE))
        while line.endswith("\\"):
            following = self.line(_CONTINUED)
            if following is None:
                return line.removesuffix("\\")
            line = line.removesuffix("\\") + "\n" + following
        return line

    def line(self, prompt: str) -> str | None:
        """One line without its newline, or None at the end of input. Raises Interrupted."""
        self._continued = prompt == _CONTINUED
        if self._readline is not None:
            try:
                return input(prompt)
            except EOFError:
                self._output.line()
                return None
        if self.interactive:
            self._output.prompt(prompt)
        text = sys.stdin.readline() if sys.stdin is not None else ""
        return text.removesuffix("\n") if text else None

    def has_begun(self) -> bool:
        """Return whether a message had been begun when Interrupted came: then that was meant for it."""
        return self._continued or (self._readline is not None and bool(self._readline.get_line_buffer()))

    def save_history(self) -> None:
        """Writes what was typed to the history file, readable by its owner only."""
        if self._readline is None:
            return
        with contextlib.suppress(OSError):
            self._history.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._history, os.O_WRONLY | os.O_CREAT, 0o600))
            self._history.chmod(0o600)
            self._readline.set_history_length(_HISTORY_LINES)
            self._readline.write_history_file(self._history)

    def _block(self, first: str) -> str:
        lines = [first]
        while not lines[-1].rstrip().endswith(_FENCE):
            line = self.line(_CONTINUED)
            if line is None:
                return "\n".join(lines).strip("\n")
            lines.append(line)
        lines[-1] = lines[-1].rstrip().removesuffix(_FENCE)
        return "\n".join(lines).strip("\n")
