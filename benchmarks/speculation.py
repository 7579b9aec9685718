"""The gain of drafting, and its cost where it gains nothing.

    python -m benchmarks.speculation [--part oracle|never|texts ...] [--rounds 5]

`oracle`: drafts that are right with a probability alpha, `k` at a time, at no cost: the measured speedup beside the
formula S = E * t_1 / t_round, E = (1 - alpha^(k+1)) / (1 - alpha), whose two times are those of the same round's steps;
resident, and with the blocks read from the disk at every step. `never`: what `--speculate auto` and each drafter cost
on text that nobody can predict, on text whose drafts are always wrong, and on text that changes, beside plain decoding.
`texts`: tokens a pass on a tale that the built-in model has not seen, on code, and on a text that is to be summarised.
Rounds take turns, each with a plain run of its own; medians with their lowest and highest. Results go
to benchmarks/results/speculation.json, part by part, and to the tables of docs/using/speculation.md.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.engines import SHAPE, answer, random_engine, random_ids, tiny_engine
from benchmarks.measure import DOCS, RESULTS, Spread, known, machine, paired, parser, save, spread, write_section
from benchmarks.oracle import FixedCount, Oracle, Wrong, draft_with, stream
from localllm.engine.engine import Engine
from localllm.engine.speculative.choice import Speculate
from localllm.engine.speculative.drafter import Drafter, SkipDrafter
from localllm.engine.speculative.ngram import NgramLookup
from localllm.engine.speculative.speculator import Speculation

ALPHAS, COUNTS = (0.3, 0.6, 0.8, 0.95), (2, 4, 8)
_PASSES = 64  # with which the tokens of each are known to a tenth or so
_CTX = 1024
_BEGIN, _END = "<!-- tables: written by `python -m benchmarks.speculation` -->", "<!-- end of the tables -->"
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

Row = Mapping[str, Any]


def oracle(rounds: int, shape: str) -> dict[str, Any]:
    rows = []
    with random_engine(shape, _CTX) as engine:
        for placement, num_tokens in (("resident", 192), ("streamed", 96)):
            if placement == "streamed":
                stream(engine, lambda _name: True)
            for alpha, count in product(ALPHAS, COUNTS):
                rows.append(oracle_row(engine, placement, alpha, count, rounds, num_tokens, _PASSES))
    return {"rows": rows}


def oracle_row(
    engine: Engine, placement: str, alpha: float, count: int, rounds: int, num_tokens: int, least_passes: int = 1
) -> dict[str, Any]:
    """least_passes: of each round; few of them give more or fewer tokens by chance."""
    prompt, vocab_size = random_ids(64, engine.config.vocab_size, 1), engine.config.vocab_size
    draft_with(engine, Speculate("off"))
    streams = {prompt: (*prompt, *answer(engine, [prompt], num_tokens).ids)}
    plain: list[float] = []
    drafted: list[float] = []
    tokens: list[float] = []
    formulas: list[float] = []
    for number in range(rounds):
        draft_with(engine, Speculate("off"))
        plain.append(answer(engine, [prompt], num_tokens).token_s)
        steps: list[float] = []
        seconds: list[float] = []
        passes = 0.0
        while passes < least_passes:
            seed = number + rounds * len(seconds)
            oracle = Oracle(streams, alpha, vocab_size, seed)
            engine.speculation = Speculation(engine.residency, oracle, (), count, FixedCount)
            record_steps(engine, steps)
            found = answer(engine, [prompt], num_tokens)
            assert found.speculation is not None and (*prompt, *found.ids) == streams[prompt]
            passes += (num_tokens - 1) / (found.speculation.tokens_per_pass or 1.0)
            seconds.append(found.token_s)
        drafted.append(mean(seconds))
        tokens.append(len(seconds) * (num_tokens - 1) / passes)
        formulas.append(expected_tokens(alpha, count) * plain[-1] / median(steps))
    speedups = [one / other for one, other in zip(plain, drafted, strict=True)]
    row = {
        "placement": placement,
        "alpha": alpha,
        "k": count,
        "speedup": spread(speedups),
        "formula": spread(formulas),
        "share": paired(speedups, formulas),
        "tokens_per_pass": spread(tokens),
        "expected_tokens_per_pass": expected_tokens(alpha, count),
        "plain_tok_s": 1 / median(plain),
    }
    shown = f"{row['speedup']} x, formula {row['formula']}, of which {row['share']}"
    print(f"{placement:9} alpha {alpha:<5} k {count}  {shown}", file=sys.stderr)
    return row


def expected_tokens(alpha: float, count: int) -> float:
    """Tokens of a pass that verifies so many drafted ones (Leviathan et al., arXiv:2211.17192, equation 1)."""
    return float((1 - alpha ** (count + 1)) / (1 - alpha))


def record_steps(engine: Engine, steps: list[float]) -> None:
    """Record the seconds of the next answer's steps, as the engine times them."""
    learn = engine.speculation.learn

    def record(step_s: float) -> None:
        steps.append(step_s)
        learn(step_s)

    engine.speculation.learn = record  # type: ignore[method-assign]


def never(rounds: int, shape: str) -> dict[str, Any]:
    rows: list[Row] = []
    with random_engine(shape, _CTX) as engine:
        rows += _never_rows(engine, f"{shape} resident", rounds, 192)
        stream(engine, lambda name: name.split(".")[1] in map(str, range(6, 14)))
        rows += _never_rows(engine, f"{shape} streamed", rounds, 64)
    with tiny_engine(_CTX) as engine:
        rows += _never_rows(engine, "tiny resident", rounds, 400)
        stream(engine, lambda name: name.split(".")[1] in ("5", "6", "7"))
        # Each is half a second, in which the disk is not as fast.
        rows += _never_rows(engine, "tiny streamed", 4 * rounds, 200)
    return {"rows": rows}


def _never_rows(engine: Engine, placement: str, rounds: int, num_tokens: int) -> Iterator[Row]:
    """Three engines in one: plain, drafting, and plain once more; the plain ones' ratio is the machine's noise."""
    vocab_size = engine.config.vocab_size
    random_text, half = random_ids(128, vocab_size, 2), random_ids(24, vocab_size, 3)
    texts: dict[str, tuple[tuple[int, ...], dict[str, Any], tuple[str, ...]]] = {
        "random": (random_text, {"temperature": 3.0, "seed": 1}, ("auto", "ngram", "skip")),
        "wrong": (random_text, {"temperature": 0}, ("wrong",)),
        "switching": ((*half * 3, *random_text, *half), {"temperature": 1.0, "seed": 2}, ("auto", "ngram", "skip")),
    }
    for text, (prompt, sampling, drafters) in texts.items():
        draft_with(engine, Speculate("off"))
        expected = answer(engine, [prompt], num_tokens, **sampling).ids
        for who in drafters:
            draft_with(engine, Speculate("off"))
            plain = engine.speculation
            lookup = Wrong({prompt: (*prompt, *expected)}, vocab_size) if who == "wrong" else None
            draft_with(engine, Speculate("ngram" if who == "wrong" else who), lookup)
            drafting = engine.speculation
            answer(engine, [prompt], num_tokens, **sampling)  # warm
            ratios: list[float] = []
            noise: list[float] = []
            for number in range(2 * rounds):
                seconds: dict[bool, list[float]] = {True: [], False: []}
                for each in (plain, drafting, plain) if number % 2 else (plain, plain, drafting):
                    engine.speculation = each
                    found = answer(engine, [prompt], num_tokens, **sampling)
                    assert found.ids == expected
                    seconds[each is plain].append(found.token_s)
                (first, second), (own,) = seconds[True], seconds[False]
                ratios.append((first + second) / 2 / own)
                noise.append(first / second)
            row = {"placement": placement, "text": text, "who": who, "of_plain": spread(ratios), "noise": spread(noise)}
            print(f"{placement:24} {text:10} {who:6} {row['of_plain']} of plain, plain of plain {row['noise']}")
            yield row


def texts(_rounds: int, _shape: str) -> dict[str, Any]:
    """The blocks that are left out are those that trials on other passages of the book found to be needed the least."""
    rows = []
    sets = json.loads((RESULTS / "speculation.json").read_text(encoding="utf-8"))["texts"]["skipped"]
    with tiny_engine(_CTX) as engine:
        passages = held_out(2 * PASSAGES)[:PASSAGES]
        prompts = {
            "a tale it has not seen": [engine.encode(text) for text in passages],
            "code": [engine.encode(CODE)],
            "a text to summarise": [
                engine.encode([{"role": "user", "content": SUMMARISE + text}]) for text in passages
            ],
        }
        for (text, some), temperature in product(prompts.items(), (0.0, 0.8)):
            rows.append(_text_row(engine, text, some, temperature, "ngram"))
            for share in SKIPPED_SHARES:
                skipped = frozenset(sets[str(share)])
                rows.append(_text_row(engine, text, some, temperature, "skip", skipped, share))
                rows.append(_text_row(engine, text, some, temperature, "ngram+skip", skipped, share))
    return {"rows": rows, "draft_tokens": DRAFT_TOKENS, "skipped": sets, "trials": TRIALS}


def _text_row(
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
        engine.speculation = Speculation(engine.residency, lookup, drafters, DRAFT_TOKENS, FixedCount)
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


# The tables of docs/using/speculation.md


def tables(result: Mapping[str, Any]) -> str:
    """The tables of the parts that were measured."""
    parts = {"texts": _texts_table, "oracle": _oracle_table, "never": _never_table}
    return "\n".join(line for part, lines in parts.items() if part in result for line in lines(result[part]))


def _table(title: str, text: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    yield from (f"### {title}", "", text, "", f"| {' | '.join(head)} |", "|" + "---|" * len(head))
    yield from (f"| {' | '.join(map(str, row))} |" for row in rows)
    yield ""


def _texts_table(part: Row) -> Iterator[str]:
    text = (
        f"The built-in model, with {part['draft_tokens']} draft tokens at every step, whether they pay off or not.\n"
        f"`skip` leaves out the quarter or half of its blocks that matter least,\n"
        f"as {part['trials']} trials on other passages of the book found."
    )
    head = ("text", "temperature", "ngram", "skip, 25%", "ngram+skip, 25%", "skip, 50%", "ngram+skip, 50%")
    columns = [("ngram", 0.0), *((who, share) for share in (0.25, 0.5) for who in ("skip", "ngram+skip"))]
    rows = []
    for about, temperature in dict.fromkeys((row["text"], row["temperature"]) for row in part["rows"]):
        own = [
            _one(part["rows"], text=about, temperature=temperature, who=who, skipped_share=share)
            for who, share in columns
        ]
        cells = [f"{row['tokens_per_pass']['median']:.2f} ({row['accepted']:.0%} accepted)" for row in own]
        rows.append((about, temperature, *cells))
    return _table("Tokens a pass, on texts", text, head, rows)


def _oracle_table(part: Row) -> Iterator[str]:
    text = (
        f"A model of the shape of {part['shape']} in INT4. Its drafts are free, have k tokens, and are accepted with\n"
        "probability alpha. The table shows the speedup over plain decoding, and its share of the formula\n"
        "E * t_1 / t_round, with E = (1 - alpha^(k+1)) / (1 - alpha) and the step times of the same round."
    )
    head = ("alpha", "k", "resident", "share of the formula", "streamed from the disk", "share of the formula")
    rows = []
    for alpha, k in dict.fromkeys((row["alpha"], row["k"]) for row in part["rows"]):
        both = [_one(part["rows"], alpha=alpha, k=k, placement=placement) for placement in ("resident", "streamed")]
        rows.append((alpha, k, *(_shown(row[key]) for row in both for key in ("speedup", "share"))))
    return _table("By the share of drafts that are accepted", text, head, rows)


def _never_table(part: Row) -> Iterator[str]:
    text = (
        "Speed relative to plain decoding, and the ratio of two plain runs in the same rounds. The texts:\n\n"
        "- random: a prompt of random tokens, and answers sampled at temperature 3;\n"
        "- wrong: a lookup whose drafts are always wrong;\n"
        "- switching: text that repeats itself and text that does not, in turn."
    )
    head = ("model", "text", "drafter", "vs. plain decoding", "plain vs. plain")
    rows = (
        (row["placement"], row["text"], row["who"], _shown(row["of_plain"]), _shown(row["noise"]))
        for row in part["rows"]
    )
    return _table("Where no draft is accepted", text, head, rows)


def _one(rows: Sequence[Row], **values: object) -> Row:
    return next(row for row in rows if all(row[key] == value for key, value in values.items()))


def _shown(value: Mapping[str, float]) -> str:
    return str(Spread(**value))


PARTS: dict[str, Callable[[int, str], dict[str, Any]]] = {
    "oracle": oracle,
    "never": never,
    "texts": texts,
}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--part", choices=tuple(PARTS), action="append")
    arguments.add_argument("--shape", default=SHAPE)
    arguments.add_argument("--save", type=Path, default=RESULTS, help="a folder for the results")
    options = arguments.parse_args()
    result = known("speculation", options.save)
    for part in options.part or PARTS:
        result[part] = {"machine": machine(), "shape": options.shape, **PARTS[part](options.rounds, options.shape)}
        print(f"wrote {save('speculation', result, options.save)}")
    if options.save == RESULTS:
        write_section(DOCS / "using" / "speculation.md", _BEGIN, _END, tables(known("speculation")))


if __name__ == "__main__":
    main()
