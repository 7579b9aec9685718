"""Calls told apart from text and thoughts, in whatever pieces an answer comes, as each family of models writes them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm import hub
from localllm.server.tools.argument_readers import ValueEnd
from localllm.server.tools.deltas import AnswerParser, Part, Says
from localllm.server.tools.output_format import OutputFormat
from localllm.server.tools.tool_formats import GENERIC, TOOL_FORMATS
from localllm.server.tools.tool_parser import partial_object
from localllm.server.tools.toolset import Tool, Toolset
from localllm.text.tokenizer import Tokenizer
from tests.server.support import Json
from tests.thinning import examples

BY_NAME = {syntax.name: syntax for syntax in (*TOOL_FORMATS, GENERIC)}
NAMES = ("weather", "clock")
TOKENIZER = Tokenizer.load(hub.locate("tiny").directory)
HARMONY_THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
HARMONY_CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"


def hermes(*arguments: Any, name: str = "weather") -> str:
    """Calls, each in lines of its own."""
    said = (json.dumps({"name": name, "arguments": each}) for each in arguments)
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in said)


UNIT = ("call", "weather"), ("arguments", '{"unit": "C"}')
NOON = ("call", "clock"), ("arguments", "{}")
# How models write that a call has no arguments.
NOTHING = ("", *(f', "arguments": {nothing}' for nothing in ("null", '""', '"null"', '"{}"', "{}")))
MISTRAL_LIST = '[TOOL_CALLS] [{"name": "weather", "arguments": {"unit": "C"}, "id": "abcdefghi"}'

# family, what the model says, what that comes to
RECORDED: list[tuple[str, str, Sequence[Part]]] = [
    ("hermes", hermes({"unit": "C"}), UNIT),
    ("hermes", "Let me look.\n" + hermes({"unit": "C"}) + "\n" + hermes({}, name="clock") + "\n",
     [("text", "Let me look."), *UNIT, *NOON]),
    ("hermes", hermes({"unit": "C"}) + "\n\nThat was all.", [*UNIT, ("text", "That was all.")]),
    ("hermes", '<tool_call>{"arguments": {"unit": "C"}, "name": "weather"}</tool_call>', UNIT),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"unit\\": \\"C\\"}"}</tool_call>', UNIT),
    ("hermes", '<tool_call>{"type": "function", "function": {"name": "weather", "parameters": {"unit": "C"}}}', UNIT),
    ("hermes", '<tool_call>\n[{"name": "weather", "arguments": {"unit": "C"}}, {"name": "clock"}]</tool_call>',
     [*UNIT, *NOON]),
    ("hermes", hermes({"unit": 'a } "<tool_call>" \\'}),
     [("call", "weather"), ("arguments", json.dumps({"unit": 'a } "<tool_call>" \\'}))]),
    ("generic", hermes({"unit": "C"}) * 2, [*UNIT, *UNIT]),
    *((family, f'<tool_call>{{"name": "clock"{none}}}</tool_call>', NOON)
      for family in ("hermes", "generic") for none in NOTHING),
    *(("hermes", f'<tool_call>{{{none[2:]}, "name": "clock"}}</tool_call>', NOON) for none in NOTHING if none),
    ("hermes", '<tool_call>{"type": "function", "function": {"name": "clock", "arguments": ""}}', NOON),
    ("hermes", '<tool_call>[{"name": "clock", "arguments": null}, {"name": "clock"}]</tool_call>', [*NOON, *NOON]),
    *(("mistral-list", f'[TOOL_CALLS] [{{"name": "clock"{none}}}]', NOON) for none in NOTHING),
    *(("llama", f'{before}{{"name": "clock"{none.replace("arguments", "parameters")}}}', NOON)
      for before in ("", "<|python_tag|>") for none in NOTHING),
    *(("mistral", f"[TOOL_CALLS]clock{none}", NOON)
      for none in ("", "[ARGS]", "[ARGS]null", '[ARGS] ""', "[CALL_ID]Ab3[ARGS]", "[ARGS]{}")),
    *(("mistral", f'[TOOL_CALLS]clock{none}[TOOL_CALLS]weather[ARGS]{{"unit": "C"}}', [*NOON, *UNIT])
      for none in ("", "[ARGS]", "[ARGS]null", '[ARGS]""', "[ARGS] {}")),
    *(("harmony", HARMONY_CALL.replace("weather", "clock") + none, NOON) for none in ("", " ", "null", '""', "{}")),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"unit": "C"}[TOOL_CALLS]clock[CALL_ID]Ab3[ARGS]{}', [*UNIT, *NOON]),
    ("mistral", 'Let me look.[TOOL_CALLS]weather[ARGS] {"unit": "C"}', [("text", "Let me look."), *UNIT]),
    ("mistral-list", MISTRAL_LIST + "]", UNIT),
    ("mistral-list", MISTRAL_LIST + ', {"name": "clock", "arguments": {}}]', [*UNIT, *NOON]),
    ("llama", '{"name": "weather", "parameters": {"unit": "C"}}', UNIT),
    ("llama", '<|python_tag|>{"name": "weather", "parameters": {"unit": "C"}}; {"name": "clock", "parameters": {}}',
     [*UNIT, *NOON]),
    *(("qwen-xml", f"{before}<function=weather>\n<parameter=unit>\nC\n</parameter>\n</function>{behind}", UNIT)
      for before, behind in (("<tool_call>\n", "\n</tool_call>"), ("", "\n</tool_call>"), ("<tool_call>", ""))),
    ("hermes", '<tool_call>\n[\n  {"name": "weather", "arguments": {"unit": "C"}},\n'
     '  {"name": "clock", "arguments": {}}\n]\n</tool_call>', [*UNIT, *NOON]),  # as Falcon H1 does
    ("qwen-xml", 'It is.\n\n<tool_call><function=weather><parameter=unit>C</parameter></function></tool_call>\n'
     "<tool_call>\n<function=clock>\n</function>\n</tool_call>", [("text", "It is."), *UNIT, *NOON]),
    ("qwen-xml", '<tool_call>\n{"name": "weather", "arguments": {"unit": "C"}}\n</tool_call>', UNIT),
    ("seed", "<seed:tool_call>\n<function=weather>\n<parameter=unit>C</parameter>\n</function>\n</seed:tool_call>",
     UNIT),
    ("minimax", '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="unit">C</parameter>\n</invoke>\n'
     '<invoke name="clock">\n</invoke>\n</minimax:tool_call>', [*UNIT, *NOON]),
    *((family, f"<tool_call>weather{line}<arg_key>unit</arg_key>{line}<arg_value>C</arg_value>{line}</tool_call>"
       f"{line}<tool_call>clock{line}</tool_call>", [*UNIT, *NOON])
      for family in ("glm", "glm-line") for line in ("", "\n")),
    ("gemma", '<|tool_call>call:weather{unit:<|"|>C<|"|>}<tool_call|><|tool_call>call:clock{}<tool_call|>',
     [*UNIT, *NOON]),
    ("gemma", '<|tool_call>call:weather{"unit": "C"}<tool_call|>', UNIT),
    *(("lfm", f"Let me look.<|tool_call_start|>[weather(unit={said}), clock()]<|tool_call_end|>",
       [("text", "Let me look."), *UNIT, *NOON]) for said in ('"C"', "'C'", "'\\x43'", '"\\u0043",')),
    ("lfm", "<|tool_call_start|>weather(unit='C')<|tool_call_end|>", UNIT),
    ("lfm", '<|tool_call_start|>[{"name": "weather", "arguments": {"unit": "C"}}]<|tool_call_end|>', UNIT),
    *(("minicpm", f"<|tool_call_start|>\n```python\nweather(unit={said})\nclock()\n```\n<|tool_call_end|>\n",
       [*UNIT, *NOON]) for said in ('"C"', "'C'")),
    ("nemotron-list", 'Let me look.\n<TOOLCALL>[{"name": "weather", "arguments": {"unit": "C"}}, '
     '{"name": "clock", "arguments": {}}]</TOOLCALL>', [("text", "Let me look."), *UNIT, *NOON]),
    ("granite-list", '<|tool_call|>[{"name": "weather", "arguments": {"unit": "C"}}, '
     '{"name": "clock", "arguments": {}}]', [*UNIT, *NOON]),
    ("deepseek-function", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
     '{"unit": "C"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{}\n```'
     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", [*UNIT, *NOON]),
    ("deepseek", "Let me look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
     '{"unit": "C"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}'
     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", [("text", "Let me look."), *UNIT, *NOON]),
    ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
     '{"unit": "C"}<|tool_call_end|><|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>{}<|tool_call_end|>'
     "<|tool_calls_section_end|>", [*UNIT, *NOON]),
    ("mistral-id", '[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"unit": "C"}[TOOL_CALLS]clock[ARGS]{}', [*UNIT, *NOON]),
    ("harmony", HARMONY_THOUGHT + HARMONY_CALL + '{"unit": "C"}', [("thought", "Hm."), *UNIT]),
    ("harmony", ' to=functions.weather<|channel|>commentary json<|message|>{"unit": "C"}', UNIT),
    ("harmony", HARMONY_THOUGHT + "<|channel|>final<|message|>It is < warm.",
     [("thought", "Hm."), ("text", "It is < warm.")]),
    ("harmony", "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant to=functions.clock<|channel|>"
     "commentary<|message|>{}", [("text", "Let me look."), *NOON]),
    ("harmony", "It speaks without channels.", [("text", "It speaks without channels.")]),
]  # fmt: skip

# What is not a call, and is said as it is.
TEXTS: list[tuple[str, str]] = [
    ("hermes", "  No call at all, 1 < 2 and <tool_talk>.  "),
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"unit": }}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"unit": "C"}\n</tool_call> and more'),
    ("hermes", hermes({}, name="nobody")),
    ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"unit": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"unit": 1e999}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call> weather(unit=C) </tool_call>"),
    ("hermes", "<tool_call>"),
    ("hermes", hermes({"unit": "C"})[:-20]),
    ("mistral", '[TOOL_CALLS]nobody[ARGS]{"unit": "C"}'),
    ("mistral", "[TOOL_CALLS] and what they are"),
    ("mistral", "[TOOL_CALLS]nobody"),
    ("mistral", "[TOOL_CALLS]nobody[ARGS]null"),
    ("mistral-list", "[TOOL_CALLS] [1, 2]"),
    ("qwen-xml", "<tool_call>\n<function=nobody>\n</function>\n</tool_call>"),
    ("qwen-xml", "<tool_call>\n<function=weather>\nunit=C\n</function>\n</tool_call>"),
    ("qwen-xml", "<tool_call>\n<function=weather>\n<parameter=unit>\nC\n</parameter>\n"),
    ("qwen-xml", "A <function=weather> is how a call begins."),
    ("glm", "<tool_call>weather\n<arg_key>unit</arg_key>\n<arg_val>C</arg_val>\n</tool_call>"),
    ("glm", "<tool_call>weather in Rome</tool_call>"),
    ("gemma", "<|tool_call>call:weather{unit:C}<tool_call|>"),
    ("gemma", '<|tool_call>call:nobody{unit:<|"|>C<|"|>}<tool_call|>'),
    ("lfm", "<|tool_call_start|>[weather(unit=C)]<|tool_call_end|>"),
    ("lfm", "<|tool_call_start|>[clock(), weather(C)]<|tool_call_end|>"),
    ("lfm", '<|tool_call_start|>[nobody(unit="C")]<|tool_call_end|>'),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{unit}<｜tool▁call▁end｜>"),
    ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.nobody:0<|tool_call_argument_begin|>{}"),
    ("llama", '{"unit": "C"} is an object, and no call'),
    ("llama", '{"name": "Ada", "born": 1815}'),
    ("llama", "{ is a brace"),
    ("llama", "[1] is a note"),
    ("llama", '<|python_tag|>print("hi")'),
]


def read(reader: AnswerParser, pieces: Iterable[str], *, is_cut: bool = False) -> list[Part]:
    """Parts, those of a kind behind each other as one."""
    parts = [part for piece in pieces for part in reader.feed(piece)] + reader.end(is_cut=is_cut)
    joined: list[Part] = []
    for kind, text in parts:
        if joined and joined[-1][0] == kind != "call":
            joined[-1] = (kind, joined[-1][1] + text)
        elif text:
            joined.append((kind, text))
    return joined


def reader_of(family: str, *, streams: bool = False, splits: bool = False, says: Says = "anything") -> AnswerParser:
    tools = Toolset(tuple(map(Tool, NAMES)), NAMES, must_call=says == "nothing", one_call=streams)
    output = OutputFormat(TOKENIZER, tools, BY_NAME[family], splits)
    parser = output.parser(is_thinking=False, has_form=says == "json")
    assert parser is not None
    return parser


def certain(family: str, *arguments: Json) -> str:
    """A call of each tool, as a grammar lets them be made; of one, where the family makes no more."""
    written = BY_NAME[family]
    return written.written(list(zip(NAMES, arguments, strict=False))[: 1 if written.one_call else 2])


def cut(text: str, places: Sequence[int]) -> list[str]:
    """In pieces, at these places of it."""
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@pytest.mark.parametrize(("family", "text", "parts"), RECORDED)
def test_what_a_model_writes_is_told_apart(family: str, text: str, parts: Sequence[Part]) -> None:
    assert read(reader_of(family), [text]) == read(reader_of(family), text) == list(parts)


@pytest.mark.parametrize(("family", "text"), TEXTS)
def test_what_is_no_call_is_text(family: str, text: str) -> None:
    assert read(reader_of(family), [text]) == read(reader_of(family), text) == [("text", text)]


@given(
    case=st.sampled_from([*((family, text) for family, text, _ in RECORDED), *TEXTS]),
    places=st.lists(st.integers(0, 400), max_size=12),
    splits=st.booleans(),
    is_cut=st.booleans(),
)
@settings(max_examples=examples(80), deadline=None)
def test_the_pieces_in_which_it_comes_make_no_difference(
    case: tuple[str, str], places: list[int], splits: bool, is_cut: bool
) -> None:
    family, text = case
    whole = read(reader_of(family, splits=splits), [text], is_cut=is_cut)
    assert read(reader_of(family, splits=splits), cut(text, places), is_cut=is_cut) == whole


_MARKS = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", '{"name": "weather", "arguments": {', '"unit": "C"',
          "}", "}}", "[", "]", "null", '""', '"', "\\", "\n", " ", "weather", "final", "analysis", "to=functions.clock",
          "a", ";", ",", "(", ")", "unit=", "unit:", "'C'", "<function=weather>\n", "<parameter=unit>\n", "```json",
          *(mark for form in BY_NAME.values() for mark in (*form.opens, *form.special))]  # fmt: skip


@given(
    family=st.sampled_from(sorted(BY_NAME)),
    pieces=st.lists(st.sampled_from(_MARKS), max_size=14),
    begins=st.booleans(),
    places=st.lists(st.integers(0, 200), max_size=8),
    streams=st.booleans(),
    is_cut=st.booleans(),
)
@settings(max_examples=examples(120), deadline=None)
def test_nothing_that_a_model_says_is_too_odd(
    family: str, pieces: list[str], begins: bool, places: list[int], streams: bool, is_cut: bool
) -> None:
    text = "".join(pieces)
    if begins:  # like a call
        form = BY_NAME[family]
        text = f"{form.first}{form.begins}weather{form.middle}{text}{form.ends}{form.last}"
    whole = read(reader_of(family, streams=streams), [text], is_cut=is_cut)
    assert read(reader_of(family, streams=streams), cut(text, places), is_cut=is_cut) == whole
    calls = [part for part in whole if part[0] == "call"]
    assert all(name in NAMES for _, name in calls)
    if not streams and not is_cut:
        assert all(isinstance(json.loads(said), dict) for kind, said in whole if kind == "arguments")


@pytest.mark.parametrize("splits", [False, True])
def test_a_thought_stands_in_front_of_calls(splits: bool) -> None:
    text = f"<think>\nOf <tool_call> I know.\n</think>\n\n{hermes({'unit': 'C'})}"
    parts = read(reader_of("hermes", splits=splits), text)
    if splits:
        assert parts == [("thought", "Of <tool_call> I know.\n"), *UNIT]
    else:
        assert parts[0][0] == "text" and parts[-2:] == list(UNIT)


def test_a_thought_is_one_while_it_is_written() -> None:
    reader = reader_of("harmony")
    pieces = "<|channel|>analysis", "<|message|>", "Hm.", "<|end|>", "<|start|>assistant<|channel|>final<|message|>"
    for piece, is_thinking in zip(pieces, (False, True, True, False, False), strict=True):
        reader.feed(piece)
        assert reader.is_thinking == is_thinking


# Calls that a grammar has seen to


@pytest.mark.parametrize("family", BY_NAME)
def test_the_arguments_of_a_certain_call_are_given_out_as_they_come(family: str) -> None:
    text = certain(family, said := {"unit": "C", "list": [{}, "}"]}, said)
    reader, given_out = reader_of(family, streams=True), 0
    for char in text:
        given_out += any(kind == "arguments" for kind, _ in reader.feed(char))
    assert given_out >= 4 and reader.end(is_cut=False) == []
    parts = read(reader_of(family, streams=True), [text])
    in_order = sorted(said) if BY_NAME[family].name == "gemma" else said
    arguments = json.dumps({name: said[name] for name in in_order})
    told = [part for name in NAMES for part in (("call", name), ("arguments", arguments))]
    assert parts == told[: 2 if BY_NAME[family].one_call else 4]


@pytest.mark.parametrize(
    ("family", "text", "parts"),
    [
        ("hermes", f"Let me look.\n{hermes({'unit': 'C'})}", [("text", "Let me look."), *UNIT]),
        ("hermes", "Just text.", [("text", "Just text.")]),
        ("llama", '{"unit": "C"}', [("text", '{"unit": "C"}')]),
    ],
)
def test_text_may_stand_before_a_certain_call_or_in_its_place(family: str, text: str, parts: Sequence[Part]) -> None:
    assert read(reader_of(family, streams=True), text) == parts


# Answers that are cut


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_that_is_cut_is_told_as_far_as_it_goes(streams: bool) -> None:
    text = hermes({"unit": "C", "days": [1, 2]})
    begun = text.index("arguments") + len('arguments": ') + 1
    for end in range(begun, len(text)):
        kinds = dict(read(reader_of("hermes", streams=streams), [text[:end]], is_cut=True))
        assert kinds.get("call") == "weather" and text[begun - 1 :].startswith(kinds.get("arguments", "?"))
    assert "call" not in dict(read(reader_of("hermes", streams=streams), [text[:20]], is_cut=True))


def read_by_parts(text: str, family: str, splits: bool, says: Says) -> Iterator[list[Part]]:
    """What it comes to wherever it is cut, however it is told to end, and in whatever pieces it comes."""
    for end, is_cut in itertools.product(range(len(text) + 1), (True, False)):
        for pieces in ([text[:end]], text[:end]):
            yield read(reader_of(family, streams=True, splits=splits, says=says), pieces, is_cut=is_cut)


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("blank", ["", "\n\n"])
@pytest.mark.parametrize("family", BY_NAME)
def test_nothing_is_said_beside_a_call_that_has_to_be_made(family: str, blank: str, splits: bool) -> None:
    said: Json = {"days": [1, 2], "unit": "C"}
    for parts in read_by_parts(blank + certain(family, said, {}), family, splits, "nothing"):
        assert {kind for kind, _ in parts} <= {"call", "arguments"}
        assert f"{json.dumps(said)}{{}}".startswith("".join(part for kind, part in parts if kind == "arguments"))


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("family", [family for family in BY_NAME if family not in ("harmony", "llama")])
def test_a_call_in_the_place_of_json_is_never_said(family: str, splits: bool) -> None:
    for parts in read_by_parts("\n\n" + certain(family, {"unit": "C"}, {}), family, splits, "json"):
        assert {kind for kind, _ in parts} <= {"call", "arguments"}


@pytest.mark.parametrize("answer", ['{"name": "Ada", "says": "[TOOL_CALLS]clock[ARGS]{}, <tool_call>"}', '["<"]', "7"])
@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("family", [family for family in BY_NAME if family != "harmony"])
def test_json_begins_with_its_first_character_and_has_no_call_in_it(family: str, splits: bool, answer: str) -> None:
    for end in range(len(answer) + 1):
        for pieces in (["\n\n" + answer[:end]], "\n\n" + answer[:end]):
            parts = read(reader_of(family, streams=True, splits=splits, says="json"), pieces, is_cut=end < len(answer))
            assert parts == [("text", answer[:end])] or (parts == [] and answer[:end] in ("", "["))


@pytest.mark.parametrize(
    ("text", "found"),
    [('{"a": 1, "b": [1, 2', {"a": 1, "b": [1, 2]}), ('{"a": "tex', {}), ("", {}), ("[1", {}), ('{"a": 1e999}', {}),
     ('{"a": 1}', {"a": 1}), ("{" * 5000, {})],
)  # fmt: skip
def test_of_arguments_that_are_cut_there_is_what_is_whole(text: str, found: Json) -> None:
    assert partial_object(text) == found


# Whatever comes


LEAVES = st.none() | st.text(max_size=5) | st.integers()


@given(st.recursive(LEAVES, lambda each: st.lists(each) | st.dictionaries(st.text(max_size=3), each)))
@settings(max_examples=30, deadline=None)
def test_a_value_ends_where_it_does(value: Any) -> None:
    text = json.dumps([value])
    end = ValueEnd()
    found = [end.feed(char) for char in text]
    assert found[:-1] == [None] * (len(text) - 1) and found[-1] == 1
    assert ValueEnd().feed(text + "]}") == len(text)


BEGUN = '<tool_call>{"name": "weather", "arguments": {"a": '
BULKY = {
    "open": BEGUN + "[" * 300_000,
    "deep": BEGUN + "[" * 300_000 + "]" * 300_000 + "}}</tool_call>",
    "begun": "<tool_call>{ " * 20_000,
    "nested": "<tool_call>{ " * 20_000 + "}" * 20_000,
    "marks": "<tool_call>" * 20_000,
    "blanks": " " * 300_000,
    "digits": BEGUN + "9" * 10_000 + "}}</tool_call>",
}


@pytest.mark.parametrize("text", BULKY.values(), ids=BULKY)
def test_megabytes_that_are_no_call_are_text(text: str) -> None:
    assert read(reader_of("hermes"), cut(text, range(0, len(text), 997))) == [("text", text)]


def test_thousands_of_calls_are_calls() -> None:
    parts = read(reader_of("hermes"), cut(hermes(*[{"unit": "C"}] * 3000), range(0, 300_000, 101)))
    assert parts == list(UNIT) * 3000
