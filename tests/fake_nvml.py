"""The module `pynvml` of a machine with such cards as a test wants."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

GIB = 1 << 30


class NVMLError(Exception):
    pass


@dataclass
class FakeCard:
    """An RTX 4090 by default. silent: functions that this card does not support, without their `nvmlDeviceGet`."""

    name: str = "NVIDIA GeForce RTX 4090"
    uuid: str = "GPU-0a1b"
    total: int = 24 * GIB
    reserved: int = GIB // 2
    used: int = GIB
    own: int = 0
    capability: tuple[int, int] = (8, 9)
    generation: tuple[int, int] = (4, 4)  # now, at most
    width: tuple[int, int] = (16, 16)
    display: bool = False
    silent: frozenset[str] = frozenset()
    lost: bool = False


@dataclass
class FakeNvml:
    cards: list[FakeCard] = field(default_factory=lambda: [FakeCard()])
    driver: str = "580.65.06"
    cuda: int = 13000
    refuses: str = ""
    knows_reserved: bool = True
    open_sessions: int = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
        monkeypatch.setitem(sys.modules, "pynvml", self._module())
        return self

    def _module(self) -> ModuleType:
        module: Any = ModuleType("pynvml")
        module.__spec__ = ModuleSpec("pynvml", None)
        module.NVMLError, module.nvmlMemory_v2 = NVMLError, 0x2000028
        module.nvmlInit, module.nvmlShutdown = self._open, self._close
        module.nvmlSystemGetDriverVersion = lambda: self.driver
        module.nvmlSystemGetCudaDriverVersion_v2 = lambda: self.cuda
        module.nvmlDeviceGetCount = lambda: len(self.cards)
        module.nvmlDeviceGetHandleByIndex = self._handle
        answers = {
            "Name": lambda card: card.name,
            "UUID": lambda card: card.uuid,
            "CudaComputeCapability": lambda card: card.capability,
            "CurrPcieLinkGeneration": lambda card: card.generation[0],
            "MaxPcieLinkGeneration": lambda card: card.generation[1],
            "CurrPcieLinkWidth": lambda card: card.width[0],
            "MaxPcieLinkWidth": lambda card: card.width[1],
            "DisplayActive": lambda card: int(card.display),
            "ComputeRunningProcesses": self._processes,
            "GraphicsRunningProcesses": lambda card: [],
            "MemoryInfo": self._memory,
        }
        for name, answer in answers.items():
            setattr(module, f"nvmlDeviceGet{name}", self._supported(name, answer))
        return module

    def _open(self) -> None:
        if self.refuses:
            raise NVMLError(self.refuses)
        self.open_sessions += 1

    def _close(self) -> None:
        self.open_sessions -= 1

    def _handle(self, index: int) -> FakeCard:
        if self.cards[index].lost:
            raise NVMLError("GPU is lost")
        return self.cards[index]

    def _supported(self, name: str, answer: Any) -> Any:
        def ask(card: FakeCard, *arguments: Any) -> Any:
            assert self.open_sessions
            if name in card.silent:
                raise NVMLError("Not Supported")
            return answer(card, *arguments)

        return ask

    def _processes(self, card: FakeCard) -> list[SimpleNamespace]:
        others = SimpleNamespace(pid=1, usedGpuMemory=None)
        return [others, SimpleNamespace(pid=os.getpid(), usedGpuMemory=card.own)]

    def _memory(self, card: FakeCard, version: int | None = None) -> SimpleNamespace:
        free = card.total - card.reserved - card.used
        if version is None:
            return SimpleNamespace(total=card.total, free=free, used=card.used + card.reserved)
        if not self.knows_reserved:
            raise NVMLError("Function Not Found")
        return SimpleNamespace(total=card.total, free=free, used=card.used)
