"""Settings: where they come from, which values are accepted, and where each one was set.

A flag beats a preset (`runtime.presets`), which beats a LOCALLLM_* variable, which beats the user's config.toml. Knows
the names and ranges of settings, not what they do; what a model's entry adds to them is `registry.with_model_defaults`.
"""

from __future__ import annotations

import difflib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from localllm.errors import Fix, SettingsError
from localllm.settings import SETTINGS, Accepts, Settings, parse_bytes
from localllm.toml_file import TomlFile

ENVIRONMENT_PREFIX = "LOCALLLM_"
_NEAR = 0.6  # of letters in common: contxt has 0.67 of ctx, accept 0.46 of adapter
# Not settings: the folder of all user files, the folder of what can be made again, the test suite's data, and the key
# of `serve`, which `config show` must not print.
OTHER_VARIABLES = frozenset({"LOCALLLM_HOME", "LOCALLLM_CACHE", "LOCALLLM_TEST_DATA", "LOCALLLM_API_KEY"})


def format_time(seconds: float) -> str:
    """ "2026-11-21 22:09" here; "" for 0, which is not known, and for what no clock shows."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) if seconds else ""
    except (OverflowError, ValueError, OSError):
        return ""


def format_figure(value: float, digits: int = 3) -> str:
    """Format a measurement in as many digits as can be trusted, without powers of ten: 0.88, 12.3, 1170."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    behind = digits - 1 - math.floor(math.log10(abs(value)))
    text = f"{round(value, behind):.{max(0, behind)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_bytes(count: int, digits: int = 1) -> str:
    """1536 -> "1.5 KiB". digits: behind the point of GiB; two where amounts are compared that lie close together."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            behind = {"B": 0, "GiB": digits}.get(unit, 1)
            return f"{value:.{behind}f} {unit}"
        value /= 1024
    return f"{value:.{digits}f} TiB"


def shown_setting(value: object) -> str:
    """A setting's value for a person: `-` where the model decides."""
    if value is None or value == ():
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ", ".join(repr(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name} = {item!r}" for name, item in value.items()) or "-"
    return str(value)


@dataclass(frozen=True)
class Origin:
    """The source of a value: `where` is a flag, a variable, `file:line` (of a preset, too), or "default"."""

    kind: Literal["flag", "preset", "environment", "file", "registry", "checkpoint", "default"]
    where: str


DEFAULT = Origin("default", "default")


@dataclass(frozen=True)
class ResolvedSettings:
    """Settings, and for each field who set it."""

    settings: Settings = field(default_factory=Settings)
    origins: Mapping[str, Origin] = field(default_factory=lambda: dict.fromkeys(SETTINGS, DEFAULT))

    def overlaid(self, values: Mapping[str, tuple[Any, Origin]]) -> ResolvedSettings:
        """A copy in which `values` replace what was there."""
        settings = replace(self.settings, **{name: value for name, (value, _) in values.items()})
        return ResolvedSettings(settings, {**self.origins, **{name: origin for name, (_, origin) in values.items()}})


@dataclass(frozen=True)
class UserDirectories:
    """The folders of a user's files; none of them need exist."""

    config: Path
    data: Path
    cache: Path


def user_directories(environ: Mapping[str, str] = os.environ) -> UserDirectories:
    """The platform's folders (XDG on Linux), or config, data and cache below LOCALLLM_HOME.

    LOCALLLM_CACHE names the cache alone: gigabytes, which may have to go to another disk.
    """
    home, own_cache = (_folder(environ, name) for name in ("LOCALLLM_HOME", "LOCALLLM_CACHE"))
    if home:
        return UserDirectories(home / "config", home / "data", own_cache or home / "cache")
    from platformdirs import PlatformDirs

    platform = PlatformDirs("localllm", appauthor=False)

    def folder(kind: str) -> Path:
        try:
            return below_home(Path(getattr(platform, f"user_{kind}_path")))
        except RuntimeError:  # there is no home
            return below_home(Path("~", kind))

    return UserDirectories(folder("config"), folder("data"), own_cache or folder("cache"))


def below_home(path: Path) -> Path:
    """The path; of a user who has no home one where nothing is, and nothing can be made: no folder `~` of this one."""
    return Path(os.devnull) / path if path.parts[:1] == ("~",) else path


def _folder(environ: Mapping[str, str], name: str) -> Path | None:
    if not environ.get(name):
        return None
    try:
        return Path(environ[name]).expanduser().absolute()
    except RuntimeError:  # ~ of nobody
        return below_home(Path(environ[name]))


def load_settings(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    config_file: Path | None = None,
) -> ResolvedSettings:
    """Settings from `flags` (by setting name; None: not given), the environment and the user's config.toml.

    Raises SettingsError for an unknown key or variable, a wrong type, a value out of range, and broken TOML.
    """
    file = config_file or user_directories(environ).config / "config.toml"
    resolved = ResolvedSettings().overlaid(_from_file(file))
    resolved = resolved.overlaid(_from_environment(environ))
    typed = {name: ("--" + name.replace("_", "-"), value) for name, value in (flags or {}).items() if value is not None}
    return resolved.overlaid(
        {name: (accepted(name, value, flag), Origin("flag", flag)) for name, (flag, value) in typed.items()}
    )


def _from_file(path: Path) -> dict[str, tuple[Any, Origin]]:
    file = TomlFile.read(path)
    values = {}
    for key, value in file.data.items():
        where = file.where(key)
        if key not in SETTINGS:
            raise unknown_key(key, where, SETTINGS)
        if SETTINGS[key].accepts.kind == "table" and isinstance(value, dict):
            value = flat_table(value, where)
        values[key] = (accepted(key, value, where), Origin("file", where))
    return values


def flat_table(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Names with points are tables in tables to TOML, where nobody quotes them. Raises SettingsError for one that is
    there twice, quoted and not, and for a table without a name."""
    found: dict[str, Any] = {}
    waiting = list(table.items())[::-1]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            if not value:
                raise SettingsError(
                    f"{name!r} holds nothing in {where}", why="its table is empty", fix="delete it there"
                )
            waiting += ((f"{name}.{inner}", each) for inner, each in list(value.items())[::-1])
        elif name in found:
            why = "once in quotes, and once without them"
            raise SettingsError(f"{name!r} is there twice in {where}", why=why, fix="delete one of the two lines")
        else:
            found[name] = value
    return found


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[Any, Origin]]:
    values = {}
    for variable, text in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in OTHER_VARIABLES:
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if name not in SETTINGS or not variable.isupper():
            names = [*(ENVIRONMENT_PREFIX + key.upper() for key in SETTINGS), *OTHER_VARIABLES]
            raise unknown_key(variable, "the environment", names, fix=f"unset {variable}")
        if text:  # an empty variable is how a shell says "not set"
            values[name] = (accepted(name, parsed_setting(name, text), variable), Origin("environment", variable))
    return values


def parsed_setting(name: str, text: str) -> object:
    """The value that `text`, as a variable or a command has it, stands for; `text` itself where it is none of its
    kind."""
    kind = SETTINGS[name].accepts.kind
    try:
        if kind == "integer":
            return int(text)
        if kind == "number":
            return float(text)
    except ValueError:
        return text
    if kind == "switch":
        words = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off"), False)}
        return words.get(text.lower(), text)
    if kind == "table":  # name=text;name=text
        return dict(part.strip().partition("=")[::2] for part in text.split(";") if part.strip())
    return [text] if kind == "texts" else text


def accepted(key: str, value: object, where: str | Callable[[], str], accepts: Accepts | None = None) -> Any:
    """`value` in its own type (float for a number, tuple for a list), or SettingsError naming key, value and range.

    `where` may be a function: finding a line costs a parse, and only an error needs it.
    """
    accepts = accepts or SETTINGS[key].accepts
    if not accepts.allows(value):
        place, shown = where if isinstance(where, str) else where(), repr(value)[:80]
        is_flag = place.startswith("--")
        if is_flag and accepts.kind == "texts":  # of those that were typed one is empty
            why, mended = "it must be a text that is not empty", f"leave {place} out, or give it a text"
            raise SettingsError(f"{place} is empty", why=why, fix=mended)
        fix: str | Fix = f"unset {place}" if place.startswith(ENVIRONMENT_PREFIX) else "change that line, or delete it"
        if is_flag:
            fix = flag_fix(place, value, accepts)
        elif place.rfind("/") == 0:  # a command of the chat
            likeliest = accepts.likeliest(value)
            fix = f"{place} {key} {likeliest}" if likeliest else f"give {key} {accepts.describe()}"
        what = f"{place} is {shown}" if is_flag else f"{key} is {shown} in {place}"
        raise SettingsError(what, why=f"it must be {accepts.describe()}", fix=fix)
    if accepts.kind == "number":
        return float(value)  # type: ignore[arg-type]
    if accepts.kind == "bytes":
        return parse_bytes(value)
    if accepts.kind == "bytes or off":
        return parse_bytes(value) or 0
    return tuple(value) if accepts.kind == "texts" else value  # type: ignore[arg-type]


def flag_fix(flag: str, value: object, accepts: Accepts) -> Fix:
    """Return the fix for a flag that does not accept this value."""
    likeliest = accepts.likeliest(value)
    return Fix.flag(flag, likeliest) if likeliest else Fix.advice(f"leave {flag} out, or give it {accepts.describe()}")


def nearest_key(key: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """Return the known key that is spelled most like this one; "" where none is near."""
    spelled = {_plain(name): name for name in known}
    found = difflib.get_close_matches(_plain(key), list(spelled), n=1, cutoff=_NEAR)
    return spelled[found[0]] if found else ""


def _plain(key: str) -> str:
    """Return a key without what all variables share: by their prefix alone any two would be alike."""
    return key[:80].removeprefix(ENVIRONMENT_PREFIX).casefold().replace("-", "_")


def unknown_key(key: str, where: str, known: Sequence[str] | Mapping[str, Any], fix: str | Fix = "") -> SettingsError:
    """The error for a key nobody reads; it names the nearest one that is, if any is near."""
    nearest = nearest_key(key, known)
    names = f"known are {', '.join(sorted(known))}"
    return SettingsError(
        f"unknown key {key[:80]!r} in {where}",
        why=f"the nearest is {nearest!r}; {names}" if nearest else names,
        fix=fix or (f"write {nearest!r} there, or delete the line" if nearest else "delete the line"),
    )
