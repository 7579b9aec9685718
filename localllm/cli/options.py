"""The flags that several commands share, and which of them are settings or sampling parameters.

A flag that was not typed is None: what stands in config.toml, the registry or the checkpoint is then used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import typer

from localllm.cli.names import complete_installed, complete_models, complete_weights
from localllm.errors import UsageError

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
Device = Annotated[
    Literal["auto", "cpu", "cuda"] | None, typer.Option("--device", metavar="auto|cpu|cuda", help="Where to compute.")
]
Dtype = Annotated[
    Literal["auto", "bf16", "fp32"] | None,
    typer.Option(
        "--dtype", metavar="auto|bf16|fp32", help="Type of activations and KV cache; the weights have --weights."
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="auto|bf16|int8|int4|nf4",
        autocompletion=complete_weights,
        help="Format of the weights, packed at first use; int4-g32, -g64, -g128 too. "
        "auto: what is packed already, else int4 if it is not small.",
    ),
]
Threads = Annotated[int | None, typer.Option("--threads", metavar="N", help="CPU threads.")]
Offline = Annotated[bool | None, typer.Option("--offline", help="Never use the network.")]

# A sequence has its KV cache reserved for the longest answer that it may give: with the rest of the context for each,
# few prompts of a job would have room at once.
DEFAULT_MAX_TOKENS = 512
DEFAULT_PARALLEL = 32  # where the memory for their KV cache allows it

# The defaults here are those of a model that recommends none.
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", metavar="N", help="Longest answer, in tokens. Default: to the context's end."),
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", metavar="T", help="0 to 100. 0: always the likeliest; above 1: wild. Default: 0.8."),
]
TopK = Annotated[
    int | None, typer.Option("--top-k", metavar="N", help="Draw from the N likeliest tokens. Default: 0, from all.")
]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", metavar="P", help="0 to 1: draw from the likeliest that sum to P. Default: 1."),
]
MinP = Annotated[
    float | None,
    typer.Option("--min-p", metavar="P", help="0 to 1: drop tokens below P times the likeliest one's. Default: 0."),
]
TypicalP = Annotated[
    float | None, typer.Option("--typical-p", metavar="P", help="0 to 1: locally typical sampling. Default: 1, off.")
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
        "--frequency-penalty", metavar="X", help="-100 to 100: taken off for each use of a token. Default: 0."
    ),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option("--presence-penalty", metavar="X", help="-100 to 100: taken off once for a used token. Default: 0."),
]
DryMultiplier = Annotated[
    float | None,
    typer.Option("--dry-multiplier", metavar="X", help="0 to 100: strength of the DRY penalty. Default: 0, off."),
]
DryBase = Annotated[
    float | None,
    typer.Option("--dry-base", metavar="X", help="DRY, 1 to 100: growth with each repeated token. Default: 1.75."),
]
DryAllowedLength = Annotated[
    int | None,
    typer.Option(
        "--dry-allowed-length", metavar="N", help="DRY, from 1: repeated tokens that cost nothing. Default: 2."
    ),
]
LogitBias = Annotated[
    list[str] | None, typer.Option("--logit-bias", metavar="ID=X", help="Added to a token's logit; may be repeated.")
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", help="The same seed gives the same text. Default: drawn; --stats tells it."),
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="End the answer before TEXT; may be repeated.")
]

# Flags that are settings too (config.toml, LOCALLLM_*), by their name in both.
_SETTING_NAMES = (
    "system", "ctx", "ram", "vram", "device", "dtype", "weights", "threads", "offline", "max_tokens", "temperature",
    "top_k", "top_p",
    "min_p", "typical_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed", "stop",
)  # fmt: skip
_DRY_NAMES = ("dry_multiplier", "dry_base", "dry_allowed_length")
SAMPLING_SETTING_NAMES = _SETTING_NAMES[_SETTING_NAMES.index("max_tokens") :]


def setting_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of a command that are settings, as `load_settings` takes them: None where one was not typed."""
    chosen = {name: flags.get(name) for name in _SETTING_NAMES}
    return {name: (tuple(value) or None) if isinstance(value, list) else value for name, value in chosen.items()}


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
        except ValueError:
            why = "it must be a token id, as `tokenize` prints them, and a number: 13=-100"
            fix = "localllm tokenize MODEL TEXT"
            raise UsageError(f"--logit-bias is {pair!r}", why=why, fix=fix) from None
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


_WHY = {
    ("--json", "--jsonl"): "one prints a single object, the other one object for each event",
    ("--jsonl", "--no-stream"): "--jsonl is the stream of events",
    ("--raw", "--messages"): "--raw knows no template, and messages need one",
    ("--raw", "--system"): "--raw knows no template, and a system message needs one",
    ("--messages", ""): "the messages are the prompt",
    ("--messages", "--system"): "write the system message into the file",
    ("--batch", ""): "the prompts are the lines of its file, and the output is a JSON object for each",
    ("--show-prompt", ""): "the prompt is printed byte for byte, and nothing is generated",
}
