"""How a model's answer to one request is written: what its prompt has beside the messages, what its grammar is, and how
it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from localllm.chat.harmony import FINAL, is_harmony
from localllm.chat.thoughts import THOUGHT_MARKS, special_among, splits_off_thoughts
from localllm.chat.tool_words import has_calls
from localllm.server.failures import RequestError
from localllm.server.tools.calling import Toolset
from localllm.server.tools.grammars import tools_lark
from localllm.server.tools.parts import Reader, ThoughtReader
from localllm.server.tools.prompting import told
from localllm.server.tools.syntaxes import HARMONY, Syntax, syntax_of
from localllm.text.grammar.grammar import Grammar

if TYPE_CHECKING:
    from localllm.text.chat_template import ChatInput, ChatTemplate
    from localllm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Manner:
    """syntax: of calls; None where there are none and the answer is no harmony. splits: there may be thoughts. tail:
    behind the prompt, where the answer has to begin within the message that is said. no_tools: what the template is
    given where there are none; of several, only the one for tools knows calls."""

    tokenizer: Tokenizer
    tools: Toolset | None
    syntax: Syntax | None
    splits: bool
    tail: str = ""
    no_tools: tuple[()] | None = None

    @property
    def tail_ids(self) -> Sequence[int]:
        return self.tokenizer.encode(self.tail, special=True) if self.tail else ()

    @property
    def shown_ids(self) -> frozenset[int]:
        """Special tokens by which the answer is told apart."""
        thoughts = [mark for pair in THOUGHT_MARKS.items() for mark in pair] if self.splits else []
        return special_among(self.tokenizer, [*(self.syntax.special if self.syntax else ()), *thoughts])

    def told(self, chat: ChatInput) -> ChatInput:
        """As its template wants it."""
        if self.syntax is None:
            return chat
        messages, tools = told(chat.messages, self.tools, self.syntax)
        return replace(chat, messages=messages, tools=self.no_tools if tools is None and self.syntax.is_told else tools)

    def grammar(
        self, answer: Grammar | None, answer_field: str, *, is_thinking: bool, may_think: bool
    ) -> Grammar | None:
        """answer: of what is said, if it is no call. Raises RequestError where it cannot go together with tools."""
        found = self._unthinking(answer, answer_field)
        if found is None or self.syntax is HARMONY:
            return found
        splits = is_thinking or (self.splits and may_think)
        return replace(found, thoughts=tuple(THOUGHT_MARKS.items()) if splits else (), is_thinking=is_thinking)

    def _unthinking(self, answer: Grammar | None, answer_field: str) -> Grammar | None:
        tools = self.tools
        if tools is None or self.syntax is None or (answer is None and not tools.is_constrained):
            return answer
        if answer is not None and answer.kind != "json_schema":
            what = f"{answer_field!r} cannot go together with tools"
            why = "beside calls, an answer can have a JSON Schema, and no grammar of another kind"
            raise RequestError(400, what, why=why, param=answer_field, name="unsupported_value")
        schema = None if answer is None or tools.must_call else answer.source
        return Grammar("lark", tools_lark(self.syntax, tools, self.tokenizer.token_id, schema))

    def reader(self, *, is_thinking: bool, has_form: bool) -> Reader | None:
        """A new one for each answer; None: all of it is text. has_form: what is said is held to one."""
        splits = is_thinking or self.splits
        if self.syntax is HARMONY or (self.syntax is not None and self.tools is not None):
            tools = self.tools
            must_call = tools is not None and tools.must_call
            return self.syntax.reader(
                () if tools is None else tools.callable,
                streams=has_form or (tools is not None and tools.is_constrained),
                says="nothing" if must_call else "json" if has_form else "anything",
                is_thinking=is_thinking,
                splits=splits,
                is_final=bool(self.tail),
            )
        return ThoughtReader(is_thinking=is_thinking) if splits else None


def manner_of(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[dict[str, Any]],
    tools: Toolset | None,
    *,
    is_begun: bool,
) -> Manner:
    """is_begun: what is said begins with the answer, or did so before: no thought and no call is in front of it."""
    splits = splits_off_thoughts(template, tokenizer)
    if is_harmony(template):
        return Manner(tokenizer, tools, HARMONY, splits=False, tail=FINAL if is_begun else "")
    if tools is None and not has_calls(messages):
        return Manner(tokenizer, None, None, splits)
    no_tools = () if "tool_use" in template.sources else None
    return Manner(tokenizer, tools, syntax_of(template), splits, no_tools=no_tools)
