"""`localllm cache`: what is kept on the disk of earlier conversations, and how to be rid of it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer

from localllm.cli import options
from localllm.cli.app import PlainCommand, plain_group
from localllm.cli.context import CliContext, cli_context
from localllm.cli.options import option, takes
from localllm.cli.output import SCHEMA_VERSION
from localllm.config import format_bytes, load_settings
from localllm.errors import Fix, LocalLLMError, ModelNotFoundError

if TYPE_CHECKING:
    from localllm.cache.page_folder import KeptPages

_LATEST_S = 253_000_000_000  # in the year 9987: no date is later, a file's time may be

cache_app = plain_group("cache", "")


@cache_app.callback(invoke_without_command=True)
@takes(options.AS_JSON)
def cache(context: typer.Context, as_json: bool) -> None:
    """Show or clear the prefix cache on the disk.

    It holds the KV cache and the tokens of earlier prompts, readable only by you. Later runs continue from it instead
    of computing the prompt again. Without a command: `info`.
    """
    if context.invoked_subcommand is None:
        _info(cli_context(context), as_json)


@cache_app.command("info", cls=PlainCommand)
@takes(options.AS_JSON)
def info(context: typer.Context, as_json: bool) -> None:
    """Show the prefix cache on the disk, by model.

    Also shows its folder and its limit, which is the setting `cache_disk`. The least recently used pages are evicted
    first.
    """
    _info(cli_context(context), as_json or _typed_before(context))


@cache_app.command("clear", cls=PlainCommand)
@takes(
    option("--model", "Only the cache of this model, named as in `cache info`.", "NAME"),
    options.UNASKED,
    options.AS_JSON,
)
def clear(context: typer.Context, model: str | None, yes: bool, as_json: bool) -> None:
    """Delete the prefix cache on the disk.

    Later prompts are computed again. A running model is not disturbed.
    """
    from localllm.cache.page_folder import (
        kept_pages,
        kv_root,
        quarantined_sizes,
        remove_pages,
        remove_quarantined,
        root_folders,
    )

    cli, directory = cli_context(context), kv_root()
    kept = kept_pages(directory)
    chosen = _of_model(kept, model) if model is not None else kept
    size_bytes = sum(pages.num_bytes for pages in chosen) + (
        0 if model is not None else sum(quarantined_sizes(directory))
    )
    roots = [pages.root for pages in chosen] if model is not None else root_folders(directory)
    what = "what is kept of conversations" + (f" with {model}" if model is not None else "")
    if size_bytes and not yes:
        of_model = f" --model {shlex.quote(model)}" if model is not None else ""
        cli.ask_to_delete(f"{what} ({format_bytes(size_bytes)})", f"localllm cache clear{of_model} --yes")
    try:
        freed_bytes = remove_pages(directory, roots) + (remove_quarantined(directory) if model is None else 0)
    except OSError as error:
        raise LocalLLMError(
            "the cache of conversations could not be cleared",
            why=f"{error.strerror or error} ({error.filename or directory})",
            fix=f"ls -lR {shlex.quote(str(directory))}",
        ) from None
    if as_json or _typed_before(context):
        cli.output.json({"schema_version": SCHEMA_VERSION, "model": model, "freed_bytes": freed_bytes})
    elif size_bytes:
        cli.output.line(f"removed {what}: {format_bytes(freed_bytes)} freed")
    else:
        cli.output.note(f"nothing is kept in {directory}")


def _typed_before(context: typer.Context) -> bool:
    """`localllm cache --json info` is as good as `localllm cache info --json`."""
    return context.parent is not None and bool(context.parent.params.get("as_json"))


def _info(cli: CliContext, as_json: bool) -> None:
    from localllm.cache.page_folder import default_limit_bytes, free_bytes, kept_pages, kv_root, quarantined_sizes

    directory = kv_root()
    kept, quarantined = kept_pages(directory), quarantined_sizes(directory)
    size_bytes = sum(pages.num_bytes for pages in kept)
    asked_bytes = load_settings().settings.cache_disk
    limit_bytes = default_limit_bytes(directory, size_bytes) if asked_bytes is None else asked_bytes
    if as_json:
        fields = {
            "schema_version": SCHEMA_VERSION,
            "directory": str(directory),
            "limit_bytes": limit_bytes,
            "free_bytes": free_bytes(directory),
            "size_bytes": size_bytes,
            "pages": sum(pages.num_pages for pages in kept),
            "tokens": sum(pages.num_tokens for pages in kept),
            "snapshots": sum(pages.num_snapshots for pages in kept),
            "quarantined": len(quarantined),
            "quarantined_bytes": sum(quarantined),
            "models": [_fields(pages) for pages in kept],
        }
        cli.output.json(fields, indent=2)
        return
    why = "cache_disk is off" if asked_bytes == 0 else "its disk has no room, or cannot be written"
    limit = f"at most {format_bytes(limit_bytes)}" if limit_bytes else f"and nothing is added: {why}"
    cli.output.line(f"{format_bytes(size_bytes)} in {directory}, {limit}")
    if kept:
        header = ("MODEL", "FORMAT", "TOKENS", "SIZE", "LAST USED")
        rows = [
            (
                pages.about.get("model", "-"),
                ", ".join(f"{key} {pages.about[key]}" for key in ("weights", "kv", "dtype") if key in pages.about),
                str(pages.num_tokens),
                format_bytes(pages.num_bytes),
                _when(pages).astimezone().strftime("%Y-%m-%d %H:%M"),
            )
            for pages in kept
        ]
        cli.output.table(header, rows, optional=("LAST USED", "FORMAT"))
    if quarantined:
        count = "1 damaged file" if len(quarantined) == 1 else f"{len(quarantined)} damaged files"
        verb = "is" if len(quarantined) == 1 else "are"
        cli.output.note(f"{count} ({format_bytes(sum(quarantined))}) {verb} set aside there")


def _fields(pages: KeptPages) -> dict[str, Any]:
    return {
        "model": pages.about.get("model"),
        "about": dict(pages.about),
        "pages": pages.num_pages,
        "tokens": pages.num_tokens,
        "snapshots": pages.num_snapshots,
        "size_bytes": pages.num_bytes,
        "last_used": _when(pages).isoformat(timespec="seconds"),
    }


def _when(pages: KeptPages) -> datetime:
    return datetime.fromtimestamp(min(max(0, pages.used_ns // 1_000_000_000), _LATEST_S), UTC)


def _of_model(kept: Sequence[KeptPages], model: str) -> list[KeptPages]:
    chosen = [pages for pages in kept if pages.about.get("model") == model]
    if not chosen:
        names = sorted({pages.about["model"] for pages in kept if "model" in pages.about})
        why = f"there is something of {', '.join(names)}" if names else "there is nothing of any model"
        raise ModelNotFoundError(
            f"nothing is kept of conversations with {model}", why=why, fix=Fix.command("cache", "info")
        )
    return chosen
