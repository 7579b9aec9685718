"""y = x @ W.T for a few rows of bf16 activations on the CPU, at the speed at which W can be read.

torch's own bf16 linear reads weights at 0.57 of DRAM bandwidth for one row (28 of 50 GB/s, 2 cores, AVX512-BF16).
Here each thread walks its part of W as one linear stream, prefetching: 0.9 of a plain read; four rows of W at once, one
page each, gave 0.78. Products and sums are fp32, in an order that depends on K alone: a row of x gives the same bits
whatever rows stand beside it.
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
PREFETCH_BYTES = 4096  # 2 KB ahead reads 12 % less, 32 KB is no better


def _source(M: int) -> str:
    """LLVM IR of `gemv(args)`; args = {x, w, y, N, K} as five 64-bit words, rows of W shared out over the team."""
    lanes, words = "<16 x float>", "<16 x i32>"
    low_half, high_mask = "splat (i32 16)", "splat (i32 -65536)"
    fma = f"call {lanes} @llvm.fma.v16f32"
    reduce = "call reassoc float @llvm.vector.reduce.fadd.v16f32"
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
        "  %b0 = mul i64 %N, %tid",
        "  %begin = udiv i64 %b0, %nth",
        "  %tid1 = add i64 %tid, 1",
        "  %e0 = mul i64 %N, %tid1",
        "  %end = udiv i64 %e0, %nth",
        "  %row_bytes = shl i64 %K, 1",
        "  %any = icmp ult i64 %begin, %end",
        "  br i1 %any, label %rows, label %done",
        "rows:",
        "  %n = phi i64 [%begin, %entry], [%n1, %store]",
        "  %wo = mul i64 %n, %row_bytes",
        "  %w_row = getelementptr i8, ptr %w, i64 %wo",
        "  br label %inner",
        "inner:",
        "  %k = phi i64 [0, %rows], [%k1, %inner]",
        *[
            f"  %{half}_{m} = phi {lanes} [zeroinitializer, %rows], [%{half}1_{m}, %inner]"
            for m in range(M)
            for half in ("even", "odd")
        ],
        "  %wp = getelementptr i8, ptr %w_row, i64 %k",
        f"  %ahead = getelementptr i8, ptr %wp, i64 {PREFETCH_BYTES}",
        "  call void @llvm.prefetch.p0(ptr %ahead, i32 0, i32 3, i32 1)",
        f"  %wv = load {words}, ptr %wp, align 2",
        f"  %wl = shl {words} %wv, {low_half}",
        f"  %wh = and {words} %wv, {high_mask}",
        f"  %we = bitcast {words} %wl to {lanes}",
        f"  %wd = bitcast {words} %wh to {lanes}",
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
            f"  %even1_{m} = {fma}({lanes} %we, {lanes} %xe_{m}, {lanes} %even_{m})",
            f"  %odd1_{m} = {fma}({lanes} %wd, {lanes} %xd_{m}, {lanes} %odd_{m})",
        ]
    lines += [
        f"  %k1 = add i64 %k, {2 * VECTOR}",
        "  %more = icmp ult i64 %k1, %row_bytes",
        "  br i1 %more, label %inner, label %store",
        "store:",
    ]
    for m in range(M):
        lines += [
            f"  %both_{m} = fadd {lanes} %even1_{m}, %odd1_{m}",
            f"  %sum_{m} = {reduce}(float 0.0, {lanes} %both_{m})",
            f"  %yb_{m} = mul i64 %N, {m}",
            f"  %yo_{m} = add i64 %yb_{m}, %n",
            f"  %yp_{m} = getelementptr i16, ptr %y, i64 %yo_{m}",
            # Rounded to nearest even by hand: without AVX512-BF16 LLVM makes `fptrunc` a call that nothing resolves.
            f"  %bits_{m} = bitcast float %sum_{m} to i32",
            f"  %high_{m} = lshr i32 %bits_{m}, 16",
            f"  %last_{m} = and i32 %high_{m}, 1",
            f"  %bump_{m} = add i32 %last_{m}, 32767",
            f"  %bumped_{m} = add i32 %bits_{m}, %bump_{m}",
            f"  %rounded_{m} = lshr i32 %bumped_{m}, 16",
            f"  %nan_{m} = fcmp uno float %sum_{m}, 0.0",
            f"  %kept_{m} = select i1 %nan_{m}, i32 32704, i32 %rounded_{m}",
            f"  %yv_{m} = trunc i32 %kept_{m} to i16",
            f"  store i16 %yv_{m}, ptr %yp_{m}, align 2",
        ]
    lines += [
        "  %n1 = add i64 %n, 1",
        "  %again = icmp ult i64 %n1, %end",
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
    if not 1 <= rows <= MAX_ROWS or in_features % VECTOR or not out_features:
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
