"""A table of how families of models write calls of tools. A model's row follows from its chat template.

A model whose template knows no tools, or has them in a form that is not here, is told of them in a message of ours.
The grammar of an answer that is, or may be, a call is in llguidance's Lark; source of its syntax:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localllm.chat import harmony
from localllm.chat.tool_words import knows_tools
from localllm.errors import GrammarError
from localllm.server.errors import RequestError
from localllm.server.fields import ANY_OBJECT
from localllm.server.tools.toolset import Tool, Toolset
from localllm.text.grammar.schema import checked

if TYPE_CHECKING:
    from localllm.text.chat_template import ChatTemplate


@dataclass(frozen=True)
class ToolFormat:
    """The rules by which calls are written, parsed, and given to the chat template.

    Written under a grammar: `first`, then for each call `begins` NAME `middle` ARGUMENTS `ends`, with `between` between
    two, then `last`.
    one_call: an answer never has more than one call
    opens: the marks in front of a call, or of several; none in harmony
    closes: the mark behind; "" for none
    is_bare: an answer that begins as an object may be a call, too
    signs: words that the chat templates of the family have, all of them
    strangers: words that none of them has
    is_in_template: the template tells the model of tools
    one_at_a_time: a turn of the template holds one call
    has_short_ids: calls have ids of 9 letters and digits
    answers_results: the template refuses a question right behind a result
    """

    name: str
    begins: str
    middle: str
    ends: str = ""
    first: str = ""
    between: str = ""
    last: str = ""
    one_call: bool = False
    opens: tuple[str, ...] = ()
    closes: str = ""
    is_bare: bool = False
    signs: tuple[str, ...] = ()
    strangers: tuple[str, ...] = ()
    is_in_template: bool = True
    one_at_a_time: bool = False
    has_short_ids: bool = False
    answers_results: bool = False

    @property
    def is_harmony(self) -> bool:
        return not self.opens

    @property
    def special(self) -> tuple[str, ...]:
        """Marks that a tokenizer may have as special tokens."""
        if self.is_harmony:
            return harmony.MARKS
        more = ("[ARGS]", "[CALL_ID]") if "[TOOL_CALLS]" in self.opens else ()
        return (*self.opens, *filter(None, [self.closes]), *more)


_TAG, _END_TAG = "<tool_call>", "</tool_call>"
_TAGGED = (f'{_TAG}\n{{"name": "', '", "arguments": ', f"}}\n{_END_TAG}")

# No line break between two calls: behind one, a model that was not trained to make several would rather end.
GENERIC = ToolFormat("generic", *_TAGGED, opens=(_TAG,), closes=_END_TAG, is_in_template=False)
HARMONY = ToolFormat(
    "harmony", "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>",
    one_call=True, signs=harmony.SIGNS, one_at_a_time=True,
)  # fmt: skip
TOOL_FORMATS = (
    HARMONY,
    ToolFormat(
        "mistral", "[TOOL_CALLS]", "[ARGS]", opens=("[TOOL_CALLS]",), signs=("[TOOL_CALLS]", "[ARGS]"),
        has_short_ids=True,
    ),
    ToolFormat(
        "mistral-list", '{"name": "', '", "arguments": ', "}", first="[TOOL_CALLS][", between=", ", last="]",
        opens=("[TOOL_CALLS]",), signs=("[TOOL_CALLS]",), has_short_ids=True, answers_results=True,
    ),
    ToolFormat(
        "hermes", *_TAGGED, between="\n", opens=(_TAG,), closes=_END_TAG, signs=(_TAG, "arguments"),
        strangers=("<function=", "<arg_key>"),
    ),
    ToolFormat(
        "llama", '{"name": "', '", "parameters": ', "}", one_call=True, opens=("<|python_tag|>",), is_bare=True,
        signs=('"parameters": ', "dictionary of argument name and its value"), one_at_a_time=True,
    ),
)  # fmt: skip


def tool_format_of(template: ChatTemplate) -> ToolFormat:
    """Return the row of the model that has this template. It takes a fraction of a millisecond: the template is run."""
    source = "\n".join(template.sources.values())
    for row in TOOL_FORMATS:
        if all(sign in source for sign in row.signs) and not any(word in source for word in row.strangers):
            return row if knows_tools(template) else GENERIC
    return GENERIC


TokenId = Callable[[str], int | None]

# Arguments are written as the templates do, with nothing that a small model could get lost in.
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


def tools_lark(form: ToolFormat, tools: Toolset, token_id: TokenId, answer: str | None = None) -> str:
    """Return the grammar. Raises RequestError, GrammarError for schemas that nothing can be held to.

    token_id: of a mark that is one token of the vocabulary; None of another text
    answer: the JSON Schema of an answer that is not a call; None: any text is one
    """
    lark, choices = _Lark(form, token_id), tools.choices

    def any_call(begins: str) -> str:
        return " | ".join(
            f"{lark(begins + tool.name + form.middle)} arguments{i} {lark(form.ends)}".rstrip()
            for i, tool in enumerate(choices)
        )

    more = "" if tools.one_call or form.one_call else f" ({lark(form.between)} call)*"
    last = f"{more} {lark(form.last)}".rstrip()
    rules = [
        f"calls: {lark(form.first)} call{last}",
        f"call: {any_call(form.begins)}",
        *(f"arguments{i}: %json {_schema_of(tools, tool)}" for i, tool in enumerate(choices)),
    ]
    if answer is not None:
        rules.append(f"answer: %json {_compact(answer)}")
    if form.is_harmony:
        message, said = lark(harmony.MESSAGE), "answer" if answer is not None else "TEXT"
        channel, behind = lark(harmony.CHANNEL), lark(harmony.END + harmony.START)
        last_message = "calls" if tools.must_call else f'(calls | {channel} "final" {message} {said})'
        starts = [
            f"start: thought* {last_message}",
            f'thought: {channel} "analysis" {message} TEXT {behind} "assistant"',
            f"TEXT: {_ANY}",
        ]
    elif tools.must_call or answer is not None:
        starts = [f"start: BLANK {'calls' if tools.must_call else '(answer | calls)'}", "BLANK: /\\n{0,2}/"]
    elif form.is_bare:
        starts = ["start: TEXT | calls", "TEXT: /([^{](.|\\n)*)?/"]
    else:  # text, or calls with or without text in front of them
        [opens] = form.opens
        starts = ["start: TEXT | TEXT calls", f"TEXT: {_ANY} & ~/(.|\\n)*{re.escape(opens)}(.|\\n)*/"]
        if not lark.is_token(opens):  # a mark of several tokens is a part of the text, which ends with it
            begun = any_call((form.first + form.begins).removeprefix(opens))
            starts[0] = f"start: TEXT | before begun{last}"
            starts += [f"before[suffix={_text(opens)}]: {_ANY}", f"begun: {begun}"]
    return "\n".join(["%llguidance {}", *starts, *rules, ""])


class _Lark:
    """Writes a format's texts in Lark: marks that are one token as that token."""

    def __init__(self, form: ToolFormat, token_id: TokenId) -> None:
        self._is_bare = form.is_bare
        self._ids = {mark: index for mark in form.special if (index := token_id(mark)) is not None}
        self._any = re.compile(f"({'|'.join(map(re.escape, self._ids)) or '(?!)'})")

    def is_token(self, mark: str) -> bool:
        return mark in self._ids

    def __call__(self, text: str) -> str:
        """Return "" for no text."""
        parts = self._any.split(text)
        return " ".join(f"<[{self._ids[part]}]>" if part in self._ids else self._texts(part) for part in parts if part)

    def _texts(self, text: str) -> str:
        # The lexer does not go back: where an answer may be JSON, too, both have to be made of the same lexemes.
        return " ".join(map(_text, _LEXEMES.findall(text))) if self._is_bare else _text(text)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _schema_of(tools: Toolset, tool: Tool) -> str:
    """Return any object for a tool whose schema cannot be enforced. Raises RequestError, naming the tool, where it has
    to be: the tool is strict, or there is no other to call."""
    try:
        if (known := tools.unheld.get(tool.name)) is not None:
            raise GrammarError(known.what, why=known.why, fix=known.fixes)
        return _compact(schema_source(tool))
    except GrammarError as error:
        if not tool.strict and not (tools.must_call and len(tools.choices) == 1):
            return _compact(ANY_OBJECT.source)
        what = f"tools[{tools.tools.index(tool)}], {tool.name!r}: {error.what}"
        raise RequestError(400, what, why=error.why, fix=error.fixes, param="tools", name="invalid_grammar") from None


def schema_source(tool: Tool) -> str:
    """Return the JSON Schema of a tool's arguments: any object where the tool declares nothing."""
    is_said = not tool.parameters or "properties" in tool.parameters
    return json.dumps(tool.schema if is_said else {"type": "object", **tool.parameters})


def _compact(source: str) -> str:
    """Raises GrammarError for a schema that an answer cannot be held to."""
    found = checked(source)
    # Closed, `oneOf` would be taken where more than one may be met.
    return json.dumps({**(found.opened or found.schema), "x-guidance": _OPTIONS})
