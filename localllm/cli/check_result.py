"""The result of one check of `doctor`. Knows none of the checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """detail: what was seen, with its numbers. fix: one command to paste, where something is to be done."""

    status: Status
    detail: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert bool(self.fix) == (self.status != "ok")


@dataclass(frozen=True)
class Check:
    """One line of the report. examine looks at one thing, and only when it is called."""

    name: str
    examine: Callable[[], Finding]

    def finding(self) -> Finding:
        """Never raises: the doctor must not fall ill of what it examines."""
        try:
            return self.examine()
        except Exception as error:
            detail = f"could not be examined: {type(error).__name__}: {error}"
            return warn(detail, "localllm help failure")


def ok(detail: str) -> Finding:
    return Finding("ok", detail)


def warn(detail: str, fix: str) -> Finding:
    """Works, but less well than it could."""
    return Finding("warn", detail, fix)


def fail(detail: str, fix: str) -> Finding:
    """Does not work."""
    return Finding("fail", detail, fix)


def sm_name(capability: tuple[int, int] | None) -> str:
    """(8, 6) -> "sm_86"."""
    return "of an unknown generation" if capability is None else f"sm_{capability[0]}{capability[1]}"
