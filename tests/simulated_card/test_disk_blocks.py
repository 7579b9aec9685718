"""What passes from the disk to a card: copied as soon as it is read and has a place, and nobody waits for the copy."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.kernels.page_locked import page_locked
from localllm.offload.streaming.device_stream import DeviceStream, HostRun, Lane
from localllm.offload.streaming.disk_stream import DiskStream, StreamedFile
from localllm.offload.streaming.host_buffer import host_buffer
from localllm.offload.streaming.pinned import Pinning
from localllm.offload.streaming.ring import Ring
from tests.server.support import wait_for
from tests.simulated_card.device import DEVICE, CardConfig
from tests.simulated_card.streams import SCHEDULES

PAGE = 4096
NAMES = ("ram 0", "disk 1", "ram 2", "disk 3", "host 4", "disk 5")  # the host computes one that comes from the disk


class Watched(Lane):
    """Remembers the order of copies."""

    def __init__(self) -> None:
        super().__init__(DEVICE)
        self.begun: list[int] = []

    def copy(self, content: Tensor, into: Tensor, after: Any | None) -> Any:
        self.begun.append(int(content[0]))
        return super().copy(content, into, after)


class Blocks:
    """Each full of its own number."""

    def __init__(self, folder: Path) -> None:
        from_disk = [name for name in NAMES if not name.startswith("ram")]
        files = []
        for name in from_disk:
            path = folder / name
            path.write_bytes(bytes([int(name[-1])]) * PAGE)
            files.append(StreamedFile(name, path, PAGE, lambda _content: None, "make it anew"))
        ring = Ring.of([PAGE] * len(files))
        self.memory = host_buffer(ring.num_bytes)
        self.pinning = Pinning(DEVICE)
        self.pinning.add(self.memory)
        assert self.pinning.wait() == 1
        self.on_host = {name: self.memory[at : at + PAGE] for name, at in zip(from_disk, ring.offsets, strict=True)}
        self.disk = DiskStream(files, ring, self.memory, maps=False)
        runs = [
            HostRun(name, self.on_host[name], from_disk=True)
            if name.startswith("disk")
            else HostRun(name, page_locked((PAGE,), torch.uint8, DEVICE).fill_(int(name[-1])))
            for name in NAMES
            if not name.startswith("host")
        ]
        on_device = Ring.of([PAGE] * len(runs))
        memory = torch.zeros(on_device.num_bytes, dtype=torch.uint8, device=DEVICE)
        self.places = {run.name: memory[at : at + PAGE] for run, at in zip(runs, on_device.offsets, strict=True)}
        self.lane = Watched()
        self.stream = DeviceStream(runs, on_device, memory, self.lane, self.disk)

    def computed(self, name: str) -> Tensor:
        """What a forward reads of a block, inside `held`."""
        where = self.on_host if name.startswith("host") else self.places
        return where[name].sum(dtype=torch.int64)


@contextmanager
def opened(folder: Path) -> Iterator[Blocks]:
    blocks = Blocks(folder)
    try:
        yield blocks
    finally:
        blocks.lane.drain()
        blocks.disk.close()
        blocks.pinning.close()


def test_a_block_that_is_read_is_copied_ahead_of_its_turn_and_the_host_waits_for_no_copy(tmp_path, simulated_card):
    with simulated_card(CardConfig("lazy")) as card, opened(tmp_path) as blocks:
        wait_for(lambda: blocks.disk.is_read("disk 1"))
        blocks.stream.begin()
        assert blocks.lane.begun == [0, 1]
        for name in NAMES[:2]:
            with blocks.stream.held(name):
                blocks.computed(name)
        assert blocks.lane.begun[:3] == [0, 1, 2]
        assert card.timeline.compute.last is not None and not card.timeline.compute.last.is_done


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
def test_every_block_is_whole_when_it_is_computed_in_forward_after_forward(seed, schedule, tmp_path, simulated_card):
    """Some of them are given up in their midst; what was copied for those is in nobody's way."""
    choose = random.Random(seed)
    with simulated_card(CardConfig(schedule, seed)), opened(tmp_path) as blocks:
        found = []
        for _ in range(12):
            end = choose.randrange(len(NAMES)) if choose.random() < 0.3 else len(NAMES)
            blocks.stream.begin()
            for name in NAMES[:end]:
                with blocks.stream.held(name):
                    found.append((int(name[-1]), blocks.computed(name)))
        assert [int(total) for _, total in found] == [number * PAGE for number, _ in found]
