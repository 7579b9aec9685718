"""Puts into an error the model's name, and the variable or file that a setting came from in place of its flag."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from localllm.config import Origin, ResolvedSettings
from localllm.errors import Fix, LocalLLMError
from localllm.registry import BUILT_IN

if TYPE_CHECKING:
    from localllm.hub import ModelFiles

_FLAG = re.compile(r"(?<!\S)--([a-z][a-z-]*)(?![\w-])")


def named(error: LocalLLMError, files: ModelFiles | None) -> LocalLLMError:
    """The error with the model's name where its fix says MODEL. What was not fetched cannot be fetched anew."""
    if files is None:
        return error
    copy = "reinstall localllm" if files.name == BUILT_IN else files.copied_anew
    error.fix = [
        copy if fix.kind == "refetch" and files.repo is None else fix.with_model(files.name) for fix in error.fixes
    ]
    return error


def with_origins(error: LocalLLMError, resolved: ResolvedSettings) -> None:
    """Puts a variable or a key of a file in the place of its flag where that is where the value came from."""
    proposed = (word for fix in error.fixes if fix.kind in ("flag", "without") for word in fix.words)
    told = [name for text in (error.what, *proposed) for name in _settings_in(text, resolved)]
    for name in dict.fromkeys(told):
        origin = resolved.origins[name]
        error.what = _renamed(error.what, name, origin)
        why = [error.why] if error.why else []
        error.why = "; ".join([*why, f"the setting {name} is from {origin.where}"])
        error.fix = [_stored(fix, name, origin) for fix in error.fixes]


def _settings_in(text: str, resolved: ResolvedSettings) -> list[str]:
    """Return the settings behind the flags of a text that stand in the environment or in a file of the user's."""
    names = (found[1].replace("-", "_") for found in _FLAG.finditer(text))
    return [name for name in names if name in resolved.origins and _is_stored(resolved.origins[name])]


def _is_stored(origin: Origin) -> bool:
    return origin.kind in ("environment", "file", "preset")


def _renamed(text: str, name: str, origin: Origin) -> str:
    """ "--ram 9GiB is" -> "LOCALLLM_RAM=9GiB is", or "ram = 9GiB is"."""
    flag = re.escape("--" + name.replace("_", "-"))
    is_variable = origin.kind == "environment"
    text = re.sub(rf"(?<!\S){flag} (?=\d)", f"{origin.where}=" if is_variable else f"{name} = ", text)
    return re.sub(rf"(?<!\S){flag}(?![\w-])", origin.where if is_variable else name, text)


def _stored(fix: Fix, name: str, origin: Origin) -> Fix:
    """Return the fix for the place that the value is from."""
    flag = "--" + name.replace("_", "-")
    is_variable = origin.kind == "environment"
    match fix.kind, fix.words:
        case "without", (left,) if left == flag:
            return Fix.advice(f"unset {origin.where}" if is_variable else f"delete the line {origin.where}")
        case "flag", (given, value) if given == flag:
            if is_variable:
                return Fix.advice(f"export {origin.where}={value}")
            shown = value if re.fullmatch(r"[\d.]+", value) else f'"{value}"'
            return Fix.advice(f"write `{name} = {shown}` into {origin.where}")
    return fix  # a whole line, in which a flag beats what is stored
