"""A model that is loaded by a plan of the simulated card, measured as a card is: from the rates to the answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from localllm import Engine, EngineConfig
from localllm.offload.measurements import device_rates, measurement, roofline
from localllm.offload.placement import GRAPH_ROOMS
from localllm.offload.planner.machine import SPLIT_KERNELS
from localllm.offload.planner.profile import FormatRates
from tests.engine_support import generated
from tests.simulated_card.device import CardConfig

PROMPT = tuple(range(3, 23))
NODE_BYTES = 40 << 10
MIB = 1 << 20


@pytest.fixture(autouse=True)
def measured_small(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would take seconds of a CPU that plays a card is small, and products have the rates of one."""
    rates = measurement.format_rates
    monkeypatch.setattr(device_rates, "_COPY_BYTES", MIB)
    monkeypatch.setattr(roofline, "_AWAKE_S", 0.0)
    monkeypatch.setattr(
        measurement,
        "format_rates",
        lambda *of: FormatRates(900.0, 90_000.0, MIB) if of[-1].type == "cuda" else rates(*of),
    )


@pytest.fixture(scope="module")
def expected() -> list[int]:
    engine = Engine.load("tiny", EngineConfig(device="cpu", weights="int8", dtype="fp32"))
    ids = generated(engine, PROMPT, 6)
    engine.close()
    return ids


def loaded(**wanted: object) -> Engine:
    config = EngineConfig(device="cuda", weights="int8", dtype="fp32", ctx=256, **wanted)  # type: ignore[arg-type]
    return Engine.load("tiny", config)


def test_graphs_are_measured_and_have_their_part_of_the_card(simulated_card, expected):
    """What torch may take is the plan's share without them; and the limit is the same whatever is there."""
    config = CardConfig(memory_bytes=2 << 30, graph_bytes=1000 * NODE_BYTES)  # as the measured graph has 1000 launches
    with simulated_card(config, is_measured=True) as card:
        engine = loaded()
        plan = engine.plan
        assert plan is not None and plan.is_whole
        graphs, limit = plan.ledger["vram"]["graphs"], plan.limits["vram"]
        assert graphs == GRAPH_ROOMS * (SPLIT_KERNELS * len(plan.shape.blocks) + 8) * NODE_BYTES
        context = plan.ledger["vram"]["context"]
        assert card.memory.fraction == pytest.approx((limit - context - graphs) / config.memory_bytes)
        card.config = replace(config, graph_bytes=graphs // GRAPH_ROOMS)  # of the model, which has fewer
        assert generated(engine, PROMPT, 6) == expected
        assert card.memory.taken_bytes["graphs"] == engine.residency.graph_bytes > 0
        assert engine.planned(engine.ctx).limits["vram"] == limit
        engine.close()
