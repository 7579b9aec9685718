"""The cost of several answers to one prompt: `python -m benchmarks.choices`.

Eight answers to one prompt of 2,048 tokens, prefilled once and cached once, beside one answer to a prompt as long,
and beside eight that have prompts of their own, as long as well: seconds until every answer has its first token, and
the bytes of keys and values that are held when each has two. Then a search by four beams beside a greedy answer: the
seconds of a step. Random INT4 weights cost what trained ones do. Nothing is known of any prompt before. One thread, and
seconds of its processor: other programs may have the machine meanwhile. Rounds take turns; medians with their lowest
and highest. Results go to benchmarks/results/choices.json.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks.engines import random_engine
from benchmarks.measure import RESULTS, interleaved, machine, paired, parser, save, spread
from localllm.engine.engine import Engine
from localllm.engine.prefix_config import IN_POOLS
from localllm.engine.request import Request, SamplingParams

READ, SEARCHED = "tiny", "tinyllama-1.1b"
LAYERS = 4  # of the one that is searched with, which has 22; the head is all of it
PROMPT_TOKENS, ANSWERS, ANSWER_TOKENS = 2048, 8, 32
BEAMS, SEARCHED_TOKENS = 4, 16


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    arguments.add_argument("--searched", default=SEARCHED, help="the shape that a search is measured with")
    arguments.add_argument("--save", type=Path, default=RESULTS, help="a folder for the results")
    options = arguments.parse_args()
    result: dict[str, object] = {
        "machine": machine(),
        "sharing": {"shape": READ, **sharing(options.prompt_tokens, options.rounds)},
        "search": {"shape": options.searched, "layers": LAYERS, **search(options.searched, options.rounds)},
    }
    print(f"wrote {save('choices', result, options.save)}")


def sharing(num_tokens: int, rounds: int) -> dict[str, Any]:
    held: dict[str, int] = {}
    with engine_of(READ, num_tokens + ANSWER_TOKENS) as engine:
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
    return shown(result)


def search(name: str, rounds: int) -> dict[str, Any]:
    with engine_of(name, 256, num_hidden_layers=LAYERS) as engine:
        prompts = Prompts(engine, 64)
        cases = {
            "greedy": lambda: step_s(engine, prompts.next(), 1),
            "beams": lambda: step_s(engine, prompts.next(), BEAMS),
        }
        seconds = interleaved(cases, rounds)
    result: dict[str, Any] = {"beams": BEAMS}
    result |= {f"{name}_step_s": spread(values) for name, values in seconds.items()}
    return shown({**result, "beams_of_greedy": paired(seconds["beams"], seconds["greedy"])})


def engine_of(name: str, ctx: int, **changes: int) -> AbstractContextManager[Engine]:
    """An engine of this shape as if it had been trained for that context, on which its speed does not depend."""
    changes |= {"max_position_embeddings": ctx}
    return random_engine(name, ctx, changes=changes, threads=1, reuse=IN_POOLS)


class Prompts:
    """Prompts of which each is new."""

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
    """Step until every answer has so many tokens."""
    scheduler = engine.scheduler
    while scheduler.num_waiting or min(each.num_completion_tokens for each in scheduler.running) < num_tokens:
        engine.step()


def step_s(engine: Engine, prompt: tuple[int, ...], beams: int) -> float:
    sampling = SamplingParams(temperature=0, max_tokens=SEARCHED_TOKENS, ignore_eos=True)
    engine.submit(Request(prompt, sampling, beams=beams))
    engine.step()  # prefills the prompt
    started, num_steps = time.process_time(), 0
    while engine.has_work:
        engine.step()
        num_steps += 1
    return (time.process_time() - started) / num_steps


def held_bytes(engine: Engine) -> int:
    """Bytes of the keys and values that have an owner."""
    pools = {pool for group in engine.residency.kv_pages.groups for pool in group.pools}
    return sum(pool.page_bytes * sum(page.owners > 0 for page in pool.pages) for pool in pools)


def shown(result: dict[str, Any]) -> dict[str, Any]:
    for key, value in result.items():
        print(f"{key}: {value}")
    return result


if __name__ == "__main__":
    main()
