"""`localllm pull`: fetches a model, going on where an earlier pull stopped."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import typer

from localllm.cli import options
from localllm.cli.context import cli_context
from localllm.cli.options import takes
from localllm.cli.output import SCHEMA_VERSION, Output, ProgressLine
from localllm.config import format_bytes, load_settings
from localllm.runtime.download import fetch

if TYPE_CHECKING:
    from localllm.hub import PullProgress

EXAMPLES = """Examples:

\b
  localllm pull mistral-7b
  localllm pull HuggingFaceTB/SmolLM2-135M-Instruct
  HF_TOKEN=hf_... localllm pull gemma2-2b
"""


@takes(options.REQUIRED_MODEL, "offline", options.AS_JSON)
def pull_command(context: typer.Context, **flags: Any) -> None:
    """Fetch a model from the Hugging Face hub.

    A pull that was interrupted goes on where it stopped.
    """
    front, model = cli_context(context), flags["model"]
    resolved = load_settings({"offline": flags["offline"]})
    front.interrupts.farewell = f"interrupted; what was fetched is kept. To go on: localllm pull {shlex.quote(model)}"
    with front.output.progress(f"pulling {model}", plain_lines=True) as line:
        files = fetch(model, resolved, _Teller(front.output, line).tell)
    size_bytes = sum(path.stat().st_size for path in files.directory.iterdir() if path.is_file())
    if flags["as_json"]:
        fields = {"model": files.name, "repo": files.repo, "revision": files.revision}
        where = {"directory": str(files.directory), "size_bytes": size_bytes}
        front.output.json({"schema_version": SCHEMA_VERSION, **fields, **where})
    else:
        front.output.line(f"{files.name}: {format_bytes(size_bytes)} in {files.directory}")


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
