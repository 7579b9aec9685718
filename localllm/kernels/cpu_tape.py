"""Several kernels as one native call: every thread walks the same list of kernels, with a barrier after each.

A dispatch from Python costs 20-50 us and a torch operator 3-5 us; a barrier among threads that are awake costs a
fraction of one. The team is torch's own OpenMP pool, entered through `GOMP_parallel`: a second pool would fight it for
the cores.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache

import torch

from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native, best_isa, link, openmp

Arguments = ctypes.Array[ctypes.c_int64]
# About 50 us of waiting; then the core may be wanted, also by the rest of the team where that has just woken on it. A
# sleep gives it away at once; a yield kept it for a time slice, 4 ms, behind each wait for the disk.
_SPINS = 4096
_COUNTER_BYTES = 64  # a cache line each

# args: {tape, number of kernels, threads wanted, arrivals, counters}. OpenMP may give fewer threads than are wanted
# (OMP_THREAD_LIMIT, OMP_DYNAMIC): the team counts itself. A count of arrivals that only grows needs no second
# barrier to reset it.
_SOURCE = """
declare void @GOMP_parallel(ptr, ptr, i32, i32)
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
declare i32 @usleep(i32)
{declare_pause}
define void @run(ptr %args) {{
  %threads_at = getelementptr i64, ptr %args, i64 2
  %arrivals = getelementptr i64, ptr %args, i64 3
  %threads = load i64, ptr %threads_at
  %threads32 = trunc i64 %threads to i32
  store i64 0, ptr %arrivals
  call void @GOMP_parallel(ptr @team, ptr %args, i32 %threads32, i32 0)
  ret void
}}
define void @team(ptr %args) {{
entry:
  %tape = load ptr, ptr %args
  %count_at = getelementptr i64, ptr %args, i64 1
  %arrivals = getelementptr i64, ptr %args, i64 3
  %counters_at = getelementptr i64, ptr %args, i64 4
  %counters = load ptr, ptr %counters_at
  %count = load i64, ptr %count_at
  %threads32 = call i32 @omp_get_num_threads()
  %threads = zext i32 %threads32 to i64
  %thread32 = call i32 @omp_get_thread_num()
  %thread = zext i32 %thread32 to i64
  br label %next
next:
  %i = phi i64 [0, %entry], [%i1, %passed]
  %wanted = phi i64 [%threads, %entry], [%wanted1, %passed]
  %offset = mul i64 %i, 16
  %entry_at = getelementptr i8, ptr %tape, i64 %offset
  %args_at = getelementptr i8, ptr %entry_at, i64 8
  %function = load ptr, ptr %entry_at
  %kernel_args = load ptr, ptr %args_at
  %counter_offset = mul i64 %i, {counter_bytes}
  %counter = getelementptr i8, ptr %counters, i64 %counter_offset
  call void %function(ptr %kernel_args, i64 %thread, i64 %threads, ptr %counter)
  %before = atomicrmw add ptr %arrivals, i64 1 acq_rel
  br label %wait
wait:
  %spins = phi i64 [0, %next], [%spins1, %again]
  %arrived = load atomic i64, ptr %arrivals acquire, align 8
  %all = icmp uge i64 %arrived, %wanted
  br i1 %all, label %passed, label %still
still:
  %patient = icmp ult i64 %spins, {spins}
  br i1 %patient, label %spin, label %yield
spin:
  {pause}
  br label %again
yield:
  %ignored = call i32 @usleep(i32 20)
  br label %again
again:
  %spins1 = add i64 %spins, 1
  br label %wait
passed:
  %i1 = add i64 %i, 1
  %wanted1 = add i64 %wanted, %threads
  %more = icmp ult i64 %i1, %count
  br i1 %more, label %next, label %done
done:
  ret void
}}
"""
_PAUSES = {
    "x86_64": ("declare void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse2.pause()"),
    "aarch64": ("declare void @llvm.aarch64.hint(i32)", "call void @llvm.aarch64.hint(i32 1)"),
}
_RESOLVED = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "usleep")


class Tape:
    """A list of (kernel, arguments), run in order by all of torch's threads. Arguments may change between two runs."""

    def __init__(self, kernels: Sequence[tuple[Native, Arguments]]) -> None:
        self._kernels = list(kernels)  # keeps code and arguments alive
        words = [word for kernel, args in kernels for word in (kernel.address, ctypes.addressof(args))]
        self._tape = (ctypes.c_int64 * len(words))(*words)
        self._counters = ctypes.create_string_buffer(_COUNTER_BYTES * len(kernels))
        self._run = _runner(best_isa())

    def __len__(self) -> int:
        return len(self._kernels)

    def run(self, begin: int = 0, end: int | None = None) -> None:
        """Kernels [begin, end). The GIL is released; memory is written before this returns."""
        count = len(self) if end is None else end
        if count <= begin:
            return
        start = ctypes.addressof(self._tape) + 16 * begin
        counters = ctypes.addressof(self._counters)
        ctypes.memset(counters, 0, _COUNTER_BYTES * (count - begin))
        self._run((ctypes.c_int64 * 5)(start, count - begin, torch.get_num_threads(), 0, counters))


@cache
def _runner(isa: Isa) -> Callable[[Arguments], None]:
    from llvmlite import binding as llvm

    process = ctypes.CDLL(None)
    for symbol in _RESOLVED:
        function = getattr(process if symbol == "usleep" else openmp(), symbol)
        llvm.add_symbol(symbol, ctypes.cast(function, ctypes.c_void_p).value)
    declare_pause, pause = _PAUSES[isa.machine]
    source = _SOURCE.format(declare_pause=declare_pause, pause=pause, spins=_SPINS, counter_bytes=_COUNTER_BYTES)
    address, engine = link(source, "run", isa, _RESOLVED)
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
    run.engine = engine  # type: ignore[attr-defined]  # the code lives as long as its engine
    return run
