"""What the driver's library says of the cards, and what is left where it says nothing."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType

import pytest

from localllm.offload.planner.nvml import gpu_of, gpus, refusal
from tests.fake_nvml import GIB, FakeCard, FakeNvml
from tests.test_imports import HEAVY, loaded_by


def test_a_card_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml([FakeCard(used=3 * GIB, own=GIB, generation=(1, 4), width=(8, 16), display=True)]).install(monkeypatch)
    (card,) = gpus()
    assert (card.index, card.name, card.uuid) == (0, "NVIDIA GeForce RTX 4090", "GPU-0a1b")
    assert (card.total_bytes, card.free_bytes) == (24 * GIB, 24 * GIB - 3 * GIB - GIB // 2)
    assert (card.own_bytes, card.used_by_others_bytes) == (GIB, 2 * GIB)
    assert (card.compute_capability, card.driver_version, card.driver_cuda) == ((8, 9), "580.65.06", (13, 0))
    assert (card.pcie_generation, card.pcie_generation_max) == (1, 4)
    assert (card.pcie_width, card.pcie_width_max) == (8, 16)
    assert card.drives_display is True
    assert refusal() == ""


@pytest.mark.parametrize(("number", "version"), [(12080, (12, 8)), (13020, (13, 2)), (11040, (11, 4))])
def test_the_drivers_cuda_is_a_pair(monkeypatch: pytest.MonkeyPatch, number: int, version: tuple[int, int]) -> None:
    FakeNvml(cuda=number).install(monkeypatch)
    assert gpus()[0].driver_cuda == version


def test_what_a_card_does_not_tell_is_none_and_the_rest_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = frozenset({"MemoryInfo", "CurrPcieLinkGeneration", "DisplayActive", "ComputeRunningProcesses"})
    FakeNvml([FakeCard(silent=silent)]).install(monkeypatch)
    (card,) = gpus()
    unknown = {field for field, value in dataclasses.asdict(card).items() if value is None}
    memory = {"total_bytes", "free_bytes", "own_bytes", "used_by_others_bytes"}
    assert unknown == memory | {"pcie_generation", "drives_display"}


def test_an_older_driver_counts_its_own_share_as_used(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml([FakeCard(used=GIB, reserved=GIB)], knows_reserved=False).install(monkeypatch)
    assert (gpus()[0].free_bytes, gpus()[0].used_by_others_bytes) == (22 * GIB, 2 * GIB)


def test_a_lost_card_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml([FakeCard(lost=True), FakeCard(uuid="GPU-second")]).install(monkeypatch)
    assert [(card.index, card.uuid) for card in gpus()] == [(1, "GPU-second")]


def test_a_card_is_found_by_the_uuid_that_cuda_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml([FakeCard(uuid="GPU-0a1b"), FakeCard(uuid="GPU-2c3d"), FakeCard(silent=frozenset({"UUID"}))]).install(
        monkeypatch
    )
    found = gpu_of("2c3d")
    assert found is not None and found.index == 1
    assert gpu_of("4e5f") is None


def test_a_driver_that_refuses_has_no_cards_and_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(refuses="RM has detected an NVML/RM version mismatch.").install(monkeypatch)
    assert gpus() == ()
    assert "version mismatch" in refusal()


def test_without_the_package_there_are_no_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus() == ()
    assert refusal()


def test_another_package_of_that_name_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", ModuleType("pynvml"))
    assert gpus() == ()
    assert refusal()


def test_every_session_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([FakeCard(lost=True), FakeCard()]).install(monkeypatch)
    gpus()
    assert nvml.open_sessions == 0


@pytest.mark.parametrize("module", ["nvml", "machine_memory", "disk_speed"])
def test_the_machine_is_asked_without_torch(module: str, tmp_path: Path) -> None:
    loaded = loaded_by(f"import localllm.offload.planner.{module}", tmp_path)
    assert not loaded & HEAVY
    assert "pynvml" not in loaded
