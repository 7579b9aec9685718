"""y = x @ W.T for a few rows of bf16 activations on the CPU, at the speed at which W can be read.

torch's own bf16 linear reads weights at 0.57 of DRAM bandwidth for one row (28 of 50 GB/s, 2 cores, AVX512-BF16);
this kernel streams several rows of W at once, each with its prefetch. Products and sums are fp32, in an order that
depends on K alone: a row of x gives the same bits whatever rows stand beside it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from localllm.kernels.cpu_jit import KernelUnavailableError, compile_ir

MAX_ROWS = 8  # of x; above, the library's GEMM has more to reuse
VECTOR = 32  # bf16 values in one 64-byte load: the even ones and the odd ones make two fp32 vectors
PREFETCH_BYTES = 2048


def _rows_per_step(M: int) -> int:
    """Rows of W in flight: M * rows accumulators and 2 * rows weight vectors must fit into 32 registers."""
    return 4 if M <= 4 else 2


def _source(M: int) -> str:
    """LLVM IR of `gemv(args)`; args = {x, w, y, N, K} as five 64-bit words, rows of W shared out over the team."""
    R = _rows_per_step(M)
    lanes, words = "<16 x float>", "<16 x i32>"
    accumulators = [(r, m) for r in range(R) for m in range(M)]
    low_half = "splat (i32 16)"
    high_mask = "splat (i32 -65536)"
    lines = [
        "declare void @GOMP_parallel(ptr, ptr, i32, i32)",
        "declare i32 @omp_get_thread_num()",
        "declare i32 @omp_get_num_threads()",
        "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
        f"declare {lanes} @llvm.fma.v16f32({lanes}, {lanes}, {lanes})",
        f"declare float @llvm.vector.reduce.fadd.v16f32(float, {lanes})",
        "define void @gemv(ptr %args) {",
        "  call void @GOMP_parallel(ptr @team, ptr %args, i32 0, i32 0)",
        "  ret void",
        "}",
        "define void @team(ptr %args) {",
        "entry:",
        *[f"  %{n}a = getelementptr i64, ptr %args, i64 {i}" for i, n in enumerate("xwyNK")],
        *[f"  %{n} = load ptr, ptr %{n}a" for n in "xwy"],
        *[f"  %{n} = load i64, ptr %{n}a" for n in "NK"],
        "  %tid32 = call i32 @omp_get_thread_num()",
        "  %nth32 = call i32 @omp_get_num_threads()",
        "  %tid = zext i32 %tid32 to i64",
        "  %nth = zext i32 %nth32 to i64",
        f"  %padded = add i64 %N, {R - 1}",
        f"  %steps = udiv i64 %padded, {R}",
        "  %b0 = mul i64 %steps, %tid",
        "  %begin = udiv i64 %b0, %nth",
        "  %tid1 = add i64 %tid, 1",
        "  %e0 = mul i64 %steps, %tid1",
        "  %end = udiv i64 %e0, %nth",
        "  %row_bytes = shl i64 %K, 1",
        f"  %last = sub i64 %N, {R}",
        "  %any = icmp ult i64 %begin, %end",
        "  br i1 %any, label %rows, label %done",
        "rows:",
        "  %step = phi i64 [%begin, %entry], [%step1, %store]",
        f"  %n0 = mul i64 %step, {R}",
        "  %over = icmp ugt i64 %n0, %last",
        "  %n = select i1 %over, i64 %last, i64 %n0",  # the last step moves up and computes a few rows twice
        *[f"  %n_{r} = add i64 %n, {r}" for r in range(R)],
        *[f"  %wo_{r} = mul i64 %n_{r}, %row_bytes" for r in range(R)],
        *[f"  %w_{r} = getelementptr i8, ptr %w, i64 %wo_{r}" for r in range(R)],
        "  br label %inner",
        "inner:",
        "  %k = phi i64 [0, %rows], [%k1, %inner]",
        *[f"  %acc_{r}_{m} = phi {lanes} [zeroinitializer, %rows], [%odd_{r}_{m}, %inner]" for r, m in accumulators],
    ]
    for r in range(R):
        lines += [
            f"  %wp_{r} = getelementptr i8, ptr %w_{r}, i64 %k",
            f"  %pf_{r} = getelementptr i8, ptr %wp_{r}, i64 {PREFETCH_BYTES}",
            f"  call void @llvm.prefetch.p0(ptr %pf_{r}, i32 0, i32 3, i32 1)",
            f"  %wv_{r} = load {words}, ptr %wp_{r}, align 2",
            f"  %wl_{r} = shl {words} %wv_{r}, {low_half}",
            f"  %wh_{r} = and {words} %wv_{r}, {high_mask}",
            f"  %we_{r} = bitcast {words} %wl_{r} to {lanes}",
            f"  %wd_{r} = bitcast {words} %wh_{r} to {lanes}",
        ]
    for m in range(M):
        lines += [
            f"  %xr_{m} = mul i64 %row_bytes, {m}",
            f"  %xo_{m} = add i64 %xr_{m}, %k",
            f"  %xp_{m} = getelementptr i8, ptr %x, i64 %xo_{m}",
            f"  %xv_{m} = load {words}, ptr %xp_{m}, align 2",
            f"  %xl_{m} = shl {words} %xv_{m}, {low_half}",
            f"  %xh_{m} = and {words} %xv_{m}, {high_mask}",
            f"  %xe_{m} = bitcast {words} %xl_{m} to {lanes}",
            f"  %xd_{m} = bitcast {words} %xh_{m} to {lanes}",
        ]
    fma = f"call {lanes} @llvm.fma.v16f32"
    for r, m in accumulators:
        lines += [
            f"  %even_{r}_{m} = {fma}({lanes} %we_{r}, {lanes} %xe_{m}, {lanes} %acc_{r}_{m})",
            f"  %odd_{r}_{m} = {fma}({lanes} %wd_{r}, {lanes} %xd_{m}, {lanes} %even_{r}_{m})",
        ]
    lines += [
        f"  %k1 = add i64 %k, {2 * VECTOR}",
        "  %more = icmp ult i64 %k1, %row_bytes",
        "  br i1 %more, label %inner, label %store",
        "store:",
    ]
    reduce = "call reassoc float @llvm.vector.reduce.fadd.v16f32"
    for r, m in accumulators:
        lines += [
            f"  %sum_{r}_{m} = {reduce}(float 0.0, {lanes} %odd_{r}_{m})",
            f"  %yb_{r}_{m} = mul i64 %N, {m}",
            f"  %yo_{r}_{m} = add i64 %yb_{r}_{m}, %n_{r}",
            f"  %yp_{r}_{m} = getelementptr i16, ptr %y, i64 %yo_{r}_{m}",
            # Rounded to nearest even by hand: without AVX512-BF16 LLVM makes `fptrunc` a call that nothing resolves.
            f"  %bits_{r}_{m} = bitcast float %sum_{r}_{m} to i32",
            f"  %high_{r}_{m} = lshr i32 %bits_{r}_{m}, 16",
            f"  %odd_bit_{r}_{m} = and i32 %high_{r}_{m}, 1",
            f"  %bump_{r}_{m} = add i32 %odd_bit_{r}_{m}, 32767",
            f"  %bumped_{r}_{m} = add i32 %bits_{r}_{m}, %bump_{r}_{m}",
            f"  %rounded_{r}_{m} = lshr i32 %bumped_{r}_{m}, 16",
            f"  %nan_{r}_{m} = fcmp uno float %sum_{r}_{m}, 0.0",
            f"  %kept_{r}_{m} = select i1 %nan_{r}_{m}, i32 32704, i32 %rounded_{r}_{m}",
            f"  %yv_{r}_{m} = trunc i32 %kept_{r}_{m} to i16",
            f"  store i16 %yv_{r}_{m}, ptr %yp_{r}_{m}, align 2",
        ]
    lines += [
        "  %step1 = add i64 %step, 1",
        "  %again = icmp ult i64 %step1, %end",
        "  br i1 %again, label %rows, label %done",
        "done:",
        "  ret void",
        "}",
    ]
    return "\n".join(lines)


@cache
def _kernel(M: int) -> Callable[..., None]:
    return compile_ir(_source(M), "gemv", ctypes.c_void_p)


@cache
def supports(rows: int, out_features: int, in_features: int) -> bool:
    """Whether `cpu_gemv` can run this shape on this machine; the kernel is compiled by asking (15-150 ms, once)."""
    if not 1 <= rows <= MAX_ROWS or in_features % VECTOR or out_features < _rows_per_step(rows):
        return False
    try:
        _kernel(rows)
    except KernelUnavailableError:
        return False
    return True


def cpu_gemv(x: Tensor, weight: Tensor) -> Tensor:
    """y = x @ weight.T.

    x [M, K] bf16, weight [N, K] bf16, both contiguous, 1 <= M <= 8, K % 32 == 0. Returns [M, N] bf16.
    The caller asks `supports` first.
    """
    M, K = x.shape
    N = weight.shape[0]
    assert x.dtype == weight.dtype == torch.bfloat16 and x.is_contiguous() and weight.is_contiguous()
    assert weight.shape[1] == K and supports(M, N, K)
    y = torch.empty((M, N), dtype=torch.bfloat16)
    args = (ctypes.c_int64 * 5)(x.data_ptr(), weight.data_ptr(), y.data_ptr(), N, K)
    _kernel(M)(args)
    return y
