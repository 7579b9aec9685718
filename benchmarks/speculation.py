"""What guessing gives, and what it costs where it gives nothing.

    python -m benchmarks.speculation [--part oracle|never|texts ...] [--rounds 5]

`oracle`: guesses that are right with a probability alpha, `k` at a time, at no cost: the measured speedup beside the
formula S = E * t_1 / t_round, E = (1 - alpha^(k+1)) / (1 - alpha), whose two times are those of the same round's steps;
resident, and with the blocks read from the disk at every step. `never`: what `--speculate auto` and each drafter
cost on text that nobody guesses, on text whose guesses are always wrong, and on text that changes, beside plain
decoding. `texts`: tokens a pass on a tale that the built-in model has not seen, on code, and on a text that is to be
summarised. Rounds take turns, each with a plain run of its own; medians with their lowest and highest.
Results go to benchmarks/results/speculation.json, part by part.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks import speculation_page
from benchmarks.measure import RESULTS, machine, paired, save, spread
from benchmarks.oracle import Oracle
from benchmarks.speculation_engine import SHAPE, guess, ids, random_engine, run, stream
from benchmarks.speculation_never import never
from benchmarks.speculation_texts import texts
from localllm.engine.engine import Engine
from localllm.engine.speculative.config import OFF, Speculate

ALPHAS, COUNTS = (0.3, 0.6, 0.8, 0.95), (2, 4, 8)
_PASSES = 64  # with which the tokens of each are known to a tenth or so


def oracle(rounds: int, shape: str) -> dict[str, Any]:
    with random_engine(shape) as engine:
        rows = _oracle_rows(engine, "resident", rounds, 192)
        stream(engine, lambda _name: True)
        return {"rows": rows + _oracle_rows(engine, "streamed", rounds, 96)}


def _oracle_rows(engine: Engine, placement: str, rounds: int, num_tokens: int) -> list[dict[str, Any]]:
    pairs = [(alpha, count) for alpha in ALPHAS for count in COUNTS]
    return [oracle_row(engine, placement, alpha, count, rounds, num_tokens, _PASSES) for alpha, count in pairs]


def oracle_row(
    engine: Engine, placement: str, alpha: float, count: int, rounds: int, num_tokens: int, least_passes: int = 1
) -> dict[str, Any]:
    """least_passes: of each round; few of them give more or fewer tokens by chance."""
    prompt, vocab_size = ids(64, engine.config.vocab_size, 1), engine.config.vocab_size
    guess(engine, OFF)
    stream_ids = {prompt: (*prompt, *run(engine, prompt, num_tokens).token_ids)}
    plain: list[float] = []
    guessed: list[float] = []
    tokens: list[float] = []
    formulas: list[float] = []
    shares: list[float] = []
    for number in range(rounds):
        guess(engine, OFF)
        plain.append(run(engine, prompt, num_tokens).seconds)
        steps: list[float] = []
        seconds: list[float] = []
        passes = 0.0
        while passes < least_passes:
            seed = number + rounds * len(seconds)
            guess(engine, Speculate("ngram", count, adapts=False), Oracle(stream_ids, alpha, vocab_size, seed))
            _time(engine, steps)
            found = run(engine, prompt, num_tokens)
            assert found.told is not None and (*prompt, *found.token_ids) == stream_ids[prompt]
            passes += (num_tokens - 1) / (found.told.tokens_per_pass or 1.0)
            seconds.append(found.seconds)
        guessed.append(mean(seconds))
        tokens.append(len(seconds) * (num_tokens - 1) / passes)
        formulas.append(expected_tokens(alpha, count) * plain[-1] / median(steps))
        shares.append(plain[-1] / guessed[-1] / formulas[-1])
    measured, formula = paired(plain, guessed), spread(formulas)
    row = {
        "placement": placement,
        "alpha": alpha,
        "k": count,
        "speedup": measured,
        "formula": formula,
        "share": spread(shares),
        "tokens_per_pass": spread(tokens),
        "expected_tokens_per_pass": expected_tokens(alpha, count),
        "plain_tok_s": 1 / median(plain),
    }
    told = f"{placement:9} alpha {alpha:<5} k {count}  {measured} x, formula {formula}, of which {row['share']}"
    print(told, file=sys.stderr)
    return row


def expected_tokens(alpha: float, count: int) -> float:
    """Of a pass that verifies so many guesses (Leviathan et al., arXiv:2211.17192, equation 1)."""
    return float((1 - alpha ** (count + 1)) / (1 - alpha))


def _time(engine: Engine, steps: list[float]) -> None:
    """Adds what the steps of the next run take, as the engine times them."""
    learn = engine.speculation.learn

    def hear(step_s: float) -> None:
        steps.append(step_s)
        learn(step_s)

    engine.speculation.learn = hear  # type: ignore[method-assign]


PARTS: dict[str, Callable[[int, str], dict[str, Any]]] = {
    "oracle": oracle,
    "never": never,
    "texts": texts,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=tuple(PARTS), action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", default=SHAPE)
    parser.add_argument("--save", type=Path, default=RESULTS, help="a folder for the results")
    options = parser.parse_args()
    path = options.save / "speculation.json"
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for part in options.part or PARTS:
        result[part] = {"machine": machine(), "shape": options.shape, **PARTS[part](options.rounds, options.shape)}
        print(f"wrote {save('speculation', result, options.save)}")
    if options.save == RESULTS:
        speculation_page.write(json.loads(path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
