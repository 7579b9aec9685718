"""`localllm chat`: a conversation, line by line."""

from __future__ import annotations

import contextlib
import shlex
import signal
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from localllm.chat import slash
from localllm.chat.answer import Answer, statistics
from localllm.chat.context import evicted_text, usage_lines
from localllm.chat.dialogue import Dialogue
from localllm.chat.export import ExistsError
from localllm.chat.miss_report import Explanation
from localllm.chat.recorder import Keeper, Resumed, keeper_of, look_up
from localllm.chat.session import Talk, mended_in_chat
from localllm.chat.text_file import read_text_file, typed_path
from localllm.chat.thoughts import effort_of, told_apart
from localllm.cli import options
from localllm.cli.context import CliContext, cli_context
from localllm.cli.generate import Printing, explained, print_answer
from localllm.cli.interrupts import Interrupted
from localllm.cli.line_reader import LineReader
from localllm.cli.names import complete_sessions
from localllm.cli.options import extra_sampling, option, refuse_together, takes
from localllm.cli.output import Output
from localllm.cli.prompt import argument_text, has_blanks
from localllm.cli.screen import has_screen, run_screen
from localllm.cli.selection import select_resumed
from localllm.config import shown_setting, user_directories
from localllm.errors import (
    HistoryError,
    LocalLLMError,
    ModelNotFoundError,
    UsageError,
)
from localllm.registry import BUILT_IN
from localllm.runtime.engine_loader import Opening
from localllm.runtime.error_origins import with_origins
from localllm.runtime.selection import Selection, is_model, named
from localllm.settings import EngineConfig, SamplingSettings

if TYPE_CHECKING:
    from localllm.engine.engine_info import LoadedEngine
    from localllm.runtime.engine_handle import EngineHandle

_LISTED = 10  # by /sessions
_SHOWN_LINES = 12  # of each message that a resumed chat begins with

EXAMPLES = """Examples:

\b
  localllm chat
  localllm chat mistral-7b -s "You are a patient teacher." --temperature 0.5
  localllm chat --resume
  localllm chat --resume kibaro
  localllm chat --plain

On the screen F1 lists the keys, a slash the commands. Line by line: /help lists the commands; a line that ends in a
backslash goes on, three double quotes open and close a block. Ctrl-C stops an answer, Ctrl-D leaves."""


EXCLUSIVE = {
    "--private --cache-disk": "what is private is not kept on the disk",
    "--plain --inline": "one is line by line, the other a screen below the prompt",
}


@takes(
    options.MODEL,
    option("--plain", "Line by line; for screen readers, simple terminals and pipes."),
    option("--inline", "The full-screen chat below the prompt, not in the place of the screen."),
    "system",
    option(
        "--resume",
        "Go on with a chat of `localllm sessions list`: by its id, the beginning of one, or a part of its title. "
        "Without one, or with `last`: the latest.",
        "[ID]",
        completion=complete_sessions,
    ),
    "private",
    "overflow",
    option("--stats", "Print tokens, rates and times after each answer."),
    SamplingSettings,
    *options.DRY,
    options.LOGIT_BIAS,
    "seed",
    "think",
    "show_thoughts",
    "stop",
    EngineConfig,
    options.NO_ATTACH,
)
def chat_command(context: typer.Context, **flags: Any) -> None:
    """Talk with a model, on the full screen, or line by line.

    What was said before is part of each question. The chat is kept as it happens, on this disk alone.
    """
    from localllm.cli.load_progress import attaching

    front = cli_context(context)
    refuse_together(flags, EXCLUSIVE)
    if not flags["plain"] and not has_screen():
        front.output.note("no terminal that shows a screen: this is the line mode, as with --plain")
        flags["plain"] = True
    if flags["system"] is not None:
        flags["system"] = argument_text(flags["system"], "--system")
    resumed = _resumed(front, flags["resume"]) if flags["resume"] is not None else None
    selection = _select(front, flags["model"], flags, resumed)
    selection.sampling(extra_sampling(flags))  # what is wrong with it is said before the model is loaded
    if not flags["plain"]:
        assert front.resolved is not None
        run_screen(front, selection, front.resolved, flags, resumed)
    reader = LineReader(front.output, user_directories().data / "history")
    with (
        attaching(front, selection, Opening(keeps_pages=True), attaches=not flags["no_attach"]) as load,
        contextlib.ExitStack() as stack,
    ):
        keeper = keeper_of(front.output, selection, resumed)
        stack.callback(keeper.close)
        if not selection.private:
            stack.callback(reader.save_history)
        engine = load.wait()
        effort_of(selection.resolved, engine.template, "--think")  # raises UsageError for what cannot be had
        chat = Chat(front, selection, load.service, engine, reader, flags, keeper)
        if resumed is not None:
            resumed.restore(chat.dialogue, flags["system"])
            _show_resumed(front.output, resumed)
        chat.run()


def _resumed(front: CliContext, word: str) -> Resumed:
    try:
        return look_up(front.output, word)
    except HistoryError as error:
        if is_model(word):  # which is a positional
            error.fix = f"localllm chat {shlex.quote(word)} --resume"
        raise


def _select(front: CliContext, word: str | None, flags: Mapping[str, Any], resumed: Resumed | None) -> Selection:
    try:
        again = f"localllm chat {BUILT_IN} --resume {resumed.session.id}" if resumed else ""
        return select_resumed(front, word, flags, resumed, again)
    except ModelNotFoundError as error:
        if word is not None and has_blanks(word):
            error.fix += f", or if it is a prompt: localllm run -p {shlex.quote(word)}"
        raise


def _show_resumed(output: Output, resumed: Resumed) -> None:
    """Tells which chat it is, and how it ended."""
    from localllm.history import content_of

    output.note(f"going on with {resumed.session.id}: {resumed.session.title}")
    last = [turn for turn, _ in resumed.turns][-2:]
    for turn in last:
        is_thinking = any(turn is each for each in resumed.thinking)
        content = content_of(turn)[0]
        said = told_apart(content, is_thinking=is_thinking)[1] if turn["role"] == "assistant" else content
        lines = said.strip().splitlines()
        for index, line in enumerate(lines[:_SHOWN_LINES]):
            output.note((">>> " if index == 0 else "... ") + line if turn["role"] == "user" else line)
        if len(lines) > _SHOWN_LINES:
            output.note(f"({len(lines) - _SHOWN_LINES} more lines: localllm sessions show {resumed.session.id})")
    if resumed.is_cut:
        output.note("(interrupted: /regen answers anew)")
    elif last and last[-1]["role"] == "user":
        output.note("(not answered: /regen answers it)")


class Chat:
    """The loop: a message or a command in, an answer out; an error is told and the conversation goes on."""

    def __init__(
        self,
        front: CliContext,
        selection: Selection,
        service: EngineHandle,
        engine: LoadedEngine,
        reader: LineReader,
        flags: dict[str, Any],
        keeper: Keeper,
    ) -> None:
        self._front = front
        self._output = front.output
        self._selection = selection
        self._service = service
        self._engine = engine
        self._reader = reader
        self._keeper = keeper
        self._shows_statistics = bool(flags["stats"])
        self._last: Answer | None = None
        self._why_missed: Callable[[], Explanation | None] | None = None
        self._leaving = False
        self._exit_code = 0
        self.dialogue = Dialogue(selection.resolved, selection.settings.system)
        self._talk = Talk(selection.files, engine, self.dialogue, keeper, extra_sampling(flags))

    def run(self) -> None:
        if self._reader.interactive:
            private = "private: nothing is kept; " if self._keeper.is_private else ""
            self._output.note(f"{self._selection.files.name}, context {self._engine.ctx} tokens; {private}/help, /bye")
        try:
            self._converse()
        finally:
            self._keeper.catch_up(self.dialogue)
        if self._reader.interactive and self._keeper.session_id is not None:
            self._output.note(f"localllm chat --resume {self._keeper.session_id} goes on with this chat")
        if not self._reader.interactive:  # a script wants to know; a person has read it
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
                self._front.interrupts.settle()
                self._output.note("")  # ends the line that ^C stands on
                if hinted:
                    self._output.note("Ctrl-C again leaves; so do /bye and Ctrl-D")
            except LocalLLMError as error:
                error = named(error, self._selection.files)
                with_origins(error, self.dialogue.resolved)
                self._output.error(mended_in_chat(error))
                self._exit_code = error.exit_code
            if self._terminated:
                raise typer.Exit(self._front.interrupts.exit_code or 0)

    @property
    def _terminated(self) -> bool:
        """SIGTERM or SIGHUP came: unlike Ctrl-C it does not mean the answer alone."""
        return self._front.interrupts.exit_code not in (None, 128 + signal.SIGINT)

    def _turn(self) -> None:
        message = self._reader.message()
        if message is None:
            self._leaving = True
        else:
            self._take(message)

    def _take(self, message: str) -> None:
        if message.startswith("/"):
            name, rest = slash.split_command(message)
            getattr(self, f"_do_{name}")(rest)
            self._keeper.sync(self.dialogue)
        elif message.strip():
            self.dialogue.ask(argument_text(message, "the message").strip())
            self._reply()

    def _reply(self) -> None:
        """Answers the last question. One that cannot be answered is taken back, and the conversation kept; of an
        answer that an error ended what was said stays."""
        asked = self._talk.ask()
        if asked.evicted.turns:
            self._output.note(evicted_text(asked.evicted))
        if asked.note:
            self._output.note(asked.note)
        printing = Printing(
            statistics=self._shows_statistics,
            explain=asked.explain,
            evicted=asked.evicted,
            thinking=asked.thinking,
            shows_thoughts=self._selection.settings.show_thoughts,
        )

        def show(hear: Callable[[str], None]) -> Answer:
            stream = self._service.submit(asked.request)
            files, session_id = self._selection.files, self._keeper.session_id
            return print_answer(self._front, files, stream, asked.request, printing, hear, session_id)

        answer = self._talk.answer(asked, show)
        self._last = answer
        self._why_missed = partial(explained, answer.finished, printing) if answer.finished is not None else None
        fullness = self._talk.fullness(answer.finished) if answer.finished is not None else None
        if fullness is not None:
            (self._output.warn if fullness.is_full else self._output.note)(fullness.text)

    # Slash commands

    def _do_help(self, _: str) -> None:
        for line in slash.command_list():
            self._output.note(line)

    def _do_system(self, text: str) -> None:
        if text:
            self.dialogue.system = None if text == "-" else text
        self._output.note(f"system message: {self.dialogue.system or 'none'}")

    def _do_regen(self, _: str) -> None:
        before = list(self.dialogue.turns)
        if not (self.dialogue.take_back_answer() or self.dialogue.is_asked):
            self._output.note("there is no answer yet")
            return
        try:
            self._reply()
        except LocalLLMError:
            if len(self.dialogue.turns) < len(before):  # nothing was said in its place
                self.dialogue.turns[:] = before
            raise

    def _do_undo(self, _: str) -> None:
        done = self.dialogue.take_back_question()
        self._output.note("took the last question back" if done else "there is nothing to take back")

    def _do_clear(self, _: str) -> None:
        self._keeper.catch_up(self.dialogue)
        self.dialogue.clear()
        self._keeper.begin_anew()
        self._output.note("a new conversation")

    def _do_fork(self, _: str) -> None:
        name = self._keeper.fork(self.dialogue)
        self._output.note(f"a copy: {name}" if name is not None else "there is nothing to copy: no question stands")

    def _do_title(self, text: str) -> None:
        self._output.note(f"title: {self._keeper.rename(self.dialogue, text)}")

    def _do_sessions(self, _: str) -> None:
        from localllm.cli.sessions import listed

        for line in listed(_LISTED):
            self._output.note(line)
        self._output.note("localllm chat --resume ID goes on with one of them")

    def _do_file(self, path: str) -> None:
        count = self.dialogue.attach(typed_path(path))
        self._output.note(f"{count} characters go before the next question")

    def _do_save(self, path: str) -> None:
        target = typed_path(path or "chat.json")
        try:
            self.dialogue.save(target, overwrite=False)
        except ExistsError:
            if not self._reader.interactive:
                why = "nobody can be asked whether to overwrite it"
                raise UsageError(f"{str(target)!r} is there already", why=why, fix="/save other.json") from None
            if not self._confirms(f"{target} is there already. Overwrite it? [y/N] "):
                self._output.note("nothing was written")
                return
            self.dialogue.save(target, overwrite=True)
        self._output.note(f"wrote {target}")

    def _do_load(self, path: str) -> None:
        from localllm.text.chat_template import parse_messages_file

        text = read_text_file(typed_path(path), "/load")
        self._keeper.catch_up(self.dialogue)
        self.dialogue.load(list(parse_messages_file(text).messages))
        self._keeper.begin_anew()
        self._output.note(f"{len(self.dialogue.turns)} messages")

    def _do_set(self, text: str) -> None:
        key, value = slash.setting(text)
        if key == "think" and value:
            self._do_think(value)
        elif value:
            self._output.note(f"{key} = {self.dialogue.set(key, value)}")
        else:
            for name in self.dialogue.settable(key):
                self._output.note(f"{name} = {shown_setting(getattr(self.dialogue.resolved.settings, name))}")

    def _do_think(self, effort: str) -> None:
        self._output.note(self._talk.think(effort))

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

    def _do_cache(self, _: str) -> None:
        if self._last is None or self._last.finished is None:
            self._output.note("there is no answer yet")
            return
        usage = self._last.finished.usage
        self._output.note(
            f"{usage.cached_tokens} of the last prompt's {usage.prompt_tokens} tokens were found, the others computed"
        )
        if self._why_missed is not None and (explanation := self._why_missed()) is not None:
            self._output.note(str(explanation))

    def _do_tokens(self, _: str) -> None:
        for line in usage_lines(self._talk.usage()):
            self._output.note(line)

    def _do_bye(self, _: str) -> None:
        self._leaving = True

    def _confirms(self, question: str) -> bool:
        return (self._reader.line(question) or "").strip().lower() in ("y", "yes")
