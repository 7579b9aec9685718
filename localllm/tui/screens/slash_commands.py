"""What each slash command does in the full-screen chat: a method a command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localllm.errors import UsageError
from localllm.frontend import slash
from localllm.frontend.answer import statistics
from localllm.frontend.context import usage_lines
from localllm.tui.markdown_render import code_blocks

if TYPE_CHECKING:
    from localllm.tui.screens.chat import ChatScreen


class SlashCommands:
    """`do_NAME` for each name of `commands.COMMANDS`, given what follows it. They raise LocalLLMError."""

    def __init__(self, screen: ChatScreen) -> None:
        self._screen = screen
        self._worker = screen.worker

    def do_help(self, _: str) -> None:
        self._screen.chat_app.action_help()

    def do_system(self, text: str) -> None:
        self._worker.do(lambda: self._worker.system(text))

    def do_regen(self, _: str) -> None:
        self._screen.action_regenerate()

    def do_continue(self, _: str) -> None:
        self._screen.action_continue()

    def do_edit(self, _: str) -> None:
        self._screen.begin_edit(self._screen.num_turns - 1)

    def do_undo(self, _: str) -> None:
        self._screen.unless_answering(self._worker.undo)

    def do_clear(self, _: str) -> None:
        self._screen.action_new()

    def do_fork(self, _: str) -> None:
        self._screen.unless_answering(self._worker.fork)

    def do_title(self, text: str) -> None:
        self._worker.do(lambda: self._worker.rename(text))

    def do_copy(self, number: str) -> None:
        if not number:
            if self._screen.answer_text:
                self._screen.copy(self._screen.answer_text, "the answer")
            else:
                self._screen.notice.note("there is no answer yet")
            return
        block = self._block(number, "/copy")
        self._screen.copy(block, f"code block {number}")

    def do_code(self, rest: str) -> None:
        number, _, path = rest.partition(" ")
        if not number:
            self._screen.pick_code(self._screen.answer_text)
        elif not path.strip():
            raise UsageError("/code needs a path", why=f"only {number!r} is behind it", fix="/code 1 example.py")
        else:
            self._screen.save_code(self._block(number, "/code"), path.strip())

    def _block(self, number: str, command: str) -> str:
        blocks = code_blocks(self._screen.answer_text)
        if not number.isdecimal() or not 1 <= int(number) <= len(blocks):
            why = f"the last answer has {len(blocks)}"
            raise UsageError(
                f"there is no code block {number[:20]!r}", why=why, fix=f"{command} 1" if blocks else "/copy"
            )
        return blocks[int(number) - 1].code

    def do_file(self, path: str) -> None:
        self._worker.do(lambda: self._worker.attach(path))

    def do_detach(self, _: str) -> None:
        self._worker.do(self._worker.detach)

    def do_model(self, name: str) -> None:
        if name:
            self._screen.unless_answering(lambda: self._worker.use(name))
        else:
            self._screen.chat_app.action_models()

    def do_sessions(self, _: str) -> None:
        self._screen.chat_app.action_chats()

    def do_plan(self, _: str) -> None:
        self._screen.chat_app.action_plan()

    def do_save(self, path: str) -> None:
        self._worker.do(lambda: self._worker.save(path or "chat.json"))

    def do_export(self, path: str) -> None:
        self._worker.do(lambda: self._worker.export(path))

    def do_load(self, path: str) -> None:
        self._screen.unless_answering(lambda: self._worker.load(path))

    def do_set(self, text: str) -> None:
        key, value = slash.setting(text)
        self._worker.do(lambda: self._worker.set(key, value) if value else self._worker.tell_settings(key))

    def do_think(self, effort: str) -> None:
        self._worker.do(lambda: self._worker.think(effort))

    def do_show(self, _: str) -> None:
        self._worker.do(self._worker.tell_all)

    def do_stats(self, _: str) -> None:
        last = self._worker.answering.last
        self._screen.notice.note(
            statistics(last) if last is not None and last.finished is not None else "there is no answer yet"
        )

    def do_tokens(self, _: str) -> None:
        usage = self._screen.status.usage
        self._screen.notice.lines(usage_lines(usage) if usage is not None else ["there is no model yet"])

    def do_cache(self, _: str) -> None:
        self._worker.do(lambda: self._worker.note(self._worker.answering.why_missed()))

    def do_theme(self, name: str) -> None:
        self._screen.chat_app.choose_theme(name)

    def do_bye(self, _: str) -> None:
        self._screen.chat_app.leave()
