"""A card that fills up at any place costs no text and no process: a run ends in its answers, or in one typed error.

Memory that is missing is given up step by step (`engine/residency.py`), and INT4 and INT8 promise the same text
wherever blocks rest. So whatever an undisturbed run says, a disturbed one says too.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from localllm import Engine
from localllm.engine.request import Request, SamplingParams
from localllm.errors import DoesNotFitError, LocalLLMError
from localllm.settings import EngineConfig
from tests.checkpoints import write_checkpoint
from tests.engine_support import answered
from tests.simulated_card.device import NO_FAULTS, CardConfig, Faults, SimulatedCard
from tests.simulated_card.streams import SCHEDULES
from tests.thinning import thinned

FORMATS = ("int4-g64", "int8")
RUNS, EACH_TIME = 500, 8
REQUESTS = [
    Request(tuple(range(3, 3 + length)), SamplingParams(max_tokens=5, temperature=0.9, seed=length, ignore_eos=True))
    for length in (18, 70)  # of the second one a page is found when it comes again
]
Texts = list[list[int]]


@dataclass
class Run:
    """What a load and two answers came to: their texts, or the error that ended each; `after`: of the same requests
    side by side, once nothing goes wrong any more. load, answers: what was counted in either."""

    ends: list[list[int] | Exception] = field(default_factory=list)
    after: Texts = field(default_factory=list)
    load: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Trouble:
    """at_load: the faults begin with the load, else with the first answer. taken: how much of what is free then another
    program takes, until the answers are there. lockable_bytes: see CardConfig."""

    faults: Faults = NO_FAULTS
    at_load: bool = False
    taken: float = 0.0
    lockable_bytes: int | None = None
    schedule: Any = "lazy"


def run(
    checkpoint: Path,
    weights: str,
    simulated_card: Callable[..., AbstractContextManager[SimulatedCard]],
    trouble: Trouble,
) -> Run:
    """Raises what a load raises that does not succeed."""
    found = Run()
    config = CardConfig(trouble.schedule, lockable_bytes=trouble.lockable_bytes)
    with simulated_card(config) as card:
        card.set_faults(trouble.faults if trouble.at_load else NO_FAULTS)
        engine = Engine.load(checkpoint, EngineConfig(device="cuda", weights=weights, dtype="fp32", ctx=128))
        try:
            found.load = card.counts
            if not trouble.at_load:
                card.set_faults(trouble.faults)
            taken_bytes = int(trouble.taken * card.memory.free_bytes)
            card.take(taken_bytes)
            heard = [answered(engine, request)[0] for request in REQUESTS]
            found.ends = [each.finished.error or each.token_ids for each in heard]
            found.answers = card.counts
            card.set_faults(NO_FAULTS)
            card.take(-taken_bytes)
            found.after = [each.token_ids for each in answered(engine, *REQUESTS)]
        finally:
            engine.close()
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ladder")
    write_checkpoint(folder, "llama", layers=2)
    return folder


@pytest.fixture(scope="module")
def undisturbed(checkpoint: Path, card_guard: None) -> dict[str, Run]:
    from tests.simulated_card.support import on_simulated_card

    runs = {weights: run(checkpoint, weights, on_simulated_card, Trouble()) for weights in FORMATS}
    for each in runs.values():
        assert each.ends == each.after and all(len(text) == 5 for text in each.after)
    return runs


def trouble_of(seed: int, undisturbed: Run) -> Trouble:
    choose = random.Random(seed)
    at_load = choose.random() < 0.4
    counts = undisturbed.load if at_load else undisturbed.answers
    in_a_row = choose.choice([1, 1, 1, 2, 4, 8, 30, 10_000])
    what = choose.choice(["allocation"] * 6 + ["kernel", "graph"])
    number = choose.randrange(
        max(1, counts[{"allocation": "allocations", "kernel": "launches", "graph": "captures"}[what]])
    )
    return Trouble(
        Faults(**{what: number}, allocations=in_a_row),
        at_load,
        choose.choice([0.0, 0.0, 0.5, 1.0]),
        choose.choice([None, None, 0, 1 << choose.randrange(10, 20)]),
        choose.choice(SCHEDULES),
    )


@pytest.mark.parametrize("seed", thinned(range(RUNS), lambda seed: seed < EACH_TIME))
def test_no_text_is_wrong_and_no_process_dies(seed, checkpoint, undisturbed, simulated_card):
    weights = FORMATS[seed % len(FORMATS)]
    right = undisturbed[weights]
    try:
        found = run(checkpoint, weights, simulated_card, trouble_of(seed, right))
    except LocalLLMError:  # of the load, as a command line tells it
        return
    for end, text in zip(found.ends, right.ends, strict=True):
        assert isinstance(end, DoesNotFitError) or end == text
    assert found.after == right.after


@pytest.mark.parametrize("step", [151, pytest.param(61, marks=pytest.mark.slow)])
@pytest.mark.parametrize("weights", FORMATS)
def test_one_allocation_that_fails_ends_no_answer(weights, step, checkpoint, undisturbed, simulated_card):
    """Wherever it is: something is given up, and the step that it was in is computed again."""
    right = undisturbed[weights]
    for number in range(FORMATS.index(weights), right.answers["allocations"], step):
        assert run(checkpoint, weights, simulated_card, Trouble(Faults(allocation=number))).ends == right.ends


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_single_allocation_ends_an_answer(schedule, checkpoint, undisturbed, simulated_card):
    """Each of them fails under one of the schedules."""
    right = undisturbed["int8"]
    for number in range(SCHEDULES.index(schedule), right.answers["allocations"], len(SCHEDULES)):
        trouble = Trouble(Faults(allocation=number), schedule=schedule)
        assert run(checkpoint, "int8", simulated_card, trouble).ends == right.ends
