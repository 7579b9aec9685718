"""A table of how families of models write calls of tools. A model's row follows from its chat template.

A model whose template knows no tools, or has them in a form that is not here, is told of them in a message of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from localllm.chat.harmony import MARKS as HARMONY_MARKS
from localllm.chat.harmony import SIGNS
from localllm.chat.tool_words import knows_tools

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
            return HARMONY_MARKS
        more = ("[ARGS]", "[CALL_ID]") if "[TOOL_CALLS]" in self.opens else ()
        return (*self.opens, *filter(None, [self.closes]), *more)


_TAG, _END_TAG = "<tool_call>", "</tool_call>"
_TAGGED = (f'{_TAG}\n{{"name": "', '", "arguments": ', f"}}\n{_END_TAG}")

# No line break between two calls: behind one, a model that was not trained to make several would rather end.
GENERIC = ToolFormat("generic", *_TAGGED, opens=(_TAG,), closes=_END_TAG, is_in_template=False)
HARMONY = ToolFormat(
    "harmony", "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>",
    one_call=True, signs=SIGNS, one_at_a_time=True,
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
