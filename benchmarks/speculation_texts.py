"""How much of a text the built-in model's drafters propose rightly."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS, spread
from benchmarks.speculation_engine import CTX, run
from localllm.engine.engine import Engine
from localllm.engine.prefix_config import NO_REUSE
from localllm.engine.speculative.config import OFF
from localllm.engine.speculative.drafter import Drafter
from localllm.engine.speculative.ngram import NgramLookup
from localllm.engine.speculative.skip import SkipDrafter
from localllm.engine.speculative.speculator import Speculation

HELD_OUT = "tales/641.txt"  # a book that the built-in model was not trained on
CODE = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

class Queue:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop(0)

class"""
SUMMARISE = "Summarise this text: "
PASSAGES, PASSAGE_LETTERS, ANSWER_TOKENS, DRAFT_TOKENS = 6, 900, 200, 4
SKIPPED_SHARES = (0.25, 0.5)  # of the blocks' bytes
TRIALS = 240


def texts(_rounds: int, _shape: str) -> dict[str, Any]:
    """The blocks that are left out are those that trials on other passages of the book found to be needed the least."""
    engine = Engine.load("tiny", device="cpu", weights="int4", ctx=CTX, reuse=NO_REUSE, speculate=OFF)
    passages = held_out(2 * PASSAGES)
    sets = json.loads((RESULTS / "speculation.json").read_text(encoding="utf-8"))["texts"]["skipped"]
    passages = passages[:PASSAGES]
    prompts = {
        "a tale it has not seen": [engine.encode(text) for text in passages],
        "code": [engine.encode(CODE)],
        "a text to summarise": [engine.encode([{"role": "user", "content": SUMMARISE + text}]) for text in passages],
    }
    rows = []
    for text, some in prompts.items():
        for temperature in (0.0, 0.8):
            rows.append(_row(engine, text, some, temperature, "ngram", frozenset()))
            for share in SKIPPED_SHARES:
                skipped = frozenset(sets[str(share)])
                rows.append(_row(engine, text, some, temperature, "skip", skipped, share))
                rows.append(_row(engine, text, some, temperature, "ngram+skip", skipped, share))
    engine.close()
    return {"rows": rows, "draft_tokens": DRAFT_TOKENS, "skipped": sets, "trials": TRIALS}


def _row(
    engine: Engine,
    text: str,
    prompts: Sequence[list[int]],
    temperature: float,
    who: str,
    skipped: frozenset[str],
    share: float = 0.0,
) -> dict[str, Any]:
    told = []
    for seed, prompt in enumerate(prompts):
        lookup = NgramLookup() if "ngram" in who else None
        drafters: list[Drafter] = [SkipDrafter(lambda: engine.runner, lambda: skipped)] if "skip" in who else []
        engine.speculation = Speculation(engine.residency, lookup, drafters, DRAFT_TOKENS, adapts=False)
        found = run(engine, prompt, ANSWER_TOKENS, temperature=temperature, seed=seed).told
        assert found is not None
        told.append(found)
    drafted, accepted = sum(each.drafted for each in told), sum(each.accepted for each in told)
    row = {
        "text": text,
        "temperature": temperature,
        "who": who,
        "skipped_share": share,
        "tokens_per_pass": spread([each.tokens_per_pass or 1.0 for each in told]),
        "accepted": accepted / max(1, drafted),
    }
    shown = f"{who}{f' without {share:.0%}' if share else ''}"
    print(f"{text:24} at {temperature}  {shown:24} {row['tokens_per_pass']} tokens a pass, {row['accepted']:.2f} right")
    return row


def held_out(count: int) -> list[str]:
    """Passages from all over the book. Raises SystemExit where it is absent."""
    folder = os.environ.get("LOCALLLM_TEST_DATA", Path(__file__).parents[2] / "shared" / "data")
    path = Path(folder, HELD_OUT)
    if not path.exists():
        raise SystemExit(f"{path} is absent: set LOCALLLM_TEST_DATA to a folder that has {HELD_OUT}")
    paragraphs = re.split(r"\n\s*\n", path.read_text(encoding="utf-8").replace("\r", ""))
    text = " ".join(" ".join(paragraph.split()) for paragraph in paragraphs[100:-100])
    step = len(text) // count
    return [text[start : start + PASSAGE_LETTERS] for start in range(0, step * count, step)]
