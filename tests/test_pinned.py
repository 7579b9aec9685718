"""Memory of the host that a GPU copies from on its own: as much as the system gives, which is not the card's."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm import repairs
from localllm.kernels.page_locked import page_locked
from localllm.offload.measurements.roofline import DeviceFloors
from localllm.offload.streaming import pinned
from localllm.offload.streaming.pinned import Pinning, is_read_at_its_address

CUDA = torch.device("cuda", 0)
MIB = 1 << 20


class Driver:
    """The driver, which registers `limit` bytes at most."""

    def __init__(self, limit: int) -> None:
        self.limit, self.registered, self.refused = limit, dict[int, int](), 0

    @property
    def num_bytes(self) -> int:
        return sum(self.registered.values())

    def cudaHostRegister(self, address: int, num_bytes: int, _flags: int) -> int:
        if self.num_bytes + num_bytes > self.limit:
            self.refused += 1
            return 2
        self.registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver(1 << 40)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    return driver


def memory(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def test_kernels_read_memory_where_the_driver_says_so_and_it_is_registered(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.limit = 100 * MIB
    pinning, said, asked = Pinning(CUDA), [0, 1], list[int]()

    def attribute(found: Any, which: int, card: int) -> int:
        asked.append(which)
        found._obj.value = said.pop(0)
        return card

    monkeypatch.setattr(ctypes, "CDLL", lambda _name: SimpleNamespace(cuDeviceGetAttribute=attribute))
    blocks = [memory(60 * MIB) for _ in range(3)]
    for block in blocks[:2]:
        pinning.add(block)
    try:
        for expected in ([False] * 3, [True, False, False]):
            is_read_at_its_address.cache_clear()
            assert [pinning.is_readable(block) for block in blocks] == expected
        assert asked == [91, 91]
    finally:
        is_read_at_its_address.cache_clear()
        pinning.close()


def test_after_the_first_refusal_nothing_more_is_asked_for_and_some_is_left_for_others(driver: Driver) -> None:
    """Tables of forwards, which torch locks itself, come later."""
    driver.limit = 100 * MIB
    blocks = [memory(23 * MIB) for _ in range(8)]
    pinning = Pinning(CUDA)
    for block in blocks:
        pinning.add(block)
    num_registered = pinning.wait()
    assert 2 <= num_registered < 8 and driver.refused == 1
    assert driver.num_bytes <= driver.limit - 8 * MIB
    late = memory(MIB)
    pinning.add(late)
    assert pinning.wait() == num_registered and driver.refused == 1
    for block in (*blocks, late):
        pinning.remove(block)
    pinning.close()
    assert not driver.registered


@pytest.mark.usefixtures("driver")
def test_all_of_it_is_given_back(driver: Driver) -> None:
    blocks = [memory(MIB) for _ in range(3)]
    pinning = Pinning(CUDA)
    for block in blocks:
        pinning.add(block)
    assert pinning.wait() == 3
    pinning.remove(blocks[1])
    pinning.close()
    assert not driver.registered


@pytest.fixture
def wsl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "is_wsl", lambda: True)


@pytest.mark.usefixtures("wsl")
def test_under_windows_little_is_registered_and_what_is_set_aside_comes_first(driver: Driver) -> None:
    blocks, ring = [memory(100 * MIB) for _ in range(7)], memory(150 * MIB)
    pinning = Pinning(CUDA)
    for block in blocks:
        pinning.add(block)
    assert pinning.wait() == 5 and driver.num_bytes <= 520 * MIB
    pinning.set_aside(ring.nbytes)  # blocks stay where they are, and a ring comes that was not there before
    assert pinning.wait() == 3
    pinning.add(blocks[6])
    assert pinning.wait() == 3
    pinning.add(ring, is_set_aside=True)
    assert pinning.wait() == 4 and driver.registered[ring.data_ptr()] == ring.nbytes
    assert driver.num_bytes <= 520 * MIB
    pinning.close()


def refused(*shape: Any, pin_memory: bool = False, **named: Any) -> Tensor:
    if pin_memory:
        raise RuntimeError("CUDA error: out of memory")
    return right_zeros(*shape, **{**named, "device": "cpu"})


right_zeros = torch.zeros


def test_where_a_system_locks_no_pages_ordinary_memory_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "zeros", refused)
    found = page_locked((3, 5), torch.int64, CUDA)
    assert found.shape == (3, 5) and found.dtype is torch.int64 and not found.any()


def test_a_card_is_measured_where_no_pages_are_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the link as it will be used: from ordinary memory."""
    ones = torch.ones
    monkeypatch.setattr(torch, "zeros", refused)
    monkeypatch.setattr(torch, "ones", lambda *shape, device=None, **named: ones(*shape, **named))
    assert DeviceFloors(CUDA, 64).device == CUDA


@pytest.mark.parametrize(("release", "expected"), [("5.15.167.4-microsoft-standard-WSL2\n", True), ("6.8.0\n", False)])
def test_linux_under_windows_is_known_by_its_kernel(release: str, expected: bool, tmp_path: Path) -> None:
    file = tmp_path / "proc/sys/kernel/osrelease"
    file.parent.mkdir(parents=True)
    file.write_text(release, encoding="utf-8")
    assert repairs.is_wsl(tmp_path) is expected
    assert not repairs.is_wsl(tmp_path / "nowhere")
