"""Typer's command and group, made quick to start: a flag that is not typed costs nothing, and a number is checked in
our own words. Help is written by Output.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from localllm.cli.context import cli_context
from localllm.cli.options import require_accepted
from localllm.settings import Accepts

IMPLIED_VALUE = "last"
HELP_FLAGS: Any = MappingProxyType({"help_option_names": ["-h", "--help"]})


def plain_group(name: str) -> typer.Typer:
    """A group of commands, to which they are added."""
    return typer.Typer(
        name=name, cls=PlainGroup, add_completion=False, rich_markup_mode=None, context_settings=dict(HELP_FLAGS)
    )


class PlainCommand(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _quickened(super().get_params(ctx), getattr(self.callback, "accepted", {}))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """An option whose metavar is in square brackets may stand without its value, which then is IMPLIED_VALUE."""
        optional = {
            name for parameter in self.params if (parameter.metavar or "").startswith("[") for name in parameter.opts
        }
        end = args.index("--") if "--" in args else len(args)
        completed = []
        for index, argument in enumerate(args):
            completed.append(argument)
            following = args[index + 1] if index + 1 < end else "-"
            if index < end and argument in optional and following.startswith("-"):
                completed.append(IMPLIED_VALUE)
        return super().parse_args(ctx, completed)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """MODEL and ID..., not typer's {MODEL} and {ID...}...."""
        pieces = (re.sub(r"[{}]", "", piece) for piece in super().collect_usage_pieces(ctx))
        return [re.sub(r"\.\.\.(\]?)\.\.\.$", r"...\1", piece) for piece in pieces]


class PlainGroup(TyperGroup):
    """A group whose commands may be stand-ins until one is called.

    load: the command of a name; None where they are all there.
    """

    load: Callable[[str], Any] | None = None

    def get_params(self, ctx: Any) -> list[Any]:
        return _quickened(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in self.commands:
            self.loaded(args[0])
        return super().resolve_command(ctx, args)

    def loaded(self, name: str) -> Any:
        """The command itself, imported where it is not."""
        if self.load is not None:
            self.commands[name] = self.load(name)
        return self.commands[name]


def _quickened(parameters: list[Any], accepted: Mapping[str, Accepts] = MappingProxyType({})) -> list[Any]:
    # To coerce a value, None included, typer imports pydantic: 80 ms of a start. Its own flags default to None.
    for parameter in parameters:
        if parameter.name in ("help", "install_completion", "show_completion"):
            parameter.default = False
        if parameter.name == "help":
            parameter.callback = _print_help
        if "process_value" not in vars(parameter):
            parameter.process_value = _checked(parameter, accepted.get(parameter.name))
    return parameters


def _print_help(context: typer.Context, _parameter: Any, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        cli_context(context).output.line(context.get_help())
        raise typer.Exit


def _checked(parameter: Any, accepts: Accepts | None) -> Callable[[Any, Any], Any]:
    """Typer's own, but for what is no number or none of the choices, which it tells of in the words of its parser."""
    choices = parameter.type_descriptor.choices
    accepts = Accepts("text", choices=tuple(choices)) if choices else accepts
    process = parameter.process_value
    is_text = parameter.type_descriptor.annotation is str

    def process_value(ctx: Any, value: Any) -> Any:
        if parameter.callback is None:
            if value is None and (ctx.resilient_parsing or not parameter.required):
                return () if parameter.multiple or parameter.nargs == -1 else None
            if is_text and isinstance(value, str) and accepts is None:
                return value
        if accepts is not None:
            for text in value if isinstance(value, list | tuple) else [value]:
                if isinstance(text, str):
                    require_accepted(parameter.opts[0], text, accepts)
        return process(ctx, value)

    return process_value
