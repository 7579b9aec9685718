"""How families of models write calls of tools: a table, and which row is a model's, as its chat template shows.

A model whose template knows no tools, or has them in a form that is not here, is told of them in a message of ours.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localllm.chat.harmony import MARKS as HARMONY_MARKS
from localllm.chat.harmony import SIGNS
from localllm.chat.tool_words import knows_tools
from localllm.server.tools.harmony import HarmonyReader
from localllm.server.tools.parts import Reader, Says, ThoughtReader
from localllm.server.tools.reading import CallReader, Marks

if TYPE_CHECKING:
    from localllm.text.chat_template import ChatTemplate


@dataclass(frozen=True)
class Written:
    """A call as a grammar lets it be made: begins, its name, middle, its arguments, ends. first, between, last: in
    front of the first one, between two, behind the last one. one: there is never more than one in an answer."""

    begins: str
    middle: str
    ends: str = ""
    first: str = ""
    between: str = ""
    last: str = ""
    one: bool = False


@dataclass(frozen=True)
class Syntax:
    """signs: words that a chat template of the family has, all of them; strangers: none of these. is_told: its template
    tells the model of tools. one_at_a_time: a turn of its template holds one call. has_short_ids: calls have ids of 9
    letters and digits. answers_results: a question behind a result is refused, unless something was said in between.
    marks: None for harmony."""

    name: str
    written: Written
    marks: Marks | None
    signs: tuple[str, ...] = ()
    strangers: tuple[str, ...] = ()
    is_told: bool = True
    one_at_a_time: bool = False
    has_short_ids: bool = False
    answers_results: bool = False

    @property
    def special(self) -> tuple[str, ...]:
        """Marks that a tokenizer may have as special tokens."""
        if self.marks is None:
            return HARMONY_MARKS
        more = ("[ARGS]", "[CALL_ID]") if "[TOOL_CALLS]" in self.marks.opens else ()
        return (*self.marks.opens, *filter(None, [self.marks.closes]), *more)

    def reader(
        self, names: Collection[str], *, streams: bool, says: Says, is_thinking: bool, splits: bool, is_final: bool
    ) -> Reader:
        """names: of the tools. streams: a grammar sees to it that calls are calls; says: and what stands beside them.
        is_thinking: the answer begins in a thought; splits: there may be one. is_final: as `HarmonyReader` has it."""
        if self.marks is None:
            return HarmonyReader(names, streams=streams, is_final=is_final)
        said = CallReader(self.marks, names, streams=streams, says=says)
        return ThoughtReader(is_thinking=is_thinking, said=said) if splits else said


_TAGGED = Written('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", between="\n")
_TAGS = Marks(("<tool_call>",), "</tool_call>")

# Without a line between two calls: behind one, a model that was not trained to make several rather ends.
GENERIC = Syntax("generic", replace(_TAGGED, between=""), _TAGS, is_told=False)
HARMONY = Syntax(
    "harmony",
    Written("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", one=True),
    None,
    signs=SIGNS,
    one_at_a_time=True,
)
SYNTAXES = (
    HARMONY,
    Syntax(
        "mistral",
        Written("[TOOL_CALLS]", "[ARGS]"),
        Marks(("[TOOL_CALLS]",)),
        signs=("[TOOL_CALLS]", "[ARGS]"),
        has_short_ids=True,
    ),
    Syntax(
        "mistral-list",
        Written('{"name": "', '", "arguments": ', "}", first="[TOOL_CALLS][", between=", ", last="]"),
        Marks(("[TOOL_CALLS]",)),
        signs=("[TOOL_CALLS]",),
        has_short_ids=True,
        answers_results=True,
    ),
    Syntax("hermes", _TAGGED, _TAGS, signs=("<tool_call>", "arguments"), strangers=("<function=", "<arg_key>")),
    Syntax(
        "llama",
        Written('{"name": "', '", "parameters": ', "}", one=True),
        Marks(("<|python_tag|>",), is_bare=True),
        signs=('"parameters": ', "dictionary of argument name and its value"),
        one_at_a_time=True,
    ),
)


def syntax_of(template: ChatTemplate) -> Syntax:
    """Of the model whose template it is. A fraction of a millisecond: the template is asked."""
    source = "\n".join(template.sources.values())
    for syntax in SYNTAXES:
        if all(sign in source for sign in syntax.signs) and not any(word in source for word in syntax.strangers):
            return syntax if knows_tools(template) else GENERIC
    return GENERIC
