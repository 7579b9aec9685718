"""The commands of `localllm` and their help. Imports every command, none of which imports more than it must."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Annotated, Any

import typer

from localllm.cli import bench, chat, connect, perplexity, plan, pull, quantize, run, serve, tokenize
from localllm.cli.bench import bench_command
from localllm.cli.cache import cache_app
from localllm.cli.chat import chat_command
from localllm.cli.commands import PlainCommand, PlainGroup
from localllm.cli.config import config_app
from localllm.cli.connect import connect_command
from localllm.cli.doctor import doctor_command
from localllm.cli.front import front_of
from localllm.cli.help import help_command
from localllm.cli.list import list_command
from localllm.cli.perplexity import perplexity_command
from localllm.cli.plan import plan_command
from localllm.cli.pull import pull_command
from localllm.cli.quantize import quantize_command
from localllm.cli.rm import rm_command
from localllm.cli.run import run_command
from localllm.cli.serve import serve_command
from localllm.cli.server import load_command, ps_command, stop_command
from localllm.cli.sessions import sessions_app
from localllm.cli.show import show_command
from localllm.cli.tokenize import tokenize_command
from localllm.version import __version__

_HELP_FLAGS = {"help_option_names": ["-h", "--help"]}

# Plain help: the same on a terminal, in a pipe and to a screen reader, and without rich's start-up time.
app = typer.Typer(
    name="localllm",
    cls=PlainGroup,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=_HELP_FLAGS,
    epilog="""Exit codes: 0 done, 1 failure, 2 usage, 3 model absent, 4 does not fit, 5 context overflow, 6 download,
7 schema, 130 interrupted (143: by SIGTERM, 129: by SIGHUP). `localllm help CODE` explains an error.""",
)


@app.callback(invoke_without_command=True)
def localllm(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[  # noqa: ARG001 (taken off the line by `dispatch`, wherever it stands; here for the help)
        bool, typer.Option("--debug", help="Show the traceback of an error; may also stand behind the command.")
    ] = False,
) -> None:
    """Run large language models on this machine: on one GPU, or on a plain CPU.

    `localllm run "Tell me a tale about a fox."` works at once, with the model in the package; `localllm list --all`
    shows what can be pulled.
    """
    output = front_of(context).output
    if version:
        output.line(f"localllm {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        output.line(context.get_help())


def _add(name: str, function: Callable[..., Any], epilog: str | None = None) -> None:
    app.command(name, cls=PlainCommand, epilog=epilog, context_settings=_HELP_FLAGS)(function)


_add("run", run_command, run.EXAMPLES)
_add("chat", chat_command, chat.EXAMPLES)
_add("serve", serve_command, serve.EXAMPLES)
_add("ps", ps_command)
_add("load", load_command)
_add("stop", stop_command)
_add("connect", connect_command, connect.EXAMPLES)
_add("pull", pull_command, pull.EXAMPLES)
_add("quantize", quantize_command, quantize.EXAMPLES)
_add("list", list_command)
_add("show", show_command)
_add("rm", rm_command)
_add("tokenize", tokenize_command, tokenize.EXAMPLES)
_add("perplexity", perplexity_command, perplexity.EXAMPLES)
_add("plan", plan_command, plan.EXAMPLES)
_add("bench", bench_command, bench.EXAMPLES)
_add("doctor", doctor_command)
app.add_typer(cache_app)
app.add_typer(sessions_app)
app.add_typer(config_app)
_add("help", help_command)


def app_of(words: Sequence[str]) -> typer.Typer:
    """`app`, with no more than the command that the words begin with: typer takes 2 ms to read each. `help` asks the
    others for theirs."""
    found, names = copy(app), words[:1]
    if names == ["help"]:
        return app
    found.registered_commands = [each for each in app.registered_commands if [each.name] == names]
    found.registered_groups = [
        each for each in app.registered_groups if each.typer_instance and [each.typer_instance.info.name] == names
    ]
    return found if found.registered_commands or found.registered_groups else app
