"""What goes wrong around an engine on a card: other programs, a slow link, a kernel that ends the context."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from localllm import Engine
from localllm.engine.memory import HEADROOM
from localllm.errors import CardFaultError
from localllm.offload.planner import plan as plan_module
from localllm.settings import EngineConfig
from tests.engine_support import generated
from tests.simulated_card.device import CardConfig, Faults
from tests.simulated_card.streams import SCHEDULES
from tests.thinning import thinned

PROMPT = tuple(range(3, 21))


@pytest.fixture(scope="module")
def checkpoint(packed_models) -> Path:
    return packed_models["int8"].checkpoint


@pytest.fixture(scope="module")
def expected(checkpoint) -> list[int]:
    engine = Engine.load(checkpoint, EngineConfig(device="cpu", weights="int8", dtype="fp32", ctx=128))
    token_ids = generated(engine, PROMPT, 6, temperature=0.9, seed=5)
    engine.close()
    return token_ids


def loaded(checkpoint, **wanted) -> Engine:
    return Engine.load(checkpoint, EngineConfig(device="cuda", weights="int8", dtype="fp32", ctx=128, **wanted))


def text(engine) -> list[int]:
    return generated(engine, PROMPT, 6, temperature=0.9, seed=5)


def places(engine) -> Counter[tuple[str, str]]:
    """How many blocks rest where, and are computed by whom, without the embedding."""
    return Counter((block.tier, block.exec) for block in engine.residency.blocks[1:])


@pytest.fixture
def fine_caps(monkeypatch) -> None:
    """These models are smaller than the step of a cap."""
    monkeypatch.setattr(plan_module, "_CAP_STEP_BYTES", 4096)


@pytest.mark.parametrize("schedule", thinned(SCHEDULES, "random".__eq__))
def test_another_program_goes_and_comes_and_the_text_stays(schedule, checkpoint, expected, simulated_card, fine_caps):
    with simulated_card(CardConfig(schedule)) as card:
        game = card.memory.free_bytes - int(least(checkpoint) / HEADROOM)
        card.take(game)
        engine = loaded(checkpoint)
        assert text(engine) == expected
        crowded = places(engine)
        assert crowded["vram", "gpu"] < crowded.total()
        card.take(-game)
        assert text(engine) == expected
        assert set(places(engine)) == {("vram", "gpu")}
        card.take(card.memory.free_bytes)  # it has room for what is there, but not for more
        assert text(engine) == expected
        engine.close()


def test_over_a_slow_link_the_cpu_computes_what_the_card_cannot_hold(checkpoint, expected, simulated_card, fine_caps):
    found = {}
    for link_gbs in (0.001, 400.0):
        with simulated_card(CardConfig(link_gbs=link_gbs)):
            engine = loaded(checkpoint, vram=least(checkpoint))
            assert text(engine) == expected
            found[link_gbs] = places(engine)
            engine.close()
    assert found[0.001]["ram", "gpu"] == 0 < found[0.001]["ram", "cpu"]
    assert found[400.0]["ram", "gpu"] > 0


def least(checkpoint) -> int:
    """The bytes of an empty card in which everything has room but some blocks."""
    engine = loaded(checkpoint)
    plan = engine.plan
    assert plan is not None
    vram, step = plan.total_bytes("vram"), plan.ledger["vram"]["weights"] // 3
    while set(places(engine)) == {("vram", "gpu")}:
        engine.close()
        vram -= step
        engine = loaded(checkpoint, vram=vram)
    engine.close()
    return vram


def test_wherever_a_kernel_ends_the_context_no_text_is_wrong(checkpoint, expected, simulated_card):
    """The answer is right, or ends in the one error that ends the engine's process."""
    number, ends = 0, Counter()
    while not ends["answers"]:
        with simulated_card(CardConfig("random", seed=number)) as card:
            engine = loaded(checkpoint)
            card.set_faults(Faults(illegal_access=number))
            try:
                assert text(engine) == expected
                ends["answers"] += 1
            except CardFaultError:
                ends["faults"] += 1
            engine.close()
        number += 37
    assert ends["faults"] > 3
