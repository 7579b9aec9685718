"""The gain of the head that a checkpoint brings to draft, and its cost where it is never right.

    python -m benchmarks.speculation_mtp [--model qwen3.5-4b] [--rounds 5]

A model and a head of random INT4 weights, which cost what trained ones do. `oracle`: the head computes its drafts, and
they are then replaced by ones that are right with a probability alpha: the measured speedup beside the formula
S = E * t_1 / t_round, E = (1 - alpha^(k+1)) / (1 - alpha), whose times are those of the same round's steps and drafts.
`never`: what `--speculate auto` costs beside plain decoding where each of the head's drafts is wrong, and the text
repeats nothing. Rounds take turns; medians with their lowest and highest. Results go to
benchmarks/results/speculation-mtp.json.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from benchmarks.engines import WEIGHTS, answer, random_engine, random_ids
from benchmarks.measure import RESULTS, machine, paired, parser, save, spread
from benchmarks.oracle import FixedCount
from benchmarks.speculation import expected_tokens, record_steps
from localllm.bench.random_model import RandomBlocks
from localllm.cache.paged_kv import PagedKV
from localllm.engine.engine import Engine
from localllm.engine.residency import Residency, new_pages
from localllm.engine.sequence import Sequence as Running
from localllm.engine.speculative.choice import Speculate
from localllm.engine.speculative.drafter import Draft
from localllm.engine.speculative.head_drafter import HeadDrafter
from localllm.engine.speculative.speculator import Speculation, speculation
from localllm.models.block_layouts import block_layouts
from localllm.models.load import BlockTensors, DecoderParts
from localllm.quant.recipe import RECIPES

SHAPE = "qwen3.5-4b"
ALPHAS, COUNTS = (0.6, 0.8), (1, 2, 4)
TOKENS, PASSES, _CTX = 64, 64, 1024  # tokens of a pass differ by 60% of their mean: 64 passes by 8%


class OracleHead(HeadDrafter):
    """A head whose drafts take as long as they take, and are right as often as is asked for."""

    def rehearse(self, answers: Sequence[int], alpha: float, vocab_size: int, seed: int) -> None:
        """answers: prompt and answer, as they will be."""
        self._answers, self._alpha, self._vocab_size = answers, alpha, vocab_size
        self._random, self.seconds = random.Random(seed), list[float]()

    def propose(
        self, sequences: Sequence[Running], limits: Sequence[int], least: float, is_cancelled: Callable[[], bool]
    ) -> list[Draft]:
        began = time.perf_counter()
        found = super().propose(sequences, limits, least, is_cancelled)
        self.seconds.append(time.perf_counter() - began)
        pairs = zip(sequences, found, strict=True)
        return [Draft(self._told(len(each.token_ids), len(draft.token_ids)), self.name) for each, draft in pairs]

    def _told(self, begin: int, count: int) -> tuple[int, ...]:
        right = self._answers[begin : begin + count]
        return tuple(t if self._random.random() < self._alpha else (t + 1) % self._vocab_size for t in right)


def new_head(residency: Residency, kind: type[HeadDrafter]) -> HeadDrafter:
    """Return a head of random weights for this model."""
    config, recipe = residency.config.draft_head, RECIPES[WEIGHTS]
    assert config is not None, "the shape has a head"
    source = RandomBlocks(recipe)
    blocks = [BlockTensors(layout, source.tensors(layout)) for layout in block_layouts(config)]
    parts = DecoderParts(config, recipe, residency.model.dtype, torch.device("cpu"))
    head_of = partial(parts.draft_head, blocks)
    pages = new_pages(head_of(residency.model), residency.kv_pages.format)
    return kind(residency, head_of, partial(PagedKV, pages))


@contextmanager
def plainly(engine: Engine) -> Iterator[None]:
    """Inside, nobody drafts and nobody listens."""
    before, listener = engine.speculation, engine.runner.on_states
    engine.speculation = Speculation(engine.residency, None, (), 0)
    engine.residency.watch_states(None)
    yield
    engine.speculation = before
    engine.residency.watch_states(listener)


def oracle(engine: Engine, rounds: int) -> list[dict[str, Any]]:
    prompt, vocab_size = random_ids(64, engine.config.vocab_size, 1), engine.config.vocab_size
    with plainly(engine):
        told = (*prompt, *answer(engine, [prompt], TOKENS).ids)
    head = new_head(engine.residency, OracleHead)
    assert isinstance(head, OracleHead)
    return [_oracle_row(engine, head, told, alpha, k, rounds, vocab_size) for alpha, k in product(ALPHAS, COUNTS)]


def _oracle_row(
    engine: Engine, head: OracleHead, told: Sequence[int], alpha: float, count: int, rounds: int, vocab_size: int
) -> dict[str, Any]:
    prompt = tuple(told[: len(told) - TOKENS])
    speedups, formulas = list[float](), list[float]()
    for number in range(rounds):
        with plainly(engine):
            plain_s = answer(engine, [prompt], TOKENS).token_s
        seconds, steps, drafts, passes = list[float](), list[float](), list[float](), 0.0
        while passes < PASSES:
            head.rehearse(told, alpha, vocab_size, number + rounds * len(seconds))
            engine.speculation = Speculation(engine.residency, None, [head], count, FixedCount)
            record_steps(engine, steps)
            found = answer(engine, [prompt], TOKENS)
            assert found.speculation is not None and (*prompt, *found.ids) == tuple(told)
            passes += (TOKENS - 1) / (found.speculation.tokens_per_pass or 1.0)
            seconds.append(found.token_s)
            drafts += head.seconds
        speedups.append(plain_s / mean(seconds))
        formulas.append(expected_tokens(alpha, count) * plain_s / (median(steps) + median(drafts)))
    share = paired(speedups, formulas)
    print(f"alpha {alpha} k {count}  {spread(speedups)} x, of the formula {share}", file=sys.stderr)
    return {"alpha": alpha, "k": count, "speedup": spread(speedups), "formula": spread(formulas), "share": share}


def never(engine: Engine, rounds: int) -> dict[str, Any]:
    """Each round has a plain run before and one behind: their ratio is the machine's noise."""
    prompt, vocab_size = random_ids(128, engine.config.vocab_size, 2), engine.config.vocab_size
    # A draft shares the noise of its token, so that a head of random weights is right at a high temperature.
    sampling: dict[str, Any] = {"temperature": 3.0, "seed": 1}
    with plainly(engine):
        told = (*prompt, *answer(engine, [prompt], 2 * TOKENS, **sampling).ids)
    head = new_head(engine.residency, OracleHead)
    assert isinstance(head, OracleHead)
    head.rehearse(told, 0.0, vocab_size, 0)
    engine.speculation = speculation(Speculate("auto"), engine.residency, engine.plan, lambda _: head)
    answer(engine, [prompt], 2 * TOKENS, **sampling)  # warm
    ratios, noise = list[float](), list[float]()
    for _ in range(2 * rounds):
        with plainly(engine):
            first = answer(engine, [prompt], 2 * TOKENS, **sampling)
        own = answer(engine, [prompt], 2 * TOKENS, **sampling)
        with plainly(engine):
            second = answer(engine, [prompt], 2 * TOKENS, **sampling)
        assert own.ids == first.ids == second.ids
        ratios.append((first.token_s + second.token_s) / 2 / own.token_s)
        noise.append(first.token_s / second.token_s)
    print(f"never right: {spread(ratios)} of plain, plain of plain {spread(noise)}", file=sys.stderr)
    return {"of_plain": spread(ratios), "noise": spread(noise)}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--model", default=SHAPE, help="whose shape is taken")
    arguments.add_argument("--save", type=Path, default=RESULTS, help="a folder for the results")
    options = arguments.parse_args()
    with random_engine(options.model, _CTX) as engine:
        result = {"machine": machine(), "shape": options.model, "never": never(engine, options.rounds)}
        result["oracle"] = oracle(engine, options.rounds)
    print(f"wrote {save('speculation-mtp', result, options.save)}")


if __name__ == "__main__":
    main()
