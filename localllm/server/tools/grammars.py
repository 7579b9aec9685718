"""The grammar of an answer that has to be a call, or may be one, in llguidance's Lark.

Source of the syntax: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from localllm.chat import harmony
from localllm.errors import GrammarError
from localllm.server.failures import RequestError
from localllm.server.structured import ANY_OBJECT
from localllm.server.tools.calling import Tool, Toolset
from localllm.server.tools.syntaxes import Syntax
from localllm.text.grammar.schema import checked

TokenId = Callable[[str], int | None]

# As the templates write arguments, and with nothing that a small model could get lost in; the rest as every schema has.
_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',
    "coerce_one_of": False,
    "lenient": False,
}
_ANY = "/(.|\\n)*/"
_LEXEMES = re.compile(r'"[^"]*"|, |: |.', re.DOTALL)


def tools_lark(syntax: Syntax, tools: Toolset, token_id: TokenId, answer: str | None = None) -> str:
    """token_id: of a mark that is one token of the vocabulary, None of another. answer: the JSON Schema of an answer
    that is no call; None: any text is one. Raises RequestError, GrammarError for schemas that nothing can be held
    to."""
    marks = _Marks(syntax, token_id)
    written, choices = syntax.written, tools.choices
    is_one = tools.one_call or written.one
    more = "" if is_one else f" ({marks.lark(written.between)} call)*"
    last = f"{more} {marks.lark(written.last)}".rstrip()
    rules = [
        f"calls: {marks.lark(written.first)} call{last}",
        *_calls("call", written.begins, marks, choices),
        *(f"arguments{i}: %json {_schema_of(tools, tool)}" for i, tool in enumerate(choices)),
    ]
    if answer is not None:
        rules.append(f"answer: %json {_compact(answer)}")
    if syntax.marks is None:
        starts = _harmony_starts(marks, tools, answer)
    elif tools.must_call or answer is not None:
        starts = [f"start: BLANK {'calls' if tools.must_call else '(answer | calls)'}", "BLANK: /\\n{0,2}/"]
    elif syntax.marks.is_bare:
        starts = ["start: TEXT | calls", "TEXT: /([^{](.|\\n)*)?/"]
    else:
        starts = _text_starts(marks, choices, last)
    return "\n".join(["%llguidance {}", *starts, *rules, ""])


def _calls(rule: str, begins: str, marks: _Marks, choices: Sequence[Tool]) -> list[str]:
    """One call of any of the tools."""
    written = marks.syntax.written
    named = [
        f"{marks.lark(begins + tool.name + written.middle)} arguments{i} {marks.lark(written.ends)}".rstrip()
        for i, tool in enumerate(choices)
    ]
    return [f"{rule}: " + " | ".join(named)]


def _text_starts(marks: _Marks, choices: Sequence[Tool], last: str) -> list[str]:
    """Text, or calls with or without text in front of them."""
    assert marks.syntax.marks is not None
    [opens] = marks.syntax.marks.opens
    text = f"TEXT: {_ANY} & ~/(.|\\n)*{re.escape(opens)}(.|\\n)*/"
    if marks.is_token(opens):
        return ["start: TEXT | TEXT calls", text]
    # Of several tokens, the mark is a part of the text, which ends with it.
    written = marks.syntax.written
    begun = _calls("begun", (written.first + written.begins).removeprefix(opens), marks, choices)
    return [f"start: TEXT | before begun{last}", f"before[suffix={_text(opens)}]: {_ANY}", text, *begun]


def _harmony_starts(marks: _Marks, tools: Toolset, answer: str | None) -> list[str]:
    message, said = marks.lark(harmony.MESSAGE), "answer" if answer is not None else "TEXT"
    channel, behind = marks.lark(harmony.CHANNEL), marks.lark(harmony.END + harmony.START)
    last = "calls" if tools.must_call else f'(calls | {channel} "final" {message} {said})'
    return [
        f"start: thought* {last}",
        f'thought: {channel} "analysis" {message} TEXT {behind} "assistant"',
        f"TEXT: {_ANY}",
    ]


class _Marks:
    """What a family writes, in Lark: marks that are one token are that token."""

    def __init__(self, syntax: Syntax, token_id: TokenId) -> None:
        self.syntax = syntax
        self._ids = {mark: index for mark in syntax.special if (index := token_id(mark)) is not None}
        self._any = re.compile("|".join(map(re.escape, self._ids)) or "(?!)")
        # The lexer does not go back: where an answer may be JSON too, both have to be made of the same lexemes.
        self._is_json = syntax.marks is not None and syntax.marks.is_bare

    def is_token(self, mark: str) -> bool:
        return mark in self._ids

    def lark(self, text: str) -> str:
        """ "" for no text."""
        found, at = [], 0
        for mark in self._any.finditer(text):
            found += [self._texts(text[at : mark.start()]), f"<[{self._ids[mark[0]]}]>"]
            at = mark.end()
        return " ".join(filter(None, [*found, self._texts(text[at:])]))

    def _texts(self, text: str) -> str:
        return " ".join(map(_text, _LEXEMES.findall(text))) if self._is_json else _text(text)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _schema_of(tools: Toolset, tool: Tool) -> str:
    """Any object, of a tool to which no call can be held; one that has to be, as there is no other to call or it is
    strict, is refused. Raises RequestError, naming the tool."""
    try:
        if (known := tools.unheld.get(tool.name)) is not None:
            raise GrammarError(known.what, why=known.why, fix=known.fix)
        return _compact(schema_source(tool))
    except GrammarError as error:
        if not tool.strict and not (tools.must_call and len(tools.choices) == 1):
            return _compact(ANY_OBJECT.source)
        what = f"tools[{tools.tools.index(tool)}], {tool.name!r}: {error.what}"
        raise RequestError(400, what, why=error.why, fix=error.fix, param="tools", name="invalid_grammar") from None


def schema_source(tool: Tool) -> str:
    """The JSON Schema of what it takes: any object, where it says nothing of that."""
    is_said = not tool.parameters or "properties" in tool.parameters
    return json.dumps(tool.schema if is_said else {"type": "object", **tool.parameters})


def _compact(source: str) -> str:
    """Raises GrammarError for a schema that an answer cannot be held to."""
    found = checked(source)
    # Closed, `oneOf` would be taken where more than one may be met.
    return json.dumps({**(found.opened or found.schema), "x-guidance": _OPTIONS})
