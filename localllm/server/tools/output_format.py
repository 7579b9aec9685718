"""The format of a model's answer to one request: what its prompt has beside the messages, its grammar, its parser."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from localllm.chat.harmony import FINAL, is_harmony
from localllm.chat.thoughts import THOUGHT_MARKS, special_among, splits_off_thoughts
from localllm.chat.tool_words import has_calls
from localllm.server.errors import RequestError
from localllm.server.tools.deltas import AnswerParser, Says, ThoughtParser
from localllm.server.tools.grammars import tools_lark
from localllm.server.tools.harmony import HarmonyParser
from localllm.server.tools.prompts import prompt_of
from localllm.server.tools.tool_formats import HARMONY, ToolFormat, tool_format_of
from localllm.server.tools.tool_parser import ToolCallParser
from localllm.server.tools.toolset import Toolset
from localllm.text.grammar.grammar import Grammar

if TYPE_CHECKING:
    from localllm.text.chat_template import ChatInput, ChatTemplate
    from localllm.text.tokenizer import Tokenizer


def parser_of(
    tool_format: ToolFormat,
    names: Collection[str],
    *,
    streams: bool,
    says: Says,
    is_thinking: bool,
    splits: bool,
    is_final: bool,
) -> AnswerParser:
    """Return a parser of one answer.

    names: of the tools
    streams, says: as `ToolCallParser` has them
    is_thinking: the answer begins in a thought
    splits: there may be a thought
    is_final: as `HarmonyParser` has it
    """
    if tool_format.is_harmony:
        return HarmonyParser(names, streams=streams, is_final=is_final)
    said = ToolCallParser(tool_format, names, streams=streams, says=says)
    return ThoughtParser(is_thinking=is_thinking, said=said) if splits else said


@dataclass(frozen=True)
class OutputFormat:
    """The format of one request's answers.

    tool_format: of calls; None where there are none and the answer is no harmony
    splits: there may be thoughts
    tail: text behind the prompt, where the answer has to begin within the final message
    no_tools: the template's `tools` where there are none; of several templates, only the one for tools knows calls
    """

    tokenizer: Tokenizer
    tools: Toolset | None
    tool_format: ToolFormat | None
    splits: bool
    tail: str = ""
    no_tools: tuple[()] | None = None

    @property
    def tail_ids(self) -> Sequence[int]:
        return self.tokenizer.encode(self.tail, special=True) if self.tail else ()

    @property
    def shown_ids(self) -> frozenset[int]:
        """Special tokens that are written out, as the parser needs them."""
        thoughts = [mark for pair in THOUGHT_MARKS.items() for mark in pair] if self.splits else []
        return special_among(self.tokenizer, [*(self.tool_format.special if self.tool_format else ()), *thoughts])

    def template_input(self, chat: ChatInput) -> ChatInput:
        """Return the chat as the model's template wants it."""
        if self.tool_format is None:
            return chat
        messages, tools = prompt_of(chat.messages, self.tools, self.tool_format)
        if tools is None and self.tool_format.is_in_template:
            tools = self.no_tools
        return replace(chat, messages=messages, tools=tools)

    def grammar(
        self, answer: Grammar | None, answer_field: str, *, is_thinking: bool, may_think: bool
    ) -> Grammar | None:
        """Return the grammar of an answer, thoughts included. Raises RequestError where `answer`, the grammar of text
        that is no call, cannot go together with tools."""
        found = self._without_thoughts(answer, answer_field)
        if found is None or self.tool_format is HARMONY:
            return found
        splits = is_thinking or (self.splits and may_think)
        return replace(found, thoughts=tuple(THOUGHT_MARKS.items()) if splits else (), is_thinking=is_thinking)

    def _without_thoughts(self, answer: Grammar | None, answer_field: str) -> Grammar | None:
        tools = self.tools
        if tools is None or self.tool_format is None or (answer is None and not tools.is_constrained):
            return answer
        if answer is not None and answer.kind != "json_schema":
            what = f"{answer_field!r} cannot go together with tools"
            why = "beside calls, an answer can have a JSON Schema, and no grammar of another kind"
            raise RequestError(400, what, why=why, param=answer_field, name="unsupported_value")
        schema = None if answer is None or tools.must_call else answer.source
        return Grammar("lark", tools_lark(self.tool_format, tools, self.tokenizer.token_id, schema))

    def parser(self, *, is_thinking: bool, has_form: bool) -> AnswerParser | None:
        """Return a new parser of one answer; None where all of it is text. has_form: its text is held to a grammar."""
        splits, tools = is_thinking or self.splits, self.tools
        if self.tool_format is None or (tools is None and self.tool_format is not HARMONY):
            return ThoughtParser(is_thinking=is_thinking) if splits else None
        return parser_of(
            self.tool_format,
            () if tools is None else tools.callable,
            streams=has_form or (tools is not None and tools.is_constrained),
            says="nothing" if tools is not None and tools.must_call else "json" if has_form else "anything",
            is_thinking=is_thinking,
            splits=splits,
            is_final=bool(self.tail),
        )


def output_format_of(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[dict[str, Any]],
    tools: Toolset | None,
    *,
    is_begun: bool,
) -> OutputFormat:
    """is_begun: the answer goes on with its text: no thought and no call is in front of it."""
    splits = splits_off_thoughts(template, tokenizer)
    if is_harmony(template):
        return OutputFormat(tokenizer, tools, HARMONY, splits=False, tail=FINAL if is_begun else "")
    if tools is None and not has_calls(messages):
        return OutputFormat(tokenizer, None, None, splits)
    no_tools = () if "tool_use" in template.sources else None
    return OutputFormat(tokenizer, tools, tool_format_of(template), splits, no_tools=no_tools)
