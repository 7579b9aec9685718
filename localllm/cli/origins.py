"""Where the settings of a command come from, and what an error says of one that nobody typed.

Knows flags, variables and the lines of files. Knows nothing of what a setting does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from localllm.cli.front import Front
from localllm.cli.options import setting_flags
from localllm.config import Origin, ResolvedSettings, load_settings
from localllm.errors import LocalLLMError

_FLAG = re.compile(r"(?<!\S)--([a-z][a-z-]*)(?![\w-])")


def read_settings(front: Front, flags: Mapping[str, Any]) -> ResolvedSettings:
    """The settings under the flags of a command; `front` hears of them. Raises SettingsError, UsageError."""
    front.resolved = load_settings(setting_flags(flags))
    _warn_of_idle_guessing(front, flags)
    if front.resolved.settings.device == "cpu":  # whether there is a GPU is known when torch is there
        _refuse_idle_vram(front.resolved)
    return front.resolved


def _warn_of_idle_guessing(front: Front, flags: Mapping[str, Any]) -> None:
    """Of two flags one of which says that nobody guesses. They are no error: both mean plain decoding."""
    who, count = flags.get("speculate"), flags.get("draft_tokens")
    if who is None or count is None or (who == "off") == (count == 0):
        return
    off, idle = f"--speculate {who}", f"--draft-tokens {count}"
    if count == 0:
        off, idle = idle, off
    front.output.warn(f"{idle} has no effect: with {off} nothing is guessed")


def vram_cap(front: Front, tell: Callable[[str], None], *, has_gpu: bool) -> int | None:
    """The cap on the GPU's memory. One of a file or a variable is left aside where no GPU is used, which `tell` hears
    of: machines with a GPU and without share such files.

    Raises UsageError for one that was typed there.
    """
    assert front.resolved is not None
    cap, origin = front.resolved.settings.vram, front.resolved.origins["vram"]
    if cap is None or has_gpu:
        return cap
    _refuse_idle_vram(front.resolved)
    front.resolved = front.resolved.overlaid({"vram": (None, origin)})
    tell(f"the setting vram from {origin.where} is left aside: no GPU is used")
    return None


def _refuse_idle_vram(resolved: ResolvedSettings) -> None:
    if resolved.origins["vram"].kind == "flag":
        from localllm.offload.refusal import idle_vram

        raise idle_vram()


def with_origins(error: LocalLLMError, resolved: ResolvedSettings) -> None:
    """Puts a variable or a key of a file in the place of its flag where that is where the value came from."""
    proposed = (fix for fix in error.fix.split(", or ") if fix.startswith(("--", "leave --")))
    told = [name for text in (error.what, *proposed) for name in _settings_in(text, resolved)]
    for name in dict.fromkeys(told):
        origin = resolved.origins[name]
        error.what = _renamed(error.what, name, origin)
        why = [error.why] if error.why else []
        error.why = "; ".join([*why, f"the setting {name} is from {origin.where}"])
        error.fix = _fix(error.fix, name, origin)


def _settings_in(text: str, resolved: ResolvedSettings) -> list[str]:
    """Of the flags in a text, those whose values stand in the environment or in the user's file."""
    names = (found[1].replace("-", "_") for found in _FLAG.finditer(text))
    return [name for name in names if name in resolved.origins and _is_stored(resolved.origins[name])]


def _is_stored(origin: Origin) -> bool:
    return origin.kind in ("environment", "file")


def _renamed(text: str, name: str, origin: Origin) -> str:
    """ "--ram 9GiB is" -> "LOCALLLM_RAM=9GiB is", or "ram = 9GiB is"."""
    flag = re.escape("--" + name.replace("_", "-"))
    is_variable = origin.kind == "environment"
    text = re.sub(rf"(?<!\S){flag} (?=\d)", f"{origin.where}=" if is_variable else f"{name} = ", text)
    return re.sub(rf"(?<!\S){flag}(?![\w-])", origin.where if is_variable else name, text)


def _fix(fix: str, name: str, origin: Origin) -> str:
    """The fix for the place that the value is from; several are divided by ", or "."""
    return ", or ".join(_one_fix(part, name, origin) for part in fix.split(", or "))


def _one_fix(fix: str, name: str, origin: Origin) -> str:
    flag = "--" + name.replace("_", "-")
    is_variable = origin.kind == "environment"
    if fix == f"leave {flag} out":
        return f"unset {origin.where}" if is_variable else f"delete the line {origin.where}"
    found = re.fullmatch(rf"{re.escape(flag)} (\S+)", fix)
    if found is None:  # a whole line, in which a flag beats what is stored
        return fix
    if is_variable:
        return f"export {origin.where}={found[1]}"
    value = found[1] if re.fullmatch(r"[\d.]+", found[1]) else f'"{found[1]}"'
    return f"write `{name} = {value}` into {origin.where}"
