"""The grammars of calls, as the engine holds to them: with marks that are tokens of the vocabulary, and without."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken

from localllm import hub
from localllm.chat import harmony
from localllm.chat.thoughts import marks_in_grammar
from localllm.server.errors import RequestError
from localllm.server.tools.notations import JsonNotation
from localllm.server.tools.tool_formats import GENERIC, TOOL_FORMATS
from localllm.server.tools.tool_grammars import tools_lark
from localllm.server.tools.toolset import Tool, Toolset, toolset
from localllm.text.grammar.compiled import Grammars
from localllm.text.grammar.grammar import Grammar
from localllm.text.tokenizer import Tokenizer
from tests.server.support import Json

BY_NAME = {syntax.name: syntax for syntax in (*TOOL_FORMATS, GENERIC)}
TOOLS = (
    Tool("weather", "", {"properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]}),
    Tool("clock", "", {"properties": {}}),
)
PLAIN = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")  # as GLM has them
SPECIAL = [mark for form in BY_NAME.values() for mark in form.special if mark not in PLAIN]
THOUGHTS = (("<think>", "</think>"),)
ANSWER = '{"type": "object", "properties": {"name": {"enum": ["Ada"]}}, "required": ["name"]}'


@pytest.fixture(scope="module", params=["tokens", pytest.param("texts", marks=pytest.mark.slow)])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """The built-in model's; as tokens: with the marks of every family."""
    backend = tokenizers.Tokenizer.from_file(str(hub.locate("tiny").directory / "tokenizer.json"))
    if request.param == "tokens":
        backend.add_special_tokens(SPECIAL)
        backend.add_tokens([AddedToken(text, normalized=False) for text in PLAIN])
    return Tokenizer(backend, {"eos_token": "<|im_end|>"})


class CallGrammar:
    """Of calls of a family, beside an answer's schema or in its place."""

    def __init__(self, tokenizer: Tokenizer, family: str, tools: Toolset | None, answer: str | None = None) -> None:
        assert tools is not None and tokenizer.eos_token_id is not None
        self._encode = tokenizer.encode
        self.lark = tools_lark(BY_NAME[family], tools, tokenizer.token_id, answer)
        self._grammars = grammars_of(tokenizer)

    def takes(self, text: str, **thinking: Any) -> bool:
        constraint = self._grammars.constraint(Grammar("lark", self.lark, **thinking))
        return constraint.is_met(self._encode(text, special=True))


@cache
def grammars_of(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, [tokenizer.eos_token_id], tokenizer.vocab_size)


def written(family: str, *calls: tuple[str, Any]) -> str:
    """Of (name, arguments) each."""
    return BY_NAME[family].written(calls)


WARM, NOON = ("weather", {"unit": "C"}), ("clock", {})


def require_marks(tokenizer: Tokenizer, family: str = "harmony") -> None:
    if family == "harmony" and tokenizer.token_id(harmony.CHANNEL) is None:
        pytest.skip("every model of harmony has its marks as tokens")


@pytest.mark.parametrize("family", BY_NAME)
def test_a_call_that_has_to_be_made_is_one_of_the_tools(tokenizer: Tokenizer, family: str) -> None:
    grammar = CallGrammar(tokenizer, family, toolset(TOOLS, must_call=True))
    for call in (WARM, NOON):
        assert grammar.takes(written(family, call))
    assert grammar.takes(written(family, WARM, NOON)) != BY_NAME[family].one_call
    for call in (("weather", {}), ("weather", {"unit": "K"}), ("clock", {"a": 1}), ("nobody", {})):
        assert not grammar.takes(written(family, call))
    assert not grammar.takes("It is warm.") and not grammar.takes("")


@pytest.mark.parametrize("family", BY_NAME)
def test_a_tool_that_is_named_is_called_once(tokenizer: Tokenizer, family: str) -> None:
    grammar = CallGrammar(tokenizer, family, toolset(TOOLS, must_call=True, only=["clock"], one_call=True))
    assert grammar.takes(written(family, NOON))
    assert not grammar.takes(written(family, WARM))
    assert not grammar.takes(written(family, NOON, NOON))


@pytest.mark.parametrize("family", BY_NAME)
def test_a_call_that_may_be_made_is_held_to_once_it_begins(tokenizer: Tokenizer, family: str) -> None:
    require_marks(tokenizer, family)
    grammar = CallGrammar(tokenizer, family, toolset(TOOLS, one_call=True))
    text = "It is warm." if family != "harmony" else "<|channel|>final<|message|>It is warm."
    assert grammar.takes(text) and grammar.takes(written(family, WARM))
    assert not grammar.takes(written(family, ("weather", {"unit": "K"})))
    if family not in ("harmony", "llama"):
        assert grammar.takes(f"Let me look.\n{written(family, NOON)}")


@pytest.mark.parametrize("family", [name for name in BY_NAME if name != "harmony"])
def test_an_answer_that_is_no_call_may_have_a_schema(tokenizer: Tokenizer, family: str) -> None:
    grammar = CallGrammar(tokenizer, family, toolset(TOOLS), ANSWER)
    assert grammar.takes('{"name": "Ada"}')
    assert grammar.takes(written(family, WARM))
    assert not grammar.takes('{"name": "Bob"}')
    assert not grammar.takes("It is warm.")


def test_harmony_may_think_in_front_of_a_call(tokenizer: Tokenizer) -> None:
    require_marks(tokenizer)
    grammar = CallGrammar(tokenizer, "harmony", toolset(TOOLS, must_call=True))
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert grammar.takes(thought + written("harmony", WARM))
    assert grammar.takes(thought * 2 + written("harmony", WARM))
    assert not grammar.takes(thought)


def test_a_thought_stands_in_front_of_a_call(tokenizer: Tokenizer) -> None:
    grammar, call = CallGrammar(tokenizer, "hermes", toolset(TOOLS, must_call=True)), written("hermes", WARM)
    assert grammar.takes(f"<think>\nHm.\n</think>\n\n{call}", thoughts=THOUGHTS)
    assert grammar.takes(f"Hm.\n</think>\n\n{call}", thoughts=THOUGHTS, is_thinking=True)
    assert not grammar.takes("<think>\nHm.\n</think>\n\nWarm.", thoughts=THOUGHTS)


def test_a_thought_has_marks_that_are_special_tokens() -> None:
    backend = tokenizers.Tokenizer.from_file(str(hub.locate("tiny").directory / "tokenizer.json"))
    backend.add_special_tokens(["<|channel>", "<channel|>", "[THINK]", "[/THINK]"])
    tokenizer = Tokenizer(backend, {"eos_token": "<|im_end|>"})
    thoughts, call = marks_in_grammar(tokenizer), written("hermes", WARM)
    grammar = CallGrammar(tokenizer, "hermes", toolset(TOOLS, must_call=True))
    for thought in ("<|channel>thought\nHm.\n<channel|>", "[THINK]Hm.[/THINK]", "<think>\nHm.\n</think>\n\n", ""):
        assert grammar.takes(thought + call, thoughts=thoughts)
    assert not grammar.takes(f"[THINK]Hm.{call}", thoughts=thoughts)
    for closing in ("[/THINK]", "<channel|>", "</think>\n\n"):
        assert grammar.takes(f"Hm.{closing}{call}", thoughts=thoughts, is_thinking=True)
    assert not grammar.takes(call, thoughts=thoughts, is_thinking=True)


def test_what_is_only_read_of_a_tool_is_not_in_its_grammar(tokenizer: Tokenizer) -> None:
    title = {"type": "string", "description": "Of the book." * 9000}
    parameters = {"properties": {"title": title}, "title": "Arguments"}
    grammar = CallGrammar(tokenizer, "hermes", toolset([Tool("find", "", parameters)], must_call=True))
    assert "Of the book." not in grammar.lark and '"title"' in grammar.lark and "Arguments" not in grammar.lark


FIND = Tool("find", "", {"properties": {"a": {"not": {}}}})


@pytest.mark.parametrize("family", BY_NAME)
@pytest.mark.parametrize("choice", [{"must_call": True}, {"one_call": True}], ids=str)
def test_a_tool_to_which_no_call_can_be_held_takes_any_object_and_the_others_what_they_say(
    tokenizer: Tokenizer, family: str, choice: Json
) -> None:
    require_marks(tokenizer, family)
    grammar = CallGrammar(tokenizer, family, toolset([FIND, *TOOLS], **choice))
    for call in (("find", {"a": 1, "b": [{}]}), WARM):
        assert grammar.takes(written(family, call))
    assert not grammar.takes(written(family, ("weather", {"unit": "K"})))
    if BY_NAME[family].notation == JsonNotation():
        assert not grammar.takes(written(family, ("find", [1])))


@pytest.mark.parametrize(
    "tools",
    [
        toolset([TOOLS[0], FIND], must_call=True, only=["find"], one_call=True),
        toolset([FIND], must_call=True),
        toolset([*TOOLS, replace(FIND, strict=True)]),
    ],
    ids=["named", "alone", "strict"],
)
def test_a_schema_to_which_no_call_can_be_held_is_refused_where_one_must_be(
    tokenizer: Tokenizer, tools: Toolset
) -> None:
    with pytest.raises(RequestError) as caught:
        CallGrammar(tokenizer, "hermes", tools)
    assert f"tools[{len(tools.tools) - 1}]" in caught.value.what
    assert caught.value.param == "tools" and "'find'" in caught.value.what and "'not'" in caught.value.why
