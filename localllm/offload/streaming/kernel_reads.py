"""Reads past the page cache that the kernel does beside the program (Linux AIO): no thread waits for any of them.

Two cores that compute have none to spare for threads that wake up for every read: a token of Qwen3-30B-A3B under half
its size takes 165 ms with four such threads, 137 without.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
import time
from collections.abc import Sequence

import numpy

# io_setup, io_destroy, io_getevents, io_submit: the C library has no names for them.
_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
_READ = 0  # IOCB_CMD_PREAD
# `struct iocb` of linux/aio_abi.h, and `struct io_event`.
_CONTROL_BLOCK = numpy.dtype(
    [
        ("key", "<u8"),
        ("", "<u8"),
        ("call", "<u2"),
        ("", "<u2"),
        ("descriptor", "<u4"),
        ("address", "<u8"),
        ("num_bytes", "<u8"),
        ("begin", "<i8"),
        ("", "<u8"),
        ("", "<u8"),
    ]
)
_EVENT = numpy.dtype([("key", "<u8"), ("", "<u8"), ("count", "<i8"), ("", "<i8")])


class KernelReads:
    """Up to `depth` reads at a time. One thread uses it. Raises OSError where the system has no such reads."""

    def __init__(self, depth: int) -> None:
        is_64_bit_linux = sys.platform == "linux" and sys.maxsize > 1 << 32
        calls = _CALLS.get(platform.machine()) if is_64_bit_linux else None
        if calls is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self._setup, self._destroy, self._get_events, self._submit = calls
        self._system = ctypes.CDLL(None, use_errno=True).syscall
        self._system.restype = ctypes.c_long
        self._blocks = numpy.zeros(depth, _CONTROL_BLOCK)
        self._addresses = self._blocks.ctypes.data + _CONTROL_BLOCK.itemsize * numpy.arange(depth, dtype=numpy.uint64)
        self._events = numpy.zeros(depth, _EVENT)
        self._context = ctypes.c_ulong()
        self._call(self._setup, depth, ctypes.addressof(self._context))

    def begin(self, reads: Sequence[tuple[int, int, int, int, int]]) -> int:
        """Begin (key, descriptor, first byte, address, number of bytes), the last three multiples of a page's; return
        how many of them, from the first on. Raises OSError where it is not even one."""
        for number, (key, descriptor, begin, address, num_bytes) in enumerate(reads):
            self._blocks[number] = (key, 0, _READ, 0, descriptor, address, num_bytes, begin, 0, 0)
        return self._call(self._submit, self._context.value, len(reads), self._addresses.ctypes.data)

    def ended(self, timeout_s: float) -> list[tuple[int, int]]:
        """Wait for the next one that ends, and return (key, bytes read, or less than 0 for an error number) of all that
        have ended; none where nothing does for so long."""
        until, depth, events = time.monotonic() + timeout_s, len(self._events), self._events
        while True:
            left_ns = max(0, int((until - time.monotonic()) * 1e9))
            timeout = (ctypes.c_long * 2)(left_ns // 10**9, left_ns % 10**9)
            try:
                count = self._call(
                    self._get_events, self._context.value, 1, depth, events.ctypes.data, ctypes.addressof(timeout)
                )
            except InterruptedError:  # by a signal, which Python handles before the next line
                continue
            return [(int(event["key"]), int(event["count"])) for event in events[:count]]

    def close(self) -> None:
        """Call when all reads have ended: it waits for them."""
        self._call(self._destroy, self._context.value)

    def _call(self, number: int, *arguments: int) -> int:
        result: int = self._system(ctypes.c_long(number), *(ctypes.c_long(each) for each in arguments))
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return result
