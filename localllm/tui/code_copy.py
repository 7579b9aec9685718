"""Copies the texts of a chat to the clipboard, and its code blocks by their numbers."""

from __future__ import annotations

import os
from typing import Any

from textual.app import App

from localllm.chat.text import printable
from localllm.errors import UsageError
from localllm.tui.chat_worker import ChatWorker
from localllm.tui.code_index import CodeIndex
from localllm.tui.widgets.status import Notice


class CodeCopy:
    def __init__(self, app: App[Any], worker: ChatWorker, codes: CodeIndex, notice: Notice) -> None:
        """notice: where it is said what was copied."""
        self._app = app
        self._worker = worker
        self._codes = codes
        self._notice = notice

    def copy(self, text: str, what: str) -> None:
        """Copy by the terminal (OSC 52), without control characters: a shell might obey them in a paste."""
        self._app.copy_to_clipboard(printable(text))
        by_tmux = "; tmux hands it on with `set -g set-clipboard on`" if os.environ.get("TMUX") else ""
        self._notice.note(f"copied {what}: {len(text):,} characters{by_tmux}")

    def copy_command(self, number: str) -> None:
        """`/copy`, or `/copy NUMBER`. Raises UsageError."""
        if number:
            self.copy(self._code(number, "/copy"), f"code block {number}")
        elif answer := self._codes.last_answer:
            self.copy(answer, "the answer")
        else:
            self._notice.note("there is no answer yet")

    def save_command(self, rest: str) -> None:
        """`/code NUMBER PATH`. Raises UsageError."""
        number, _, path = rest.partition(" ")
        if not path.strip():
            raise UsageError("/code needs a path", why=f"only {number!r} is behind it", fix="/code 1 example.py")
        code = self._code(number, "/code")
        self._worker.do(lambda: self._worker.save_code(code, path.strip()))

    def _code(self, number: str, command: str) -> str:
        """The code of the block with this number on the screen. Raises UsageError."""
        blocks = self._codes.blocks
        if not number.isdecimal() or not 1 <= int(number) <= len(blocks):
            fix = f"{command} {len(blocks)}" if blocks else "/copy"
            why = f"the chat has {len(blocks)}"
            raise UsageError(f"there is no code block {number[:20]!r}", why=why, fix=fix)
        return blocks[int(number) - 1].code

    async def pick(self, first: int) -> None:
        """Show the blocks to copy or save. first: the index of the one that is chosen at first."""
        from localllm.tui.screens.dialogs import CodeDialog

        if not (blocks := self._codes.blocks):
            self._notice.note("there is no code block")
        elif (picked := await self._app.push_screen_wait(CodeDialog(blocks, first))) is not None:
            index, path = picked
            if path is None:
                self.copy(blocks[index].code, f"code block {index + 1}")
            else:
                self._worker.do(lambda: self._worker.save_code(blocks[index].code, path))
