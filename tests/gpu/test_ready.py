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
from torch import Tensor
from triton.runtime.errors import OutOfResources

from localllm.cli import checks_gpu
from localllm.cli.checks_gpu import check_kernels
from localllm.engine.loader import Watcher, note_device
from localllm.kernels.gpu import check, gemm, ready
from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.product_end import Gate
from localllm.kernels.tile16 import PackedMatrix

CARD, CPU = torch.device("cuda", 0), torch.device("cpu")


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
    monkeypatch.setattr(checks_gpu, "no_gpu", lambda: None)
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path))
    ready.why_not.cache_clear()
    yield told
    ready.why_not.cache_clear()


def anew() -> str:
    """As another process would ask."""
    ready.why_not.cache_clear()
    return ready.why_not(CARD)


def test_a_check_is_made_once(card):
    assert not ready.is_known(CARD)
    assert anew() == "" and anew() == "" and card.asked == 1
    assert ready.is_known(CARD)


def test_a_wrong_kernel_is_remembered_and_a_want_of_memory_is_not(card):
    card.says = "torch.OutOfMemoryError: CUDA out of memory"
    assert "out of memory" in anew() and "out of memory" in anew() and card.asked == 2
    card.says = "WRONG: gemv of int8, error 1.0e+00, at most 2e-06"
    assert anew().startswith("WRONG: gemv") and anew().startswith("WRONG: gemv") and card.asked == 3


def test_a_check_that_does_not_end_is_tried_again_an_hour_later(card, monkeypatch):
    """Each try may take five minutes."""
    card.says = "their check gave no answer within 300 seconds"
    assert anew() == anew() == card.says and card.asked == 1
    card.says, now = "", time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3700)
    assert anew() == "" and anew() == "" and card.asked == 2


def test_what_failed_in_a_process_is_not_tried_again_in_it(card, monkeypatch):
    """Nor kept for others: it may have been of this one."""
    monkeypatch.setattr(ready, "_failures", {})
    assert anew() == ""
    ready.give_up(CARD, "RuntimeError: out of resource")
    assert ready.why_not(CARD) == "RuntimeError: out of resource"
    monkeypatch.setattr(ready, "_failures", {})
    assert anew() == "" and card.asked == 1


def test_a_fault_of_the_card_is_kept_until_something_is_another_version(card, monkeypatch):
    """Whatever a check says: it was a model in which they ended."""
    assert anew() == ""
    ready.keep_fault(CARD, "with a model they ended in a fault of the GPU")
    assert anew() == "with a model they ended in a fault of the GPU" and ready.check(CARD) == ""
    assert anew() == "with a model they ended in a fault of the GPU" and ready.is_known(CARD)
    finding = check_kernels()
    assert finding.status == "warn" and "with a model" in finding.detail
    assert finding.fix == f"rm {ready.kept_file()}"
    ready.kept_file().unlink()
    assert anew() == ""
    ready.keep_fault(CARD, "with a model they ended in a fault of the GPU")
    monkeypatch.setattr(ready, "_triton", lambda: "another")
    assert anew() == ""


def test_other_kernels_are_checked_anew(card, monkeypatch):
    anew()
    monkeypatch.setattr(ready, "_source", lambda: "another")
    assert anew() == "" and card.asked == 2


@pytest.mark.parametrize("damaged", ["", "[]", "{", '{"x": 3}'])
def test_a_damaged_file_is_as_none(card, tmp_path, damaged):
    (tmp_path / "gpu_kernels.json").write_text(damaged, encoding="utf-8")
    assert anew() == "" and anew() == "" and card.asked == 1
    kept = list(json.loads((tmp_path / "gpu_kernels.json").read_text(encoding="utf-8")).values())
    assert kept[-1]["found"] == ""


def test_cards_that_are_too_old_and_machines_without_triton_are_told(card, monkeypatch):
    card.capability = (7, 0)
    assert "of compute capability 7.0, they need" in anew()
    card.capability = (8, 6)
    monkeypatch.setattr(ready, "_triton", lambda: "")
    assert anew() == "triton is not installed" and card.asked == 0
    monkeypatch.setattr(ready, "_triton", lambda: "3.6.0")
    monkeypatch.setattr(ready.sysconfig, "get_paths", lambda _scheme: {"include": "nowhere"})
    assert "python3-dev" in anew() and card.asked == 0
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    assert anew() == "triton finds no C compiler: install gcc" and card.asked == 0
    assert "NVIDIA" in ready.missing(torch.device("cpu"))


def test_one_line_says_that_operators_compute(card):
    said: list[str] = []
    watcher = Watcher(measuring=lambda text: said.append(f"measuring: {text}"), noting=said.append)
    note_device(CARD, watcher)
    assert said == ["measuring: checking the kernels on this graphics card, once"]
    note_device(CARD, watcher)
    note_device(torch.device("cpu"), watcher)
    assert len(said) == 1
    card.capability = (6, 1)
    ready.why_not.cache_clear()
    note_device(CARD, watcher)
    assert len(said) == 2 and said[1].startswith("torch's operators compute") and "6.1" in said[1]


def test_the_doctor_checks_anew(card):
    assert check_kernels().status == check_kernels().status == "ok" and card.asked == 2
    card.says = "WRONG: something"
    assert check_kernels().status == "warn" and "WRONG: something" in check_kernels().detail
    card.capability = (6, 1)
    assert check_kernels().status == "ok" and "not used" in check_kernels().detail


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [check.SMALL, replace(check.SMALL, attention=check.ATTENTION, groups=(32, 64, 128))], ids=["one", "all"]
)
def test_every_kernel_is_right_in_the_interpreter(sizes):
    """The check itself; and it finds what is wrong."""
    torch.manual_seed(0)
    found = list(check.cases(torch.device("cpu"), sizes))
    assert len(found) > 40 and [case.line() for case in found if not case.is_right] == []


@pytest.mark.parametrize("broken", ["gemv", "rows", "drawn"])
def test_the_check_finds_a_kernel_that_does_nothing(broken, monkeypatch):
    nothing = SimpleNamespace(run=lambda: None)
    some: Any
    if broken == "gemv":
        monkeypatch.setattr(check.gemv, "gemv", lambda *_, **__: nothing)
        some = check._products(CPU, 64, check.SMALL)
    elif broken == "rows":
        monkeypatch.setattr(check.activations, "to_floats", lambda *_, **__: nothing)
        some = check._between(CPU, check.SMALL)
    else:
        monkeypatch.setattr(check.sample, "sample", lambda *_: [])
        some = check._drawn(CPU)
    assert any(not case.is_right for case in some)


TINY = replace(check.SMALL, row_counts=(1,), attention=())


def test_the_check_finds_products_that_are_a_little_wrong(monkeypatch):
    """By a hundredth of a percent, as floats and as codes."""
    right = gemm.gemm

    def wrong(x: Codes, matrix: PackedMatrix, y: Tensor | Gate, *rest: Any, **options: Any) -> list[Any]:
        result = y.codes.scale if isinstance(y, Gate) else y
        return [*right(x, matrix, y, *rest, **options), SimpleNamespace(run=lambda: result.mul_(1.0001))]

    monkeypatch.setattr(gemm, "gemm", wrong)
    cases = list(check._products(CPU, 64, TINY))
    assert {case.name for case in cases if not case.is_right} >= {
        "gemm in 1 of int4-g64, 1 rows", "gemm in 4 of int4-g64, 1 rows", "a gate of int4-g64, 7 rows, 0 programs: bits"
    }  # fmt: skip


@pytest.mark.parametrize("wrong", [{"scale": 0.13}, {"window": 10}])
def test_the_check_finds_attention_that_is_a_little_wrong(wrong, monkeypatch):
    """A scale of 0.13 instead of 0.125, and a window where there is none."""
    attend = check.attend
    monkeypatch.setattr(check, "attend", lambda *rest, **options: attend(*rest, **{**options, **wrong}))
    case = next(check._attention(CPU, check.Heads("int8", "int4", 64, 2, 1)))
    assert not case.is_right


def test_a_kernel_that_a_card_does_not_take_is_left_and_the_others_are_checked(card, monkeypatch):
    """Its models find that out when they are loaded."""

    def refuses(*_: Any, **__: Any) -> None:
        raise OutOfResources(200_000, 101_376, "shared memory")

    monkeypatch.setattr(check, "attend", refuses)
    found = list(check.cases(CPU, replace(check.SMALL, groups=())))
    left = [case for case in found if case.error is None]
    assert len(left) == 1 and all(case.is_right for case in found) and len(found) > 10
    assert left[0].line().startswith("left: attention of int8/int4 pages") and "shared memory" in left[0].line()
