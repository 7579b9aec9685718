"""The format of a model's answer to one request: what its prompt has beside the messages, its grammar, its parser."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from localllm.chat.context import text_of
from localllm.chat.harmony import FINAL, is_harmony
from localllm.chat.template_traits import USUAL, TemplateTraits, traits_of, with_thoughts
from localllm.chat.thoughts import ALL_MARKS, marks_in_grammar, special_among, splits_off_thoughts
from localllm.chat.tool_words import has_calls, in_words, with_arguments
from localllm.server.errors import RequestError
from localllm.server.tools.deltas import AnswerParser, Says, ThoughtParser
from localllm.server.tools.tool_formats import HARMONY, SHORT_ID, ToolFormat, tool_format_of
from localllm.server.tools.tool_grammars import tools_lark
from localllm.server.tools.tool_parser import HarmonyParser, ToolCallParser
from localllm.server.tools.toolset import Toolset
from localllm.text.grammar.grammar import Grammar
from localllm.text.template_marks import WrittenText

if TYPE_CHECKING:
    from localllm.text.chat_template import ChatInput, ChatTemplate
    from localllm.text.tokenizer import Tokenizer

Message = dict[str, Any]

_OWN_ID = re.compile(r"(?:call|toolu)_(?:[0-9a-f]{24}|\d+_\d+)")  # as the server makes them


@dataclass(frozen=True)
class OutputFormat:
    """The format of one request's answers.

    tool_format: of calls; None where there are none and the answer is not harmony
    splits: there may be thoughts
    traits: of the chat template
    tail: text behind the prompt, where the answer has to begin within the final message
    no_tools: the template's `tools` where there are none; of several templates, only the one for tools knows calls
    """

    tokenizer: Tokenizer
    tools: Toolset | None
    tool_format: ToolFormat | None
    splits: bool
    traits: TemplateTraits = USUAL
    tail: str = ""
    no_tools: tuple[()] | None = None

    @property
    def tail_ids(self) -> Sequence[int]:
        return self.tokenizer.encode(self.tail, special=True) if self.tail else ()

    @property
    def shown_ids(self) -> frozenset[int]:
        """Special tokens that are written out, as the parser needs them."""
        thoughts = ALL_MARKS if self.splits else ()
        return special_among(self.tokenizer, [*(self.tool_format.special if self.tool_format else ()), *thoughts])

    def template_input(self, chat: ChatInput) -> ChatInput:
        """Return the chat as the model's template wants it."""
        messages, tools = list(chat.messages), chat.tools
        if self.tool_format is not None:
            messages, tools = prompt_of(messages, self.tools, self.tool_format, self.traits)
            if tools is None and self.tool_format.is_in_template:
                tools = self.no_tools
        return replace(chat, messages=with_thoughts(self.traits, messages), tools=tools)

    def grammar(
        self, answer: Grammar | None, answer_field: str, *, is_thinking: bool, may_think: bool
    ) -> Grammar | None:
        """Return the grammar of an answer, thoughts included. Raises RequestError where `answer`, the grammar of text
        that is not a call, cannot go together with tools."""
        tools, found = self.tools, answer
        if tools is not None and self.tool_format is not None and (answer is not None or tools.is_constrained):
            if answer is not None and answer.kind != "json_schema":
                what = f"{answer_field!r} cannot go together with tools"
                why = "beside calls, an answer can have a JSON Schema, and no grammar of another kind"
                raise RequestError(400, what, why=why, param=answer_field, name="unsupported_value")
            schema = None if answer is None or tools.must_call else answer.source
            found = Grammar("lark", tools_lark(self.tool_format, tools, self.tokenizer.token_id, schema))
        if found is None or self.tool_format is HARMONY:
            return found
        splits = is_thinking or (self.splits and may_think)
        return replace(found, thoughts=marks_in_grammar(self.tokenizer) if splits else (), is_thinking=is_thinking)

    def parser(self, *, is_thinking: bool, has_form: bool) -> AnswerParser | None:
        """Return a new parser of one answer; None where all of it is text. has_form: its text is held to a grammar."""
        splits, tools = is_thinking or self.splits, self.tools
        names = () if tools is None else tools.callable
        streams = has_form or (tools is not None and tools.is_constrained)
        if self.tool_format is HARMONY:
            return HarmonyParser(names, streams=streams, is_final=bool(self.tail))
        if self.tool_format is None or tools is None:
            return ThoughtParser(is_thinking=is_thinking) if splits else None
        says: Says = "nothing" if tools.must_call else "json" if has_form else "anything"
        schemas = {tool.name: tool.schema for tool in tools.choices}
        said = ToolCallParser(self.tool_format, schemas, streams=streams, says=says)
        return ThoughtParser(is_thinking=is_thinking, said=said) if splits else said


def output_format_of(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[dict[str, Any]],
    tools: Toolset | None,
    *,
    is_begun: bool,
) -> OutputFormat:
    """is_begun: the answer goes on with its text: no thought and no call is in front of it."""
    splits, traits = splits_off_thoughts(template, tokenizer), traits_of(template)
    if is_harmony(template):
        return OutputFormat(tokenizer, tools, HARMONY, splits=False, traits=traits, tail=FINAL if is_begun else "")
    if tools is None and not has_calls(messages):
        return OutputFormat(tokenizer, None, None, splits, traits)
    no_tools = () if "tool_use" in template.sources else None
    return OutputFormat(tokenizer, tools, tool_format_of(template), splits, traits, no_tools=no_tools)


def prompt_of(
    messages: Sequence[Message], tools: Toolset | None, form: ToolFormat, traits: TemplateTraits = USUAL
) -> tuple[list[Message], Any]:
    """Return the messages and the `tools` that a chat template is given. traits: of that."""
    told = [tool.template_input for tool in tools.tools] if tools else None
    if not form.is_in_template:
        return in_words(messages, [tool["function"] for tool in told or ()]), None
    found = list(messages)
    if form.one_at_a_time:
        found = list(_one_at_a_time(found))
    if form.answers_results:
        found = list(_answered(found))
    if form.has_short_ids:
        found = [_with_ids(message, _short_id) for message in found]
    if form.has_named_ids:
        named = _named_ids(found, counts_on=traits.tells_ids)
        found = [_with_ids(message, lambda call_id: named.get(call_id, call_id)) for message in found]
    if form.is_harmony:
        found = [_with_thinking(message) for message in found]
    if not traits.called:
        found = [_with_written_calls(message, form) for message in found]
    return [with_arguments(traits, message) for message in found], told


def _one_at_a_time(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield each call of a turn as a turn of its own, with its result behind it."""
    results = {message["tool_call_id"]: message for message in messages if message["role"] == "tool"}
    for message in messages:
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            if message["role"] != "tool" or message["tool_call_id"] in results:
                yield message
            continue
        for index, call in enumerate(calls):
            said = message if not index else {"role": message["role"], "content": ""}
            yield {**said, "tool_calls": [call]}
            if (result := results.pop(call["id"], None)) is not None:
                yield result


def _answered(messages: Sequence[Message]) -> Iterator[Message]:
    """Put an empty answer between a result and a question."""
    for before, message in pairwise([{"role": ""}, *messages]):
        if before["role"] == "tool" and message["role"] == "user":
            yield {"role": "assistant", "content": ""}
        yield message


def _with_ids(message: Message, id_of: Callable[[str], str]) -> Message:
    if "tool_calls" in message:
        return {**message, "tool_calls": [{**call, "id": id_of(call["id"])} for call in message["tool_calls"]]}
    return {**message, "tool_call_id": id_of(message["tool_call_id"])} if message["role"] == "tool" else message


def _short_id(call_id: str) -> str:
    """Return the same short id each time, so that the prefix cache finds the prompt."""
    if len(call_id) == SHORT_ID and call_id.isalnum() and call_id.isascii():
        return call_id
    return hashlib.blake2b(call_id.encode("utf-8", "replace"), digest_size=5).hexdigest()[:SHORT_ID]


def _with_thinking(message: Message) -> Message:
    """Rename the thought as harmony's template has it; beside a call the template takes no other text."""
    if "tool_calls" not in message or "reasoning_content" not in message:
        return message
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    return {**rest, "content": "", "thinking": message["reasoning_content"]}


def _named_ids(messages: Sequence[Message], *, counts_on: bool) -> dict[str, str]:
    """Return ids as the model has them, in place of those that this server has made. counts_on: the numbers of a turn
    go on from the turn before."""
    found: dict[str, str] = {}
    num_before = 0
    for message in messages:
        calls = message.get("tool_calls", ())
        for index, call in enumerate(calls):
            if _OWN_ID.fullmatch(call["id"]):
                found[call["id"]] = f"functions.{call['function']['name']}:{num_before + index}"
        num_before += len(calls) if counts_on else 0
    return found


def _with_written_calls(message: Message, form: ToolFormat) -> Message:
    """Write a turn's calls behind its text, for a template that has no others."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    if not calls or not all(isinstance(arguments, dict) for _, arguments in calls):
        return message
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": WrittenText([(text_of(message), False), *form.pieces(calls)])}
