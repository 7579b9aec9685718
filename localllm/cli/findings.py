"""The result of one check of `doctor`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """detail: what was seen, with its numbers. fix: one command to paste, where something is to be done.

    status: warn where it works, but less well than it could; fail where it does not work.
    """

    status: Literal["ok", "warn", "fail"]
    detail: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert bool(self.fix) == (self.status != "ok")


def examined(check: Callable[[], Finding]) -> Finding:
    """Return what a check finds. Never raises: an error of the check is a finding."""
    try:
        return check()
    except Exception as error:
        return warn(f"could not be examined: {type(error).__name__}: {error}", "localllm help failure")


def ok(detail: str) -> Finding:
    return Finding("ok", detail)


def warn(detail: str, fix: str) -> Finding:
    return Finding("warn", detail, fix)


def fail(detail: str, fix: str) -> Finding:
    return Finding("fail", detail, fix)
