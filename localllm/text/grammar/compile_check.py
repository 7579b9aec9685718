"""Compile a grammar where it can do no harm: in a process of its own, which ends at half a second of the CPU.

llguidance compiles most within a millisecond. But a conjunction of forty patterns takes it minutes, a chain of 8,000
rules ends the process that it is in, and a repetition of a million is noticed with the first token alone: native code
can be stopped in no other way. Run as a script, which knows the library and nothing of localllm.
"""

from __future__ import annotations

import json
import random
import re
import resource
import signal
import sys
import threading
from typing import Any

CPU_S = 0.5
MAX_BYTES = 1 << 30  # of addresses; 150 MB are the library itself
_STACK_BYTES = 2 << 20  # a quarter of what threads have: what just fits here fits there
_NUM_WALKS, _NUM_STEPS = 2, 64  # texts that are begun, and bytes of each
# There are no special tokens of a model here: another token that is not a byte stands for each.
_SPECIAL = re.compile(r"<\[\d+\]>")
_STAND_IN = 256


def main() -> None:
    """Read the request as JSON, and write the reply of `check`."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import llguidance  # noqa: F401 - from a cold disk this takes as long as a grammar, whose fault it is not

    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    request = json.load(sys.stdin)
    threading.stack_size(_STACK_BYTES)
    replies: list[dict[str, str]] = []
    thread = threading.Thread(target=lambda: replies.append(check(request)))
    thread.start()
    thread.join()
    json.dump(replies[0] if replies else {"error": "it is nested too deeply"}, sys.stdout)


def check(request: dict[str, Any]) -> dict[str, str]:
    """Compile {grammars, proof} to {grammar} or {error}. proof: what has to be a grammar, too."""
    if request["proof"] is not None and (proof := _begun(json.dumps({"grammars": [request["proof"]]}))).is_error():
        return {"error": proof.get_error()}
    grammar = json.dumps({"grammars": request["grammars"]})
    matcher = _begun(grammar)
    for seed in range(_NUM_WALKS):
        if error := matcher.get_error() if matcher.is_error() else _walked(matcher, random.Random(seed)):
            return {"error": error}
        matcher.reset()
    return {"grammar": grammar}


def _begun(grammar: str) -> Any:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    without_special = _SPECIAL.sub(f"<[{_STAND_IN}]>", grammar)
    return LLMatcher(LLTokenizer("byte"), without_special, log_level=0, limits=LLParserLimits(verbose_errors=False))


def _walked(matcher: Any, choose: random.Random) -> str:
    """Return why a text that begins by chance cannot go on; "" where it can, or has ended."""
    for _ in range(_NUM_STEPS):
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token for token in range(_STAND_IN + 1) if bits >> token & 1]
        if not allowed and not matcher.is_error():
            return "" if matcher.is_accepting() else "NoExtension"
        if allowed:
            matcher.consume_token(choose.choice(allowed))
        if matcher.is_error():
            return str(matcher.get_error())
        if matcher.is_stopped():
            break
    return ""


if __name__ == "__main__":
    main()
