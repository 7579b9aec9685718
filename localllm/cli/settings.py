"""The settings of a command: its flags over what is stored, refused where they cannot take effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localllm.cli.context import CliContext
from localllm.cli.options import setting_flags
from localllm.config import ResolvedSettings, load_settings
from localllm.runtime.vram import refuse_idle_vram


def read_settings(front: CliContext, flags: Mapping[str, Any]) -> ResolvedSettings:
    """The settings under the flags of a command; `front` hears of them. Raises SettingsError, UsageError."""
    front.resolved = load_settings(setting_flags(flags))
    _warn_of_idle_guessing(front, flags)
    if front.resolved.settings.device == "cpu":  # whether there is a GPU is known when torch is there
        refuse_idle_vram(front.resolved)
    return front.resolved


def _warn_of_idle_guessing(front: CliContext, flags: Mapping[str, Any]) -> None:
    """Of two flags one of which says that nobody guesses. They are no error: both mean plain decoding."""
    who, count = flags.get("speculate"), flags.get("draft_tokens")
    if who is None or count is None or (who == "off") == (count == 0):
        return
    off, idle = f"--speculate {who}", f"--draft-tokens {count}"
    if count == 0:
        off, idle = idle, off
    front.output.warn(f"{idle} has no effect: with {off} nothing is guessed")
