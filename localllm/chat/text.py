"""Text made safe for a terminal: a model's or a stranger's words, errors, times and speeds."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping

from localllm.errors import FETCH_ANEW, Fix, LocalLLMError, as_fixes, either

_WINDOW_S = 10.0
# Everything that could move the cursor, retitle the window, reach the clipboard or reorder what is read: C0 but tab and
# newline, DEL, C1, and the bidirectional overrides.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")

# Those, half surrogates, and what Python takes for the end of a line beside a newline.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

# The why and fix of errors that were raised without: an error always has its four lines.
_GENERIC: Mapping[str, tuple[str, str | Fix]] = {
    "failure": ("the command could not be finished", "localllm doctor"),
    "usage": ("the command line asks for something that cannot be honoured", "localllm --help"),
    "settings": ("a setting is unknown or out of range", "localllm config show --origin"),
    "model-not-found": ("no file of that model is on this disk", "localllm list --all"),
    "does-not-fit": ("it needs more memory or disk than there is", "localllm doctor"),
    "context-overflow": ("the prompt has more tokens than the context holds", "raise --ctx, or shorten the prompt"),
    "download": ("the hub did not answer as promised", "localllm pull MODEL"),
    "access": ("the repository is not open to everyone", "HF_TOKEN=... localllm pull MODEL"),
    "schema": ("the answer does not meet the schema", "raise --max-tokens"),
    "checkpoint": ("a file of the model cannot be used as it is", FETCH_ANEW),
    "unsupported-model": ("this version has no such architecture", "localllm list --all"),
    "tokenizer": ("the tokenizer's files cannot be used as they are", FETCH_ANEW),
    "template": ("the chat template did not render", "localllm run MODEL --raw -p TEXT"),
    "history": ("the file of the history refused", "localllm sessions list"),
    "non-finite": ("the model computed a value that is not a number", "localllm run MODEL --dtype fp32 -p TEXT"),
}


def printable(text: str) -> str:
    """Return the text without control characters, which a terminal would obey."""
    return UNSAFE.sub("", text)


def visible(text: str) -> str:
    """Return the text with a sign for each character that a terminal would obey, or a screen count as a line."""
    return _UNSEEN.sub(_sign, text)


def _sign(match: re.Match[str]) -> str:
    number = ord(match.group())
    if 0xD800 <= number <= 0xDFFF:
        return "\ufffd"
    if number < 0x20:
        return chr(0x2400 + number)  # the picture of a control character
    return "\u2421" if number == 0x7F else f"\\u{number:04x}"


def one_line(text: str) -> str:
    """Return the text on one line, with escapes for control characters: for names inside a line of ours."""
    return _UNSEEN.sub(lambda match: match.group().encode("unicode_escape").decode(), re.sub(r"[\n\t]", " ", text))


def format_seconds(seconds: float) -> str:
    """Return "1:15" for 75."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_ago(then: float, now: float) -> str:
    """Return when something was: "5 min ago", "2 h ago", or after a day its date; "" for 0, which is not known. Both
    times in seconds since 1970."""
    from localllm.config import format_time

    elapsed_s = now - then
    if not 0 <= elapsed_s < 86400:
        return format_time(then)[:10]
    if elapsed_s < 60:
        return "just now"
    return f"{int(elapsed_s // 60)} min ago" if elapsed_s < 3600 else f"{int(elapsed_s // 3600)} h ago"


def error_rows(error: LocalLLMError) -> list[tuple[str, str]]:
    """Return an error as (label, line): what, why, the fix, other fixes, where to read more."""
    why, fix = _GENERIC.get(error.code, _GENERIC["failure"])
    lines: list[list[Fix]] = []
    for each in error.fixes or as_fixes(fix):
        if lines and each.kind == "advice":
            lines[-1].append(each)
        else:  # a command is pasted from a line of its own
            lines.append([each])
    fixes = [("or" if number else "fix", either(line)) for number, line in enumerate(lines)]
    rows = [("error", error.what), ("why", error.why or why), *fixes, ("more", error.more)]
    return [(label, one_line(value)) for label, value in rows]


class Pace:
    """The speed of the last seconds. Bytes on disk are verified, not fetched, which is faster: an average over all
    would promise too much."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()  # (time, done), the oldest first

    def after(self, now_s: float, done: int) -> float:
        """Return the amount per second, with `done` of it there at `now_s`."""
        self._samples.append((now_s, done))
        while len(self._samples) > 2 and now_s - self._samples[1][0] > _WINDOW_S:
            self._samples.popleft()
        began_s, base = self._samples[0]
        return (done - base) / max(now_s - began_s, 1e-3)
