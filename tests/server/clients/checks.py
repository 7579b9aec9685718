"""What a script of checks has: the server that it speaks to, and how what became of each check is told.

It runs in the interpreter of a client, which knows nothing of localllm or pytest.
"""

from __future__ import annotations

import json
import sys
import traceback
import urllib.request
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from typing import Any

Check = Callable[[], None]

URL = sys.argv[1] if len(sys.argv) > 1 else ""
USER = "A tale about an owl, please."
SYSTEM = "You tell short tales."
STORY = "Once upon a time"
TOO_LONG = "owl " * 3000
LENGTH = 48  # tokens: of six, a busy machine sends more than three in one piece
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": LENGTH}
UNITS = ("C", "F")
# Of bounded arguments, so that any model that is held to them ends soon.
WEATHER: dict[str, Any] = {"type": "object", "properties": {"unit": {"enum": [*UNITS]}}, "required": ["unit"]}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather of today.", "parameters": WEATHER},
}
ROOM = 120  # tokens, for a call of it

_CHECKS: dict[str, Check] = {}


def supports(client: str, path: str, *what: str) -> Callable[[Check], Check]:
    """Marks a function as a check, which raises where the client and the server do not understand each other. What it
    says of them is read from the source."""

    def noted(check: Check) -> Check:
        _CHECKS[check.__name__] = check
        return check

    return noted


def said(path: str, body: dict[str, Any]) -> Any:
    """What the server replies to a request that is made by hand."""
    return _said(path, json.dumps(body))


@cache
def _said(path: str, body: str) -> Any:
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(URL + path, body.encode(), headers)) as reply:
        return json.load(reply)


def chat_text(*messages: dict[str, str]) -> str:
    """A greedy answer."""
    reply = said("/v1/chat/completions", {**GREEDY, "messages": messages or [{"role": "user", "content": USER}]})
    return str(reply["choices"][0]["message"]["content"])


def completion_text(prompt: str = STORY) -> str:
    """A greedy continuation."""
    return str(said("/v1/completions", {**GREEDY, "prompt": prompt})["choices"][0]["text"])


def raised(error: type[BaseException], call: Callable[[], Any]) -> Any:
    """The error that the call has to end with."""
    try:
        reply = call()
    except error as caught:
        return caught
    raise AssertionError(f"no {error.__name__}, but {reply!r}")


def tell() -> None:
    """Prints an object of JSON: of each check, the trace of what it raised; "" where all is well."""
    with redirect_stdout(sys.stderr):
        told = {name: _trace_of(check) for name, check in _CHECKS.items()}
    print(json.dumps(told))


def _trace_of(check: Check) -> str:
    try:
        check()
    except Exception:
        return traceback.format_exc()
    return ""
