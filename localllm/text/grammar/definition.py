"""Turn a `Grammar` into llguidance's own JSON, compiled once in a process of its own (compile_check.py).

Around what was asked for stands, where it is needed, what a model may think before, and the blank that some tokenizers
drop when they decode. Knows no torch: a front end may ask before it loads a model.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from typing import Any, NoReturn

from localllm.errors import BusyError, GrammarError, LocalLLMError
from localllm.text.grammar import compile_check
from localllm.text.grammar.gbnf import as_lark
from localllm.text.grammar.grammar import Grammar
from localllm.text.grammar.schema import checked, has_surrogate, parse_error

MAX_SOURCE = 64 << 10  # characters; of a JSON Schema see schema.py
# For the whole process, which needs 0.6 s of the CPU: it is done by then with a hundredth of a core. Less than the time
# that the server waits for an answer of its engine.
_PATIENCE_S = 100.0
# Signals that end a process from outside. Its own timer, memory and stack have others.
_FROM_OUTSIDE = frozenset({-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP})
_NAMES = {"json_schema": "JSON Schema", "regex": "regular expression", "lark": "Lark grammar", "gbnf": "GBNF grammar"}
# Whitespace is a blank or a line with its indentation, as people and `json.dumps` write it, never a page of blanks. No
# \u in strings: with it a key can be spelt in two ways, and one of them would be held to another schema.
_JSON_OPTIONS = {
    "whitespace_pattern": r"( |\n[ \t]{0,20})",
    "json_allowed_escapes": 'nrbtf\\"',
    "coerce_one_of": False,
    "lenient": False,
}
_IGNORED_OPTION = re.compile(
    r"^[ \t]*[\w-]+\[[^\]\n]*?\b(temperature|max_tokens|stop|stop_capture|capture)\b", re.MULTILINE
)
_TOKEN = re.compile(r"<\[(\d+)\]>")
_ROW = re.compile(r"[Cc]urrent row has (\d+) items; max is (\d+)")
_AT = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*)")
_LIMITS = re.compile(r"too (?:big|large|many(?! digits)|complex)|fuel|max is|[Ll]imit", re.ASCII)


def defined(grammar: Grammar, *, leading_spaces: int = 0) -> str:
    """Return the definition of a grammar for llguidance.

    Takes a few milliseconds in this process, and at most half a second in another.

    leading_spaces: that decoding drops of an answer, as `Tokenizer.leading_spaces` has it.
    Raises GrammarError, naming what cannot be honoured; BusyError where the process gets no CPU or is killed;
    LocalLLMError where none can be started.
    """
    schema = checked(grammar.source) if grammar.kind == "json_schema" else None
    answer = {"lark_grammar": _as_lark(grammar)} if schema is None else _of_schema(schema.schema)
    proof = None if schema is None or schema.by_the_letter is None else _of_schema(schema.by_the_letter)
    around = _around(grammar, leading_spaces)
    grammars = [] if around is None else [{"lark_grammar": around}]
    reply = check_apart(grammar, {"grammars": [*grammars, {"name": "answer", **answer}], "proof": proof})
    if "error" in reply:
        is_limit = _LIMITS.search(reply["error"]) and "too large" not in reply["error"]
        if schema is None or is_limit:
            _refuse(_NAMES[grammar.kind], reply["error"])
        schema.refuse(reply["error"])
    return reply["grammar"]


def _of_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"json_schema": {**schema, "x-guidance": _JSON_OPTIONS}}


def _as_lark(grammar: Grammar) -> str:
    name = _NAMES[grammar.kind]
    if len(grammar.source) > MAX_SOURCE:
        why = f"it has {len(grammar.source)} characters, and at most {MAX_SOURCE} are taken"
        raise GrammarError(f"the {name} is too large", why=why)
    if has_surrogate(grammar.source):
        why = "it has half of a pair of surrogates, which is not a character"
        raise GrammarError(f"the {name} cannot be used", why=why)
    if grammar.kind == "gbnf":
        return as_lark(grammar.source)
    if grammar.kind == "regex":
        from llguidance import LLMatcher

        return str(json.loads(LLMatcher.grammar_from_regex(grammar.source))["grammars"][0]["lark_grammar"])
    if (found := _IGNORED_OPTION.search(grammar.source)) is not None:
        line = grammar.source.count("\n", 0, found.start(1)) + 1
        why = f"{found[1]!r} in line {line} says how a text is made or reported, not what it may be"
        raise GrammarError("the Lark grammar has an option that is not honoured", why=why, fix="leave it out")
    return grammar.source


def _around(grammar: Grammar, leading_spaces: int) -> str | None:
    """Return what stands around the answer, in Lark; None for nothing."""
    blank = f'"{" " * leading_spaces}" ' if leading_spaces else ""
    if grammar.is_thinking and not grammar.thoughts:
        raise GrammarError("a thought without marks has no end", why="is_thinking needs those of `thoughts`")
    said = [_thought(f"said_{i}", closing) for i, (_, closing) in enumerate(grammar.thoughts)]
    if grammar.is_thinking:
        start = f"start: ({' | '.join(f'said_{i}' for i in range(len(said)))}) SPACE @answer"
        marks = "\n".join(said)
    elif grammar.thoughts:
        opened = [_opened(i, opening) for i, (opening, _) in enumerate(grammar.thoughts)]
        ways = "".join(f" | {rule.partition(':')[0]} said_{i} SPACE @answer" for i, rule in enumerate(opened))
        start, marks = f"start: {blank}@answer{ways}", "\n".join((*opened, *said))
    else:
        return f"start: {blank}@answer" if blank else None
    return f"{start}\n{marks}\nANY: /(?s:.*)/\nSPACE: /[ \\n\\r\\t]{{0,4}}/\n"


def _opened(index: int, opening: str) -> str:
    """Return a rule for the mark that opens a thought: a terminal, unless it has a token."""
    name = f"opened_{index}"
    return f"{name if _TOKEN.match(opening) else name.upper()}: /[ \\n]{{0,2}}/ {_mark(opening)}"


def _thought(name: str, closing: str) -> str:
    """Return a rule for a thought and the mark that closes it. A token cannot be a part of a text that ends with it."""
    options = "" if _TOKEN.match(closing) else "[lazy]"
    return f"{name}{options}: ANY {_mark(closing)}"


def _mark(text: str) -> str:
    """Return a mark, which may begin with a token, in Lark."""
    parts = _TOKEN.split(text)
    return " ".join(f"<[{part}]>" if index % 2 else json.dumps(part) for index, part in enumerate(parts) if part)


def check_apart(grammar: Grammar, request: dict[str, Any]) -> dict[str, str]:
    """Return the reply of `compile_check.check`, from a process of its own.

    Raises GrammarError where that meets its limits, which a busy machine does not change; the rest as `defined`.
    """
    try:
        process = subprocess.run(
            [sys.executable, "-P", compile_check.__file__],
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        why = (
            f"this machine is busy: in {_PATIENCE_S:.0f} s the process got less than {compile_check.CPU_S} s of the CPU"
        )
        raise BusyError("the grammar could not be tried out", why=why, fix="ask again") from None
    except OSError as error:
        why = error.strerror or str(error)
        raise LocalLLMError("the grammar cannot be tried out", why=f"no process can be started: {why}") from error
    if process.returncode in _FROM_OUTSIDE:
        why = f"its process was ended by {signal.Signals(-process.returncode).name}, as a system does without memory"
        raise BusyError("the grammar could not be tried out", why=why, fix="ask again")
    if process.returncode:
        why = f"compiling it takes more than the {compile_check.CPU_S} s of the CPU, or the memory, that it may take"
        raise GrammarError(f"the {_NAMES[grammar.kind]} explodes", why=why, fix="make it simpler")
    reply: dict[str, str] = json.loads(process.stdout)
    return reply


def _refuse(name: str, message: str) -> NoReturn:
    """Raise GrammarError with the message of the library."""
    if "NoExtension" in message:
        why = "there is nothing with which it can go on"
        raise GrammarError(f"no answer can meet the {name}", why=why)
    if found := _ROW.search(message):
        why = f"{found[1]} ways to go on at one place are more than the {found[2]} that are looked at"
        raise GrammarError(f"the {name} explodes", why=why, fix="fewer optional properties, or fewer alternatives")
    message = message.replace("<non-verbose/>", "")
    at = _AT.match(message)
    place = f"line {at[1]}, column {at[2]}: " if at and name == _NAMES["lark"] else ""
    why = (place + (parse_error(message) or " ".join((at[3] if at else message).split())))[:300]
    if _LIMITS.search(message):
        raise GrammarError(f"the {name} explodes", why=why, fix="make it simpler")
    raise GrammarError(f"the {name} cannot be used", why=why)
