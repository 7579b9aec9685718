"""Pages from the disk that tokens have chosen lately, each layer's part by itself (InfiniGen, arXiv:2406.19707).

Where a token attends to a few pages of its choice, only those are read. The address table of the kernels has a page's
number in the file in place of its address; once a layer's tokens have chosen, the numbers among the chosen become
addresses of slots. What was used the longest ago leaves its slot first.
"""

from __future__ import annotations

import time

import numpy
import torch
from torch import Tensor

from localllm.cache.spill_file import SpillFile
from localllm.offload.streaming.disk_stream import StreamClock
from localllm.offload.streaming.host_buffer import HUGE_PAGE_BYTES, host_buffer

_NOWHERE = -1


class PageSlots:
    """Slots for the pages of one group of layers."""

    def __init__(self, file: SpillFile, budget_bytes: int, clock: StreamClock) -> None:
        """budget_bytes: the most that slots take."""
        self._file, self._clock = file, clock
        self._most = max(1, budget_bytes // file.stride)
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._slots = numpy.full((file.num_layers, 0), _NOWHERE, numpy.int64)  # of each layer's part of a page
        self._held = numpy.full((self._most, 2), _NOWHERE, numpy.int64)  # of each slot, layer and page
        self._used = numpy.zeros(self._most, numpy.int64)  # of each slot, when
        self._now = 0

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def forget(self, page: int, count: int) -> None:
        """Pages from this number on hold something else from now on."""
        own = self._slots[:, page : page + count]
        self._held[own[own >= 0]], self._used[own[own >= 0]] = _NOWHERE, 0
        own[:] = _NOWHERE

    def clear(self) -> None:
        """Give all memory back."""
        if not self.nbytes:
            return
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._slots[:], self._held[:], self._used[:] = _NOWHERE, _NOWHERE, 0

    def bring(self, row: int, chosen: Tensor) -> None:
        """Read what is missing of a layer's chosen pages, and write their addresses in place of their numbers.

        chosen: int64 [n]; what is no number of a page stays. Raises LocalLLMError, and MemoryError.
        """
        table = chosen.numpy()
        is_number = (table > 0) & (table <= self._file.num_pages)
        if not is_number.any():
            return
        pages, places = numpy.unique(table[is_number] - 1, return_inverse=True)
        self._grow(len(pages))
        self._now += 1
        slots = self._slots[row, pages]
        self._used[slots[slots >= 0]] = self._now
        missing = pages[slots < 0]
        if len(missing):
            self._read(row, missing)
            slots = self._slots[row, pages]
        base = self._memory.data_ptr() - row * self._file.layer_bytes
        table[is_number] = base + slots[places] * self._file.stride

    def _read(self, row: int, missing: numpy.ndarray) -> None:
        """Read these pages' parts of a layer into the slots that were used the longest ago."""
        started, file = time.perf_counter(), self._file
        slots = numpy.argpartition(self._used, len(missing) - 1)[: len(missing)]
        left = self._held[slots]
        left = left[left[:, 0] >= 0]
        self._slots[left[:, 0], left[:, 1]] = _NOWHERE
        self._held[slots], self._used[slots] = _NOWHERE, 0
        first = self._memory.data_ptr()
        file.read_pages(row, missing.tolist(), [first + slot * file.stride for slot in slots.tolist()])
        self._slots[row, missing], self._used[slots] = slots, self._now
        self._held[slots] = numpy.stack((numpy.full(len(missing), row), missing), axis=1)
        self._clock.wait_s += time.perf_counter() - started
        self._clock.reading_s += time.perf_counter() - started
        self._clock.bytes_read += len(missing) * file.layer_bytes

    def _grow(self, wanted: int) -> None:
        """Make room for all pages of the file in the tables, and for as many as are wanted at once in memory."""
        if self._slots.shape[1] < self._file.num_pages:
            more = numpy.full((self._file.num_layers, 2 * self._file.num_pages - self._slots.shape[1]), _NOWHERE)
            self._slots = numpy.concatenate((self._slots, more), axis=1)
        if wanted > self._most:  # of tokens with many key heads, each of which chooses
            self._held = numpy.concatenate((self._held, numpy.full((wanted - self._most, 2), _NOWHERE)))
            self._used = numpy.concatenate((self._used, numpy.zeros(wanted - self._most, numpy.int64)))
            self._most = wanted
        if self._memory.nbytes < self._most * self._file.stride:
            self.clear()
            num_bytes = self._most * self._file.stride
            self._memory = host_buffer(-(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)
