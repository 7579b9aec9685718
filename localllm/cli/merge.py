"""`localllm merge`: a model with adapters in its weights, as a checkpoint for any program."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from localllm.cli import options
from localllm.cli.context import CliContext, cli_context
from localllm.cli.interrupts import Interrupted
from localllm.cli.options import argument, complete_adapters, complete_installed, option, takes
from localllm.cli.output import SCHEMA_VERSION
from localllm.cli.selection import select
from localllm.config import format_bytes

if TYPE_CHECKING:
    from localllm.hub import ModelFiles
    from localllm.hub.adapters import AdapterFiles

MERGE_EXAMPLES = """Examples:

\b
  localllm merge qwen3-8b my-lora -o qwen3-8b-mine
  localllm merge qwen3-8b ./style:0.7 ./facts.gguf -o merged
  localllm run ./merged "..."
"""


@takes(
    argument(
        "base",
        "BASE",
        "The model that the adapters change; of a preset its own come first.",
        completion=complete_installed,
        required=True,
    ),
    argument(
        "adapters",
        "ADAPTER[:SCALE]...",
        "A name of `localllm adapters`, ORG/REPO, a folder of PEFT's or a GGUF file; and a factor of what it adds.",
        list[str],
        completion=complete_adapters,
        required=True,
    ),
    option("-o --output", "The folder to make. Nothing may be in it yet.", "DIR", required=True),
    options.AS_JSON,
)
def merge_command(context: typer.Context, **flags: Any) -> None:
    """Write a model and its adapters (LoRA) as one checkpoint.

    The folder has bf16 weights, the tokenizer and the chat template: this program, transformers and vLLM open it. What
    several adapters add is added up. A quantized model (GPTQ, AWQ, FP8, bitsandbytes) becomes bf16 too.
    """
    from localllm.hub.adapters import locate_adapter, split_scale
    from localllm.hub.names import looks_like_path, path_of

    cli = cli_context(context)
    selection = select(cli, flags["base"], {})
    files, preset = selection.files, selection.preset
    texts = [*(preset.values.get("adapter", ()) if preset else ()), *flags["adapters"]]
    adapters = [(locate_adapter(name), scale) for name, scale in map(split_scale, texts)]
    target = path_of(flags["output"])
    size_bytes = _merge(cli, flags["base"], files, adapters, target)
    if flags["as_json"]:
        merged = [{"name": adapter.name, "scale": scale} for adapter, scale in adapters]
        fields = {"model": files.name, "adapters": merged, "directory": str(target.resolve())}
        cli.output.json({"schema_version": SCHEMA_VERSION, **fields, "size_bytes": size_bytes})
        return
    cli.output.line(f"{files.name} with {_listed(adapters)}: {format_bytes(size_bytes)} in {target}")
    typed = str(target) if looks_like_path(str(target)) else f"./{target}"
    cli.output.note(f'`{shlex.join(["localllm", "run", typed])} "..."` uses it')


def _merge(
    cli: CliContext, word: str, files: ModelFiles, adapters: Sequence[tuple[AdapterFiles, float]], target: Path
) -> int:
    """Write the checkpoint, and show how far that is; return its bytes. word: the base, as it was typed."""
    from localllm.models.merge import merge

    interrupts = cli.interrupts
    paths = [(adapter.path, scale) for adapter, scale in adapters]

    def advance(done: int, total: int) -> None:
        if interrupts.exit_code is not None:
            raise Interrupted(interrupts.exit_code)
        line.update(done, total)

    interrupts.farewell = f"interrupted; {target} was not made"
    with cli.output.progress(f"merging {files.name}", plain_lines=True) as line:
        line.show(f"merging {files.name} ...")
        with interrupts.stopping(lambda: None):  # what was begun is removed in peace
            size_bytes = merge(files.directory, paths, target.resolve(), advance, model=word)
    interrupts.farewell = ""
    return size_bytes


def _listed(adapters: Sequence[tuple[AdapterFiles, float]]) -> str:
    return " and ".join(adapter.name if scale == 1 else f"{adapter.name}:{scale:g}" for adapter, scale in adapters)
