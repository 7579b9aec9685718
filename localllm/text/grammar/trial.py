"""A grammar is tried out where it can do no harm: a process of its own, that ends at half a second of the CPU.

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
_WALKS, _STEPS = 2, 64  # texts that are begun, and bytes of each
# A special token of the model. Here is none of those: another one, that is no byte, stands for each.
_SPECIAL = re.compile(r"<\[\d+\]>")
_STAND_IN = 256


def main() -> None:
    """Reads {grammars, proof} and writes {grammar}, {error} or {stuck}. proof: what has to be a grammar, too."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import llguidance  # noqa: F401 - from a cold disk this takes as long as a grammar, whose fault it is not

    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    asked = json.load(sys.stdin)
    threading.stack_size(_STACK_BYTES)
    told: list[dict[str, str]] = []
    thread = threading.Thread(target=lambda: told.append(tried(asked)))
    thread.start()
    thread.join()
    json.dump(told[0] if told else {"error": "it is nested too deeply"}, sys.stdout)


def tried(asked: dict[str, Any]) -> dict[str, str]:
    """What `main` writes."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    def begun(grammar: str) -> Any:
        tried_out = _SPECIAL.sub(f"<[{_STAND_IN}]>", grammar)
        return LLMatcher(LLTokenizer("byte"), tried_out, log_level=0, limits=LLParserLimits(verbose_errors=False))

    if asked["proof"] is not None and (proof := begun(json.dumps({"grammars": [asked["proof"]]}))).is_error():
        return {"error": proof.get_error()}
    grammar = json.dumps({"grammars": asked["grammars"]})
    matcher = begun(grammar)
    if matcher.is_error():
        return {"error": matcher.get_error()}
    for seed in range(_WALKS):
        matcher.reset()
        if stuck := _walked(matcher, random.Random(seed)):
            return {"stuck": stuck}
    return {"grammar": grammar}


def _walked(matcher: Any, choose: random.Random) -> str:
    """Why a text that begins by chance cannot go on; "" where it can, or has ended."""
    for _ in range(_STEPS):
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token for token in range(_STAND_IN + 1) if bits >> token & 1]  # bytes, and what stands for the rest
        if matcher.is_error():
            return str(matcher.get_error())
        if not allowed:
            return "" if matcher.is_accepting() else "NoExtension"
        matcher.consume_token(choose.choice(allowed))
        if matcher.is_error():
            return str(matcher.get_error())
        if matcher.is_stopped():
            return ""
    return ""


if __name__ == "__main__":
    main()
