"""What several answers to one prompt cost: `python -m benchmarks.choices`.

Eight answers to one prompt of 2,048 tokens, which is read once and kept once, beside one answer to a prompt as long,
and beside eight that have prompts of their own, as long as well: seconds until every answer has its first token, and
the bytes of keys and values that are held when each has two. Then a search by four beams beside a greedy answer: the
seconds of a step. Random INT4 weights cost what trained ones do. Nothing is known of any prompt before. One thread, and
seconds of its processor: other programs may have the machine meanwhile. Rounds take turns; medians with their lowest
and highest. Results go to benchmarks/results/choices.json.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measure import interleaved, machine, paired, save, spread
from localllm.bench.random_model import random_model
from localllm.engine.engine import Engine
from localllm.engine.request import Request, SamplingParams
from localllm.engine.speculative.config import OFF
from localllm.models.shapes import find_shape
from localllm.quant.recipe import RECIPES

READ, SEARCHED = "tiny", "tinyllama-1.1b"
LAYERS = 4  # of the one that is searched with, which has 22; the head is all of it
PROMPT_TOKENS, ANSWERS, ANSWER_TOKENS = 2048, 8, 32
BEAMS, SEARCHED_TOKENS = 4, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--searched", default=SEARCHED, help="the shape that a search is measured with")
    parser.add_argument("--save", type=Path, help="a folder for the results in place of benchmarks/results")
    options = parser.parse_args()
    result: dict[str, object] = {
        "machine": machine(),
        "sharing": {"shape": READ, **sharing(options.prompt_tokens, options.rounds)},
        "search": {"shape": options.searched, "layers": LAYERS, **search(options.searched, options.rounds)},
    }
    print(f"wrote {save('choices', result, *([options.save] if options.save else []))}")


def sharing(num_tokens: int, rounds: int) -> dict[str, Any]:
    held: dict[str, int] = {}
    with engine_of(READ, ctx=num_tokens + ANSWER_TOKENS) as engine:
        prompts = Prompts(engine, num_tokens)

        def measured(name: str, make: Callable[[], list[tuple[int, ...]]]) -> Callable[[], float]:
            def measure() -> float:
                seconds, held[name] = first_tokens(engine, make())
                return seconds

            return measure

        cases = {
            "one": measured("one", lambda: [prompts.next()]),
            "shared": measured("shared", lambda: [prompts.next()] * ANSWERS),
            "separate": measured("separate", lambda: [prompts.next() for _ in range(ANSWERS)]),
        }
        seconds = interleaved(cases, rounds)
    result: dict[str, Any] = {"prompt_tokens": num_tokens, "answers": ANSWERS}
    result |= {f"{name}_first_tokens_s": spread(values) for name, values in seconds.items()}
    result |= {f"{name}_held_bytes": num_bytes for name, num_bytes in held.items()}
    result["shared_of_one"] = paired(seconds["shared"], seconds["one"])
    result["shared_of_separate"] = paired(seconds["shared"], seconds["separate"])
    return told(result)


def search(name: str, rounds: int) -> dict[str, Any]:
    with engine_of(name, ctx=256, num_hidden_layers=LAYERS) as engine:
        prompts = Prompts(engine, 64)
        cases = {
            "greedy": lambda: step_s(engine, prompts.next(), 1),
            "beams": lambda: step_s(engine, prompts.next(), BEAMS),
        }
        seconds = interleaved(cases, rounds)
    result: dict[str, Any] = {"beams": BEAMS}
    result |= {f"{name}_step_s": spread(values) for name, values in seconds.items()}
    return told({**result, "beams_of_greedy": paired(seconds["beams"], seconds["greedy"])})


@contextmanager
def engine_of(name: str, ctx: int, **changed: int) -> Iterator[Engine]:
    """As if the shape had been trained for that context: what it costs does not depend on it."""
    raw = {**find_shape(name).raw_config, "max_position_embeddings": ctx, **changed}
    recipe = RECIPES["int4-g64"]
    with random_model(name, raw, recipe) as files:
        engine = Engine.load(files, weights=recipe.name, ctx=ctx, threads=1, speculate=OFF)
        yield engine
        engine.close()


class Prompts:
    """Each is new."""

    def __init__(self, engine: Engine, num_tokens: int) -> None:
        self._vocab_size, self._num_tokens, self._random = engine.config.vocab_size, num_tokens, random.Random(0)

    def next(self) -> tuple[int, ...]:
        return tuple(self._random.randrange(300, self._vocab_size) for _ in range(self._num_tokens))


def first_tokens(engine: Engine, prompts: Sequence[tuple[int, ...]]) -> tuple[float, int]:
    """Seconds until all answers have one, and bytes that are held when they have two."""
    started = time.process_time()
    for seed, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        engine.submit(Request(prompt, sampling))
    step_until(engine, 1)
    seconds = time.process_time() - started
    step_until(engine, 2)
    num_bytes = held_bytes(engine)
    for sequence in engine.scheduler.sequences:
        engine.abort(sequence.request_id)
    engine.step()
    return seconds, num_bytes


def step_until(engine: Engine, num_tokens: int) -> None:
    """Every answer has so many."""
    scheduler = engine.scheduler
    while scheduler.num_waiting or min(each.num_completion_tokens for each in scheduler.running) < num_tokens:
        engine.step()


def step_s(engine: Engine, prompt: tuple[int, ...], beams: int) -> float:
    sampling = SamplingParams(temperature=0, max_tokens=SEARCHED_TOKENS, ignore_eos=True)
    engine.submit(Request(prompt, sampling, beams=beams))
    engine.step()  # reads the prompt
    started, num_steps = time.process_time(), 0
    while engine.has_work:
        engine.step()
        num_steps += 1
    return (time.process_time() - started) / num_steps


def held_bytes(engine: Engine) -> int:
    """Of keys and values, that somebody has."""
    pools = {pool for group in engine.residency.kv_pages.groups for pool in group.pools}
    return sum(pool.page_bytes * sum(page.owners > 0 for page in pool.pages) for pool in pools)


def told(result: dict[str, Any]) -> dict[str, Any]:
    for key, value in result.items():
        print(f"{key}: {value}")
    return result


if __name__ == "__main__":
    main()
