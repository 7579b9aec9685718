"""Settings: where they come from, which values are accepted, and where each one was set.

A flag beats a LOCALLLM_* variable, which beats the user's config.toml. Knows the names and ranges of settings, not what
they do; what a model's entry adds to them is `registry.with_model_defaults`.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from localllm.errors import SettingsError
from localllm.toml_file import TomlFile

ENVIRONMENT_PREFIX = "LOCALLLM_"
# Not settings: the folder of all user files, the folder of what can be made again, the test suite's data, and the key
# of `serve`, which `config show` must not print.
OTHER_VARIABLES = frozenset({"LOCALLLM_HOME", "LOCALLLM_CACHE", "LOCALLLM_TEST_DATA", "LOCALLLM_API_KEY"})


@dataclass(frozen=True)
class Settings:
    """The settings that a user may store instead of typing them each time. None: the model's own default."""

    model: str = "tiny"
    device: str = "auto"
    dtype: str = "auto"
    weights: str = "auto"
    kv: str = "auto"
    ctx: int | None = None  # tokens
    ram: int | None = None  # bytes that the process may hold
    vram: int | None = None  # bytes of the GPU's memory
    speculate: str = "auto"  # who guesses tokens ahead
    draft_tokens: int | None = None  # that are guessed at once, at most
    cache_disk: int | None = None  # bytes of the disk for what outlives the process of contexts; 0: none are kept
    threads: int | None = None
    offline: bool = False
    private: bool = False  # nothing of a chat is kept
    overflow: str = "stop"  # what is done where a chat is longer than the context
    think: str | None = None  # how much is thought before an answer
    show_thoughts: bool = False
    theme: str = "auto"  # of the full-screen chat; auto: as the terminal is, dark or light
    keys: Mapping[str, str] = field(default_factory=dict)  # of the full-screen chat, by what they do
    system: str | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None


_OFF = ("off", "false", "no", "none", "never", "0gib", "0gb", "0b")  # as people write it


@dataclass(frozen=True)
class Accepts:
    """The values that a key takes. `low` and `high` are inclusive and bound numbers; `usual` is one that often does.
    prefix: of texts that are accepted beside the choices, whatever follows it."""

    kind: Literal["text", "texts", "table", "switch", "integer", "number", "bytes", "bytes or off"]
    low: float = 0
    high: float = math.inf
    choices: tuple[str, ...] = ()
    usual: str = ""
    prefix: str = ""

    def describe(self) -> str:
        if self.choices:
            return "one of " + ", ".join(self.choices) + (f", or {self.prefix}NAME" if self.prefix else "")
        if self.kind in ("integer", "number"):
            noun = "a whole number" if self.kind == "integer" else "a number"
            high = f"{self.high:g}" if self.kind == "number" else str(self.high)
            return f"{noun} from {self.low:g} to {high}"
        return {
            "text": "a text that is not empty",
            "texts": "a list of texts, none empty",
            "table": "a table of texts, none empty; in a variable NAME=TEXT;NAME=TEXT",
            "switch": "true or false",
            "bytes": "an amount of memory above 0, with its unit: 8GiB, 1.5GiB, 600MiB",
            "bytes or off": "an amount with its unit, 8GiB, 600MiB, or off",
        }[self.kind]

    def mending(self, flag: str, value: object) -> str:
        """The flag with the value that was probably meant, else with a usual one; advice where there is neither."""
        if self.choices:
            return f"{flag} {self._likeliest(str(value).casefold())}"
        if self.kind == "bytes":
            return f"{flag} {_nearest_gib(str(value)):g}GiB"
        if self.kind == "bytes or off":
            number = _leading_number(str(value))
            is_off = str(value).strip().casefold() in _OFF
            return f"{flag} {f'{number:g}GiB' if number else 'off' if is_off else self.usual}"
        near = _as_whole_number(str(value)) if self.kind == "integer" else self._nearest(str(value))
        if near is not None and self.low <= near <= self.high:
            return f"{flag} {near if self.kind == 'integer' else f'{near:g}'}"
        return f"{flag} {self.usual}" if self.usual else f"leave {flag} out, or give it {self.describe()}"

    def _has_prefix(self, text: str) -> bool:
        return bool(self.prefix) and text.startswith(self.prefix) and bool(text.removeprefix(self.prefix).strip())

    def _nearest(self, text: str) -> float | None:
        try:
            number = float(text)
        except ValueError:
            return None
        return min(max(self.low, number), self.high) if math.isfinite(number) else None

    def _likeliest(self, word: str) -> str:
        """The choice that is spelled like `word`, else one that ends in its first digit: q4_k_m and 8bit mean bits."""
        near = difflib.get_close_matches(word, self.choices, n=1)
        bits = [letter for letter in word if letter.isdigit()]
        of_as_many = [choice for choice in self.choices if bits and choice.endswith(bits[0])]
        return [*near, *of_as_many, *self.choices][0]

    def allows(self, value: object) -> bool:
        match self.kind:
            case "text":
                is_known = not self.choices or value in self.choices
                return isinstance(value, str) and bool(value) and (is_known or self._has_prefix(value))
            case "texts":
                return isinstance(value, list | tuple) and all(isinstance(text, str) and text for text in value)
            case "table":
                return isinstance(value, Mapping) and all(isinstance(text, str) and text for text in value.values())
            case "switch":
                return isinstance(value, bool)
            case "integer":
                return isinstance(value, int) and not isinstance(value, bool) and self.low <= value <= self.high
            case "bytes":
                return parse_bytes(value) is not None
            case "bytes or off":
                return _is_off(value) or parse_bytes(value) is not None
            case "number":
                number = isinstance(value, int | float) and not isinstance(value, bool)
                return number and self.low <= value <= self.high  # type: ignore[operator]


def _as_whole_number(text: str) -> int | None:
    """Return the number that 8k, 1.5k, 1e3 and 4096.0 mean; None where it is no whole number."""
    found = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(k|e\d)?\s*", text, re.ASCII | re.IGNORECASE)
    if found is None:
        return None
    number, suffix = float(found[1]), (found[2] or "").lower()
    meant = number * (1024 if suffix == "k" else 10 ** int(suffix[1:] or 0))
    return int(meant) if meant.is_integer() else None


# "int4" stands for one of the groups; the round-to-nearest forms are there to be compared with.
WEIGHTS = (
    "auto", "bf16", "int8", "int4", "nf4", "bf12", "int4-g32", "int4-g64", "int4-g128",
    "int4-g32-rtn", "int4-g64-rtn", "int4-g128-rtn",
)  # fmt: skip

OVERFLOW_POLICIES = ("stop", "evict", "grow")

THOUGHT_LEVELS = ("low", "medium", "high")
THINK = ("on", "off", *THOUGHT_LEVELS)

KV_FORMATS = ("auto", "bf16", "int8", "k8v4", "int4")

# Who guesses tokens ahead: a drafter by its name, or a second model.
SPECULATE, DRAFT_MODEL = ("auto", "off", "ngram", "skip"), "model:"
DRAFT_TOKENS = 8  # at most, where nobody asked
MOST_DRAFT_TOKENS = 15  # with the token before them, the rows that a plan has room for the logits of

ACCEPTED: Mapping[str, Accepts] = MappingProxyType(
    {
        "model": Accepts("text"),
        "device": Accepts("text", choices=("auto", "cpu", "cuda")),
        "dtype": Accepts("text", choices=("auto", "bf16", "fp32")),
        "weights": Accepts("text", choices=WEIGHTS),
        "kv": Accepts("text", choices=KV_FORMATS),
        "ctx": Accepts("integer", 1, 2**31, usual="8192"),
        "ram": Accepts("bytes"),
        "vram": Accepts("bytes"),
        "speculate": Accepts("text", choices=SPECULATE, prefix=DRAFT_MODEL),
        "draft_tokens": Accepts("integer", 0, MOST_DRAFT_TOKENS, usual="8"),
        "cache_disk": Accepts("bytes or off", usual="8GiB"),
        "threads": Accepts("integer", 1, 1024, usual="4"),
        "offline": Accepts("switch"),
        "private": Accepts("switch"),
        "overflow": Accepts("text", choices=OVERFLOW_POLICIES),
        "think": Accepts("text", choices=THINK),
        "show_thoughts": Accepts("switch"),
        "theme": Accepts("text"),
        "keys": Accepts("table"),
        "system": Accepts("text"),
        "max_tokens": Accepts("integer", 1, 2**31, usual="512"),
        "stop": Accepts("texts"),
        "seed": Accepts("integer", 0, 2**63 - 1, usual="1"),
        "temperature": Accepts("number", 0, 100, usual="0.8"),
        "top_k": Accepts("integer", 0, 2**31, usual="40"),
        "top_p": Accepts("number", 0, 1, usual="0.95"),
        "min_p": Accepts("number", 0, 1, usual="0.05"),
        "typical_p": Accepts("number", 0, 1, usual="0.95"),
        "repetition_penalty": Accepts("number", 0.01, 100, usual="1.1"),
        "frequency_penalty": Accepts("number", -100, 100, usual="0.5"),
        "presence_penalty": Accepts("number", -100, 100, usual="0.5"),
    }
)


def format_figure(value: float, digits: int = 3) -> str:
    """Return a measured or predicted figure in as many digits as can be trusted, without powers of ten: 0.88, 12.3,
    1170."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    behind = digits - 1 - math.floor(math.log10(abs(value)))
    text = f"{round(value, behind):.{max(0, behind)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _nearest_gib(amount: str) -> float:
    """As the number in it says, where this machine has as much; else half of what it has, which any command accepts."""
    import psutil

    total = psutil.virtual_memory().total / (1 << 30)
    gib = _leading_number(amount)
    return gib if 0.5 <= gib <= total else round(total / 2, 1)


def _leading_number(amount: str) -> float:
    """8 of "8", "8gigs"; 0 where there is none."""
    number = re.match(r"\s*(\d{1,9}(?:\.\d{1,3})?)\s*([a-z]*)\s*$", amount.lower())
    return float(number[1]) if number else 0.0


def _is_off(value: object) -> bool:
    """Return whether the value means off, as text of a flag or variable or as a value of a file."""
    return value in ("0", "off") or (isinstance(value, int) and value == 0 and not isinstance(value, bool))


_AMOUNT = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([kmgt])(i?b)?\s*", re.ASCII | re.IGNORECASE)


def parse_bytes(amount: object) -> int | None:
    """The bytes of "8GiB", "8G" (the same), "8GB" (1e9 each), "600MiB"; None where it is no such amount, or 0."""
    found = _AMOUNT.fullmatch(amount) if isinstance(amount, str) else None
    if found is None:
        return None
    number, unit, suffix = found.groups()
    base = 1000 if suffix and suffix.lower() == "b" else 1024
    return int(float(number) * base ** (" kmgt".index(unit.lower()))) or None


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
    """The source of a value: `where` is a flag, a variable, `file:line`, or "default"."""

    kind: Literal["flag", "environment", "file", "registry", "checkpoint", "default"]
    where: str


DEFAULT = Origin("default", "default")


@dataclass(frozen=True)
class ResolvedSettings:
    """Settings, and for each field who set it."""

    settings: Settings = field(default_factory=Settings)
    origins: Mapping[str, Origin] = field(default_factory=lambda: dict.fromkeys(ACCEPTED, DEFAULT))

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
    return resolved.overlaid(_from_flags(flags or {}))


def _from_file(path: Path) -> dict[str, tuple[Any, Origin]]:
    file = TomlFile.read(path)
    values = {}
    for key, value in file.data.items():
        where = file.where(key)
        if key not in ACCEPTED:
            raise unknown_key(key, where, ACCEPTED)
        if ACCEPTED[key].kind == "table" and isinstance(value, dict):
            value = _flat(value, where)
        values[key] = (accepted(key, value, where), Origin("file", where))
    return values


def _flat(table: Mapping[str, Any], where: str) -> dict[str, Any]:
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
        if name not in ACCEPTED or not variable.isupper():
            names = [*(ENVIRONMENT_PREFIX + key.upper() for key in ACCEPTED), *OTHER_VARIABLES]
            raise unknown_key(variable, "the environment", names, fix=f"unset {variable}")
        if text:  # an empty variable is how a shell says "not set"
            values[name] = (accepted(name, _parsed(name, text), variable), Origin("environment", variable))
    return values


def _from_flags(flags: Mapping[str, Any]) -> dict[str, tuple[Any, Origin]]:
    values = {}
    for name, value in flags.items():
        if value is not None:
            flag = "--" + name.replace("_", "-")
            values[name] = (accepted(name, value, flag), Origin("flag", flag))
    return values


def _parsed(name: str, text: str) -> object:
    """The value that `text`, a variable's content, stands for; `text` itself where it is none of the kind."""
    kind = ACCEPTED[name].kind
    try:
        if kind == "integer":
            return int(text)
        if kind == "number":
            return float(text)
    except ValueError:
        return text
    if kind == "switch":
        words = {
            "1": True,
            "true": True,
            "yes": True,
            "on": True,
            "0": False,
            "false": False,
            "no": False,
            "off": False,
        }
        return words.get(text.lower(), text)
    if kind == "table":  # name=text;name=text
        return dict(part.strip().partition("=")[::2] for part in text.split(";") if part.strip())
    return [text] if kind == "texts" else text


def accepted(key: str, value: object, where: str | Callable[[], str], accepts: Accepts | None = None) -> Any:
    """`value` in its own type (float for a number, tuple for a list), or SettingsError naming key, value and range.

    `where` may be a function: finding a line costs a parse, and only an error needs it.
    """
    accepts = accepts or ACCEPTED[key]
    if not accepts.allows(value):
        place, shown = where if isinstance(where, str) else where(), repr(value)[:80]
        raise SettingsError(
            f"{place} is {shown}" if place.startswith("--") else f"{key} is {shown} in {place}",
            why=f"it must be {accepts.describe()}{_missing(value, accepts)}",
            fix=_mending(key, value, place, accepts),
        )
    if accepts.kind == "number":
        return float(value)  # type: ignore[arg-type]
    if accepts.kind == "bytes":
        return parse_bytes(value)
    if accepts.kind == "bytes or off":
        return parse_bytes(value) or 0
    return tuple(value) if accepts.kind == "texts" else value  # type: ignore[arg-type]


def _mending(key: str, value: object, place: str, accepts: Accepts) -> str:
    if place.startswith("--") or place.rfind("/") == 0:  # typed: a flag, a command of the chat
        return accepts.mending(place if place.startswith("--") else f"{place} {key}", value)
    return f"unset {place}" if place.startswith(ENVIRONMENT_PREFIX) else "change that line, or delete it"


def _missing(value: object, accepts: Accepts) -> str:
    is_bare = accepts.prefix and isinstance(value, str) and value.strip() == accepts.prefix
    return f", and there is no name behind {accepts.prefix}" if is_bare else ""


def unknown_key(key: str, where: str, known: Sequence[str] | Mapping[str, Any], fix: str = "") -> SettingsError:
    """The error for a key nobody reads; it names the nearest one that is."""
    spelled = {name.casefold(): name for name in known}
    nearest = spelled[difflib.get_close_matches(key.casefold().replace("-", "_"), list(spelled), n=1, cutoff=0.0)[0]]
    return SettingsError(
        f"unknown key {key[:80]!r} in {where}",
        why=f"the nearest is {nearest!r}; known are {', '.join(sorted(known))}",
        fix=fix or f"write {nearest!r} there, or delete the line",
    )
