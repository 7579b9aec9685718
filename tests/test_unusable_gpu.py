"""A GPU that torch sees and cannot use: the CPU computes, one line says why, and who asked for the GPU is told what
helps."""

from __future__ import annotations

import sys
import tomllib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from localllm.cli.checks_gpu import check_gpu, check_kernels
from localllm.cli.checks_torch import check_torch, torch_build
from localllm.engine import device
from localllm.engine.kernel_check import note_device
from localllm.engine.runner import operators_compute
from localllm.errors import UsageError
from tests.cli_support import REPOSITORY, run_cli, write_checkpoint

HAS_CODE = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
NO_KERNEL = "CUDA error: no kernel image is available for execution on the device"


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A card that is not here, and what torch says of it. error: of the first operator."""
    told = SimpleNamespace(capability=(6, 1), architectures=HAS_CODE, error="", tried=0)

    def ones(*sizes: Any, **options: Any) -> torch.Tensor:
        if str(options.get("device", "cpu")).startswith("cuda"):
            told.tried += 1
            if told.error:
                raise RuntimeError(f"{told.error}\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1")
            options["device"] = "cpu"
        return real_ones(*sizes, **options)

    real_ones = torch.ones
    properties = SimpleNamespace(uuid="GPU-0a1b", name="GeForce GTX 1080", total_memory=8 << 30)
    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(device, "torch_build", lambda: ("2.13.0+cu130", "13.0"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(told.architectures))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: told.capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: properties.name)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return told


@pytest.mark.parametrize(
    "command",
    [
        ("run", "MODEL", "-p", "Once", "--max-tokens", "2"),
        ("plan", "MODEL"),
        ("bench", "MODEL", "--prompt-tokens", "8", "--gen-tokens", "2", "--rounds", "1"),
        ("bench", "MODEL", "--random-weights", "--prompt-tokens", "8", "--gen-tokens", "2", "--rounds", "1"),
    ],
    ids=lambda words: " ".join(words[:1] + words[2:3]),
)
def test_the_cpu_computes_and_one_line_says_why(command, card, tmp_path, own_folders):
    model = str(write_checkpoint(tmp_path / "model"))
    result = run_cli(*[model if word == "MODEL" else word for word in command])
    assert result.code == 0, result.err
    (line,) = [line for line in result.err.splitlines() if "GTX 1080" in line]
    assert "the CPU computes, though GeForce GTX 1080 is here" in line and "sm_61" in line and "localllm doctor" in line
    assert "sm_75, sm_80" in line and card.tried == 0


def test_who_asks_for_it_is_told_which_torch_has_code_for_it(card):
    with pytest.raises(UsageError) as caught:
        device.device_name("cuda")
    first, second = map(str, caught.value.fixes)
    assert "sm_61" in caught.value.why and first.startswith("pip install") and first.endswith("whl/cu126")
    assert second == "--device cpu"


def test_code_for_the_card_that_fails_all_the_same_is_found_out_by_an_operator(card):
    """As where another process has the card for itself, or the driver is in trouble."""
    card.capability = (8, 6)
    assert device.device_name("auto") == device.device_name("cuda") == "cuda:0" and card.tried
    card.error = "CUDA error: all CUDA-capable devices are busy or unavailable"
    assert device.device_name("auto") == "cpu" and "busy or unavailable" in device.idle_gpu("auto")
    with pytest.raises(UsageError) as caught:
        device.device_name("cuda")
    assert caught.value.why == f"cuda:0 refuses: {card.error}"


def test_a_full_card_is_one_that_can_be_used(card):
    """The plan says what has no room; a server ends an idle model for it."""
    card.capability, card.error = (8, 6), "CUDA out of memory. Tried to allocate 2.00 MiB"
    assert device.device_name("auto") == "cuda:0" and device.idle_gpu("auto") == ""


def test_doctor_says_the_same_and_checks_no_kernel(card):
    card.capability, card.error = (8, 6), "CUDA error: all CUDA-capable devices are busy or unavailable"
    finding = check_kernels()
    assert (finding.status, finding.fix, "busy or unavailable" in finding.detail) == ("fail", "nvidia-smi", True)


def test_what_may_be_asked_without_using_the_card_makes_no_context_on_it(card):
    """A plan for the CPU names an idle card: it takes none of its memory for that."""
    assert not device.has_cuda()
    card.capability = (8, 6)
    assert device.has_cuda() and card.tried == 0
    assert device.device_name("cpu") == "cpu" and device.idle_gpu("cpu") == "" and card.tried == 0


@pytest.mark.parametrize(("hidden", "is_said"), [("0", True), ("", False)])
def test_a_card_that_is_hidden_is_not_told_of(hidden, is_said, card, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    if not hidden:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(device, "gpus", lambda: (SimpleNamespace(name="a card"),))
    assert bool(device.idle_gpu("auto")) is is_said


def test_a_driver_that_serves_no_torch_is_told(card, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "gpus", lambda: ())
    assert device.idle_gpu("auto") == ""
    old = SimpleNamespace(name="an old card", compute_capability=(8, 6), driver_cuda=(12, 4))
    monkeypatch.setattr(device, "gpus", lambda: (old,))
    assert device.idle_gpu("auto").startswith("the CPU computes, though an old card is here: torch")
    with pytest.raises(UsageError) as caught:
        device.device_name("cuda")
    assert str(caught.value.fixes[0]).endswith("whl/cu126")


# GPUs of other makers


@pytest.fixture
def amd(card, monkeypatch):
    """An AMD card and the torch for it, which calls it CUDA as well."""
    card.capability, card.architectures = (11, 0), ("gfx1030", "gfx1100")
    monkeypatch.setattr(device, "torch_build", lambda: ("2.13.0+rocm6.4", "ROCm 6.4"))
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    return card


def test_an_amd_card_computes_by_torchs_operators_and_they_say_why(amd):
    """Not that Triton is missing, which has another name there, nor that it is of a generation without code."""
    assert device.device_name("auto") == "cuda:0" and device.idle_gpu("auto") == ""
    said: list[str] = []
    note_device(torch.device("cuda", 0), [], pytest.fail, said.append)
    assert said == [operators_compute("they are made for NVIDIA's GPUs, and this one is AMD's (ROCm 6.4.43482)")]
    assert "ROCm" in check_kernels().detail


def test_doctor_knows_a_build_for_amd(amd, monkeypatch):
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    build = torch_build()
    assert "ROCm 6.4" in check_torch(build).detail and "CPU build" not in check_torch(build).detail
    finding = check_gpu((), build.devices, rocm=build.rocm)
    assert finding.status == "ok" and "1 of AMD's, ROCm 6.4" in finding.detail and "NVML" not in finding.detail


def test_a_build_for_amd_needs_amds_driver(amd, monkeypatch):
    """NVIDIA's, of a card beside it, is none for it."""
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: name)
    for is_there in (True, False):
        monkeypatch.setattr(device, "is_there", lambda path, found=is_there: found and str(path) == "/dev/kfd")
        assert device._has_driver("ROCm 6.4") is is_there


def test_a_build_for_amd_without_a_card_of_amds_leaves_torch_alone(amd, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "gpus", lambda: ())
    assert device.idle_gpu("auto") == "" and device.device_name("auto") == "cpu"


@pytest.mark.parametrize(
    ("machine", "built_for", "named"),
    [(("darwin", "arm64"), "", "Apple's"), (("linux", "x86_64"), "xpu", "Intel's"), (("linux", "x86_64"), "", "")],
)
def test_the_cpu_computes_beside_apples_and_intels_gpus_and_says_so(machine, built_for, named, card, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "torch_build", lambda: (f"2.13.0+{built_for or 'cpu'}", None))
    monkeypatch.setattr(device, "gpus", lambda: ())
    monkeypatch.setattr(sys, "platform", machine[0])
    monkeypatch.setattr("platform.machine", lambda: machine[1])
    assert (named in device.idle_gpu("auto")) if named else device.idle_gpu("auto") == ""
    assert device.device_name("auto") == "cpu" and device.idle_gpu("cpu") == ""


def test_triton_comes_with_torch_alone():
    """Its builds with CUDA bring the one that they were tested with; those for a CPU have no use for its 690 MB."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {
        group: [Requirement(each).name for each in listed]
        for group, listed in {"": project["dependencies"], **project["optional-dependencies"]}.items()
    }
    assert [group for group, names in named.items() if "triton" in names] == ["dev"]
