"""Pulling a model on the command line: because it was asked for, or because a command needs it and it is not here."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from localllm.cli.context import CliContext
from localllm.cli.options import option
from localllm.config import ResolvedSettings, format_bytes
from localllm.errors import AdapterError, Fix, LocalLLMError, ModelNotFoundError
from localllm.runtime.download import fetch
from localllm.runtime.fit_check import judge
from localllm.settings import MACHINE

if TYPE_CHECKING:
    from localllm.hub import ModelFiles, Progress, PullProgress
    from localllm.hub.adapters import AdapterFiles

Files = TypeVar("Files")
PULL = option(
    "--pull",
    "Download the model and its adapters if they are not on this disk.\n"
    "Without this flag you are asked on a terminal; elsewhere it is an error.",
    group=MACHINE,
)


def pull(cli: CliContext, name: str, resolved: ResolvedSettings) -> ModelFiles:
    """Fetch a model's files, and show how far it is. Raises what `hub.pull` does."""
    return _watched(cli, name, lambda progress: fetch(name, resolved, progress))


def pull_adapter(cli: CliContext, name: str, resolved: ResolvedSettings) -> AdapterFiles:
    """Fetch an adapter's files, and show how far it is. Raises what `adapters.pull_adapter` does."""
    from localllm.hub import adapters

    offline = resolved.settings.offline
    return _watched(cli, name, lambda progress: adapters.pull_adapter(name, progress=progress, offline=offline))


def _watched(cli: CliContext, name: str, fetched: Callable[[Progress], Files]) -> Files:
    """Return what is fetched, and show meanwhile how far it is."""
    cli.interrupts.farewell = f"interrupted; what was fetched is kept. To go on: localllm pull {shlex.quote(name)}"
    noted = ""
    with cli.output.progress(f"pulling {name}", plain_lines=True) as line:

        def show(progress: PullProgress) -> None:
            """Show the total and the current file in one line; what is out of the ordinary as a note."""
            nonlocal noted
            if progress.phase in ("waiting", "retrying") and progress.note != noted:
                noted = progress.note
                line.interject(noted)
            if not progress.total_bytes:
                line.show(f"{progress.phase} {progress.note}")
                return
            share = f"{format_bytes(progress.file_done_bytes)}/{format_bytes(progress.file_bytes)}"
            verb = "verifying " if progress.phase == "verifying" else ""
            line.update(progress.done_bytes, progress.total_bytes, f"{verb}{progress.file} {share}")

        files = fetched(show)
    cli.interrupts.farewell = ""
    return files


def pull_absent(
    cli: CliContext, resolved: ResolvedSettings, flags: Mapping[str, Any], error: ModelNotFoundError
) -> None:
    """Pull the model that `error` says is not here, where --pull or the user wants that.

    Raises the error where there is nothing to pull, where the command has no --pull, and where nobody can be asked.
    Leaves where the answer is no.
    """
    name = next((fix.words[2] for fix in error.fixes if fix.runs("pull")), None)
    if name is None or "pull" not in flags or resolved.settings.offline:
        raise error
    if not flags["pull"]:
        if not cli.can_ask:
            error.fix = [*error.fixes, Fix.flag("--pull")]
            raise error
        cli.output.note(f"{name} is not on this disk")
        try:
            cli.output.note(", ".join(_facts(cli, name, resolved)))
        except ModelNotFoundError as there:  # the hub has none of that name: one that is here may have been meant
            there.fix = [*(fix for fix in error.fixes if fix.kind == "model"), *there.fixes]
            raise
        _require_yes(cli, name, error)
    pull(cli, name, resolved)


def pull_absent_adapter(
    cli: CliContext, name: str, resolved: ResolvedSettings, error: AdapterError, *, unasked: bool
) -> None:
    """Pull the adapter that `error` says is not here, with --pull (`unasked`) or where the user wants that. Nothing
    happens where nobody can be asked, or the hub would not help: whoever uses the adapter tells. Leaves where the
    answer is no."""
    from localllm.hub.adapters import download_bytes
    from localllm.hub.names import pull_command

    if not unasked:
        if not cli.can_ask or resolved.settings.offline or pull_command(name) not in error.fixes:
            return
        cli.output.note(f"the adapter {name} is not on this disk")
        with cli.output.progress("asking the hub"):
            num_bytes = download_bytes(name)
        cli.output.note(f"{format_bytes(num_bytes)} to download")
        _require_yes(cli, name, error)
    pull_adapter(cli, name, resolved)


def _require_yes(cli: CliContext, name: str, error: LocalLLMError) -> None:
    """Ask whether to download, and leave where the answer is no. error: says that it is not here."""
    if not cli.confirms("Download it?"):
        cli.output.note(f"nothing was downloaded; localllm pull {shlex.quote(name)} does it")
        raise typer.Exit(error.exit_code)


def _facts(cli: CliContext, name: str, resolved: ResolvedSettings) -> list[str]:
    """Return what a download takes and how the model would run, for as much as is known. Asks the hub for the size."""
    from localllm import hub
    from localllm.registry import load_registry

    with cli.output.progress("asking the hub") as line:
        facts = [f"{format_bytes(hub.download_bytes(name, offline=False))} to download"]
        verdict = judge(name, resolved, line.show)
    entry = load_registry().find(name)
    if entry is not None:
        facts.append(f"licence {entry.licence}")
    if verdict.memory_bytes:
        facts.append(f"{format_bytes(verdict.memory_bytes)} in memory")
    if verdict.kind != "unknown":
        facts.append(verdict.details if verdict.tok_s is not None else f"{verdict.text} ({verdict.why})")
    return facts
