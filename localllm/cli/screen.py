"""Starts the full-screen chat, and tells of its end. Imports textual when asked."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from localllm.cli.context import CliContext
from localllm.cli.options import extra_sampling
from localllm.config import ResolvedSettings
from localllm.tui.background import Background

if TYPE_CHECKING:
    from localllm.chat.recorder import Resumed
    from localllm.runtime.selection import Selection
    from localllm.tui.app import ChatApp

# A picture makes thousands of short-lived objects: with Python's own thresholds a full collection, 100 to 400 ms of it,
# came every second while one scrolled.
_COLLECTOR = (10_000, 20, 100)
# Textual waits up to two of its frames behind each picture: at its 60 a second a key typed meanwhile was not to be seen
# for 33 ms. It paints no more often for it, as nothing moves by itself.
_FRAMES_PER_S = 240
_END_S = 2.0  # in which the threads may end
# Mouse reports, pasting, the keyboard's protocol and the alternate screen off, the cursor on.
_RESET = "\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?1015l\x1b[?2004l\x1b[<u\x1b[?1049l\x1b[?25h"


def has_screen() -> bool:
    """Return whether stdin and stdout are a terminal that can show a screen."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def tune() -> None:
    """For a screen that answers at once; before textual is imported."""
    gc.set_threshold(*_COLLECTOR)
    os.environ.setdefault("TEXTUAL_FPS", str(_FRAMES_PER_S))


def run_screen(
    cli: CliContext,
    selection: Selection,
    resolved: ResolvedSettings,
    flags: Mapping[str, Any],
    resumed: Resumed | None,
) -> None:
    """Shows it until it is left. resolved: the settings without what the model adds. Raises what nobody foresaw."""
    tune()
    background = Background(asks=resolved.settings.theme == "auto")
    try:
        app = _app(cli, selection, resolved, flags, resumed, background)
        cli.interrupts.terminal_reset = "" if flags["inline"] else _RESET
        with cli.interrupts.stopping(app.leave_soon):
            app.run(inline=flags["inline"], inline_no_clear=True)
    finally:
        background.restore()
    cli.interrupts.terminal_reset = ""
    app.close(_END_S)
    if app.chat.session_id is not None:
        cli.output.note(f"localllm chat --resume {app.chat.session_id} goes on with this chat")
    if app.failure is not None:
        raise app.failure
    raise typer.Exit(cli.interrupts.exit_code or 0)


def _app(
    cli: CliContext,
    selection: Selection,
    resolved: ResolvedSettings,
    flags: Mapping[str, Any],
    resumed: Resumed | None,
    background: Background,
) -> ChatApp:
    """Imports textual while the terminal answers."""
    try:
        from localllm.tui import drafts
        from localllm.tui.app import ChatApp, Start
        from localllm.tui.key_scopes import checked_keys, checked_theme
        from localllm.tui.model_loader import serve, serve_attached
        from localllm.tui.terminal import as_meant
        from localllm.tui.themes import DARK, LIGHT
    finally:
        is_light, typed = background.is_light()
    keys = checked_keys(resolved)
    theme = checked_theme(resolved)
    unsent = "" if selection.private else drafts.take()
    start = Start(
        selection,
        resolved,
        resumed,
        flags["system"],
        extra_sampling(flags),
        theme or (LIGHT if is_light else DARK).name,
        keys,
        unsent + typed.rstrip("\n"),  # enter was meant to send it, and there was nothing to send it yet
        shows_statistics=flags["stats"],
        follows_terminal=theme is None,
    )
    as_meant()

    @contextmanager
    def away() -> Iterator[None]:
        with cli.interrupts.elsewhere(), background.elsewhere():
            yield

    return ChatApp(start, serve if flags["no_attach"] else serve_attached, away)
