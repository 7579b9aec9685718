"""`localllm ps`, `load` and `stop`: what the server of this user has loaded, and what it is to load or let go."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import typer

from localllm.cli import options
from localllm.cli.context import cli_context
from localllm.cli.options import argument, complete_adapters, complete_installed, option, takes
from localllm.cli.output import SCHEMA_VERSION
from localllm.config import format_bytes
from localllm.errors import MODEL, Fix, LocalLLMError, ModelNotFoundError, UsageError

_TIERS = {"vram": "GPU", "ram": "memory", "disk": "disk"}
_WHY_NOT_FOUND = (
    "none of this user's listens at its socket; one that was started with --ray, or beside another, is not found here"
)

_MODEL = argument("model", "MODEL", "A model's name, or a folder.", completion=complete_installed, required=True)


@takes(options.AS_JSON)
def ps_command(context: typer.Context, as_json: bool) -> None:
    """List the models that the server has loaded.

    RESERVED is the most memory that a model may use by its plan. `ended`: its process was killed, and the next request
    loads it again. `silent`: its process is stopped and does not answer.
    """
    output = cli_context(context).output
    told = _asked("GET", "/models", is_needed=False)
    rows = [] if told is None else told["models"]
    if as_json:
        urls = [] if told is None else told["urls"]
        output.json(
            {"schema_version": SCHEMA_VERSION, "running": told is not None, "urls": urls, "models": rows}, indent=2
        )
        return
    if not rows:
        why = f"no server is found (localllm serve MODEL starts one): {_WHY_NOT_FOUND}"
        output.note(why if told is None else "no model is loaded")
        return
    header = ("NAME", "STATE", "WEIGHTS", "CONTEXT", "RESERVED", "ANSWERS", "UNTIL", "PID")
    output.table(header, [_cells(row) for row in rows], optional=("PID", "WEIGHTS"))
    for row in rows:
        if row.get("adapters"):
            output.line(f"{row['name']} has adapters in memory: {', '.join(row['adapters'])}")


@takes(
    _MODEL,
    option(
        "--adapter",
        "An adapter (LoRA) to load too; requests name it as MODEL:NAME.",
        "NAME[:SCALE]",
        completion=complete_adapters,
    ),
)
def load_command(context: typer.Context, model: str, adapter: str | None) -> None:
    """Load a model on the server before the first request.

    Other models are unloaded if their memory is needed.
    """
    output = cli_context(context).output
    with output.progress(f"loading {model}") as line:
        line.show(f"loading {model} ...")
        told = _asked("POST", "/load", {"model": _own(model), **_adapter(adapter)})
    assert told is not None
    output.note(f"{told['name']} is loaded")


@takes(
    argument("model", "MODEL", "The model to unload. Without it, the server ends.", completion=complete_installed),
    option(
        "--adapter", "Unload this adapter alone, when no answer uses it any more.", "NAME", completion=complete_adapters
    ),
)
def stop_command(context: typer.Context, model: str | None, adapter: str | None) -> None:
    """Unload a model, or end the server.

    Running answers end with an error. The next request for a model loads it again.
    """
    output = cli_context(context).output
    if model is None and adapter is not None:
        why = "an adapter is unloaded from a model"
        raise UsageError("--adapter is without a MODEL", why=why, fix=Fix.command("stop", MODEL, "--adapter", adapter))
    if model is None:
        _asked("POST", "/stop", {})
        output.note("the server ends")
        return
    told = _asked("POST", "/unload", {"model": _own(model), **({} if adapter is None else {"adapter": _own(adapter)})})
    assert told is not None
    what = "leaves when the answers that use it have ended" if told.get("is_used") else "is unloaded"
    output.note(f"{told['name']} {what}")


def own_url() -> str | None:
    """Return an address of this user's server for clients on this machine, or None."""
    told = _asked("GET", "/models", is_needed=False)
    url = next(iter(told["urls"]), None) if told is not None else None
    return None if url is None else url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def _adapter(word: str | None) -> dict[str, str]:
    """Return an adapter by its name on the hub or its whole path: the server may have been started in another folder.
    Raises AdapterError, UsageError."""
    if word is None:
        return {}
    from localllm.hub.adapters import locate_adapter, split_scale

    name, scale = split_scale(word)
    files = locate_adapter(name)
    return {"adapter": f"{files.hub_name or files.path}:{scale!r}"}


def _own(word: str) -> str:
    """A folder or a GGUF file by its whole path: the server may have been started in another folder."""
    from pathlib import Path

    from localllm.present import is_file, is_folder

    path = Path(word)
    is_path = is_folder(path) or (path.suffix.casefold() == ".gguf" and is_file(path))
    return str(path.absolute()) if is_path else word


def _asked(
    method: str, path: str, body: Mapping[str, Any] | None = None, *, is_needed: bool = True
) -> dict[str, Any] | None:
    """Ask the server and return its reply; None where there is no server. Raises what it refuses, and LocalLLMError
    where one is needed."""
    from localllm.hub.names import understand
    from localllm.registry import load_registry
    from localllm.runtime.server_client import Server, ServerRefusedError

    server = Server.find()
    try:
        if server is not None:
            told: dict[str, Any] = server.ask(method, path, body)
            return told
    except OSError:  # it was killed: what it left says nothing
        pass
    except ServerRefusedError as error:
        if error.status != 404:
            raise
        if path == "/load" and body is not None:  # an unknown name is told with the line that has the nearest one
            understand(body["model"], load_registry())
        raise ModelNotFoundError(error.what, why=error.why, fix=error.fixes or Fix.command("list")) from None
    if is_needed:
        raise LocalLLMError("no server is found", why=_WHY_NOT_FOUND, fix=Fix.command("serve", MODEL))
    return None


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    memory = ", ".join(
        f"{format_bytes(count)} {_TIERS.get(tier, tier)}" for tier, count in row.get("memory", {}).items() if count
    )
    answers = f"{row['running']}, {row['waiting']} wait" if row.get("waiting") else str(row.get("running", ""))
    expires_at = row.get("expires_at")
    until = "its room is needed" if expires_at is None else time.strftime("%H:%M:%S", time.localtime(expires_at))
    if row["state"] != "loaded":
        until = "-"
    return (
        row["name"], row["state"], row.get("weights", ""), str(row.get("ctx", "")), memory, answers, until,
        str(row["pid"] or ""),
    )  # fmt: skip
