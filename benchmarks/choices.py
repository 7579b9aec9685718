"""What several answers to one prompt cost: `python -m benchmarks.choices`.

Eight answers to one prompt of 2,048 tokens, which is read once and kept once, beside one answer to a prompt as long,
and beside eight that have prompts of their own, as long as well: seconds until every answer has its first token, and
the bytes of keys and values that are held when each has two. Then a search by four beams beside a greedy answer: the
seconds of a step. One layer and the head of a 1.1B model, random INT4 weights: a trained one costs the same, and more
layers cost both sides more. Nothing is known of any prompt before; rounds take turns; medians with their lowest and
highest. Results go to benchmarks/results/choices.json.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import interleaved, machine, paired, save, spread
from localllm.bench.random_model import random_model
from localllm.engine.engine import Engine
from localllm.engine.request import Request, SamplingParams
from localllm.engine.speculative.choice import OFF
from localllm.models.shapes import find_shape
from localllm.quant.recipe import RECIPES

NAME, LAYERS = "tinyllama-1.1b", 1
PROMPT_TOKENS, ANSWERS, ANSWER_TOKENS = 2048, 8, 32
BEAMS, SEARCHED_TOKENS = 4, 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", default=NAME)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--save", type=Path, help="a folder for the results in place of benchmarks/results")
    options = parser.parse_args()
    num_tokens, recipe = options.prompt_tokens, RECIPES["int4-g64"]
    ctx = num_tokens + ANSWER_TOKENS
    longer = {"num_hidden_layers": options.layers, "max_position_embeddings": ctx}
    raw = {**find_shape(options.shape).raw_config, **longer}
    with random_model(options.shape, raw, recipe) as files:
        engine = Engine.load(files, weights=recipe.name, ctx=ctx, speculate=OFF)
        bench = Bench(engine, num_tokens)
        about = {"machine": machine(), "shape": options.shape, "layers": options.layers, "prompt_tokens": num_tokens}
        result = about | bench.run(options.rounds)
        engine.close()
    print(f"wrote {save('choices', result, *([options.save] if options.save else []))}")


class Bench:
    """Requests to one engine, whose prompts are new each time."""

    def __init__(self, engine: Engine, num_tokens: int) -> None:
        self._engine, self._num_tokens = engine, num_tokens
        self._random = random.Random(0)
        self._held: dict[str, list[int]] = {}

    def run(self, rounds: int) -> dict[str, Any]:
        cases: dict[str, Callable[[], float]] = {
            "one": lambda: self._first_tokens("one", [self._prompt()]),
            "shared": lambda: self._first_tokens("shared", [self._prompt()] * ANSWERS),
            "separate": lambda: self._first_tokens("separate", [self._prompt() for _ in range(ANSWERS)]),
            "greedy": lambda: self._step_s(1),
            "beams": lambda: self._step_s(BEAMS),
        }
        seconds = interleaved(cases, rounds)
        result: dict[str, Any] = {"answers": ANSWERS, "beams": BEAMS}
        for name, values in seconds.items():
            result[f"{name}_{'step' if name in ('greedy', 'beams') else 'first_tokens'}_s"] = spread(values)
        for ours, other in (("shared", "one"), ("shared", "separate"), ("beams", "greedy")):
            result[f"{ours}_of_{other}"] = paired(seconds[ours], seconds[other])
        for name in ("one", "shared", "separate"):
            result[f"{name}_held_bytes"] = max(self._held[name])
        for key, value in result.items():
            print(f"{key}: {value}")
        return result

    def _prompt(self, num_tokens: int | None = None) -> tuple[int, ...]:
        vocab_size = self._engine.config.vocab_size
        return tuple(self._random.randrange(300, vocab_size) for _ in range(num_tokens or self._num_tokens))

    def _first_tokens(self, name: str, prompts: Sequence[tuple[int, ...]]) -> float:
        """Seconds until all have one."""
        engine, started = self._engine, time.perf_counter()
        for seed, prompt in enumerate(prompts):
            sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=ANSWER_TOKENS, ignore_eos=True)
            engine.submit(Request(prompt, sampling))
        self._step_until(1)
        seconds = time.perf_counter() - started
        self._step_until(2)
        self._held.setdefault(name, []).append(_held_bytes(engine))
        for sequence in engine.scheduler.sequences:
            engine.abort(sequence.request_id)
        engine.step()
        return seconds

    def _step_until(self, num_tokens: int) -> None:
        """Every answer has so many."""
        scheduler = self._engine.scheduler
        while scheduler.num_waiting or min(each.num_completion_tokens for each in scheduler.running) < num_tokens:
            self._engine.step()

    def _step_s(self, beams: int) -> float:
        """Of a token behind a short prompt."""
        engine = self._engine
        sampling = SamplingParams(temperature=0, max_tokens=SEARCHED_TOKENS, ignore_eos=True)
        engine.submit(Request(self._prompt(64), sampling, beams=beams))
        engine.step()  # reads the prompt
        started, num_steps = time.perf_counter(), 0
        while engine.has_work:
            engine.step()
            num_steps += 1
        return (time.perf_counter() - started) / num_steps


def _held_bytes(engine: Engine) -> int:
    """Of keys and values, that somebody has."""
    pools = {pool for group in engine.residency.kv_pages.groups for pool in group.pools}
    return sum(pool.page_bytes * sum(page.owners > 0 for page in pool.pages) for pool in pools)


if __name__ == "__main__":
    main()
