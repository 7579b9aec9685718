"""What is measured of a device, with the CPU as the device: that all of it is, that it is kept, and when it is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from localllm.offload.measurements.device_rates import context_bytes, graph_node_bytes
from localllm.offload.measurements.measurement import device_measured
from localllm.offload.planner import profile as profile_module
from localllm.offload.planner.nvml import Gpu, gpus
from localllm.offload.planner.profile import UNKNOWN_CONTEXT_BYTES as UNKNOWN
from localllm.offload.planner.profile import (
    UNKNOWN_GRAPH_NODE_BYTES,
    DeviceRates,
    FormatRates,
    Profile,
    keep,
    kept_profile,
    machine_key,
)
from localllm.quant.recipe import RECIPES
from tests.fake_nvml import GIB, FakeCard, FakeNvml

CPU = torch.device("cpu")
MIB = 1 << 20
RATES = DeviceRates(900.0, 25.0, 24.0, 5e-6, 2e-6, 30e-6, 400 * MIB, {"bf16": FormatRates(850.0, 9e4, 8 * MIB)})


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path))
    return tmp_path


def measured(profile: Profile, weights: str = "int4-g64") -> tuple[Profile, list[str]]:
    """And what was said of it."""
    said: list[str] = []
    recipe = RECIPES[weights]
    return device_measured(profile, CPU, weights, recipe.blocks, torch.bfloat16, said.append), said


def test_every_figure_of_a_device_is_measured_kept_and_read_back() -> None:
    profile, said = measured(kept_profile())
    assert said == ["measuring the graphics card", "measuring int4-g64 matrices on the graphics card"]
    device = profile.device
    assert device is not None
    figures = asdict(device)
    context, rates = figures.pop("context_bytes"), figures.pop("formats")["int4-g64"]
    assert (context, rates.pop("workspace_bytes")) == (0, 0)  # of a CPU, which has no memory of its own to count
    assert rates.pop("spread") >= 0
    assert all(value > 0 for value in (*figures.values(), *rates.values())), profile
    assert kept_profile() == profile and measured(profile) == (profile, [])


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        (70 * MIB, 70 * MIB // 1000),
        (0, UNKNOWN_GRAPH_NODE_BYTES),  # nothing was captured, or from memory that the driver had
        (-40 * MIB, UNKNOWN_GRAPH_NODE_BYTES),
        (3 << 30, UNKNOWN_GRAPH_NODE_BYTES),  # another program came
    ],
)
def test_what_a_graph_takes_is_believed_within_bounds(taken: int, expected: int) -> None:
    assert graph_node_bytes(taken) == expected


def test_a_new_format_measures_itself_alone_and_the_cpus_figures_stay() -> None:
    known = replace(kept_profile(), disk_read_gbs=1.5, formats={"bf16": FormatRates(30.0, 900.0)}, device=RATES)
    profile, said = measured(known, "int8")
    assert said == ["measuring int8 matrices on the graphics card"]
    assert profile.device is not None and set(profile.device.formats) == {"bf16", "int8"}
    assert replace(profile.device, formats=RATES.formats) == RATES
    assert kept_profile() == profile == replace(known, device=profile.device, taken=profile.taken)


@pytest.mark.parametrize("weights", RECIPES)
def test_a_part_of_a_matrix_repeated_is_a_matrix_in_every_format(weights: str) -> None:
    if weights == "nf4":
        pytest.importorskip("bitsandbytes")
    blocks, x = RECIPES[weights].blocks, torch.randn(3, 128)
    part = blocks.quantize(torch.randn(16, 128))
    whole = {name: torch.cat([tensor] * 4) for name, tensor in part.items()}
    x = x.to(torch.float32 if weights == "fp32" else torch.bfloat16)
    y, expected = blocks.linear(x, whole, 64, None), blocks.linear(x, part, 16, None).repeat(1, 4)
    torch.testing.assert_close(y, expected, atol=0.1, rtol=0.02)


def test_another_machine_knows_nothing_of_this_ones_device(monkeypatch: pytest.MonkeyPatch) -> None:
    keep(replace(kept_profile(), device=RATES))
    assert kept_profile().device == RATES
    monkeypatch.setattr(profile_module, "_cpu_name", lambda: "another")
    assert kept_profile().device is None


@pytest.mark.parametrize(
    "damage", [3, [], {"h2d_gbs": 3.0}, {"formats": {}}, {**asdict(RATES), "formats": {"bf16": 1}}]
)
def test_a_damaged_device_is_measured_anew(own_cache: Path, damage: object) -> None:
    profile = replace(kept_profile(), device=RATES)
    (own_cache / "profile.json").write_text(json.dumps({**asdict(profile), "device": damage}))
    assert kept_profile() == Profile(profile.machine)


def test_a_file_from_before_devices_were_measured_is_measured_anew(own_cache: Path) -> None:
    older = asdict(replace(kept_profile(), disk_read_gbs=1.5))
    del older["device"]
    (own_cache / "profile.json").write_text(json.dumps(older))
    assert kept_profile() == Profile(kept_profile().machine)


# The card, as its driver tells of it


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose torch finds a card."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(uuid="0a1b"))
    yield


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    "changed", [FakeNvml(driver="590.1"), FakeNvml([FakeCard(generation=(4, 5))]), FakeNvml([FakeCard(width=(8, 8))])]
)
def test_another_driver_or_slot_is_another_machine(monkeypatch: pytest.MonkeyPatch, changed: FakeNvml) -> None:
    FakeNvml().install(monkeypatch)
    before = machine_key()
    changed.install(monkeypatch)
    assert machine_key() != before


@pytest.mark.usefixtures("cuda")
def test_a_link_that_sleeps_and_memory_that_is_used_are_the_same_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml().install(monkeypatch)
    before = machine_key()
    FakeNvml([FakeCard(generation=(1, 4), used=5 * GIB, own=GIB)]).install(monkeypatch)
    assert machine_key() == before


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("nvml", [FakeNvml(refuses="Driver/library version mismatch"), FakeNvml([FakeCard(lost=True)])])
def test_a_driver_that_says_nothing_of_the_card_is_survived(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml) -> None:
    nvml.install(monkeypatch)
    assert "a card" in machine_key()
    keep(replace(kept_profile(), device=RATES))
    assert kept_profile().device == RATES


def card(monkeypatch: pytest.MonkeyPatch, **fields: int) -> Gpu:
    FakeNvml([FakeCard(**fields)]).install(monkeypatch)  # type: ignore[arg-type]
    return gpus()[0]


def test_a_context_is_what_this_process_holds_beside_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    now = card(monkeypatch, used=9 * GIB, own=3 * GIB)
    assert context_bytes(now, None, 3 * GIB - 300 * MIB) == 300 * MIB


def test_where_no_process_is_told_a_context_is_what_came_to_be_used_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = card(monkeypatch, used=2 * GIB).free_bytes
    now = card(monkeypatch, used=2 * GIB + 700 * MIB)
    assert context_bytes(now, before, 256 * MIB) == 444 * MIB


@pytest.mark.parametrize("used_meanwhile", [0, -3 * GIB, 9 * GIB])
def test_what_cannot_be_a_context_is_not_taken_for_one(monkeypatch: pytest.MonkeyPatch, used_meanwhile: int) -> None:
    before = card(monkeypatch, used=10 * GIB).free_bytes
    now = card(monkeypatch, used=10 * GIB + used_meanwhile)
    assert context_bytes(now, before, 0) == UNKNOWN


def test_where_nothing_is_told_a_context_is_of_the_usual_size() -> None:
    assert context_bytes(None, None, 0) == UNKNOWN
