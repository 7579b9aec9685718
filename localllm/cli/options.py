"""The flags that several commands share, and which of them are settings or sampling parameters.

A flag that was not typed is None: what stands in config.toml, the registry or the checkpoint is then used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

import typer

from localllm.chat.best_of import MAX_ANSWERS
from localllm.cli.names import complete_installed, complete_models, complete_speculate, complete_weights
from localllm.config import ACCEPTED, DRAFT_TOKENS, MOST_DRAFT_TOKENS, Accepts
from localllm.engine.request import MAX_BEAMS
from localllm.errors import UsageError
from localllm.registry import SAMPLING_SETTINGS

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        autocompletion=complete_models,
        help="A name of `localllm list --all`, ORG/REPOSITORY, or a folder. Default: the setting `model` (tiny).",
    ),
]
RequiredModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        autocompletion=complete_models,
        help="A name of `localllm list --all`, ORG/REPOSITORY, or a folder.",
    ),
]
InstalledModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", show_default=False, autocompletion=complete_installed, help="A name of `localllm list`."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

System = Annotated[str | None, typer.Option("-s", "--system", metavar="TEXT", help="The system message.")]
Ctx = Annotated[
    int | None,
    typer.Option(
        "--ctx",
        metavar="N",
        help="Context size in tokens. Default: the model's own, at most 8192; less where memory is short.",
    ),
]
Ram = Annotated[
    str | None,
    typer.Option(
        "--ram",
        metavar="SIZE",
        help="Most memory that this process may hold: 8GiB. What does not fit is read from the disk at every step; "
        "without --ctx the context shrinks, too.",
    ),
]
Vram = Annotated[
    str | None, typer.Option("--vram", metavar="SIZE", help="Most of the GPU's memory that may be used: 6GiB.")
]
CacheDisk = Annotated[
    str | None,
    typer.Option(
        "--cache-disk",
        metavar="SIZE",
        help="Most of the disk for what was computed of conversations, so that a later run need not compute it again: "
        "20GiB, or off for none. Default: 8GiB, or a tenth of what is free where that is less.",
    ),
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"] | None,
    typer.Option("--device", metavar="auto|cpu|cuda", help="Where to compute. auto: on a GPU if there is one."),
]
Dtype = Annotated[
    Literal["auto", "bf16", "fp32"] | None,
    typer.Option(
        "--dtype",
        metavar="auto|bf16|fp32",
        help="Precision of what is computed: fp32 is slower and takes twice the memory. auto: bf16. The weights have "
        "--weights, the context --kv.",
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="auto|bf16|int8|int4|nf4|bf12",
        autocompletion=complete_weights,
        help="Format of the weights: fewer bits take less memory and are faster, at some cost of quality; bf12 is bf16 "
        "without loss in 12 bits; int4-g32, -g64, -g128 too. Packed at first use. auto: what is packed already, else "
        "int4 if it has 512 MiB or more.",
    ),
]
KV = Annotated[
    Literal["auto", "bf16", "int8", "k8v4", "int4"] | None,
    typer.Option(
        "--kv",
        metavar="auto|bf16|int8|k8v4|int4",
        help="Format of the context's keys and values: with fewer bits a longer one fits. k8v4: keys in 8 bits, values "
        "in 4; bf16: as they are computed. auto: int8, with --dtype fp32 as they are computed.",
    ),
]
Speculate = Annotated[
    str | None,
    typer.Option(
        "--speculate",
        metavar="auto|off|ngram|skip|model:NAME",
        autocompletion=complete_speculate,
        help="Who guesses tokens ahead, of which one pass of the model then keeps those that it would have drawn: the "
        "text stays the same, and comes faster. ngram: what followed the last words before. skip: the model without "
        "some of its blocks. model:NAME: a second, smaller model of the same tokenizer. auto: ngram and skip, as far "
        "as they pay.",
    ),
]
DraftTokens = Annotated[
    int | None,
    typer.Option(
        "--draft-tokens",
        metavar="N",
        help=f"Most tokens that are guessed at once, 0 to {MOST_DRAFT_TOKENS}. Default: {DRAFT_TOKENS}.",
    ),
]
Threads = Annotated[int | None, typer.Option("--threads", metavar="N", help="CPU threads. Default: torch's choice.")]
Offline = Annotated[bool | None, typer.Option("--offline", help="Never use the network.")]
Overflow = Annotated[
    Literal["stop", "evict", "grow"] | None,
    typer.Option(
        "--overflow",
        metavar="stop|evict|grow",
        help="What to do where the conversation is longer than the context. stop: an error says what would fit. evict: "
        "the oldest questions and answers leave the model's view, which is told each time; the kept chat stays whole. "
        "grow: the context becomes longer, and weights make room for it. Default: stop.",
    ),
]
Private = Annotated[
    bool | None,
    typer.Option(
        "--private",
        help="Keep nothing: neither the conversation, nor what was computed of it, nor the lines that were typed.",
    ),
]
NoAttach = Annotated[
    bool,
    typer.Option("--no-attach", help="Load the model here also where `localllm serve` runs and would answer."),
]

# A sequence has its KV cache reserved for the longest answer that it may give: with the rest of the context for each,
# few prompts of a job would have room at once.
DEFAULT_MAX_TOKENS = 512

# The defaults here are those of a model that recommends none.
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", metavar="N", help="Longest answer, in tokens. Default: to the context's end."),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        metavar="T",
        help="0 to 100. 0: always the likeliest; above 1: wild. Default: the model's own, or 0.8.",
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        "--top-k", metavar="N", help="Draw from the N likeliest tokens; 0: from all. Default: the model's own, or 0."
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p", metavar="P", help="0 to 1: draw from the likeliest that sum to P. Default: the model's own, or 1."
    ),
]
MinP = Annotated[
    float | None,
    typer.Option("--min-p", metavar="P", help="0 to 1: drop tokens below P times the likeliest one's. Default: 0."),
]
TypicalP = Annotated[
    float | None,
    typer.Option(
        "--typical-p",
        metavar="P",
        help="0 to 1: draw from the tokens, P in sum, that surprise as much as is usual there. Default: 1, off.",
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty", metavar="X", help="0.01 to 100. Above 1: seen tokens less likely. Default: 1."
    ),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(
        "--frequency-penalty",
        metavar="X",
        help="-100 to 100: taken off a token's score each time it was used. Default: 0.",
    ),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option(
        "--presence-penalty", metavar="X", help="-100 to 100: taken off a token's score once it was used. Default: 0."
    ),
]
DryMultiplier = Annotated[
    float | None,
    typer.Option(
        "--dry-multiplier",
        metavar="X",
        help="0 to 100: how much a token is held back that would go on repeating a passage (DRY). Default: 0, off.",
    ),
]
DryBase = Annotated[
    float | None,
    typer.Option(
        "--dry-base", metavar="X", help="1 to 100: growth of the DRY penalty with each repeated token. Default: 1.75."
    ),
]
DryAllowedLength = Annotated[
    int | None,
    typer.Option(
        "--dry-allowed-length",
        metavar="N",
        help="From 1: length of a repetition that costs nothing of the DRY penalty. Default: 2.",
    ),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        "--logit-bias",
        metavar="ID=X",
        help="Added to the score of the token ID, as `tokenize` prints it; -100 rules it out. May be repeated.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", help="The same seed gives the same text. Default: drawn; --stats tells it."),
]
Think = Annotated[
    Literal["on", "off", "low", "medium", "high"] | None,
    typer.Option(
        "--think",
        metavar="on|off|low|medium|high",
        help="How much the model thinks before it answers, where its chat template has a choice: an error where it has "
        "none. Default: as the model does.",
    ),
]
ShowThoughts = Annotated[
    bool | None,
    typer.Option("--show-thoughts", help="Print what is thought, too: on stderr, dimmed. The answer stays alone."),
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="End the answer before TEXT; may be repeated.")
]

# Flags that are settings too (config.toml, LOCALLLM_*), by their name in both.
_SETTING_NAMES = (
    "system", "ctx", "ram", "vram", "cache_disk", "device", "dtype", "weights", "kv", "speculate",
    "draft_tokens", "threads", "offline",
    "private", "overflow", "think", "show_thoughts", *SAMPLING_SETTINGS,
)  # fmt: skip
_MOST_TOKENS = 1 << 30  # of a measurement: no cache holds as many; beyond, sizes leave the range of a float
# What a flag that takes a number accepts, by the name of its parameter: every one of every command.
NUMBERS: Mapping[str, Accepts] = MappingProxyType(
    {
        **{name: accepts for name, accepts in ACCEPTED.items() if accepts.kind in ("integer", "number")},
        "dry_multiplier": Accepts("number", 0, 100, usual="0.8"),
        "dry_base": Accepts("number", 1, 100, usual="1.75"),
        "dry_allowed_length": Accepts("integer", 1, 2**31, usual="2"),
        "logprobs": Accepts("integer", 0, 100, usual="3"),
        "parallel": Accepts("integer", 1, 1024, usual="8"),
        "port": Accepts("integer", 0, 65535, usual="8420"),
        "queue": Accepts("integer", 0, 10_000, usual="64"),
        "replicas": Accepts("integer", 1, 1024, usual="2"),
        "n": Accepts("integer", 1, MAX_ANSWERS, usual="3"),
        "best_of": Accepts("integer", 1, MAX_ANSWERS, usual="3"),
        "beams": Accepts("integer", 1, MAX_BEAMS, usual="4"),
        "group": Accepts("text", choices=("32", "64", "128")),
        "prompt_tokens": Accepts("integer", 1, _MOST_TOKENS, usual="512"),
        "gen_tokens": Accepts("integer", 1, _MOST_TOKENS, usual="128"),
        "depth": Accepts("integer", 0, _MOST_TOKENS, usual="512"),
        "rounds": Accepts("integer", 1, 1000, usual="5"),
    }
)
_MOST_BIAS = Accepts("number", -1e6, 1e6)
_DRY_NAMES = ("dry_multiplier", "dry_base", "dry_allowed_length")


def setting_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of a command that are settings, as `load_settings` takes them: None where one was not typed."""
    chosen = {name: flags.get(name) for name in _SETTING_NAMES}
    return {name: (tuple(value) or None) if isinstance(value, list) else value for name, value in chosen.items()}


def require_accepted(flag: str, text: str, accepts: Accepts) -> None:
    """Raises UsageError naming what was typed, what may be, and an example, where `text` is none of it."""
    value: object = text
    with contextlib.suppress(ValueError):
        value = {"integer": int, "number": float}.get(accepts.kind, str)(text)
    if not accepts.allows(value):
        shown = text if text.lstrip("-").isdecimal() or text != value else repr(text)
        why, fix = f"it must be {accepts.describe()}", accepts.mending(flag, text)
        raise UsageError(f"{flag} is {shown[:80]}", why=why, fix=fix)


def extra_sampling(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters of a command line that are no settings. Raises UsageError for one without effect."""
    idle = [name for name in _DRY_NAMES if flags.get(name) is not None and not flags["dry_multiplier"]]
    if idle and idle != ["dry_multiplier"]:
        flag = "--" + idle[-1].replace("_", "-")
        why = "it shapes the DRY penalty, which is off"
        raise UsageError(f"{flag} needs --dry-multiplier above 0", why=why, fix="--dry-multiplier 0.8")
    extra = {name: flags[name] for name in _DRY_NAMES if flags.get(name) is not None}
    if flags.get("logit_bias"):
        extra["logit_bias"] = parse_logit_bias(flags["logit_bias"])
    if flags.get("logprobs") is not None:
        extra["logprobs"] = flags["logprobs"]
    return extra


def parse_logit_bias(pairs: Sequence[str]) -> dict[int, float]:
    """`["13=-100"]` -> `{13: -100.0}`. Raises UsageError."""
    biases = {}
    for pair in pairs:
        token_id, equals, value = pair.partition("=")
        try:
            if not equals or not token_id.strip().isdigit():
                raise ValueError
            biases[int(token_id)] = float(value)
            if not _MOST_BIAS.allows(biases[int(token_id)]):
                raise ValueError
        except ValueError:
            why = "it must be a token id, as `tokenize` prints them, and a number from -1000000 to 1000000: 13=-100"
            fix = "--logit-bias 13=-100"
            raise UsageError(f"--logit-bias is {pair[:80]!r}", why=why, fix=fix) from None
    return biases


def refuse_together(flags: Mapping[str, Any], first: str, *others: str) -> None:
    """Raises UsageError naming both where flag `first` and one of `others` are typed."""
    if not flags.get(_field(first)):
        return
    for other in others:
        value = flags.get(_field(other))
        if value is not None and value is not False and value != []:
            raise UsageError(f"{first} and {other} cannot go together", why=_WHY.get((first, other)) or _WHY[first, ""])


def _field(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


_KEPT_JOB = "a job keeps its answers in a journal until it is done, to go on where it was interrupted"
_WHY = {
    ("--json", "--jsonl"): "one prints a single object, the other one object for each event",
    ("--jsonl", "--no-stream"): "--jsonl is the stream of events",
    ("--raw", "--messages"): "--raw knows no template, and messages need one",
    ("--raw", "--system"): "--raw knows no template, and a system message needs one",
    ("--raw", ""): "--raw knows no template, and its answer is printed as it is",
    ("--show-thoughts", ""): "JSON has them as `reasoning`",
    ("--show-thoughts", "--show-prompt"): "nothing is generated",
    ("--messages", ""): "the messages are the prompt",
    ("--messages", "--system"): "write the system message into the file",
    ("--continue", ""): "the last chat is gone on with by its messages, and through the chat template",
    ("--session", ""): "a chat is gone on with by its messages, and through the chat template",
    ("--continue", "--session"): "--continue goes on with the last chat, --session with the one that it names",
    ("--batch", "--private"): _KEPT_JOB,
    ("--batch", "--cache-disk"): "a job keeps no pages on the disk",
    ("--plain", "--inline"): "one is line by line, the other a screen below the prompt",
    ("--private", "--cache-disk"): "what is private is not kept on the disk",
    ("--show-prompt", "--private"): "nothing is computed, and nothing kept",
    ("--show-prompt", "--cache-disk"): "nothing is computed, and nothing kept",
    ("--batch", "--overflow"): "each prompt of a job stands alone, and one that does not fit is named before any runs",
    ("--show-prompt", "--overflow"): "no model is loaded, so that the size of its context is not known",
    ("--schema", ""): "an answer has one form",
    ("--regex", ""): "an answer has one form",
    ("--batch", ""): "the prompts are the lines of its file, and the output is a JSON object for each",
    ("--show-prompt", ""): "the prompt is printed byte for byte, and nothing is generated",
}
