"""Hybrids: models of which most layers keep a state in place of keys and values, wherever their blocks rest."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.oracle import FixedCount
from localllm import Engine, Request, SamplingParams
from localllm.engine.events import FinishedEvent, PrefillEvent
from localllm.engine.loader import LoadedModel
from localllm.engine.prefix_config import NO_REUSE
from localllm.engine.speculative.drafter import SkipDrafter
from localllm.engine.speculative.speculator import Speculation
from localllm.engine.step_types import Limits
from localllm.kernels.kv_page import PAGE_TOKENS
from localllm.models.layout import EMBED, HEAD
from localllm.settings import EngineConfig
from tests.checkpoints import write_checkpoint
from tests.engine_support import Heard, answered, generated, steps

FAMILIES = {
    "qwen3_5": "int4",
    "qwen3_next": "int8",
    "olmo_hybrid": "fp32",
    "granitemoehybrid": "int4",
    "nemotron_h": "int8",
    "falcon_h1": "int4",
    "mamba2": "int4",
    "mamba": "int4",
    "falcon_mamba": "int8",
    "jamba": "int8",
    "jamba-dense": "fp32",
    "rwkv7": "int4",
    "lfm2": "int4",
    "lfm2_moe": "int8",
    "kimi_linear": "int4-g32",
}
PROMPTS = [list(range(5, 5 + length)) for length in (3, 64, 130, 200)]


@pytest.fixture(scope="module", params=FAMILIES)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder, weights = tmp_path_factory.mktemp("hybrid"), FAMILIES[request.param]
    layers = 8 if "mamba" in request.param else None  # which are of one block each
    write_checkpoint(folder, request.param, layers=layers, max_position_embeddings=1024)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCALLLM_CACHE", str(tmp_path_factory.mktemp("cache")))
        dtype = "fp32" if weights == "fp32" else "bf16"
        engine = Engine.load(folder, EngineConfig(device="cpu", weights=weights, dtype=dtype, speculate="off"))
        yield engine
        engine.close()


def wishes(max_tokens: int = 20) -> list[Request]:
    sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=max_tokens, ignore_eos=True)
    return [Request(tuple(prompt), sampling) for prompt in PROMPTS]


def said(engine: Engine, *requests: Request) -> list[list[int]]:
    return [heard.token_ids for heard in answered(engine, *requests)]


def test_a_batch_is_each_alone_and_a_long_answer_is_its_tokens_as_a_prompt(hybrid: Engine) -> None:
    alone = [said(hybrid, wish)[0] for wish in wishes()]
    assert said(hybrid, *wishes()) == alone
    answer = generated(hybrid, PROMPTS[1], 256)  # over four borders of pages
    follow = generated(hybrid, [*PROMPTS[1], *answer[:200]], 56)
    assert follow == answer[200:]


@pytest.mark.parametrize("placement", ["all from the disk", "states from the disk", "attention from the disk"])
def test_no_placement_changes_a_token(hybrid: Engine, placement: str) -> None:
    if hybrid.residency.placed is None:
        pytest.skip("a model that is computed from its checkpoint stays where it is")
    expected = said(hybrid, *wishes())
    nets, layers = set(hybrid.config.recurrents), enumerate(hybrid.config.layers)
    states = {f"layers.{number}.attention" for number, layer in layers if nets & set(layer.mixers)}
    before = hybrid.residency.blocks

    def is_streamed(name: str) -> bool:
        if placement == "all from the disk":
            return name not in (EMBED, HEAD)
        return name.endswith("attention") and (name in states) == placement.startswith("states")

    hybrid.residency.move([replace(block, tier="disk" if is_streamed(block.name) else "ram") for block in before])
    assert said(hybrid, *wishes()) == expected
    hybrid.residency.move(before)
    assert said(hybrid, *wishes()) == expected


def test_blocks_that_move_within_an_answer_change_no_token(hybrid: Engine) -> None:
    if hybrid.residency.placed is None:
        pytest.skip("a model that is computed from its checkpoint stays where it is")
    (wish,) = wishes(max_tokens=40)[2:3]
    (expected,), before = said(hybrid, wish), hybrid.residency.blocks
    heard, number = Heard(), 0
    hybrid.submit(wish)
    while hybrid.has_work:
        for event in hybrid.step():
            heard.take(event)
        number += 1
        if number in (2, 9, 21):
            is_streamed = number != 9
            moved = [replace(b, tier="disk" if is_streamed and "1" in b.name else "ram") for b in before]
            hybrid.residency.move(moved)
    hybrid.residency.move(before)
    assert heard.token_ids == expected


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_cancel_leaves_the_others_and_what_was_computed(hybrid: Engine, after: int) -> None:
    first, second = wishes()[2:]
    expected = said(hybrid, first)
    cancelled, heard = hybrid.submit(second), Heard()
    kept = hybrid.submit(first)
    for number, event in enumerate(steps(hybrid)):
        if number == after:
            hybrid.abort(cancelled)
        if event.request_id == kept:
            heard.take(event)
    assert [heard.token_ids] == expected
    assert said(hybrid, second) == said(hybrid, second)


def test_a_forward_that_fails_within_a_prompt_is_begun_anew(hybrid: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory ends once, when half of the layers have taken the prompt in."""
    (wish,) = wishes()[3:]
    unknown = replace(wish, prompt_ids=(9, *wish.prompt_ids[1:]))
    (expected,) = said(hybrid, unknown)
    assert hybrid.prefix is not None and hybrid.prefix.snapshots is not None
    hybrid.prefix.snapshots.limit_ram(0)  # it is found no more
    compute, calls = hybrid.runner._logits, itertools.count()

    def failing(batches: Any, num_tokens: int, on_block: Any, *rest: Any, **named: Any) -> Any:
        def seen(block: Any, x: Any) -> None:
            if next(calls) == 4:
                raise MemoryError
            on_block(block, x)

        return compute(batches, num_tokens, None if on_block is None else seen, *rest, **named)

    monkeypatch.setattr(hybrid.runner, "_logits", failing)
    monkeypatch.setattr(hybrid.kv_allocator, "gives_way", lambda *_: True)
    assert said(hybrid, unknown) == [expected] and next(calls) > 5
    hybrid.prefix.snapshots.limit_ram(1 << 28)


def test_kernels_that_fail_within_a_prompt_leave_it_to_the_operators_from_its_beginning(
    hybrid: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the layers have taken the prompt in then."""
    (wish,) = wishes()[3:]
    unknown = replace(wish, prompt_ids=(8, *wish.prompt_ids[1:]))
    assert hybrid.prefix is not None and hybrid.prefix.snapshots is not None
    runner, snapshots, calls = hybrid.runner, hybrid.prefix.snapshots, itertools.count()
    monkeypatch.setattr(runner, "cpu_program", None)
    (expected,) = said(hybrid, unknown)
    snapshots.limit_ram(0)  # it is found no more
    noted: list[str] = []
    monkeypatch.setattr(runner, "_note", noted.append)

    monkeypatch.setattr("localllm.engine.runner.give_up", lambda *_: None)

    class Failing:
        is_whole = False

        def computes_all(self, kvs: Any) -> bool:
            return False

        def logits(self, batches: Any, *_: Any, **__: Any) -> Any:
            def seen(block: Any, x: Any) -> None:
                if next(calls) == 4:
                    raise RuntimeError("a launch failed")

            return runner.model.forward(batches, seen)

    monkeypatch.setattr(runner, "gpu_program", Failing())
    assert said(hybrid, unknown) == [expected]
    assert next(calls) == 5 and "a launch failed" in noted[0] and runner.gpu_program is None
    snapshots.limit_ram(1 << 28)


def test_what_an_answer_ends_with_is_where_the_next_turn_begins(hybrid: Engine) -> None:
    turn = [*range(5, 105), 257, *range(105, 155)]
    (answer,) = answered(hybrid, Request(tuple(turn), SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)))
    chat = (*turn, *answer.token_ids, 257, 5, 6, 7)
    (event,) = ends_of(hybrid, Request(chat, SamplingParams(temperature=0, max_tokens=2)))
    assert event.usage.cached_tokens == (len(turn) + 89) // PAGE_TOKENS * PAGE_TOKENS


def test_drafts_lose_no_state_where_the_next_turn_begins(hybrid: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that drafts takes what was accepted into the states, and does not count itself."""
    skipped = frozenset({"layers.1.attention", "layers.2.mlp"})
    skips = SkipDrafter(lambda: hybrid.runner, lambda: skipped)
    drafting = Speculation(hybrid.residency, None, [skips], 4, FixedCount)
    turn = [*range(9, 109), 257, *range(105, 155)]
    request = Request(tuple(turn), SamplingParams(temperature=0, max_tokens=190, ignore_eos=True))
    monkeypatch.setattr(hybrid, "speculation", drafting)
    (answer,) = answered(hybrid, request)
    chat = (*turn, *answer.token_ids, 257, 5, 6, 7)
    (event,) = ends_of(hybrid, Request(chat, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)))
    assert event.usage.cached_tokens >= (len(turn) + 189 - 5) // PAGE_TOKENS * PAGE_TOKENS
    drafting.close()


def sharing(hybrid: Engine) -> Engine:
    """The same model, whose steps serve several prompts at once: nothing of them is cached."""
    limits = Limits(chunk_tokens=128, shares_steps=True)
    return Engine(LoadedModel(hybrid.model, 1024), hybrid.tokenizer, limits=limits, reuse=NO_REUSE)


def test_a_cancel_lets_no_other_prompt_of_the_same_step_begin_anew(hybrid: Engine) -> None:
    engine, sampling = sharing(hybrid), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    kept = engine.submit(Request(tuple(range(5, 245)) * 2, sampling))
    events = [*engine.step(), *engine.step()]
    cancelled = engine.submit(Request(tuple(range(6, 106)), sampling))
    on_block, calls = engine.scheduler.on_block, itertools.count()

    def aborting() -> None:
        if next(calls) == 4:
            engine.abort(cancelled)
        on_block()

    engine.scheduler.on_block = aborting
    events += steps(engine)
    done = [event.done for event in events if isinstance(event, PrefillEvent) and event.request_id == kept]
    assert done[:2] == [128, 256] and done == sorted(done) and done[-1] == 480
    (ended,) = (event for event in events if isinstance(event, FinishedEvent) and event.request_id == cancelled)
    assert ended.finish_reason == "cancelled" and next(calls) > 5


def test_logprobs_of_a_prompt_that_is_begun_anew_are_told_once(hybrid: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sharing(hybrid)
    wish = Request(tuple(range(5, 245)) * 2, SamplingParams(temperature=0, max_tokens=1), prompt_logprobs=0)

    def told() -> list[Any]:
        engine.submit(wish)
        return [each for event in steps(engine) if isinstance(event, PrefillEvent) for each in event.logprobs]

    expected, compute, calls = told(), engine.runner._logits, itertools.count()

    def failing(*given: Any, **named: Any) -> Any:
        if next(calls) == 2:
            raise MemoryError
        return compute(*given, **named)

    monkeypatch.setattr(engine.runner, "_logits", failing)
    monkeypatch.setattr(engine.kv_allocator, "gives_way", lambda *_: True)
    assert told() == expected and len(expected) == 480 and next(calls) > 6


def ends_of(engine: Engine, request: Request) -> list[FinishedEvent]:
    engine.submit(request)
    return [event for event in steps(engine) if isinstance(event, FinishedEvent)]
