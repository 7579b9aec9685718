"""The commands of `localllm`, each of which is imported when it is called or when its own help is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Annotated, Any

import typer

from localllm.cli.commands import PlainCommand, PlainGroup
from localllm.cli.context import cli_context
from localllm.version import __version__

# Plain help: the same on a terminal, in a pipe and to a screen reader, and without rich's start-up time.
_PLAIN: Mapping[str, Any] = MappingProxyType(
    {
        "rich_markup_mode": None,
        "pretty_exceptions_enable": False,
        "context_settings": {"help_option_names": ["-h", "--help"]},
    }
)
# In the order of the help: where a command is, and the first line of its help, which listing them needs.
COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "run": ("run", "Answer one prompt, or with --batch many."),
        "chat": ("chat", "Talk with a model, on the full screen, or line by line."),
        "serve": (
            "serve",
            "Serve a model to the applications of this machine, and others on this disk when they are asked for.",
        ),
        "ps": ("server", "List the models that the server has loaded."),
        "load": ("server", "Have the server load a model, so that the first question need not wait for it."),
        "stop": ("server", "Unload a model, or end the server."),
        "connect": ("connect", "Print what a program needs to talk to `localllm serve`."),
        "pull": ("pull", "Fetch a model from the Hugging Face hub."),
        "quantize": ("quantize", "Pack a model's weights ahead of time."),
        "list": ("list", "List the models on this disk."),
        "show": ("show", "Show what is known about one model."),
        "rm": ("rm", "Delete a model from this disk."),
        "tokenize": ("tokenize", "Print the tokens of a text."),
        "perplexity": ("perplexity", "Measure how well a model foretells a text."),
        "plan": ("plan", "Show where a model would rest, and how fast it would be."),
        "bench": ("bench", "Measure how fast a model is on this machine."),
        "doctor": ("doctor", "Check this machine, and say what helps."),
        "help": ("help", "Explain an error or a command."),
        "cache": ("cache", "Show or clear what is kept of conversations."),
        "sessions": ("sessions", "List, read, search, export and delete kept chats."),
        "config": ("config", "Show the settings."),
    }
)

app = typer.Typer(
    name="localllm",
    cls=PlainGroup,
    epilog="""Exit codes: 0 done, 1 failure, 2 usage, 3 model absent, 4 does not fit, 5 context overflow, 6 download,
7 schema, 130 interrupted (143: by SIGTERM, 129: by SIGHUP). `localllm help CODE` explains an error.""",
    **_PLAIN,
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
    output = cli_context(context).output
    if version:
        output.line(f"localllm {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        output.line(context.get_help())


def root_command() -> Any:
    """The group of all commands, none of which is imported yet."""
    root: Any = typer.main.get_command(app)
    root.load = load_command
    root.commands = {name: PlainCommand(name, help=summary) for name, (_, summary) in COMMANDS.items()}
    return root


def load_command(name: str) -> Any:
    """A command, or a group of them, as its module has it."""
    module = import_module(f"localllm.cli.{COMMANDS[name][0]}")
    group = getattr(module, f"{name}_app", None)
    if group is not None:
        return typer.main.get_command(group)
    alone = typer.Typer(add_completion=False, **_PLAIN)
    function = getattr(module, f"{name}_command")
    alone.command(
        name, cls=PlainCommand, epilog=getattr(module, "EXAMPLES", None), context_settings=_PLAIN["context_settings"]
    )(function)
    return typer.main.get_command(alone)
