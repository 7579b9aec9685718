"""The commands of `localllm`, each of which is imported when it is called or when its own help is asked for.

Typer's command and group are made quick to start: a flag that is not typed costs nothing, and a value is checked in our
own words. Help is written by Output.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from localllm.cli.context import cli_context
from localllm.cli.options import CommandParameter, require_accepted, takes
from localllm.settings import Accepts
from localllm.version import __version__

# In the order of the help: where a command is, and the first line of its help, which listing them needs.
COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "run": ("run", "Answer one prompt, or many with --batch."),
        "chat": ("chat", "Chat with a model, on the full screen or line by line."),
        "serve": ("serve", "Serve models to the applications on this machine."),
        "ps": ("server", "List the models that the server has loaded."),
        "load": ("server", "Load a model on the server before the first request."),
        "stop": ("server", "Unload a model, or end the server."),
        "preset": ("preset", "Save and list presets: a model, a system message and settings under one name."),
        "create": ("preset", "Make a preset of Ollama's Modelfile."),
        "connect": ("connect", "Print the settings with which a program uses `localllm serve`."),
        "pull": ("models", "Download a model or an adapter from the Hugging Face hub."),
        "quantize": ("quantize", "Pack a model's weights ahead of time."),
        "merge": ("merge", "Write a model and its adapters (LoRA) as one checkpoint."),
        "list": ("models", "List the models on this disk."),
        "adapters": ("adapters", "List the adapters (LoRA) on this disk."),
        "search": ("search", "Search for models by name, also on the Hugging Face hub."),
        "show": ("models", "Show the details of one model."),
        "rm": ("models", "Delete a model or an adapter from this disk."),
        "tokenize": ("text", "Print the tokens of a text."),
        "perplexity": ("text", "Measure how well a model predicts a text."),
        "plan": ("plan", "Show where a model would be placed and how fast it would run."),
        "bench": ("bench", "Measure how fast a model is on this machine."),
        "doctor": ("doctor", "Check this machine and say how to fix what is wrong."),
        "help": ("help", "Explain an error or a command."),
        "cache": ("cache", "Show or clear the prefix cache on the disk."),
        "sessions": ("sessions", "List, read, search, export and delete saved chats."),
        "config": ("config", "Show and change the settings."),
    }
)
# The headings in the help under which they stand.
HEADINGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Talk": ("run", "chat"),
        "Serve": ("serve", "ps", "load", "stop", "connect"),
        "Models": ("list", "adapters", "search", "pull", "show", "rm", "quantize", "merge", "tokenize", "perplexity"),
        "This machine": ("plan", "bench", "doctor"),
        "This program": ("preset", "create", "sessions", "cache", "config", "help"),
    }
)
# What other programs call a command. They are not listed as commands of their own.
ALIASES: Mapping[str, str] = MappingProxyType(
    {"ls": "list", "download": "pull", "remove": "rm", "delete": "rm", "version": "--version", "chats": "sessions"}
)
IMPLIED_VALUE = "last"  # of an option that may stand without one


class PlainCommand(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _quickened(super().get_params(ctx), getattr(self.callback, "parameters", {}))

    def get_help(self, ctx: Any) -> str:
        return _help_page(self, ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """An option whose metavar is in square brackets may stand without its value, which then is IMPLIED_VALUE."""
        optional = {
            name for parameter in self.params if (parameter.metavar or "").startswith("[") for name in parameter.opts
        }
        end = args.index("--") if "--" in args else len(args)
        completed = []
        for index, word in enumerate(args):
            completed.append(word)
            following = args[index + 1] if index + 1 < end else "-"
            if index < end and word in optional and following.startswith("-"):
                completed.append(IMPLIED_VALUE)
        return super().parse_args(ctx, completed)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """MODEL and ID..., not typer's {MODEL} and {ID...}...."""
        pieces = (re.sub(r"[{}]", "", piece) for piece in super().collect_usage_pieces(ctx))
        return [re.sub(r"\.\.\.(\]?)\.\.\.$", r"...\1", piece) for piece in pieces]


class PlainGroup(TyperGroup):
    """A group whose commands may be stand-ins until one is called.

    load: the command of a name; None where they are all there.
    headings: in the help, each with the names of commands below it; empty: one for all.
    aliases: what may be typed in place of a command.
    """

    load: Callable[[str], Any] | None = None
    headings: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    aliases: Mapping[str, str] = MappingProxyType({})

    def get_params(self, ctx: Any) -> list[Any]:
        return _quickened(super().get_params(ctx), getattr(self.callback, "parameters", {}))

    def get_help(self, ctx: Any) -> str:
        return _help_page(self, ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        return super().parse_args(ctx, [*(self.aliases.get(word, word) for word in args[:1]), *args[1:]])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in self.commands:
            self.loaded(args[0])
        elif not ctx.resilient_parsing and not args[0].startswith("-"):
            from localllm.cli.unknown_command import unknown_command

            raise unknown_command(ctx.command_path, args, self.commands)
        return super().resolve_command(ctx, args)

    def loaded(self, name: str) -> Any:
        """The command itself, imported where it is not."""
        if self.load is not None:
            self.commands[name] = self.load(name)
        return self.commands[name]


def _help_page(command: Any, context: Any, *, everything: bool = False) -> str:
    from localllm.cli.help_page import help_page

    return help_page(command, context, everything=everything)


def _quickened(parameters: list[Any], declared: Mapping[str, CommandParameter]) -> list[Any]:
    # To coerce a value, None included, typer imports pydantic: 80 ms of a start. Its own flags default to None.
    for parameter in parameters:
        if parameter.name in ("help", *_COMPLETION):
            parameter.default = False
        if parameter.name in _COMPLETION:
            parameter.help, parameter.callback = _COMPLETION[parameter.name], _serve_completion
        if parameter.name in ("help", "help_all"):
            parameter.callback = _print_help
        if "process_value" not in vars(parameter):
            row = declared.get(parameter.name)
            parameter.process_value = _checked(parameter, row.accepts if row is not None else None)
    return parameters


# Typer's own scripts end a word of bash at the colon of a model's name, and wrap the help of a word of fish.
_COMPLETION: Mapping[str, str] = MappingProxyType(
    {
        "install_completion": "Complete commands and names in this shell with Tab.",
        "show_completion": "Print the script that does, to install it by hand.",
    }
)


def _serve_completion(context: typer.Context, parameter: Any, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from localllm.cli import completion

        show_or_install = completion.show if parameter.name == "show_completion" else completion.install
        show_or_install(cli_context(context).output)
        raise typer.Exit


def _print_help(context: typer.Context, parameter: Any, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        page = _help_page(context.command, context, everything=parameter.name == "help_all")
        cli_context(context).output.line(page)
        raise typer.Exit


def _checked(parameter: Any, accepts: Accepts | None) -> Callable[[Any, Any], Any]:
    """Typer's own, but for a value that is not accepted, of which it tells in the words of its parser."""
    process = parameter.process_value
    is_text = parameter.type_descriptor.annotation is str

    def process_value(ctx: Any, value: Any) -> Any:
        if accepts is not None:
            for text in value if isinstance(value, list | tuple) else [value]:
                if isinstance(text, str):
                    require_accepted(parameter.opts[0], text, accepts)
        if parameter.callback is None:
            if value is None and (ctx.resilient_parsing or not parameter.required):
                return () if parameter.multiple or parameter.nargs == -1 else None
            if is_text and isinstance(value, str):
                return value
        return process(ctx, value)

    return process_value


# Plain help: the same on a terminal, in a pipe and to a screen reader, and without rich's start-up time.
_PLAIN: Mapping[str, Any] = MappingProxyType(
    {"rich_markup_mode": None, "context_settings": {"help_option_names": ["-h", "--help"]}}
)


def plain_group(name: str, about: str) -> typer.Typer:
    """A group of commands, which prints its help where none is named. about: the first line of it."""
    group = typer.Typer(name=name, cls=PlainGroup, add_completion=False, **_PLAIN)

    @group.callback(invoke_without_command=True, help=about)
    @takes()
    def show_help(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            cli_context(context).output.line(context.get_help())

    return group


app = typer.Typer(
    name="localllm",
    cls=PlainGroup,
    pretty_exceptions_enable=False,
    epilog="""`ls` is list, `download` is pull, `remove` and `delete` are rm. `localllm COMMAND --help` explains one.

Exit codes: 0 done, 1 failure, 2 usage, 3 model absent, 4 does not fit, 5 context overflow, 6 download,
7 schema, 130 interrupted (143: by SIGTERM, 129: by SIGHUP). `localllm help CODE` explains an error.""",
    **_PLAIN,
)


@app.callback(invoke_without_command=True)
def localllm(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[  # noqa: ARG001 (taken off the line by `dispatch`, wherever it stands; here for the help)
        bool, typer.Option("--debug", help="Show the traceback of an error.")
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
    root.load, root.headings, root.aliases = load_command, HEADINGS, ALIASES
    root.commands = {name: PlainCommand(name, help=summary) for name, (_, summary) in COMMANDS.items()}
    return root


def load_command(name: str) -> Any:
    """A command, or a group of them, as its module has it."""
    module = import_module(f"localllm.cli.{COMMANDS[name][0]}")
    group = getattr(module, f"{name}_app", None)
    if group is None:
        group = typer.Typer(add_completion=False, **_PLAIN)
        epilog = getattr(module, f"{name.upper()}_EXAMPLES", None)
        group.command(name, cls=PlainCommand, epilog=epilog, context_settings=_PLAIN["context_settings"])(
            getattr(module, f"{name}_command")
        )
    return typer.main.get_command(group)
