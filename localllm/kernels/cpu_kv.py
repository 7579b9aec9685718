"""Keys and values of a KV page (see `kv_page`) as the CPU kernels write and read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from localllm.kernels import cpu_math
from localllm.kernels.cpu_ir import F32, F32V, I32V, LANES, Kernel, Value, vector_of
from localllm.kernels.kv_page import (
    GROUP,
    INT4_ZERO,
    NOT_FINITE,
    PAGE_TOKENS,
    SCALE_BIAS,
    SCALE_HIGH,
    SCALE_LOW,
    SCALE_SHIFT,
    Coding,
    PageLayout,
)

BYTES = vector_of("i8")
NAN_BITS = 0x7FC00000


@dataclass(frozen=True)
class HeadPlan:
    """The places of one head's parts of a page, and how they are coded. Offsets in bytes from the head's first."""

    layout: PageLayout

    @property
    def is_float(self) -> bool:
        return self.layout.dtype is torch.float32

    @property
    def group_size(self) -> int:
        """Features that are computed together: those of a scale, or of a vector where these do not divide a head."""
        return GROUP if self.layout.head_dim % GROUP == 0 else LANES

    @property
    def offsets(self) -> tuple[int, int, int, int]:
        """Offsets of keys, key scales, values, value scales."""
        keys, key_scales, values, _ = self.layout.sizes
        return 0, keys, keys + key_scales, keys + key_scales + values

    @property
    def token_value_bytes(self) -> int:
        return self.layout.sizes[2] // PAGE_TOKENS

    def keys(self, head: Value, feature: Value, tokens: int) -> list[tuple[int, list[Value]]]:
        """The vectors of 16 tokens each, `tokens` from where `head` was moved to, of the key row that has this feature:
        [(how many features further on, its vectors)]. feature: of INT4, one of the first half of its group."""
        coding = self.layout.keys
        if coding == "dense":
            row = head.at(feature * (PAGE_TOKENS * self.layout.dtype.itemsize))
            return [(0, [self._dense(row, n) for n in range(tokens // LANES)])]
        if coding == "int8":
            row = head.at(feature * PAGE_TOKENS)
            return [(0, [_signed(row.at(LANES * n)) for n in range(tokens // LANES)])]
        half = GROUP // 2
        row = head.at((feature / GROUP * half + feature % half) * PAGE_TOKENS)
        pairs = [_nibbles(row.at(LANES * n)) for n in range(tokens // LANES)]
        return [(0, [low for low, _ in pairs]), (half, [high for _, high in pairs])]

    def values(self, token: Value, group: Value) -> list[Value]:
        """The vectors of a token's group of features. token: a pointer to its values."""
        coding = self.layout.values
        if coding == "dense":
            at = token.at(group * (self.group_size * self.layout.dtype.itemsize))
            return [self._dense(at, n) for n in range(self.group_size // LANES)]
        if coding == "int8":
            at = token.at(group * GROUP)
            return [_signed(at), _signed(at.at(LANES))]
        return [nibble - INT4_ZERO for nibble in _nibbles(token.at(group * (GROUP // 2)))]

    def _dense(self, at: Value, vector: int) -> Value:
        if self.is_float:
            return at.at(4 * LANES * vector).load(F32V)
        halves = at.at(2 * LANES * vector).load(vector_of("i16"), 2)
        return (halves.convert("zext", I32V) << 16).convert("bitcast", F32V)


def _signed(at: Value) -> Value:
    return at.load(BYTES, 1).convert("sitofp", F32V)


def _nibbles(at: Value) -> tuple[Value, Value]:
    words = at.load(BYTES, 1).convert("zext", I32V)
    return (words & 15).convert("sitofp", F32V), (words >> 4).convert("sitofp", F32V)


def scales(at: Value) -> Value:
    """16 of them, NaN where the group is not finite."""
    codes = at.load(BYTES, 1).convert("zext", I32V)
    # The one code with a carry into the ninth bit becomes a NaN, without a comparison.
    is_not_finite = ((codes + (256 - NOT_FINITE)) >> 8) * NAN_BITS
    return (((codes << SCALE_SHIFT) + SCALE_BIAS) | is_not_finite).convert("bitcast", F32V)


def hadamard(k: Kernel, vectors: list[Value]) -> list[Value]:
    """`kv_page.rotated` of the group of 32 in two vectors, or of one of 16."""
    mixed = []
    for vector in [vectors[0] + vectors[1], vectors[0] - vectors[1]] if len(vectors) == 2 else vectors:
        for stride in (8, 4, 2, 1):
            partner = k.shuffle(vector, vector, [lane ^ stride for lane in range(LANES)])
            signs = k.f32_lanes([-1.0 if lane & stride else 1.0 for lane in range(LANES)])
            vector = k.fma(vector, signs, partner)
        mixed.append(vector * (LANES * len(vectors)) ** -0.5)
    return mixed


def rotated(k: Kernel, vectors: list[Value]) -> list[Value]:
    """All groups of a head."""
    return [vector for at in range(0, len(vectors), 2) for vector in hadamard(k, vectors[at : at + 2])]


def coded_run(k: Kernel, vectors: list[Value], coding: Coding) -> tuple[Value, list[Value]]:
    """The scale's code (i32) of a run of groups of 32, and their codes as bytes: of each two vectors for INT8, one for
    INT4."""
    peaks, spreads = k.unary("fabs", vectors[0]), vectors[0] - vectors[0]
    for vector in vectors[1:]:
        peaks = k.larger(peaks, k.unary("fabs", vector))
        spreads = spreads + (vector - vector)
    wanted = cpu_math.largest(k, peaks) * (1 / (127 if coding == "int8" else 8))
    clamped = k.smaller(k.constant(F32, SCALE_HIGH), k.larger(k.constant(F32, SCALE_LOW), wanted))
    bits = clamped.convert("bitcast", "i32") - SCALE_BIAS
    code = (bits + ((1 << SCALE_SHIFT) - 1)) >> SCALE_SHIFT  # the smallest whose scale is not below
    spread = cpu_math.total(k, spreads)  # 0, or NaN where one is not finite
    code = spread.compare("oeq", 0.0).choose(code, k.constant("i32", NOT_FINITE))
    scale = ((code << SCALE_SHIFT) + SCALE_BIAS).convert("bitcast", F32).splat()
    steps = [vector / scale for vector in vectors]
    if coding == "int8":
        limited = [_within(k, k.unary("rint", step), -127.0, 127.0) for step in steps]
        return code, [step.convert("fptosi", I32V).convert("trunc", BYTES) for step in limited]
    nibbles = [_within(k, k.unary("floor", step) + 8.0, 0.0, 15.0).convert("fptosi", I32V) for step in steps]
    pairs = zip(nibbles[::2], nibbles[1::2], strict=True)
    return code, [(low | (high << 4)).convert("trunc", BYTES) for low, high in pairs]


def _within(k: Kernel, vector: Value, low: float, high: float) -> Value:
    """A NaN becomes the lowest: as a code it must be some number."""
    return k.smaller(k.larger(vector, k.f32v(low)), k.f32v(high))


def store_keys(k: Kernel, plan: HeadPlan, head: Value, slot: Value, vectors: list[Value]) -> None:
    """A token's key into its column. vectors: of 16 features each, rotated where the layout is coded."""
    coding = plan.layout.keys
    if coding == "dense":
        size = plan.layout.dtype.itemsize
        column = head.at(slot * size)
        for i, vector in enumerate(vectors):
            row = vector if plan.is_float else cpu_math.to_bf16(k, vector)
            for lane in range(LANES):
                column.at((i * LANES + lane) * PAGE_TOKENS * size).store(k.lane(row, lane), size)
        return
    column, scale_column = head.at(slot), head.at(plan.offsets[1]).at(slot)
    row_number = 0
    for group in range(plan.layout.groups):
        code, rows = coded_run(k, vectors[2 * group : 2 * group + 2], coding)
        scale_column.at(group * PAGE_TOKENS).store(code.convert("trunc", "i8"), 1)
        for row in rows:
            for lane in range(LANES):
                column.at((row_number + lane) * PAGE_TOKENS).store(k.lane(row, lane), 1)
            row_number += LANES


def store_values(k: Kernel, plan: HeadPlan, head: Value, slot: Value, vectors: list[Value]) -> None:
    """A token's value into its row."""
    coding = plan.layout.values
    row = head.at(plan.offsets[2]).at(slot * plan.token_value_bytes)
    if coding == "dense":
        for i, vector in enumerate(vectors):
            stored = vector if plan.is_float else cpu_math.to_bf16(k, vector)
            row.at(i * LANES * plan.layout.dtype.itemsize).store(stored, 2)
        return
    scale_column = head.at(plan.offsets[3]).at(slot)
    at = 0
    for group in range(plan.layout.groups):
        code, parts = coded_run(k, vectors[2 * group : 2 * group + 2], coding)
        scale_column.at(group * PAGE_TOKENS).store(code.convert("trunc", "i8"), 1)
        for part in parts:
            row.at(at).store(part, 1)
            at += LANES
