"""Which of many cases of a test run each time: siblings that hardly fail alone run with the slow tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import settings


def thinned(cases: Iterable[Any], runs: Callable[[Any], bool]) -> list[Any]:
    """All cases, a tuple being one of several parameters; slow where `runs` says no."""
    return [case if runs(case) else _slow(case) for case in cases]


def every_other(cases: Iterable[Any]) -> list[Any]:
    """All cases, every second of them slow."""
    return one_in(2, cases)


def one_in(count: int, cases: Iterable[Any]) -> list[Any]:
    """All cases, slow but for the first of each so many."""
    return [_slow(case) if number % count else case for number, case in enumerate(cases)]


def examples(count: int) -> int:
    """How many a property is tried on: so many where the slow tests run, else a third, as the profile has it."""
    return -(-count * settings().max_examples // 100)


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
