"""Regular expressions in an adapter's config: those of `re`, and never long."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.errors import AdapterError
from localllm.models.adapters.patterns import NamePatterns

LETTERS = st.sampled_from([r"\.", r"\d", r"\w", r"\D", "[ab]", "[^a]", ".", "a", "b", "1"])
CHARACTERS = st.builds("{}{}".format, LETTERS, st.sampled_from(["", "*", "+", "?"]))
EXPRESSIONS = st.recursive(
    st.lists(st.one_of(CHARACTERS, CHARACTERS, st.sampled_from("^$")), max_size=4).map("".join),
    lambda inner: st.builds(
        "{}({}{}){}".format,
        inner,
        st.sampled_from(["", "?:"]),
        st.lists(inner, min_size=1, max_size=3).map("|".join),
        inner,
    ),
    max_leaves=5,
)


def matches(expression: str, name: str) -> bool:
    return NamePatterns({expression: True}, "config").value(name) is True


@given(EXPRESSIONS, st.text("ab1.", max_size=7))
def test_an_expression_matches_what_re_matches_from_a_dot_to_the_end(expression: str, name: str) -> None:
    begins = [0, *(dot.end() for dot in re.finditer(r"\.", name))]
    assert matches(expression, name) == any(re.compile(expression).fullmatch(name, begin) for begin in begins)


@pytest.mark.parametrize("expression", [r"\D?" * 150 + "Z", r"(\w|\D\D|\D)" * 40 + "Z", ".*" * 200 + "Z"])
def test_an_expression_that_takes_re_years_is_matched_at_once(expression: str) -> None:
    assert not matches(expression, "model.layers.11.self_attn.q_proj")


@pytest.mark.parametrize(
    "expression", ["a{3}", "(a)+", "(?=a)", "(a", "a)", "a)(b", "[z-a]", "a**", "(" * 400, "\\b", "x y"]
)
def test_what_is_no_such_expression_is_refused(expression: str) -> None:
    with pytest.raises(AdapterError, match="regular expression"):
        NamePatterns({expression: 1}, "config")
