"""`localllm pull`: fetches a model, going on where an earlier pull stopped."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

import typer

from localllm.cli import options
from localllm.cli.front import front_of
from localllm.cli.names import is_model
from localllm.cli.output import SCHEMA_VERSION, Output, ProgressLine
from localllm.config import ResolvedSettings, format_bytes, load_settings
from localllm.errors import ModelNotFoundError

if TYPE_CHECKING:
    from localllm.hub import PullProgress

EXAMPLES = """Examples:

\b
  localllm pull mistral-7b
  localllm pull HuggingFaceTB/SmolLM2-135M-Instruct
  HF_TOKEN=hf_... localllm pull gemma2-2b
"""


def pull_command(
    context: typer.Context,
    model: options.RequiredModel,
    offline: options.Offline = None,
    as_json: options.AsJson = False,
) -> None:
    """Fetch a model from the Hugging Face hub.

    A pull that was interrupted goes on where it stopped.
    """
    from localllm import hub

    front = front_of(context)
    resolved = load_settings({"offline": offline})
    front.interrupts.farewell = f"interrupted; what was fetched is kept. To go on: localllm pull {shlex.quote(model)}"
    with front.output.progress(f"pulling {model}", plain_lines=True) as line:
        try:
            files = hub.pull(model, offline=resolved.settings.offline, progress=_Teller(front.output, line).tell)
        except ModelNotFoundError as error:
            if is_model(model):
                error.fix = _online_again(resolved, model) or error.fix
            raise
    size_bytes = sum(path.stat().st_size for path in files.directory.iterdir() if path.is_file())
    if as_json:
        fields = {"model": files.name, "repo": files.repo, "revision": files.revision}
        where = {"directory": str(files.directory), "size_bytes": size_bytes}
        front.output.json({"schema_version": SCHEMA_VERSION, **fields, **where})
    else:
        front.output.line(f"{files.name}: {format_bytes(size_bytes)} in {files.directory}")


def _online_again(resolved: ResolvedSettings, model: str) -> str:
    """The command without what keeps it offline; "" where nothing does."""
    from huggingface_hub import constants

    command = f"localllm pull {shlex.quote(model)}"
    origin = resolved.origins["offline"]
    if resolved.settings.offline and origin.kind == "file":
        return f"offline = false in {origin.where}, or for once: LOCALLLM_OFFLINE=0 {command}"
    variables = [
        name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if constants.HF_HUB_OFFLINE and os.environ.get(name)
    ]
    if origin.kind == "environment" and resolved.settings.offline:
        variables.append(origin.where)
    if variables:
        return f"env {' '.join(f'-u {name}' for name in variables)} {command}"
    return command if resolved.settings.offline else ""


class _Teller:
    """Shows a pull's progress: the total and the current file in one line; what is out of the ordinary as a note."""

    def __init__(self, output: Output, line: ProgressLine) -> None:
        self._output = output
        self._line = line
        self._said = ""

    def tell(self, progress: PullProgress) -> None:
        if progress.phase in ("waiting", "retrying") and progress.note != self._said:
            self._said = progress.note
            self._line.interject(progress.note)
        if not progress.total_bytes:
            self._line.show(f"{progress.phase} {progress.note}")
            return
        share = f"{format_bytes(progress.file_done_bytes)}/{format_bytes(progress.file_bytes)}"
        verb = "verifying " if progress.phase == "verifying" else ""
        self._line.update(progress.done_bytes, progress.total_bytes, f"{verb}{progress.file} {share}")
