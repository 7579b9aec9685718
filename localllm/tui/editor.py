"""A text in the user's own editor."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from localllm.errors import LocalLLMError


def edited(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """What the editor of $VISUAL or $EDITOR (else nano, where there is one, or vi) leaves of the text. Blocks until it
    ends.

    Raises LocalLLMError where it cannot be started or fails; the text is then as it was.
    """
    command = environ.get("VISUAL") or environ.get("EDITOR") or shutil.which("nano") or "vi"
    try:
        with tempfile.TemporaryDirectory(prefix="localllm-") as folder:  # readable by its owner only
            path = Path(folder, "message.md")
            path.write_text(text, encoding="utf-8", errors="replace")
            subprocess.run([*shlex.split(command), str(path)], check=True)
            return path.read_text(encoding="utf-8", errors="replace").removesuffix("\n")
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        fix = "export EDITOR=nano"
        raise LocalLLMError(f"the editor {command!r} did not work", why=str(error), fix=fix) from None
