"""An unsent message: saved for the next start, and edited in the user's own editor."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from localllm.chat.text_file import replace_file
from localllm.config import user_directories
from localllm.errors import Fix, LocalLLMError, UsageError


def _path() -> Path:
    return user_directories().data / "draft"


def save(text: str) -> None:
    """Save the draft, readable by its owner alone; remove it where it is empty. Errors of the disk are ignored."""
    path = _path()
    with suppress(OSError, UsageError):
        if not text.strip():
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode(errors="replace").decode())


def take() -> str:
    """Return the saved draft and remove it; "" where there is none."""
    path = _path()
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        path.unlink()
    except OSError:
        return ""
    return text


def edited(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """The text after $VISUAL, $EDITOR, nano or vi has ended. Raises LocalLLMError where the editor fails."""
    command = environ.get("VISUAL") or environ.get("EDITOR") or shutil.which("nano") or "vi"
    try:
        with tempfile.TemporaryDirectory(prefix="localllm-") as folder:  # readable by its owner only
            path = Path(folder, "message.md")
            path.write_text(text, encoding="utf-8", errors="replace")
            subprocess.run([*shlex.split(command), str(path)], check=True)
            return path.read_text(encoding="utf-8", errors="replace").removesuffix("\n")
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        what = f"the editor {command!r} did not work"
        raise LocalLLMError(what, why=str(error), fix="export EDITOR=nano") from None


def no_terminal() -> LocalLLMError:
    """The error of a terminal that cannot be lent to an editor."""
    why = "it cannot be lent to another program"
    return LocalLLMError("an editor has no place on this terminal", why=why, fix=Fix.command("chat"))
