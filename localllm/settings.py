"""The settings, each written down once: its type, default, range, help, and what takes it.

From a field of `Settings` follow its key in config.toml, its LOCALLLM_* variable, its flag and the flag's completion,
`/set`, docs/using/cli.md and, of `EngineConfig`, what an engine is given. Knows no files and no command line.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal

# "int4" stands for one of the groups; the round-to-nearest forms are there to be compared with.
WEIGHTS = (
    "auto", "bf16", "int8", "int4", "nf4", "bf12", "kept", "int4-g32", "int4-g64", "int4-g128",
    "int4-g32-rtn", "int4-g64-rtn", "int4-g128-rtn",
)  # fmt: skip

OVERFLOW_POLICIES = ("stop", "evict", "grow")

THOUGHT_LEVELS = ("low", "medium", "high")
THINK = ("on", "off", *THOUGHT_LEVELS)

KV_FORMATS = ("auto", "bf16", "int8", "k8v4", "int4")

REUSE = ("prefix", "chunks")

# What drafts tokens: a drafter by its name, or a second model.
SPECULATE, DRAFT_MODEL = ("auto", "off", "ngram", "skip", "mtp"), "model:"
MAX_ADAPTER_SCALE = 100.0
DRAFT_TOKENS = 8  # at most, where nobody asked
MOST_DRAFT_TOKENS = 15  # with the token before them, the rows that a plan has room for the logits of

# Headings in the help of a command, under which its options stand.
PROMPT, ANSWER, SAMPLING, OUTPUT, KEPT, MACHINE = (
    "Prompt", "Answer", "Sampling", "Output", "Saved chats", "Memory and speed",
)  # fmt: skip

_OFF = ("off", "false", "no", "none", "never", "0gib", "0gb", "0b")  # as people write it


@dataclass(frozen=True)
class Accepts:
    """The values that a key takes. `low` and `high` are inclusive and bound numbers; `usual` is one that often does.
    prefix: of texts that are accepted beside the choices, whatever follows it. numbered: names that are accepted beside
    the choices with a whole number behind a colon, NAME:N, each with its least; `high` is the largest of all."""

    kind: Literal["text", "texts", "table", "switch", "integer", "number", "bytes", "bytes or off"]
    low: float = 0
    high: float = math.inf
    choices: tuple[str, ...] = ()
    usual: str = ""
    prefix: str = ""
    numbered: Mapping[str, int] = field(default_factory=dict)

    def describe(self) -> str:
        if self.numbered:
            *others, last = (*self.choices, *(f"{name}:N" for name in self.numbered))
            leasts = set(self.numbered.values())
            lows = (f"{low} ({name})" if len(leasts) > 1 else str(low) for name, low in self.numbered.items())
            low = " or ".join(dict.fromkeys(lows))
            return f"{', '.join(others)} or {last}, where N is a whole number from {low} to {self.high}"
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

    def likeliest(self, value: object) -> str:
        """Return the nearest value, else a usual one; "" where there is neither."""
        text = str(value).strip().casefold()
        if text == "gpu" and "cuda" in self.choices:  # it is spelled more like cpu
            return "cuda"
        if self.numbered:
            return self._likeliest_numbered(text)
        if self.choices:
            bits = [letter for letter in text if letter.isdigit()]  # q4_k_m and 8bit are said elsewhere
            of_as_many = [choice for choice in self.choices if bits and choice.endswith(bits[0])]
            return [*difflib.get_close_matches(text, self.choices, n=1), *of_as_many, *self.choices][0]
        if self.kind == "bytes":
            return f"{_nearest_gib(text):g}GiB"
        if self.kind == "bytes or off":
            number = _leading_number(text)
            return f"{number:g}GiB" if number else "off" if text in _OFF else self.usual
        if self.kind == "integer":
            meant = _as_whole_number(text)
            return str(meant) if meant is not None and self.low <= meant <= self.high else self.usual
        with contextlib.suppress(ValueError):
            number = float(text.removesuffix("%"))
            if self.high <= 1 and self.low <= number / 100 <= self.high and (number >= 2 or text.endswith("%")):
                number /= 100  # a share in percent
            if math.isfinite(near := min(max(self.low, number), self.high)):
                return f"{near:g}"
        return self.usual

    def _likeliest_numbered(self, text: str) -> str:
        if text in _OFF and self.choices:
            return self.choices[0]
        *names, number = text.replace("=", ":").rsplit(":", 1)
        usual, _, usual_number = self.usual.partition(":")
        name = next(iter(difflib.get_close_matches((names or [text])[0], self.numbered, n=1)), usual)
        meant = _as_whole_number(number)
        return f"{name}:{min(max(int(usual_number) if meant is None else meant, self.numbered[name]), int(self.high))}"

    def _has_prefix(self, text: str) -> bool:
        return bool(self.prefix) and text.startswith(self.prefix) and bool(text.removeprefix(self.prefix).strip())

    def _is_numbered(self, text: str) -> bool:
        found = re.fullmatch(r"(.+):([1-9]\d{0,17})", text, re.ASCII)
        return found is not None and self.numbered.get(found[1], math.inf) <= int(found[2]) <= self.high

    def allows(self, value: object) -> bool:
        match self.kind:
            case "text":
                if not isinstance(value, str) or not value:
                    return False
                is_known = not self.choices or value in self.choices
                return is_known or self._has_prefix(value) or self._is_numbered(value)
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
    """Return the whole number that 8k, 1.5k, 1e3 or 4096.0 means; None where there is none."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(k|e\d)?", text, re.ASCII)
    if found is None:
        return None
    suffix = found[2] or "e0"
    meant = float(found[1]) * (1024 if suffix == "k" else 10 ** int(suffix[1:]))
    return int(meant) if meant.is_integer() else None


def _nearest_gib(amount: str) -> float:
    """Return the number in the text where this machine has as much memory, else half of its memory."""
    import psutil

    total = psutil.virtual_memory().total / (1 << 30)
    gib = _leading_number(amount)
    return gib if 0.5 <= gib <= total else round(total / 2, 1)


def _leading_number(amount: str) -> float:
    """8 of "8", "8gigs"; 0 where there is none."""
    number = re.match(r"\s*(\d{1,9}(?:\.\d{1,3})?)\s*([a-z]*)\s*$", amount.lower())
    return float(number[1]) if number else 0.0


def _is_off(value: object) -> bool:
    """Return whether a flag's or variable's text, or a file's number, means off."""
    return value in ("0", "off") or (isinstance(value, int) and value == 0 and not isinstance(value, bool))


def number_of(value: str, name: str) -> int | None:
    """Return N of NAME:N, a value of such a name that was checked before; None of any other value."""
    found, _, number = value.partition(":")
    return int(number) if found == name and number else None


_AMOUNT = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([kmgt])(i?b)?\s*", re.ASCII | re.IGNORECASE)


def parse_bytes(amount: object) -> int | None:
    """The bytes of "8GiB", "8G" (the same), "8GB" (1e9 each), "600MiB"; None where it is no such amount, or 0."""
    found = _AMOUNT.fullmatch(amount) if isinstance(amount, str) else None
    if found is None:
        return None
    number, unit, suffix = found.groups()
    base = 1000 if suffix and suffix.lower() == "b" else 1024
    return int(float(number) * base ** (" kmgt".index(unit.lower()))) or None


@dataclass(frozen=True)
class Setting:
    """A row of the table.

    taken_by: the commands with a flag of this name; `/set` and `models.toml` are among them.
    flags: as they are typed, where that is more than the name.
    help: its first line is enough for a short page of help.
    group: the heading in the help under which the flag stands. is_basic: on the short page too.
    """

    accepts: Accepts
    taken_by: tuple[str, ...] = ()
    metavar: str | None = None
    help: str = ""
    flags: tuple[str, ...] = ()
    group: str = ""
    is_basic: bool = False


def setting(
    default: Any, accepts: Accepts, taken_by: str = "", metavar: str | None = None, about: str = "", **more: Any
) -> Any:
    """A field of `Settings`, with its row of the table."""
    row = {"setting": Setting(accepts, tuple(taken_by.split()), metavar, about, **more)}
    return (
        field(default_factory=dict, metadata=row) if accepts.kind == "table" else field(default=default, metadata=row)
    )


_ANSWERING = "run chat serve "
_PLANNED = _ANSWERING + "plan "
_MEASURED = _PLANNED + "perplexity "
_SAMPLED = "run chat /set models.toml "


@dataclass(frozen=True)
class EngineConfig:
    """The computation and the memory of an engine: fixed when it is loaded. None: as the model has it."""

    ctx: int | None = setting(
        None, Accepts("integer", 1, 2**31, usual="8192"), _MEASURED, "N",
        "Context length in tokens. Default: at most 8192.\n"
        "By default it is the model's own, at most 8192, of a hybrid 262144; less if memory is short.",
        group=MACHINE, is_basic=True,
    )  # fmt: skip
    ram: int | None = setting(
        None, Accepts("bytes"), _MEASURED, "SIZE",
        "Memory limit, such as 8GiB.\n"
        "Default: nine tenths of what is free. Weights that do not fit are read from the disk at every step. Without "
        "--ctx, the context gets shorter too.",
        group=MACHINE, is_basic=True,
    )  # fmt: skip
    vram: int | None = setting(
        None, Accepts("bytes"), _MEASURED + "bench", "SIZE",
        "GPU memory limit, such as 6GiB.\nDefault: nine tenths of what is free.",
        group=MACHINE, is_basic=True,
    )  # fmt: skip
    device: str = setting(
        "auto", Accepts("text", choices=("auto", "cpu", "cuda")), _MEASURED + "bench", "auto|cpu|cuda",
        "Where to compute. Default: auto, on a GPU if torch can use one.",
        group=MACHINE,
    )  # fmt: skip
    dtype: str = setting(
        "auto", Accepts("text", choices=("auto", "bf16", "fp32")), _MEASURED + "bench", "auto|bf16|fp32",
        "Precision of the activations. fp32 is slower and takes twice the memory. Default: auto, which is bf16, and "
        "fp32 on a GPU that emulates bf16 (RTX 20, GTX 16, T4). For weights see --weights, for the KV cache --kv.",
        group=MACHINE,
    )  # fmt: skip
    weights: str = setting(
        "auto", Accepts("text", choices=WEIGHTS, prefix="kept-"), _MEASURED + "bench", "FORMAT",
        "Weights: bf16, int8, int4, nf4, bf12, kept or auto.\n"
        "Fewer bits take less memory and are faster, at some loss of quality. bf12: bf16 without loss in 12 bits. "
        "kept: a quantized file's own codes. Also int4-g32, -g64, -g128. Packed on first use. Default: auto, which is "
        "a file's own codes if it has any, else the format that is already packed, else int4 for models of 512 MiB or "
        "more.",
        group=MACHINE, is_basic=True,
    )  # fmt: skip
    kv: str = setting(
        "auto", Accepts("text", choices=KV_FORMATS), _MEASURED + "bench", "FORMAT",
        "Format of the KV cache: bf16, int8, k8v4 or int4. Fewer bits make room for a longer context. k8v4: keys in 8 "
        "bits, values in 4. bf16: as computed. Default: auto, which is int8, or as computed with --dtype fp32.",
        group=MACHINE,
    )  # fmt: skip
    kv_offload: str = setting(
        "off", Accepts("text", high=2**31, choices=("off", "auto"), usual="keep:16384", numbered={"keep": 256}),
        _MEASURED, "auto|keep:N",
        "Where keys and values of a long context rest. keep:N: those of N tokens of a sequence in memory, the others "
        "on the disk, from where every step reads them; the text stays the same. On a GPU: in its memory, the others "
        "in the host's. auto: as many as there is room for beside the weights. Default: off, all in memory.",
        group=MACHINE,
    )  # fmt: skip
    attend: str = setting(
        "all", Accepts("text", high=65536, choices=("all",), usual="top:64", numbered={"top": 1}), _MEASURED + "bench",
        "all|top:N",
        "What the tokens of an answer attend to. all: everything before them. top:N: the first page of 64 tokens, the "
        "last two, and in each layer the N others whose keys promise most; faster behind long prompts, at some loss. "
        "Prompts attend to everything, and layers with a sliding window to all of it. Default: all.",
        group=MACHINE,
    )  # fmt: skip
    kv_evict: str = setting(
        # heavy: the first page, the newest, and one that is chosen.
        "off", Accepts("text", high=2**31, choices=("off",), usual="sinks:4096", numbered={"sinks": 64, "heavy": 192}),
        _MEASURED, "RULE",
        "Give back the keys and values of a long text's middle: sinks:WINDOW, heavy:BUDGET or off. Memory is bounded, "
        "at a loss of quality. sinks: a token sees the first 64 tokens and the last WINDOW. heavy: of more than BUDGET "
        "tokens those leave that got the least attention. Default: off.",
        group=MACHINE,
    )  # fmt: skip
    speculate: str = setting(
        "auto", Accepts("text", choices=SPECULATE, prefix=DRAFT_MODEL), _PLANNED, "DRAFTER",
        "Speculative decoding: a drafter proposes tokens and the model verifies several in one pass. The text stays "
        "the same. off. ngram: drafts from earlier text. skip: the model without some of its blocks. mtp: the head "
        "that some checkpoints bring for it. model:NAME: a smaller model with the same tokenizer. Default: auto, which "
        "is ngram, skip and mtp when they pay.",
        group=MACHINE,
    )  # fmt: skip
    draft_tokens: int | None = setting(
        None, Accepts("integer", 0, MOST_DRAFT_TOKENS, usual="8"), _PLANNED, "N",
        f"Maximum number of tokens drafted at once, 0 to {MOST_DRAFT_TOKENS}. Default: {DRAFT_TOKENS}.",
        group=MACHINE,
    )  # fmt: skip
    adapter_memory: int | None = setting(
        None, Accepts("bytes"), _PLANNED, "SIZE",
        "Memory for adapters (LoRA). The least recently used leave it first. Default: twice what those named with "
        "--adapter take, at least 64MiB; without any, up to a quarter of what is free.",
        group=MACHINE,
    )  # fmt: skip
    cache_disk: int | None = setting(
        None, Accepts("bytes or off", usual="8GiB"), _ANSWERING, "SIZE",
        "Disk space for the prefix cache, from which later runs continue without computing a prompt again: 20GiB, or "
        "off. Default: 8GiB, or a tenth of the free space if that is less.",
        group=MACHINE,
    )  # fmt: skip
    reuse: str = setting(
        "prefix", Accepts("text", choices=REUSE), _ANSWERING, "prefix|chunks",
        "What of earlier prompts is not computed again. prefix: what a prompt begins with, exactly. chunks: documents "
        "too that stood elsewhere, approximately: only the borders of each are computed anew. Not for models with "
        "recurrent layers. Default: prefix.",
        group=MACHINE,
    )  # fmt: skip
    threads: int | None = setting(
        None, Accepts("integer", 1, 1024, usual="4"), _MEASURED + "bench", "N",
        "Number of CPU threads. Default: torch's choice.",
        group=MACHINE,
    )  # fmt: skip

    @property
    def chosen_pages(self) -> int | None:
        """The pages that a token of an answer chooses to attend to; None where it attends to all."""
        return number_of(self.attend, "top")


@dataclass(frozen=True)
class SamplingSettings:
    """The sampling of tokens, and the end of an answer. None: as the model recommends it."""

    max_tokens: int | None = setting(
        None, Accepts("integer", 1, 2**31, usual="512"), "chat /set", "N",
        "Longest answer, in tokens.\nDefault: up to the end of the context.",
        group=ANSWER, is_basic=True,
    )  # fmt: skip
    temperature: float | None = setting(
        None, Accepts("number", 0, 100, usual="0.8"), _SAMPLED + "serve", "T",
        "Randomness, 0 to 100. 0: always the likeliest token.\nDefault: the model's own, or 0.8.",
        group=ANSWER, is_basic=True,
    )  # fmt: skip
    top_k: int | None = setting(
        None, Accepts("integer", 0, 2**31, usual="40"), _SAMPLED + "serve", "N",
        "Sample from the N likeliest tokens; 0: from all. Default: the model's own, or 0.",
        group=SAMPLING,
    )  # fmt: skip
    top_p: float | None = setting(
        None, Accepts("number", 0, 1, usual="0.95"), _SAMPLED + "serve", "P",
        "Sample from the likeliest tokens whose probabilities sum to P, 0 to 1. Default: the model's own, or 1.",
        group=SAMPLING,
    )  # fmt: skip
    min_p: float | None = setting(
        None, Accepts("number", 0, 1, usual="0.05"), _SAMPLED + "serve", "P",
        "Drop tokens less likely than P times the likeliest one, 0 to 1. Default: 0.",
        group=SAMPLING,
    )  # fmt: skip
    typical_p: float | None = setting(
        None, Accepts("number", 0, 1, usual="0.95"), _SAMPLED, "P",
        "Locally typical sampling with probability mass P, 0 to 1. Default: 1, off.",
        group=SAMPLING,
    )  # fmt: skip
    repetition_penalty: float | None = setting(
        None, Accepts("number", 0.01, 100, usual="1.1"), _SAMPLED + "serve", "X",
        "Above 1: make tokens that already appeared less likely, 0.01 to 100. Default: 1.",
        group=SAMPLING,
    )  # fmt: skip
    frequency_penalty: float | None = setting(
        None, Accepts("number", -100, 100, usual="0.5"), _SAMPLED, "X",
        "Subtract X from a token's logit for each time it appeared in the answer, -100 to 100. Default: 0.",
        group=SAMPLING,
    )  # fmt: skip
    presence_penalty: float | None = setting(
        None, Accepts("number", -100, 100, usual="0.5"), _SAMPLED, "X",
        "Subtract X from a token's logit once it has appeared in the answer, -100 to 100. Default: 0.",
        group=SAMPLING,
    )  # fmt: skip
    repeat_last_n: int | None = setting(
        None, Accepts("integer", -1, 2**31 - 1, usual="64"), "run chat /set", "N",
        "The number of last tokens that the three penalties look at; 0: none, -1: all. Default: -1.",
        group=SAMPLING,
    )  # fmt: skip
    seed: int | None = setting(
        None, Accepts("integer", 0, 2**63 - 1, usual="1"), "run chat /set", "N",
        "The same seed gives the same text. Default: a random seed, which --stats prints.",
        group=SAMPLING,
    )  # fmt: skip
    stop: tuple[str, ...] = setting(
        (), Accepts("texts"), "run chat /set", "TEXT", "End the answer before TEXT. May be repeated.", group=ANSWER
    )


@dataclass(frozen=True)
class Settings(SamplingSettings, EngineConfig):
    """All that a user may set once instead of typing it each time. None: the model's own default."""

    model: str = setting("tiny", Accepts("text"))
    system: str | None = setting(
        None, Accepts("text"), "run chat", "TEXT", "The system message: how the model is to answer.",
        flags=("-s", "--system"), group=PROMPT, is_basic=True,
    )  # fmt: skip
    adapter: tuple[str, ...] = setting(
        (), Accepts("texts"), _ANSWERING, "NAME",
        "An adapter (LoRA) on the model; NAME:0.5 is half of it.\n"
        "A name of `localllm adapters`, ORG/REPO, a folder or a .gguf file. May be repeated: what they "
        "add is added up. `serve` answers with one where a request names MODEL:NAME.",
        group=MACHINE, is_basic=True,
    )  # fmt: skip
    offline: bool = setting(False, Accepts("switch"), "pull", about="Never use the network.")
    private: bool = setting(
        False, Accepts("switch"), _ANSWERING,
        about="Save nothing: no chat, no KV cache on the disk, no typed lines.",
        group=KEPT,
    )  # fmt: skip
    overflow: str = setting(
        "stop", Accepts("text", choices=OVERFLOW_POLICIES), "run chat /set", "stop|evict|grow",
        "What to do when the chat is longer than the context. stop: an error says what would fit. evict: leave the "
        "oldest turns out of the prompt and say so; the saved chat stays complete. grow: enlarge the context and "
        "move weights out of its way. Default: stop.",
        group=MACHINE,
    )  # fmt: skip
    think: str | None = setting(
        None, Accepts("text", choices=THINK), "run chat /set", "LEVEL",
        "How much it thinks first: on, off, low, medium, high.\n"
        "Default: the model's own. An error if its chat template has no such choice.",
        group=ANSWER, is_basic=True,
    )  # fmt: skip
    show_thoughts: bool = setting(
        False, Accepts("switch"), "run chat",
        about="Print the model's thoughts too, dimmed, on stderr.",
        group=OUTPUT,
    )  # fmt: skip
    theme: str = setting("auto", Accepts("text"))
    keys: Mapping[str, str] = setting({}, Accepts("table"))

    @property
    def engine(self) -> EngineConfig:
        """The settings that an engine is given, as one value."""
        return EngineConfig(**{each.name: getattr(self, each.name) for each in fields(EngineConfig)})


SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        each.name: each.metadata["setting"]
        for each in sorted(fields(Settings), key=lambda each: each.name != "model")  # the model's name stands first
    }
)


OF_KV = ("kv", "kv_offload", "attend", "kv_evict", "reuse")  # of keys and values, and not for each model


def taken_by(who: str) -> tuple[str, ...]:
    """The names of the settings that a command, `/set` or `models.toml` takes."""
    return tuple(name for name, row in SETTINGS.items() if who in row.taken_by)
