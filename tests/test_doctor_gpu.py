"""What `doctor` finds out about cards, their driver, torch and Triton; each finding is seen to fire and not to fire."""

from __future__ import annotations

import dataclasses
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localllm import repairs
from localllm.cli.checks_gpu import LinkTrial, check_gpu, check_link, check_pinned, check_vram, try_link
from localllm.cli.checks_torch import (
    TorchBuild,
    check_capability,
    check_driver,
    check_torch,
    check_triton,
    probe_triton,
    torch_build,
)
from localllm.offload.planner.nvml import Gpu, gpus
from tests.fake_nvml import GIB, FakeCard, FakeNvml
from tests.thinning import one_in

CUDA_13 = TorchBuild("2.13.0", (13, 0), 1, ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"), 8)
MEMORY = {"total_bytes": 24 * GIB, "free_bytes": 23 * GIB, "own_bytes": 0, "used_by_others_bytes": GIB // 2}
DRIVER = {"compute_capability": (8, 9), "driver_version": "580.65.06", "driver_cuda": (13, 0)}
LINK = {"pcie_generation": 4, "pcie_generation_max": 4, "pcie_width": 16, "pcie_width_max": 16}
CARD = Gpu(0, "NVIDIA GeForce RTX 4090", "GPU-0a1b", **MEMORY, **DRIVER, **LINK, drives_display=False)  # type: ignore[arg-type]


def card(**changes: Any) -> Gpu:
    return dataclasses.replace(CARD, **changes)


def build(**changes: Any) -> TorchBuild:
    return dataclasses.replace(CUDA_13, **changes)


@pytest.fixture
def only_apt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool, *_: "/usr/bin/apt-get" if tool == "apt-get" else None)


# torch by itself


@pytest.mark.parametrize(
    ("found", "status", "text"),
    [
        (build(), "ok", "2.13.0 (CUDA 13.0), 8 threads"),
        (TorchBuild("2.11.1+cpu", threads=2), "ok", "2.11.1+cpu (CPU build), 2 threads"),
        (build(version="2.10.1"), "warn", "not one that is tested"),
        (build(version="2.14.0"), "warn", "not one that is tested"),
        (build(version="3.nightly"), "warn", "not one that is tested"),
        (TorchBuild(error="ImportError: libcudart.so.13"), "fail", "cannot be imported: ImportError: libcudart.so.13"),
    ],
)
def test_torch_is_there_and_of_a_tested_release(found: TorchBuild, status: str, text: str) -> None:
    finding = check_torch(found)
    assert (finding.status, text in finding.detail) == (status, True)


def test_this_machines_torch_describes_itself() -> None:
    import torch

    found = torch_build()
    assert (found.version, found.devices) == (torch.__version__, torch.cuda.device_count())
    assert found.threads == torch.get_num_threads()


def test_a_torch_that_cannot_be_imported_is_described_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert torch_build().version == "" and "torch" in torch_build().error


# The driver and torch


@pytest.mark.parametrize(
    ("driver", "torch"), [((13, 0), (13, 0)), ((13, 2), (12, 6)), ((12, 4), (12, 8)), (None, (13, 0))], ids=str
)
def test_a_driver_serves_its_own_cuda_and_older_ones(driver: tuple[int, int], torch: tuple[int, int]) -> None:
    assert check_driver((card(driver_cuda=driver),), build(cuda=torch)).status == "ok"


@pytest.mark.parametrize(
    ("changes", "index"),
    [
        ({"driver_cuda": (12, 8)}, "whl/cu126"),
        ({"driver_cuda": (12, 8), "compute_capability": (12, 0)}, "'torch==2.11.*' --index-url"),
        ({"driver_cuda": (12, 8), "compute_capability": (12, 0)}, "whl/cu128"),
        ({"driver_cuda": (11, 4)}, "sudo apt-get install -y nvidia-driver"),
    ],
)
@pytest.mark.usefixtures("only_apt")
def test_a_driver_older_than_torchs_cuda_is_named_with_the_build_that_it_serves(changes: dict, index: str) -> None:
    finding = check_driver((card(**changes),), build())
    assert finding.status == "fail" and "too old for torch's CUDA 13.0" in finding.detail and index in finding.fix


def test_a_cpu_build_beside_a_card_fails_with_the_build_that_the_card_runs() -> None:
    finding = check_driver((CARD,), TorchBuild("2.13.0+cpu", threads=8))
    assert finding.status == "fail" and "CPU build" in finding.detail and finding.fix.endswith("whl/cu130")


def test_a_missing_torch_beside_a_card_fails() -> None:
    assert check_driver((CARD,), TorchBuild(error="No module named 'torch'")).status == "fail"


def test_hidden_cards_are_told_from_a_broken_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    unseen = build(devices=0, architectures=(), error="CUDA unknown error")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert check_driver((CARD,), unseen).fix == "unset CUDA_VISIBLE_DEVICES"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    finding = check_driver((CARD,), unseen)
    assert (finding.status, "CUDA unknown error" in finding.detail, "modprobe" in finding.fix) == ("fail", True, True)


# What the card can do


@pytest.mark.parametrize(
    ("capability", "status", "text"),
    [
        ((9, 0), "ok", "sm_90: bf16 and fp8"),
        ((8, 9), "ok", "sm_89: bf16 and fp8"),
        ((8, 6), "ok", "sm_86 lacks fp8"),
        ((12, 1), "ok", "sm_121: bf16 and fp8"),
        ((7, 5), "ok", "sm_75 lacks bf16, so that models compute in fp32"),
        (None, "ok", "does not tell"),
    ],
)
def test_a_generation_is_said_to_lack_what_it_lacks(capability: Any, status: str, text: str) -> None:
    finding = check_capability(card(compute_capability=capability), build())
    assert (finding.status, text in finding.detail) == (status, True)
    assert finding.fix == ""


def test_a_card_that_torch_has_no_code_for_fails_with_the_build_that_has() -> None:
    finding = check_capability(card(compute_capability=(6, 1)), build())
    assert (finding.status, finding.fix.endswith("whl/cu126")) == ("fail", True)
    older = build(cuda=(12, 6), architectures=("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"))
    assert check_capability(card(compute_capability=(6, 1)), older).status == "ok"
    assert check_capability(card(compute_capability=(3, 5)), older).fix == "export LOCALLLM_DEVICE=cpu"


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (("sm_80",), (8, 6), True),
        (("sm_86",), (8, 0), False),
        (("sm_80",), (9, 0), False),
        (("compute_80",), (9, 0), True),
        (("compute_90",), (8, 0), False),
        (("sm_90a",), (9, 0), True),
        (("sm_120f",), (12, 1), False),
        (("strange",), (8, 0), False),
    ],
)
def test_machine_code_runs_on_its_own_generation_only(
    architectures: tuple[str, ...], capability: tuple[int, int], runs: bool
) -> None:
    finding = check_capability(card(compute_capability=capability), build(architectures=architectures))
    assert (finding.status != "fail") is runs


# Triton


def installed(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    def version(name: str) -> str:
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)


NO_HEADER = "probe.c:2:10: fatal error: Python.h: No such file or directory"


def never(_capability: int) -> str:
    raise AssertionError("compiled for no card")


@pytest.mark.parametrize("found", ["3.7.1", None])
def test_triton_is_not_tried_where_there_is_no_card(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(found, monkeypatch)
    finding = check_triton((), never)
    assert (finding.status, "not needed without a GPU" in finding.detail) == ("ok", True)


def test_triton_is_tried_once_for_each_kind_of_card(monkeypatch: pytest.MonkeyPatch) -> None:
    installed("3.7.1", monkeypatch)
    asked: list[int] = []
    cards = (CARD, card(index=1), card(index=2, compute_capability=(12, 0)))
    assert check_triton(cards, lambda capability: (asked.append(capability), "")[1]).status == "ok"
    assert asked == [89, 120]


@pytest.mark.parametrize(
    ("says", "status", "fix"),
    [
        ("RuntimeError: Failed to find C compiler.", "warn", "sudo apt-get install -y gcc"),
        (NO_HEADER, "warn", f"sudo apt-get install -y python3.{sys.version_info[1]}-dev"),
        ("subprocess.CalledProcessError: Command '['/usr/bin/gcc'", "warn", "sudo apt-get install -y gcc"),
        ("RuntimeError: PassManager::run failed", "fail", repairs.TRITON),
    ],
)
@pytest.mark.usefixtures("only_apt")
def test_what_keeps_triton_from_compiling_decides_what_is_to_be_installed(
    says: str, status: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("3.7.1", monkeypatch)
    finding = check_triton((CARD,), lambda _capability: says)
    assert (finding.status, says in finding.detail, finding.fix) == (status, True, fix)


def test_a_missing_triton_is_a_finding_beside_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(None, monkeypatch)
    assert check_triton((CARD,), never).fix == repairs.TRITON


@pytest.mark.parametrize("capability", one_in(3, [89, 75, 120]))
def test_a_kernel_compiles_in_a_process_of_its_own(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # of the session that asks: nothing would be compiled
    assert probe_triton(capability) == ""


def test_the_probe_says_what_the_compiler_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    refusing = tmp_path / "cc"
    refusing.write_text(f"#!/bin/sh\necho '{NO_HEADER}' >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("CC", str(refusing))
    assert probe_triton(89) == NO_HEADER


def test_a_compiler_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.cli.checks_torch._PROBE_SECONDS", -1.0)  # less than it has used
    monkeypatch.setattr("localllm.kernels.child._LOOK_S", 0.001)
    assert "no answer" in probe_triton(89)


# Whether there is a card


def file_of(root: Path, name: str, text: str = "") -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def on_the_bus(root: Path, vendor: str = "0x10de", kind: str = "0x030000") -> None:
    file_of(root, "sys/bus/pci/devices/0000:01:00.0/vendor", f"{vendor}\n")
    file_of(root, "sys/bus/pci/devices/0000:01:00.0/class", f"{kind}\n")


def loaded_driver(root: Path) -> None:
    file_of(root, "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX 580.65.06\nGCC version: 12\n")


def given(root: Path) -> None:
    file_of(root, "dev/nvidiactl")


def test_cards_are_listed(tmp_path: Path) -> None:
    detail = check_gpu((CARD, card(name=None, total_bytes=None, compute_capability=None)), 2, tmp_path).detail
    assert detail == "NVIDIA GeForce RTX 4090 (24.0 GiB, sm_89); a card (of an unknown generation)"


MISMATCH, NOT_FOUND = "RM has detected an NVML/RM version mismatch.", "NVML Shared Library Not Found"


@pytest.mark.parametrize(
    ("signs", "refusal", "devices", "told"),
    [
        *(
            ([partial(on_the_bus, **other)], NOT_FOUND, 0, "ok none; models run on the CPU")
            for other in ({"vendor": "0x1002"}, {"kind": "0x040300"}, {"kind": ""})
        ),
        ([on_the_bus], NOT_FOUND, 0, "warn .* sudo apt-get install -y nvidia-driver"),
        ([on_the_bus, loaded_driver], MISMATCH, 0, "warn .*version mismatch.* sudo reboot"),
        *(
            ([sign, partial(file_of, name=mark)], NOT_FOUND, 0, "warn .* docker run --gpus all IMAGE")
            for sign in (on_the_bus, loaded_driver)
            for mark in (".dockerenv", "run/.containerenv")
        ),
        ([partial(file_of, name=".dockerenv"), given, loaded_driver], MISMATCH, 0, ".*version mismatch"),
        ([], "Not Supported", 1, "ok "),
    ],
)
@pytest.mark.usefixtures("only_apt")
def test_no_card_no_driver_and_a_driver_that_refuses_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signs: list[Any], refusal: str, devices: int, told: str
) -> None:
    FakeNvml([], refuses=refusal).install(monkeypatch)
    for sign in signs:
        sign(tmp_path)
    finding = check_gpu((), devices, tmp_path)
    assert re.match(told, f"{finding.status} {finding.detail} {finding.fix}")


@pytest.mark.parametrize("devices", [1, 0])
def test_a_card_is_not_judged_without_nvidias_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: int
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    loaded_driver(tmp_path)
    assert "nvidia-ml-py" in check_gpu((), devices, tmp_path).fix


# Its memory


@pytest.mark.parametrize(
    ("others", "held", "display", "status"),
    [(GIB // 2, "512.0 MiB", True, "ok"), (6 * GIB, "6.0 GiB", False, "ok"), (7 * GIB, "7.0 GiB", True, "warn")],
)
def test_memory_that_others_hold_is_counted(others: int, held: str, display: bool, status: str) -> None:
    finding = check_vram(card(used_by_others_bytes=others, drives_display=display, free_bytes=16 * GIB))
    assert (finding.status, "and the display" in finding.detail) == (status, display)
    assert f"16.0 GiB free of 24.0 GiB, {held} held by other programs" in finding.detail


def test_a_card_without_memory_of_its_own_is_well() -> None:
    assert check_vram(card(total_bytes=None, free_bytes=None, used_by_others_bytes=None)).status == "ok"


# Its link


@pytest.mark.parametrize(
    ("now", "trial_gbs", "status", "text"),
    [
        ({}, 25.3, "ok", "PCIe 4 x16, at most 4 x16, 25.3 GB/s from pinned memory"),
        ({"pcie_width": 4}, 6.1, "warn", "PCIe 4 x4, at most 4 x16"),
        ({"pcie_width": 4}, None, "warn", "seat the card again"),
        ({"pcie_generation": 1}, 3.1, "warn", "slower than it can be"),
        ({"pcie_generation": 1}, None, "ok", "lets its link sleep"),
        ({"pcie_generation": None}, 25.3, "ok", "does not tell"),
    ],
)
def test_a_link_is_judged_while_it_is_awake(now: dict[str, Any], trial_gbs: Any, status: str, text: str) -> None:
    awake = card(**now)
    before = CARD if trial_gbs is not None else awake
    finding = check_link(before, LinkTrial(trial_gbs, awake if trial_gbs is not None else None))
    assert (finding.status, text in finding.detail) == (status, True)


class FakeTorch(SimpleNamespace):
    """As much of torch as copies to the second of two cards, of which this is the first that NVML names."""

    def __init__(self, nvml_card: FakeCard, *, full: bool = False) -> None:
        def empty(num_bytes: int, *, dtype: str, pin_memory: bool = False, device: Any = None) -> SimpleNamespace:
            assert pin_memory != (device is not None)
            if full and device is not None:
                raise RuntimeError("CUDA out of memory")
            return SimpleNamespace(device=device, copy_=lambda _source: copy(device))

        def copy(device: int) -> None:
            assert properties[device].uuid in nvml_card.uuid
            nvml_card.generation = (4, 4)

        properties = [SimpleNamespace(uuid="ffff"), SimpleNamespace(uuid="0a1b")]
        cuda = SimpleNamespace(
            device_count=lambda: 2,
            get_device_properties=lambda index: properties[index],
            synchronize=lambda _device: None,
        )
        super().__init__(uint8="uint8", empty=empty, cuda=cuda, device=lambda _kind, index: index)


@pytest.mark.parametrize("full", [False, True])
def test_a_copy_wakes_the_link_and_measures_it(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeping = FakeCard(generation=(1, 4))
    FakeNvml([sleeping]).install(monkeypatch)
    monkeypatch.setitem(sys.modules, "torch", FakeTorch(sleeping, full=full))
    (before,) = gpus()
    trial = try_link(before)
    assert (before.pcie_generation, trial.error) == (1, "")
    if full:
        assert trial == LinkTrial()
    else:
        assert trial.gbs and trial.gbs > 0 and trial.after and trial.after.pcie_generation == 4


def test_without_torch_no_link_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert try_link(CARD).gbs is None


# Pinned memory


def wsl(root: Path) -> Path:
    file_of(root, "proc/sys/kernel/osrelease", "5.15.167.4-microsoft-standard-WSL2\n")
    return root


def test_the_limit_of_locked_memory_is_named_and_is_no_fault(tmp_path: Path) -> None:
    finding = check_pinned(LinkTrial(), 8 << 20, tmp_path)
    assert (finding.status, finding.detail) == ("ok", "mlock may take 8.0 MiB, which CUDA does not count")
    assert check_pinned(LinkTrial(), root=tmp_path).status == "ok"
    assert "under WSL Windows limits it" in check_pinned(LinkTrial(), 8 << 20, wsl(tmp_path)).detail


def test_memory_that_cannot_be_pinned_is_a_finding(tmp_path: Path) -> None:
    refused = LinkTrial(error="CUDA error: out of memory")
    assert check_pinned(refused, root=tmp_path).status == "warn"
    assert check_pinned(refused, root=wsl(tmp_path)).fix == "wsl.exe --shutdown"


# Commands for other systems


@pytest.mark.parametrize(
    ("tool", "driver", "compiler"),
    [
        ("dnf", "sudo dnf install -y akmod-nvidia", "sudo dnf install -y gcc"),
        ("pacman", "sudo pacman -S nvidia-open", "sudo pacman -S gcc"),
        ("ubuntu-drivers", "sudo ubuntu-drivers install", "export CC=/the/path/of/a/C/compiler"),
        ("", "xdg-open https://www.nvidia.com/drivers", "export CC=/the/path/of/a/C/compiler"),
    ],
)
def test_packages_are_installed_with_what_the_system_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, driver: str, compiler: str
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, *_: f"/usr/bin/{name}" if name == tool else None)
    assert (repairs.install_driver(tmp_path), repairs.install_compiler()) == (driver, compiler)


def test_the_driver_of_wsl_is_windows_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, *_: f"/usr/bin/{name}")
    assert repairs.install_driver(wsl(tmp_path)).startswith("xdg-open")
