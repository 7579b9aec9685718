"""A table of how families of models write calls of tools. A model's row follows from its chat template.

A model whose template knows no tools, or has them in a form that is not here, is told of them in a message of ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from localllm.chat import harmony
from localllm.chat.template_traits import ARGUMENTS, NAME, traits_of
from localllm.server.tools.notations import JsonNotation, LiteralNotation, Notation, TaggedNotation

if TYPE_CHECKING:
    from localllm.text.chat_template import ChatTemplate


_MARK = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")
_JSON = JsonNotation()


@dataclass(frozen=True)
class ToolFormat:
    """The rules by which calls are written, parsed, and given to the chat template.

    Written under a grammar: `first`, then for each call `begins` NAME `call_id` `middle` ARGUMENTS `ends`, with
    `between` between two, then `last`.
    notation: of the arguments
    call_id: what stands in front of a call's own id, and a regular expression of that; "" for an id that is only read
    one_call: an answer never has more than one call
    opens: the marks in front of a call, or of several; none in harmony
    is_bare: an answer that begins as an object may be a call, too
    signs: words that the chat templates of the family have, all of them
    strangers: words that none of them has
    is_in_template: the template tells the model of tools
    also: the format in which it tells of calls, where it does not tell of tools; calls in that are read, too
    one_at_a_time: a turn of the template holds one call
    has_short_ids: calls have ids of 9 letters and digits
    has_named_ids: calls have ids of their name and number
    answers_results: the template refuses a question right behind a result
    """

    name: str
    begins: str
    middle: str
    ends: str = ""
    first: str = ""
    between: str = ""
    last: str = ""
    notation: Notation = _JSON
    call_id: tuple[str, str] = ("", "")
    one_call: bool = False
    opens: tuple[str, ...] = ()
    is_bare: bool = False
    signs: tuple[str, ...] = ()
    strangers: tuple[str, ...] = ()
    is_in_template: bool = True
    also: ToolFormat | None = None
    one_at_a_time: bool = False
    has_short_ids: bool = False
    has_named_ids: bool = False
    answers_results: bool = False

    @property
    def is_harmony(self) -> bool:
        return not self.opens

    @property
    def names_stand_alone(self) -> bool:
        """A call without arguments may be its name alone."""
        return self.notation == _JSON and '"' not in self.begins

    @property
    def has_lines(self) -> bool:
        """Calls have nothing around them but lines of their own, up to a mark behind all."""
        return not self.begins and self.between == "\n"

    @cached_property
    def closings(self) -> tuple[str, ...]:
        """Marks behind a call, or behind all, beside brackets."""
        return tuple(re.findall(rf"{_MARK.pattern}|```", self.ends + self.last))

    @cached_property
    def special(self) -> tuple[str, ...]:
        """Marks that a tokenizer may have as special tokens."""
        if self.is_harmony:
            return harmony.MARKS
        around = (*self.opens, self.first, self.begins, self.call_id[0], self.middle, self.ends, self.last)
        also = self.also.special if self.also is not None else ()
        return tuple(dict.fromkeys((*_MARK.findall("\n".join((*around, *self.notation.marks))), *also)))

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Return calls, (name, arguments) each, as the model writes them."""
        return "".join(text for text, _ in self.pieces(calls))

    def pieces(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[tuple[str, bool]]:
        """Yield the same in pieces, each with whether it is around arguments, and its marks are meant."""
        for index, (name, arguments) in enumerate(calls):
            before = self.between if index else self.first
            yield f"{before}{self.begins}{name}{self._numbered(index)}{self.middle}", True
            yield self.notation.written(arguments), False
            yield self.ends + (self.last if index == len(calls) - 1 else ""), True

    def may_show_in(self, prompt: str) -> bool:
        """Tell if a prompt, as `TemplateTraits.called` has it, is not one of another format."""
        return not prompt or self.is_harmony or self.is_bare or any(mark in prompt for mark in self.opens)

    def shows_in(self, prompt: str) -> bool:
        """Tell if such a prompt has a call exactly as this format has it, which JSON alone would not show."""
        return self.notation != _JSON and self.written([(NAME, ARGUMENTS)]) in prompt

    def _numbered(self, index: int) -> str:
        mark, pattern = self.call_id
        return f"{mark}{index:0>{SHORT_ID if self.has_short_ids else 1}}" if pattern else ""


SHORT_ID = 9  # letters and digits, as Mistral's templates demand
_TAG, _END_TAG = "<tool_call>", "</tool_call>"
_TAGGED = (f'{_TAG}\n{{"name": "', '", "arguments": ', f"}}\n{_END_TAG}")
_OBJECT = ('{"name": "', '", "arguments": ', "}")
_OF_FUNCTION = TaggedNotation("<parameter=", ">\n", "\n</parameter>\n", "</function>")
_PYTHON = LiteralNotation("(", ")", "=", ", ", '"', ("True", "False", "None"))
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
_DEEPSEEK_ENDS = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
_KIMI = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")

# No line break between two calls: behind one, a model that was not trained to make several would rather end.
GENERIC = ToolFormat("generic", *_TAGGED, opens=(_TAG,), is_in_template=False)
HARMONY = ToolFormat(
    "harmony", "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>",
    one_call=True, signs=harmony.SIGNS, one_at_a_time=True,
)  # fmt: skip
TOOL_FORMATS = (
    HARMONY,
    ToolFormat(
        "mistral-id", "[TOOL_CALLS]", "[ARGS]", opens=("[TOOL_CALLS]",), call_id=("[CALL_ID]", "[a-zA-Z0-9]{9}"),
        signs=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), has_short_ids=True,
    ),
    ToolFormat(
        "mistral", "[TOOL_CALLS]", "[ARGS]", opens=("[TOOL_CALLS]",), call_id=("[CALL_ID]", ""),
        signs=("[TOOL_CALLS]", "[ARGS]"), has_short_ids=True,
    ),
    ToolFormat(
        "mistral-list", *_OBJECT, first="[TOOL_CALLS][", between=", ", last="]",
        opens=("[TOOL_CALLS]",), signs=("[TOOL_CALLS]",), has_short_ids=True, answers_results=True,
    ),
    ToolFormat(
        "granite-list", *_OBJECT, first="<|tool_call|>[", between=", ", last="]", opens=("<|tool_call|>",),
        signs=("<|tool_call|>",),
    ),
    ToolFormat(
        "nemotron-list", *_OBJECT, first="<TOOLCALL>[", between=", ", last="]</TOOLCALL>", opens=("<TOOLCALL>",),
        signs=("<TOOLCALL>",),
    ),
    ToolFormat(
        "qwen-xml", f"{_TAG}\n<function=", ">\n", f"\n{_END_TAG}", between="\n", notation=_OF_FUNCTION,
        opens=(_TAG, "<function="), signs=(_TAG, "<function=", "<parameter="),
    ),
    ToolFormat(
        "seed", "<seed:tool_call>\n<function=", ">\n", "\n</seed:tool_call>", between="\n",
        notation=TaggedNotation("<parameter=", ">", "</parameter>\n", "</function>"), opens=("<seed:tool_call>",),
        signs=("<seed:tool_call>", "<function=", "<parameter="),
    ),
    ToolFormat(
        "minimax", '<invoke name="', '">\n', "\n", first="<minimax:tool_call>\n", last="</minimax:tool_call>",
        notation=TaggedNotation('<parameter name="', '">', "</parameter>\n", "</invoke>"),
        opens=("<minimax:tool_call>", "<invoke name="), signs=("<minimax:tool_call>", "<invoke name="),
    ),
    ToolFormat(
        "glm", _TAG, "\n", between="\n", opens=(_TAG,), signs=(_TAG, "</arg_key>\n<arg_value>"),
        notation=TaggedNotation("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", _END_TAG),
    ),
    ToolFormat(
        "glm-line", _TAG, "", opens=(_TAG,), signs=(_TAG, "</arg_key><arg_value>"),
        notation=TaggedNotation("<arg_key>", "</arg_key><arg_value>", "</arg_value>", _END_TAG),
    ),
    ToolFormat(
        "gemma", "<|tool_call>call:", "", "<tool_call|>", opens=("<|tool_call>",),
        notation=LiteralNotation("{", "}", ":", ",", '<|"|>', ("true", "false", "null"), has_bare_names=True),
        signs=("<|tool_call>call:", '<|"|>'),
    ),
    ToolFormat(
        "lfm", "", "", first="<|tool_call_start|>[", between=", ", last="]<|tool_call_end|>",
        notation=_PYTHON, opens=("<|tool_call_start|>",), signs=("List of tools: ",),
    ),
    ToolFormat(
        "minicpm", "", "", first="<|tool_call_start|>\n```python\n", between="\n", last="\n```\n<|tool_call_end|>",
        notation=_PYTHON, opens=("<|tool_call_start|>",), signs=("<|tool_call_start|>", "```python"),
    ),
    ToolFormat(
        "deepseek-function", f"{_DEEPSEEK[1]}function<｜tool▁sep｜>", "\n```json\n", f"\n```{_DEEPSEEK_ENDS[0]}",
        first=_DEEPSEEK[0], between="\n", last=_DEEPSEEK_ENDS[1], opens=_DEEPSEEK, signs=(*_DEEPSEEK, "```json"),
    ),
    ToolFormat(
        "deepseek", _DEEPSEEK[1], "<｜tool▁sep｜>", _DEEPSEEK_ENDS[0], first=_DEEPSEEK[0], last=_DEEPSEEK_ENDS[1],
        opens=_DEEPSEEK, signs=_DEEPSEEK,
    ),
    ToolFormat(
        "kimi", f"{_KIMI[1]}functions.", "<|tool_call_argument_begin|>", "<|tool_call_end|>", first=_KIMI[0],
        last="<|tool_calls_section_end|>", call_id=(":", "[0-9]{1,4}"), opens=_KIMI, signs=_KIMI, has_named_ids=True,
    ),
    ToolFormat(
        "hermes", *_TAGGED, between="\n", opens=(_TAG,), signs=(_TAG, "arguments"),
        strangers=("<function=", "<arg_key>", "<invoke name="),
    ),
    ToolFormat(
        "llama", '{"name": "', '", "parameters": ', "}", one_call=True, opens=("<|python_tag|>",), is_bare=True,
        signs=('"parameters": ', "dictionary of argument name and its value"), one_at_a_time=True,
    ),
)  # fmt: skip


def tool_format_of(template: ChatTemplate) -> ToolFormat:
    """Return the row of the model that has this template."""
    traits, source = traits_of(template), "\n".join(template.sources.values())
    for row in TOOL_FORMATS:
        has_signs = all(sign in source for sign in row.signs) and not any(word in source for word in row.strangers)
        if (has_signs and row.may_show_in(traits.called)) or row.shows_in(traits.called):
            return row if traits.tells_tools else replace(GENERIC, also=row)
    return GENERIC
