"""Adapters (LoRA): what thin matrices add behind a product, each row by its own adapters, in two launches.

`shrink` brings a row down to the ranks, t = scale * (A x); `expand` adds B t to what the matrix made of it. One table
of a batch says which adapters a row has; each adapter's table says where its matrices of every layer are (S-LoRA,
arXiv:2311.03285; Punica, arXiv:2310.18547). Sums are in fp32, in an order that depends on the matrices alone: a row
has the same bits whatever rows are beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels.gpu.launch import KernelLaunch, after_previous
from localllm.kernels.gpu.rope import page_at

# Of one adapter of a row: the address of its table, 0 where there is none, the parts that the table has of each layer,
# and the bits of what multiplies it. A row's adapters stand before its zeros.
USE_WORDS = ("table", "parts", "scale")
# Of one part of a layer in an adapter's table: addresses of A [rank, K] and of B [rows, rank], multiples of 16; the
# rank is 0 where there is none. What B makes is added from `first_row` on.
RECORD_WORDS = ("a", "b", "rank", "first_row", "rows")
RANK_STEP = 16  # ranks of B that are summed at once, of which t has a multiple
_RANKS = 4  # of A, of a program
_COLUMNS = 1024  # of A at once
_ROWS = 128  # of B, of a program
_USE, _RECORD = tl.constexpr(len(USE_WORDS)), tl.constexpr(len(RECORD_WORDS))
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _record_of(table, parts, site, part):
    return table.to(tl.pointer_type(tl.int64)) + (site * parts + part) * _RECORD


@triton.jit(do_not_specialize=["num_uses", "most_parts", "site", "room"])
def _shrink(
    uses, x, t, x_stride, features, num_uses, most_parts, site, room,
    TYPE: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAPS)
    row, slot = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own, part = uses + (row * num_uses + slot // most_parts) * _USE, slot % most_parts
    table, parts = tl.load(own), tl.load(own + 1)
    if (table != 0) & (part < parts):
        record = _record_of(table, parts, site, part)
        rank, ranks = tl.load(record + 2), tl.program_id(2) * RANKS + tl.arange(0, RANKS)
        if tl.program_id(2) * RANKS < rank:
            a = page_at(tl.load(record), 0).to(tl.pointer_type(TYPE))
            total = tl.zeros((RANKS, BLOCK), tl.float32)
            for begin in range(0, features, BLOCK):
                k = begin + tl.arange(0, BLOCK)
                values = tl.load(x + row * x_stride + k, mask=k < features, other=0)
                is_there = (ranks < rank)[:, None] & (k < features)[None, :]
                weights = tl.load(a + ranks[:, None] * features + k[None, :], mask=is_there, other=0).to(tl.float32)
                total = tl.fma(weights, tl.broadcast_to(values[None, :], weights.shape), total)
            scale = tl.load(own + 2).to(tl.int32).to(tl.float32, bitcast=True)
            into = t + (row * num_uses * most_parts + slot) * room + ranks
            tl.store(into, scale * tl.sum(total, axis=1), mask=ranks < rank)


@triton.jit
def _with_part(values, n, first, record, t, TYPE: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """The values of columns n, of which `first` is the first one, and what B t adds to those that are its own."""
    rank, first_row, rows = tl.load(record + 2), tl.load(record + 3), tl.load(record + 4)
    if (rank > 0) & (first_row < first + BLOCK) & (first_row + rows > first):
        b, inside = page_at(tl.load(record + 1), 0).to(tl.pointer_type(TYPE)), n - first_row
        is_own = (inside >= 0) & (inside < rows)
        total = tl.zeros((BLOCK, STEP), tl.float32)
        for begin in range(0, rank, STEP):
            ranks = begin + tl.arange(0, STEP)
            small = tl.load(t + ranks, mask=ranks < rank, other=0)
            is_there = is_own[:, None] & (ranks < rank)[None, :]
            weights = tl.load(b + inside[:, None] * rank + ranks[None, :], mask=is_there, other=0).to(tl.float32)
            total = tl.fma(weights, tl.broadcast_to(small[None, :], weights.shape), total)
        values = tl.where(is_own, values + tl.sum(total, axis=1), values)
    return values


@triton.jit(do_not_specialize=["num_uses", "most_parts", "site", "room"])
def _expand(
    uses, t, y, y_stride, features, num_uses, most_parts, site, room,
    TYPE: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAPS)
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    own = uses + row * num_uses * _USE
    if tl.load(own) != 0:
        n = first + tl.arange(0, BLOCK)
        into = y + row * y_stride + n
        values = tl.load(into, mask=n < features, other=0).to(tl.float32)
        for use in range(num_uses):
            table, parts = tl.load(own + use * _USE), tl.load(own + use * _USE + 1)
            if table != 0:
                for part in range(parts):
                    small = t + ((row * num_uses + use) * most_parts + part) * room
                    record = _record_of(table, parts, site, part)
                    values = _with_part(values, n, first, record, small, TYPE, STEP, BLOCK)
        tl.store(into, values.to(y.dtype.element_ty), mask=n < features)


def new_ranks(uses: Tensor, parts: int, rank: int) -> Tensor:
    """Return room for t, fp32 [M, adapters of a row times parts of a layer, ranks]. parts, rank: the most that there
    are."""
    room = -(-rank // RANK_STEP) * RANK_STEP
    return torch.empty((len(uses), uses.shape[1] * parts, room), device=uses.device)


def shrink(uses: Tensor, site: int, x: Tensor, t: Tensor, dtype: torch.dtype) -> KernelLaunch:
    """t of `new_ranks` = scale * (A x) for each part of each adapter of a row.

    uses: int64 [M, adapters, USE_WORDS]. site: the layer's number in the adapters' tables.
    x: fp32 [M, K], in rows of any stride. dtype: of A and B.
    """
    num_uses = uses.shape[1]
    return KernelLaunch(
        _shrink,
        (len(x), t.shape[1], triton.cdiv(t.shape[2], _RANKS)),
        {
            "uses": uses, "x": x, "t": t, "x_stride": x.stride(0), "features": x.shape[1], "num_uses": num_uses,
            "most_parts": t.shape[1] // num_uses, "site": site, "room": t.shape[2],
        },
        {"TYPE": _TYPES[dtype], "RANKS": _RANKS, "BLOCK": _COLUMNS},
    )  # fmt: skip


def expand(uses: Tensor, site: int, t: Tensor, y: Tensor, dtype: torch.dtype) -> KernelLaunch:
    """y [M, N] of any float type, in rows of any stride, += B t for each adapter of a row, in their order. Rows without
    any are not touched. The rest as in `shrink`."""
    num_uses = uses.shape[1]
    return KernelLaunch(
        _expand,
        (len(y), triton.cdiv(y.shape[1], _ROWS)),
        {
            "uses": uses, "t": t, "y": y, "y_stride": y.stride(0), "features": y.shape[1], "num_uses": num_uses,
            "most_parts": t.shape[1] // num_uses, "site": site, "room": t.shape[2],
        },
        {"TYPE": _TYPES[dtype], "STEP": RANK_STEP, "BLOCK": _ROWS},
    )  # fmt: skip
