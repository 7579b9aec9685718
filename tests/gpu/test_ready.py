"""Whether a card computes by our kernels: what is asked of it, what its check says, and what is kept of that."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from localllm.cli.checks_gpu import check_kernels
from localllm.engine import loading
from localllm.engine.loading import Watcher, note_device
from localllm.kernels.gpu import check, ready

CARD = torch.device("cuda", 0)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """capability: of a card that is not here; says: its check, each time that it runs."""
    told = SimpleNamespace(capability=(8, 6), says="", asked=0)

    def checked(_device: torch.device) -> str:
        told.asked += 1
        return str(told.says)

    properties = SimpleNamespace(name="a card", major=8, minor=6)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: told.capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(ready, "_checked", checked)
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path))
    ready.why_not.cache_clear()
    yield told
    ready.why_not.cache_clear()


def anew() -> str:
    """As another process would ask."""
    ready.why_not.cache_clear()
    return ready.why_not(CARD)


def test_a_check_is_made_once(card: SimpleNamespace) -> None:
    assert not ready.is_known(CARD)
    assert anew() == "" and anew() == "" and card.asked == 1
    assert ready.is_known(CARD)


def test_a_wrong_kernel_is_remembered_and_a_want_of_memory_is_not(card: SimpleNamespace) -> None:
    card.says = "torch.OutOfMemoryError: CUDA out of memory"
    assert "out of memory" in anew() and "out of memory" in anew() and card.asked == 2
    card.says = "WRONG: gemv of int8, error 1.0e+00, at most 2e-06"
    assert anew().startswith("WRONG: gemv") and anew().startswith("WRONG: gemv") and card.asked == 3


def test_a_check_that_does_not_end_is_tried_again_an_hour_later(
    card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try may take five minutes."""
    card.says = "their check gave no answer within 300 seconds"
    assert anew() == anew() == card.says and card.asked == 1
    card.says, now = "", time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3700)
    assert anew() == "" and anew() == "" and card.asked == 2


def test_other_kernels_are_checked_anew(card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    anew()
    monkeypatch.setattr(ready, "_source", lambda: "another")
    assert anew() == "" and card.asked == 2


@pytest.mark.parametrize("damaged", ["", "[]", "{", '{"x": 3}'])
def test_a_damaged_file_is_as_none(card: SimpleNamespace, tmp_path: Path, damaged: str) -> None:
    (tmp_path / "gpu_kernels.json").write_text(damaged, encoding="utf-8")
    assert anew() == "" and anew() == "" and card.asked == 1
    kept = list(json.loads((tmp_path / "gpu_kernels.json").read_text(encoding="utf-8")).values())
    assert kept[-1]["found"] == ""


def test_cards_that_are_too_old_and_machines_without_triton_are_told(
    card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    card.capability = (7, 0)
    assert "of compute capability 7.0, they need" in anew()
    card.capability = (8, 6)
    monkeypatch.setattr(ready, "_triton", lambda: "")
    assert anew() == "triton is not installed" and card.asked == 0
    monkeypatch.setattr(ready, "_triton", lambda: "3.6.0")
    monkeypatch.setattr(ready.sysconfig, "get_paths", lambda: {"include": "nowhere"})
    assert "python3-dev" in anew() and card.asked == 0
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    assert anew() == "triton finds no C compiler: install gcc" and card.asked == 0
    assert "NVIDIA" in ready.missing(torch.device("cpu"))


def test_one_line_says_that_operators_compute(card: SimpleNamespace) -> None:
    said: list[str] = []
    watcher = Watcher(measuring=lambda text: said.append(f"measuring: {text}"), noting=said.append)
    note_device(CARD, watcher, is_chosen=True)
    assert said == ["measuring: checking the kernels on this graphics card, once"]
    note_device(CARD, watcher, is_chosen=True)
    note_device(torch.device("cpu"), watcher, is_chosen=True)
    assert len(said) == 1
    card.capability = (6, 1)
    ready.why_not.cache_clear()
    note_device(CARD, watcher, is_chosen=True)
    assert len(said) == 2 and said[1].startswith("torch's operators compute") and "6.1" in said[1]


def test_a_card_that_torch_cannot_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not to who asks for the CPU, or hides the card."""
    said: list[str] = []
    watcher, cpu = Watcher(noting=said.append), torch.device("cpu")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(loading, "gpus", lambda: ())
    note_device(cpu, watcher, is_chosen=True)
    monkeypatch.setattr(loading, "gpus", lambda: (SimpleNamespace(name="an old card"),))
    note_device(cpu, watcher, is_chosen=False)
    assert said == []
    note_device(cpu, watcher, is_chosen=True)
    assert len(said) == 1 and "the CPU computes, though an old card is here: torch" in said[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    note_device(cpu, watcher, is_chosen=True)
    assert len(said) == 1


def test_the_doctor_checks_anew(card: SimpleNamespace) -> None:
    assert check_kernels().status == check_kernels().status == "ok" and card.asked == 2
    card.says = "WRONG: something"
    assert check_kernels().status == "warn" and "WRONG: something" in check_kernels().detail
    card.capability = (6, 1)
    assert check_kernels().status == "ok" and "not used" in check_kernels().detail


@pytest.mark.parametrize(
    "sizes",
    [
        check.SMALL,
        pytest.param(replace(check.SMALL, attention=check.ATTENTION, groups=(32, 64, 128)), marks=pytest.mark.slow),
    ],
    ids=["one", "all"],
)
def test_every_kernel_is_right_in_the_interpreter(sizes: check.Sizes) -> None:
    """The check itself; and it finds what is wrong."""
    torch.manual_seed(0)
    found = list(check.cases(torch.device("cpu"), sizes))
    assert len(found) > 40 and [case.line() for case in found if not case.is_right] == []


@pytest.mark.parametrize("broken", ["gemv", "rows", "drawn"])
def test_the_check_finds_a_kernel_that_is_wrong(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, nothing = torch.device("cpu"), SimpleNamespace(run=lambda: None)
    some: Any
    if broken == "gemv":
        monkeypatch.setattr(check.gemv, "gemv", lambda *_: nothing)
        some = check._products(cpu, 64, check.SMALL)
    elif broken == "rows":
        monkeypatch.setattr(check.activations, "to_floats", lambda *_, **__: nothing)
        some = check._between(cpu, check.SMALL)
    else:
        monkeypatch.setattr(check.sample, "sample", lambda *_: [])
        some = [check._drawn(cpu)]
    assert any(not case.is_right for case in some)
