"""How much of a text the built-in model's drafters propose rightly."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.engines import answer, tiny_engine
from benchmarks.measure import RESULTS, spread
from localllm.engine.engine import Engine
from localllm.engine.speculative.drafter import Drafter, SkipDrafter
from localllm.engine.speculative.ngram import NgramLookup
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
CTX = 1024


def texts(_rounds: int, _shape: str) -> dict[str, Any]:
    """The blocks that are left out are those that trials on other passages of the book found to be needed the least."""
    rows = []
    sets = json.loads((RESULTS / "speculation.json").read_text(encoding="utf-8"))["texts"]["skipped"]
    with tiny_engine(CTX) as engine:
        passages = held_out(2 * PASSAGES)[:PASSAGES]
        prompts = {
            "a tale it has not seen": [engine.encode(text) for text in passages],
            "code": [engine.encode(CODE)],
            "a text to summarise": [
                engine.encode([{"role": "user", "content": SUMMARISE + text}]) for text in passages
            ],
        }
        for (text, some), temperature in product(prompts.items(), (0.0, 0.8)):
            rows.append(_row(engine, text, some, temperature, "ngram"))
            for share in SKIPPED_SHARES:
                skipped = frozenset(sets[str(share)])
                rows.append(_row(engine, text, some, temperature, "skip", skipped, share))
                rows.append(_row(engine, text, some, temperature, "ngram+skip", skipped, share))
    return {"rows": rows, "draft_tokens": DRAFT_TOKENS, "skipped": sets, "trials": TRIALS}


def _row(
    engine: Engine,
    text: str,
    prompts: Sequence[list[int]],
    temperature: float,
    who: str,
    skipped: frozenset[str] = frozenset(),
    share: float = 0.0,
) -> dict[str, Any]:
    stats = []
    for seed, prompt in enumerate(prompts):
        lookup = NgramLookup() if "ngram" in who else None
        drafters: list[Drafter] = [SkipDrafter(lambda: engine.runner, lambda: skipped)] if "skip" in who else []
        engine.speculation = Speculation(engine.residency, lookup, drafters, DRAFT_TOKENS, adapts=False)
        found = answer(engine, [prompt], ANSWER_TOKENS, temperature=temperature, seed=seed).speculation
        assert found is not None
        stats.append(found)
    drafted, accepted = sum(each.drafted for each in stats), sum(each.accepted for each in stats)
    row = {
        "text": text,
        "temperature": temperature,
        "who": who,
        "skipped_share": share,
        "tokens_per_pass": spread([each.tokens_per_pass or 1.0 for each in stats]),
        "accepted": accepted / max(1, drafted),
    }
    shown = f"{who}{f' without {share:.0%}' if share else ''}"
    print(f"{text:24} at {temperature}  {shown:24} {row['tokens_per_pass']} tokens a pass, {row['accepted']:.2f} right")
    return row


def held_out(count: int) -> list[str]:
    """Passages spread over the book. Raises SystemExit where it is absent."""
    folder = os.environ.get("LOCALLLM_TEST_DATA", Path(__file__).parents[2] / "shared" / "data")
    path = Path(folder, HELD_OUT)
    if not path.exists():
        raise SystemExit(f"{path} is absent: set LOCALLLM_TEST_DATA to a folder that has {HELD_OUT}")
    paragraphs = re.split(r"\n\s*\n", path.read_text(encoding="utf-8").replace("\r", ""))
    text = " ".join(" ".join(paragraph.split()) for paragraph in paragraphs[100:-100])
    step = len(text) // count
    return [text[start : start + PASSAGE_LETTERS] for start in range(0, step * count, step)]
