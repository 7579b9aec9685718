"""The grammars of answers that are, or may be, calls of tools, in llguidance's Lark."""

from __future__ import annotations

import json
from typing import Any

from localllm.chat import harmony
from localllm.errors import GrammarError
from localllm.server.errors import RequestError
from localllm.server.fields import ANY_OBJECT
from localllm.server.tools.argument_grammars import arguments_lark, json_lark
from localllm.server.tools.lark import ANY, Lark, TokenId, pattern, quoted
from localllm.server.tools.tool_formats import ToolFormat
from localllm.server.tools.toolset import Tool, Toolset
from localllm.text.grammar.schema import checked


def tools_lark(form: ToolFormat, tools: Toolset, token_id: TokenId, answer: str | None = None) -> str:
    """Return the grammar. Raises RequestError, GrammarError for schemas that nothing can be held to.

    token_id: of a mark that is one token of the vocabulary; None of another text
    answer: the JSON Schema of an answer that is not a call; None: any text is one
    """
    lark, choices = Lark(form.special, token_id, is_bare=form.is_bare), tools.choices

    def any_call(begins: str) -> str:
        return " | ".join(
            f"{_head(lark, form, begins + tool.name)} arguments{i} {lark(form.ends)}".rstrip()
            for i, tool in enumerate(choices)
        )

    more = "" if tools.one_call or form.one_call else f" ({lark(form.between)} call)*"
    last = f"{more} {lark(form.last)}".rstrip()
    rules = [
        f"calls: {lark(form.first)} call{last}",
        f"call: {any_call(form.begins)}",
        *(rule for i, tool in enumerate(choices) for rule in _rules_of(lark, form, tools, tool, f"arguments{i}")),
    ]
    if answer is not None:
        rules.append(f"answer: {json_lark(_checked(answer))}")
    if form.is_harmony:
        message, said = lark(harmony.MESSAGE), "answer" if answer is not None else "TEXT"
        channel, behind = lark(harmony.CHANNEL), lark(harmony.END + harmony.START)
        last_message = "calls" if tools.must_call else f'(calls | {channel} "final" {message} {said})'
        starts = [
            f"start: thought* {last_message}",
            f'thought: {channel} "analysis" {message} TEXT {behind} "assistant"',
            f"TEXT: /{ANY}/",
        ]
    elif tools.must_call or answer is not None:
        starts = [f"start: BLANK {'calls' if tools.must_call else '(answer | calls)'}", "BLANK: /\\n{0,2}/"]
    elif form.is_bare:
        starts = ["start: TEXT | calls", "TEXT: /([^{](.|\\n)*)?/"]
    else:  # text, or calls with or without text in front of them
        opens = form.opens[0]
        starts = ["start: TEXT | TEXT calls", f"TEXT: /{ANY}/ & ~/{ANY}{pattern(opens)}{ANY}/"]
        if not lark.is_token(opens):  # a mark of several tokens is a part of the text, which ends with it
            begun = any_call((form.first + form.begins).removeprefix(opens))
            starts[0] = f"start: TEXT | before begun{last}"
            starts += [f"before[suffix={quoted(opens)}]: /{ANY}/", f"begun: {begun}"]
    return "\n".join(["%llguidance {}", *starts, *rules, ""])


def _head(lark: Lark, form: ToolFormat, before: str) -> str:
    """Return a call up to its arguments. before: up to the end of its name."""
    mark, call_id = form.call_id
    return f"{lark(before + mark)} /{call_id}/ {lark(form.middle)}" if call_id else lark(before + form.middle)


def _rules_of(lark: Lark, form: ToolFormat, tools: Toolset, tool: Tool, name: str) -> list[str]:
    """Return the rules of a tool's arguments, of any object where its schema cannot be enforced. Raises RequestError,
    naming the tool, where it has to be: the tool is strict, or there is no other to call."""
    try:
        if (known := tools.unheld.get(tool.name)) is not None:
            raise GrammarError(known.what, why=known.why, fix=known.fixes)
        return arguments_lark(lark, form.notation, name, _checked(schema_source(tool)), is_strict=tool.strict)
    except GrammarError as error:
        if not tool.strict and not (tools.must_call and len(tools.choices) == 1):
            return arguments_lark(lark, form.notation, name, _checked(ANY_OBJECT.source), is_strict=False)
        what = f"tools[{tools.tools.index(tool)}], {tool.name!r}: {error.what}"
        raise RequestError(400, what, why=error.why, fix=error.fixes, param="tools", name="invalid_grammar") from None


def schema_source(tool: Tool) -> str:
    """Return the JSON Schema of a tool's arguments: any object where the tool declares nothing."""
    is_said = not tool.parameters or "properties" in tool.parameters
    return json.dumps(tool.schema if is_said else {"type": "object", **tool.parameters})


def _checked(source: str) -> dict[str, Any]:
    """Raises GrammarError for a schema that an answer cannot be held to."""
    found = checked(source)
    # Closed, `oneOf` would be taken where more than one may be met.
    return found.opened or found.schema
