"""GBNF of llama.cpp: which texts a grammar takes, and what of it is refused."""

from __future__ import annotations

import itertools
import json
import re
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from localllm.errors import GrammarError
from localllm.text.grammar.gbnf import as_lark, is_gbnf
from tests.structured.support import BYTES
from tests.thinning import examples

JSON = r"""
# A part of JSON: what `json.gbnf` of llama.cpp has
root  ::= object
value ::= object | array | string | number | ("true" | "false") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}"
array  ::= "[" ws ( value ("," ws value)* )? "]"
string ::=
  "\"" (
    [\x20\x21\x23-\x5b\x5d-\U0010FFFF] | # any code point but " and \
    "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\""
number ::= "-"? [0-9]+ ws
ws ::= ([ \t\n] ws)?
"""
ARITHMETIC = """root  ::= (expr "=" ws term "\\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \\t\\n]*
"""
NAMES = """root ::= start | Start | foo-bar foo_bar | Foo | foo
start ::= "s"
Start ::= "S"
foo-bar ::= "1"
foo_bar ::= "2"
Foo ::= "F"
foo ::= "f"
"""


def takes(lark: str, text: str) -> bool:
    """Whether it is one of the language, whole."""
    matcher = LLMatcher(BYTES, json.dumps({"grammars": [{"lark_grammar": lark}]}), log_level=0)
    assert not matcher.is_error(), (matcher.get_error(), lark)
    for byte in text.encode():
        if matcher.is_stopped() or not int.from_bytes(matcher.compute_bitmask(), "little") >> byte & 1:
            return False
        matcher.consume_token(byte)
    return bool(matcher.is_accepting())


@pytest.mark.parametrize(
    ("source", "taken", "refused"),
    [
        ("root ::= [a-z&&b]+", ["&b", "a"], ["-", ""]),
        ("root ::= [~~+--]", ["~", ",", "-"], [".", "a"]),
        ("root ::= [a-][[]", ["a[", "-["], ["b[", "a]"]),
        (r"root ::= [^\]\n]", ["[", "a", "é"], ["]", "\n"]),
        ('root ::= "a"\nunused ::= unused', ["a"], [""]),
        ('root ::= "a"{0} "b" [c]{0,0} | "d"+', ["b", "d"], ["ab", "a"]),
        ('\ufeffroot ::= "a"', ["a"], [""]),
        ("root ::= .", ["\n", "é", "😀"], ["ab", ""]),
        (NAMES, ["s", "S", "12", "F", "f"], ["1", "2", "21"]),
        (r'root ::= "\u00e9\U0001F600\x41" [\u3040-\u309f]', ["é😀Aあ"], ["é😀A", "éA"]),
        ('root ::= as "a"\nas ::= "a"*', ["a", "aaa"], ["", "b"]),
        ('root ::= "a"*? ("b"{2}){0,1}', ["", "aa", "bb", "abb"], ["b"]),
        ('root ::=\n  "a" | # why\n "b"\n | "c"\n', ["a", "b", "c"], ["d"]),
        ('root ::= () "a" |', ["a", ""], ["b"]),
        (r'root ::= "\t\r\n\"\\\[\]\-' + '\x7f"', ['\t\r\n"\\[]-\x7f'], ["t"]),
        ('root ::= "[" (root ("," root)*)? "]"', ["[]", "[[],[[]]]"], ["[,]", "["]),
        ('root ::= "(" root ")" ws ws | (ws)*\nws ::= | " " | "\\n" [ \\t]{0,20}', ["(())", "( )\n  "], [")"]),
        ("root ::= " + '("a" root? ' * 50 + '"b"' + ")?" * 50, ["", "a", "aaa"], ["b", "ab"]),
        (JSON, ['{"a": [1, -2 , "x\\"é😀\\u00e9"], "b": {}}'], ['{"a":}', '{"a": 01x}']),
        (ARITHMETIC, ["a+(b*2) = 3\nx=y\n"], ["a+=3\n", "a"]),
    ],
)
def test_a_grammar_takes_its_texts_and_no_others(source: str, taken: list[str], refused: list[str]) -> None:
    lark = as_lark(source)
    found = {text: takes(lark, text) for text in taken + refused}
    assert found == dict.fromkeys(taken, True) | dict.fromkeys(refused, False)


@settings(deadline=None)
@given(
    members=st.lists(st.characters(codec="utf-8"), min_size=1, max_size=8),
    is_negated=st.booleans(),
    probe=st.characters(codec="utf-8"),
)
def test_a_class_holds_its_characters_whatever_they_mean(members: list[str], is_negated: bool, probe: str) -> None:
    inner = "".join(f"\\U{ord(each):08X}" for each in members)
    lark = as_lark(f"root ::= [{'^' if is_negated else ''}{inner}]")
    for character in {*members, probe}:
        assert takes(lark, character) == ((character in members) != is_negated)


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters='\\"'), max_size=20))
def test_a_text_is_itself(text: str) -> None:
    assert takes(as_lark(f'root ::= "{text}"'), text)


@settings(deadline=None)
@given(st.text(st.sampled_from("ab&-~[]^ "), max_size=6))
def test_a_class_is_read_as_one_of_plain_characters_and_ranges(inner: str) -> None:
    escaped = "".join(f"\\{each}" if each in "[]" else each for each in inner)
    try:
        with warnings.catch_warnings(action="ignore"):
            expected = re.compile("[" + "".join(f"\\{each}" if each in "[]&~" else each for each in inner) + "]")
    except re.error:
        return
    try:
        lark = as_lark(f"root ::= [{escaped}]")
    except GrammarError:
        return
    for character in "ab&-~[]^ _":
        assert takes(lark, character) == bool(expected.fullmatch(character)), (inner, character)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("", "no rule 'root'"),
        ('start ::= "a"', "no rule 'root'"),
        ("root ::= nothing", "line 1, column 10: there is no rule 'nothing'"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: the rule 'root' is there twice"),
        ('root ::= "a', "line 1, column 10"),
        ('root ::= "a" )', "line 1, column 14: expected the end of the line, not )"),
        ("root ::= *", "expected something to repeat"),
        ('root = "a"', "line 1, column 6"),
        ('root ::=\n  "a"\n  "b"', "line 3, column 3: expected the name of a rule"),
        (r'root ::= "\q"', r"line 1, column 11: \q is not an escape"),
        (r'root ::= "\u12"', r"line 1, column 11: \u is not an escape"),
        (r'root ::= "\uD800"', "is not a character"),
        (r"root ::= [\U00110000]", "is not a character"),
        ("root ::= []", "has no characters"),
        (r"root ::= [^\x00-\U0010FFFF]", "leaves no character"),
        ('root ::= "a"{3,2}', "3 is more than 2"),
        ('root ::= "a"{99999999999}', "is too often"),
        ("root ::= [z-a]", "the range from 'z' to 'a'"),
        ('root ::= "a" root', "the rule 'root' has to hold itself"),
        ('root ::= "x" | "a" loop?\nloop ::= [bc] loop', "the rule 'loop' has to hold itself"),
        ("root ::= <think>", "<think>, a token of a model, is not supported"),
        ("root ::= !<[7]>", "!<[7]>, a token of a model, is not supported"),
        ("root ::= " + "(" * 51 + '"a"' + ")" * 51, "50 levels"),
    ],
)
def test_what_is_no_grammar_is_refused_with_its_place(source: str, says: str) -> None:
    with pytest.raises(GrammarError) as refused:
        as_lark(source)
    assert says in refused.value.why


def test_gbnf_is_told_from_lark_by_its_rules() -> None:
    assert is_gbnf('# one\n  root-1 ::= "a"') and is_gbnf("root::=a")
    assert not is_gbnf('start: "::=" | /[a-z] ::= /')


LONGEST = 4
TEXTS = [""] + [text for n in range(1, LONGEST + 1) for text in map("".join, itertools.product("ab", repeat=n))]
Words = frozenset[str]


@st.composite
def expressions(draw: st.DrawFn, names: tuple[str, ...], depth: int = 2) -> tuple[str, Any]:
    """(its source, what makes its words of those of the rules)."""
    kinds = ["text", "class", *(["rule"] if names else []), *(["chain", "choice", "repeated"] if depth else [])]
    kind = draw(st.sampled_from(kinds))
    if kind == "text":
        text = draw(st.sampled_from(["", "a", "b", "ab", "ba"]))
        return f'"{text}"', lambda _: frozenset({text})
    if kind == "class":
        return draw(st.sampled_from([("[a]", lambda _: frozenset("a")), ("[a-b]", lambda _: frozenset("ab"))]))
    if kind == "rule":
        name = draw(st.sampled_from(names))
        return name, lambda words: words[name]
    if kind == "repeated":
        source, one = draw(expressions(names, depth - 1))
        signs = [("*", 0, 9), ("+", 1, 9), ("?", 0, 1), ("{2}", 2, 2), ("{1,2}", 1, 2)]
        sign, least, most = draw(st.sampled_from(signs))
        return f"({source}){sign}", lambda words: repeated(one(words), least, most)
    (left, one), (right, other) = draw(expressions(names, depth - 1)), draw(expressions(names, depth - 1))
    if kind == "choice":
        return f"({left} | {right})", lambda words: one(words) | other(words)
    return f"({left} {right})", lambda words: chained(one(words), other(words))


def chained(one: Words, other: Words) -> Words:
    return frozenset(text for text in map("".join, itertools.product(one, other)) if len(text) <= LONGEST)


def repeated(one: Words, least: int, most: int) -> Words:
    found, words = set[str](), frozenset({""})
    for number in range(most + 1):
        found |= words if number >= least else set()
        words = chained(words, one)
    return frozenset(found)


def language(rules: dict[str, Any]) -> Words:
    """Words of the root, of at most LONGEST characters."""
    words: dict[str, Words] = dict.fromkeys(rules, frozenset())
    while (grown := {name: rule(words) for name, rule in rules.items()}) != words:
        words = grown
    return words["root"]


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_a_grammar_without_recursion_takes_exactly_its_texts(data: st.DataObject) -> None:
    rules = {"a-1": data.draw(expressions(())), "A_1": data.draw(expressions(("a-1",)))}
    rules["root"] = data.draw(expressions(("a-1", "A_1")))
    expected = language({name: words for name, (_, words) in rules.items()})
    lark = as_lark("\n".join(f"{name} ::= {source}" for name, (source, _) in rules.items()))
    assert {text for text in TEXTS if takes(lark, text)} == expected


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_a_recursive_grammar_takes_no_other_text_and_leaves_a_way_to_end(data: st.DataObject) -> None:
    names = ("root", "b")
    rules = {name: data.draw(expressions(names)) for name in names}
    expected = language({name: words for name, (_, words) in rules.items()})
    try:
        lark = as_lark("\n".join(f"{name} ::= {source}" for name, (source, _) in rules.items()))
    except GrammarError:  # it never ends, or a part of it
        return
    assert {text for text in TEXTS if takes(lark, text)} <= expected
