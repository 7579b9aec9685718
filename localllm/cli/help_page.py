"""The help of a command as a page: what it does, examples, and its options in groups.

A command with many options has two pages. The short one has the basic options, each with the first line of its help.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localllm.cli.options import ARGUMENTS, HELP, MOST_OPTIONS, OPTIONS
from localllm.settings import MACHINE, SAMPLING

_WIDEST = 22  # columns of what is typed, beside its help: of 80, 52 are left for that


def help_page(command: Any, context: Any, *, everything: bool = False) -> str:
    """Return the page of a command or of a group of them. everything: with all options and the whole help of each."""
    formatter = context.make_formatter()
    command.format_usage(context, formatter)
    command.format_help_text(context, formatter)
    examples, notes = examples_of(command)
    if examples:
        with formatter.section("Examples"):
            formatter.write("".join(f"  {line}\n" for line in examples))
    is_short = has_two_pages(command) and not everything
    for sections in (_commands(command), _options(command, context, is_short=is_short)):
        width = min(_WIDEST, max((len(left) for rows in sections.values() for left, _ in rows), default=0))
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl([(left.ljust(width), about) for left, about in rows], col_max=width)
    if notes:
        formatter.write_paragraph()
        formatter.write_text(notes)
    page: str = formatter.getvalue()
    return page.rstrip("\n")


def has_two_pages(command: Any) -> bool:
    """Return whether a command has too many options for one screen."""
    options = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
    return len(options) > MOST_OPTIONS


def examples_of(command: Any) -> tuple[list[str], str]:
    """Return the lines of a command's examples, and the text of its epilog that is none."""
    before, mark, behind = (command.epilog or "").partition("\b\n")
    if not mark:
        return [], before
    examples, _, notes = behind.partition("\n\n")
    return [line.removeprefix("  ") for line in examples.rstrip().splitlines()], notes


def grouped(command: Any, context: Any) -> dict[str, list[Any]]:
    """Return the parameters of a command by the heading under which they stand, in the order of the page."""
    declared = getattr(command.callback, "parameters", {})
    groups: dict[str, list[Any]] = {}
    for parameter in command.get_params(context):
        if getattr(parameter, "hidden", False):
            continue
        heading = ARGUMENTS if parameter.param_type_name == "argument" else OPTIONS
        if has_two_pages(command):
            heading = HELP if parameter.name == "help" else declared[parameter.name].group
        groups.setdefault(heading, []).append(parameter)
    first, last = [ARGUMENTS], [SAMPLING, MACHINE, HELP]
    between = [heading for heading in groups if heading not in first + last]
    return {heading: groups[heading] for heading in first + between + last if heading in groups}


def typed(parameter: Any) -> str:
    """Return how a parameter is typed: `-f, --file FILE`."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar)
    return " ".join([", ".join(sorted(parameter.opts, key=len)), *([parameter.metavar] if parameter.metavar else [])])


def _options(command: Any, context: Any, *, is_short: bool) -> dict[str, list[tuple[str, str]]]:
    declared = getattr(command.callback, "parameters", {})
    sections = {}
    for heading, parameters in grouped(command, context).items():
        shown = [each for each in parameters if not is_short or each.name == "help" or declared[each.name].is_basic]
        rows = [
            (typed(each), (each.help.partition("\n")[0] if is_short else " ".join(each.help.split()))) for each in shown
        ]
        if rows:
            sections[heading] = rows
    return sections


def _commands(command: Any) -> Mapping[str, list[tuple[str, str]]]:
    """Return the commands of a group by their headings; none of a command."""
    commands = getattr(command, "commands", {})
    if not commands:
        return {}
    headings = getattr(command, "headings", None) or {"Commands": tuple(commands)}
    return {
        heading: [(name, commands[name].help.partition("\n")[0]) for name in names]
        for heading, names in headings.items()
    }
