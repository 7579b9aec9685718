"""`localllm connect`: what to put where, so that a program talks to this server. It writes into nobody's files."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from urllib.parse import urlsplit

import typer

from localllm.cli import options
from localllm.cli.context import CliContext, cli_context
from localllm.cli.options import argument, complete_connections, option, takes
from localllm.cli.output import SCHEMA_VERSION
from localllm.cli.server import own_url
from localllm.config import load_settings
from localllm.errors import Fix, UsageError
from localllm.runtime.client_configs import (
    CONNECTIONS,
    PLACEHOLDER_KEY,
    USUAL_CTX,
    YOUR_KEY,
    Answering,
    ClientConfig,
    Part,
    ProbedModel,
    Target,
    ask_models,
    names,
)

DEFAULT_URL = "http://127.0.0.1:8420"

CONNECT_EXAMPLES = """Examples:

\b
  localllm connect
  localllm connect aider
  localllm connect openai > tale.py
  localllm connect claude-code --model qwen3-8b
  localllm connect zed --url http://box.local:8420
"""


@takes(
    argument(
        "name", "NAME", f"The program: {', '.join(names())}. Without it: list them.", completion=complete_connections
    ),
    option("--url", f"Address of the server. Default: the running server's, else {DEFAULT_URL}.", "URL"),
    option("--model", "The model to name. Default: the one the server has, else the setting `model` (tiny).", "NAME"),
    options.AS_JSON,
)
def connect_command(
    context: typer.Context, name: str | None, url: str | None, model: str | None, as_json: bool
) -> None:
    """Print the settings with which a program uses `localllm serve`.

    They are tested, and filled in with the server's address, model and key. The settings go to stdout, and where to put
    them to stderr. No file is written.
    """
    cli = cli_context(context)
    if name is None:
        for flag, value in (("--url", url), ("--model", model)):
            if value is not None:
                why = "the list is the same for every server"
                raise UsageError(f"{flag} needs a NAME", why=why, fix=Fix.without(flag))
        _list(cli, as_json=as_json)
        return
    connection, address = _connection(name), _address(url or own_url() or DEFAULT_URL)
    if model is not None and (not model.strip() or not model.isprintable()):
        raise UsageError(f"--model is {model[:80]!r}", why="it must be a name", fix=Fix.flag("--model", "tiny"))
    key = os.environ.get("LOCALLLM_API_KEY")
    answering = ask_models(address, key)
    if model is not None:
        served = next((each for each in answering.models if each.name == model), ProbedModel(model))
    else:
        served = next(iter(answering.models), None) or ProbedModel(load_settings().settings.model)
    is_local = urlsplit(address).hostname in ("localhost", "127.0.0.1", "::1")
    is_open = answering.state == "ready" or (is_local and answering.state == "absent")
    target = Target(
        url=address,
        model=served.name,
        ctx=served.ctx or USUAL_CTX,
        has_tools=served.has_tools is not False,
        key=PLACEHOLDER_KEY if is_open and not key else YOUR_KEY,  # the key itself is printed nowhere
    )
    if as_json:
        parts = [vars(part) for part in connection.filled(target)]
        told = {"name": connection.name, "speaks": connection.speaks, "tested": connection.tested}
        known = {"url": target.url, "model": target.model, "server": answering.state}
        cli.output.json({"schema_version": SCHEMA_VERSION, **told, **known, "parts": parts}, indent=2)
    else:
        _print(cli, connection.filled(target))
    _tell(cli, connection, answering, served, target)


def _list(cli: CliContext, *, as_json: bool) -> None:
    keys = ("name", "title", "speaks", "tested")
    if as_json:
        rows = [{key: getattr(each, key) for key in keys} for each in CONNECTIONS]
        cli.output.json({"schema_version": SCHEMA_VERSION, "connections": rows}, indent=2)
        return
    cells = [[getattr(each, key) for key in keys] for each in CONNECTIONS]
    cli.output.table(("NAME", "PROGRAM", "SPEAKS", "TESTED"), cells, optional=("SPEAKS", "TESTED"))
    cli.output.note("localllm connect NAME prints what to put where")


def _connection(name: str) -> ClientConfig:
    found = next((each for each in CONNECTIONS if each.name == name.casefold()), None)
    if found is None and len(plain := _letters(name)) > 2:  # "vscode": Continue is for VS Code
        meant = [each for each in CONNECTIONS if plain in _letters(f"{each.name} {each.title}")]
        found = meant[0] if len(meant) == 1 else None
    if found is None:
        near = difflib.get_close_matches(name.casefold()[:100], names(), n=1)
        why = f"there are {', '.join(names())}; what speaks OpenAI's, Anthropic's or Ollama's dialect takes the address"
        raise UsageError(f"nothing is known of {name[:80]!r}", why=why, fix=Fix.command("connect", *near))
    return found


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text)).casefold()


def _address(url: str) -> str:
    """Without its path: each dialect has its own. Raises UsageError."""
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_right = False
    if not is_right or "@" in url or not url.isprintable() or " " in url:
        raise UsageError(
            f"--url is {url[:200]!r}",
            why="it must be http:// or https:// and a host",
            fix=Fix.flag("--url", DEFAULT_URL),
        )
    path = parts.path.rstrip("/")
    if path not in ("", "/v1") or parts.query or parts.fragment:
        why = "the paths of the server's dialects are put behind its address"
        raise UsageError(f"--url is {url[:200]!r}", why=why, fix=Fix.flag("--url", f"{parts.scheme}://{parts.netloc}"))
    return f"{parts.scheme}://{parts.netloc}"


def _print(cli: CliContext, parts: Sequence[Part]) -> None:
    """Print the text of the (first) file to stdout, so that it can be redirected, and all else to stderr."""
    whole = next((part for part in parts if part.language != "sh"), parts[0])
    for part in parts:
        cli.output.note(f"# {part.where}")
        if part is whole:
            cli.output.line(part.text)
        else:
            for line in part.text.split("\n"):
                cli.output.note(line)
        cli.output.note("")


def _tell(cli: CliContext, connection: ClientConfig, answering: Answering, served: ProbedModel, target: Target) -> None:
    note, warn = cli.output.note, cli.output.warn
    note(f"{connection.tested}; docs/using/connect.md says how")
    if answering.state == "ready":
        known = [each.name for each in answering.models]
        note(f"a server answers at {target.url}, with {', '.join(known)}")
        if served.name not in known:
            warn(f"the model {served.name!r} is not served there")
    elif answering.state == "absent":
        note(f"no server answers at {target.url} yet: localllm serve {target.model}")
    elif answering.state == "locked":
        note(f"the server at {target.url} wants its API key; LOCALLLM_API_KEY lets this command ask it, too")
    else:
        warn(f"what answers at {target.url} is not such a server, or is still being started")
    if served.ctx is None and any("$ctx" in part.template for part in connection.parts):
        note(f"how many tokens of context {target.model} has is not known here: {target.ctx} stands for it")
    if target.key == YOUR_KEY:
        note(f"put the server's API key in the place of {YOUR_KEY}")
    program = connection.title.partition(",")[0]
    if served.ctx is not None and served.ctx < connection.least_ctx:
        warn(f"{program} wants {connection.least_ctx} tokens of context; there are {served.ctx}")
    if connection.is_agent and served.has_tools is False:
        warn(f"{program} works by tools, which this model is not served with")
    if connection.note:
        note(connection.note)
