"""Estimates what an 8B model in INT4 would do on cards that are not here: `python tools/estimate_gpu.py`.

Every launch of a step and of a prompt's chunk is compiled for each card. The table has what the compiled code tells:
launches, registers, shared memory, bytes, and the instructions of the loops; and a roofline over them, at 85 % of the
bandwidth, 80 % of the issue rate and 1.5 us between two launches. The last column is a prompt whose weights would be
dequantized and multiplied in bf16. Nothing of it is measured. It takes two minutes.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from check_kernels import compiled_for, loops_of
from torch import Tensor

from localllm.kernels.gpu import activations, embedding, rope, sample
from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.attention import AttentionHistory, attend, block_rows
from localllm.kernels.gpu.attention_merge import new_parts
from localllm.kernels.gpu.launch import KernelLaunch, is_interpreted
from localllm.kernels.gpu.product import Dispatch
from localllm.kernels.gpu.product_end import Gate
from localllm.kernels.gpu.rope import Rope, TokenTables
from localllm.kernels.kv_page import PAGE_TOKENS, PageLayout
from localllm.kernels.packed_matrix import PackedMatrix
from localllm.kernels.sizes import INT8_GROUP, TILE, Glu
from localllm.offload.planner.card_sheets import CardSheet, find_card

HIDDEN, WIDE, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB, GROUP = 4096, 14336, 32, 8, 128, 32, 128256, 64
DEPTH, CHUNK = 512, 512
BANDWIDTH_SHARE, ISSUE_SHARE = 0.85, 0.8  # of the peak: what good kernels reach
NODE_S = 1.5e-6  # between two launches of a graph
OVERLAPPED_NODE_S = 0.5e-6  # where the next one waits on the multiprocessors already
_META = torch.device("meta")


@dataclass(frozen=True)
class Chip:
    """What else is needed of a card whose data sheet is known."""

    card: CardSheet
    multiprocessors: int
    ghz: float

    @property
    def capability(self) -> int:
        major, minor = self.card.capability
        return 10 * major + minor


CHIPS = (
    Chip(find_card("rtx-3060-12gb"), 28, 1.78),
    Chip(find_card("rtx-3090"), 82, 1.70),
    Chip(find_card("rtx-4070"), 46, 2.48),
    Chip(find_card("rtx-4090"), 128, 2.52),
    Chip(find_card("rtx-5090"), 170, 2.41),
)


@dataclass(frozen=True)
class Work:
    """A launch, how often it is in the forward, the bytes that it reads and writes, its multiplications on the tensor
    cores in INT8 and in bf16, and how often each warp goes through its loop."""

    launch: KernelLaunch
    times: int
    num_bytes: float
    int8_macs: float = 0.0
    bf16_macs: float = 0.0
    rounds: float = 0.0


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=_META)


def _matrix(N: int, K: int, group: int | None = GROUP) -> PackedMatrix:
    tiles = -(-N // TILE)
    if group is None:
        return PackedMatrix(_empty(tiles, K // 4, TILE, 4, dtype=torch.int8), _empty(tiles, TILE), None)
    values = _empty(tiles, K // group, TILE, dtype=torch.float16)
    return PackedMatrix(_empty(tiles, K // 8, TILE, dtype=torch.int32), values, values)


def _product(
    dispatch: Dispatch, rows: int, N: int, K: int, times: int, *, adds: bool, gated: bool = False
) -> Iterator[Work]:
    matrix = _matrix(N, K, None if N == VOCAB else GROUP)
    x, weights = (
        Codes.of(rows, matrix),
        sum(t.nbytes for t in (matrix.qweight, matrix.scale, matrix.bias) if t is not None),
    )
    y: Tensor | Gate = _empty(rows, N)
    if gated:
        y = Gate(Codes.empty(rows, N // 2, GROUP, _META), Glu("silu"), N // 2)
    for launch in dispatch.product(x, matrix, y, N, None, adds=adds):
        if launch.name == "_parts_added":
            yield Work(launch, times, matrix.slices * rows * N * 4)
            continue
        moved = rows * N * 4 * (1 + adds) + rows * K
        is_tensor = launch.name == "_gemm"
        steps = -(-matrix.groups // matrix.slices)
        own = launch.constants["OWN"] if is_tensor else 1
        macs = rows * N * K if is_tensor else 0
        yield Work(launch, times, weights + moved, int8_macs=macs, rounds=steps * own)


def _attention(rows: int, depth: int) -> Iterator[Work]:
    dense = PageLayout(KV_HEADS, HEAD_DIM, "dense", "dense", torch.bfloat16)
    coded = PageLayout(KV_HEADS, HEAD_DIM, "int8", "int8", torch.bfloat16)
    is_step = rows == 1
    tables = TokenTables(_empty(rows, dtype=torch.int32), *(_empty(rows, dtype=torch.int64) for _ in range(3)))
    each = block_rows(HEADS // KV_HEADS, is_prefill=not is_step)
    tasks = -(-rows * HEADS // KV_HEADS // each)
    pages = -(-depth // PAGE_TOKENS)
    history = AttentionHistory(_empty(tasks, 4, dtype=torch.int32), _empty(1, pages, dtype=torch.int64))
    q, qkv = _empty(rows, HEADS, HEAD_DIM), _empty(rows, HEADS + 2 * KV_HEADS, HEAD_DIM)
    stored = rows * (HEADS + 2 * KV_HEADS) * HEAD_DIM * 8
    yield Work(rope.rope_store(qkv, q, tables, Rope(_empty(1, HEAD_DIM // 2)), dense, coded, 3), LAYERS, stored)
    parts = new_parts(pages if is_step else 1, rows, HEADS, HEAD_DIM, _META)
    out = Codes.empty(rows, HIDDEN, GROUP, _META)
    read = tasks * pages * coded.layer_bytes
    macs = 0 if is_step else rows * HEADS * depth / 2 * HEAD_DIM * 2
    attending, merging = attend(q, out, tables, history, parts, dense, coded, 3, scale=HEAD_DIM**-0.5, rows=each)
    yield Work(attending, LAYERS, read + parts.mixed.nbytes, bf16_macs=macs, rounds=0 if is_step else pages / 2)
    yield Work(merging, LAYERS, 2 * parts.mixed.nbytes)


def forward(chip: Chip, rows: int, depth: int) -> list[Work]:
    """Return the launches of a step of one token, or of a prompt's chunk."""
    dispatch, x, weight = Dispatch(chip.multiprocessors, gemv_rows=4), _empty(rows, HIDDEN), _empty(HIDDEN)
    codes = Codes.empty(rows, HIDDEN, GROUP, _META)
    norm = activations.to_codes(x, codes, HIDDEN, weight=weight, eps=1e-5)
    found = [Work(norm, 2 * LAYERS, rows * HIDDEN * 5)]
    qkv = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    for N, K, adds, gated in (
        (qkv, HIDDEN, False, False),
        (HIDDEN, HIDDEN, True, False),
        (2 * WIDE, HIDDEN, False, True),
        (HIDDEN, WIDE, True, False),
    ):
        found += _product(dispatch, rows, N, K, LAYERS, adds=adds, gated=gated)
    found += _attention(rows, depth)
    head = Codes.empty(1, HIDDEN, INT8_GROUP, _META, 8)
    found.append(Work(activations.to_codes(_empty(1, HIDDEN), head, HIDDEN, weight=weight, eps=1e-5), 1, HIDDEN * 5))
    found += _product(dispatch, 1, VOCAB, HIDDEN, 1, adds=False)
    table = _empty(VOCAB // TILE, HIDDEN // 4, TILE, 4, dtype=torch.int8)
    found.append(
        Work(
            embedding.embed(table, _empty(VOCAB // TILE, TILE), _empty(rows, dtype=torch.int64), x, 1.0),
            1,
            rows * HIDDEN * 5,
        )
    )
    if rows == 1:
        ids, logits, room = _empty(1, dtype=torch.int64), _empty(1, VOCAB), sample.SampleRoom.empty(1, VOCAB, _META)
        found += [
            Work(launch, 1, logits.nbytes) for launch in sample.sample(logits, ids, _empty(1), _empty(1), ids, room)
        ]
    return found


def loop_instructions(cubin: bytes) -> int:
    """Return the instructions of the loop that multiplies: of the innermost one with the most products."""
    best = (0, 0)
    for loop in loops_of(cubin):
        products = sum(bool(re.search(r"\b(IMMA|HMMA|IDP)\b", line)) for line in loop)
        best = max(best, (products, sum("/*" in line for line in loop)))
    return best[1]


def seconds(chip: Chip, work: Work, instructions: int) -> dict[str, float]:
    """Return the seconds of one launch by what it would wait for."""
    card = chip.card
    assert card.int8_tops is not None and card.bf16_tflops is not None
    warps = work.launch.num_warps
    for count in work.launch.grid:
        warps *= count
    return {
        "bytes": work.num_bytes / (BANDWIDTH_SHARE * card.memory_gbs * 1e9),
        "tensor cores": 2 * work.int8_macs / card.int8_tops / 1e12 + 2 * work.bf16_macs / card.bf16_tflops / 1e12,
        "instructions": instructions * work.rounds * warps / (ISSUE_SHARE * 4 * chip.multiprocessors * chip.ghz * 1e9),
    }


def estimate(chip: Chip, rows: int, depth: int, *, shows: bool) -> float:
    """Return the seconds of a forward; shows: print its launches."""
    total_s, node_s = 0.0, OVERLAPPED_NODE_S if chip.capability >= 90 else NODE_S
    for work in forward(chip, rows, depth):
        made = compiled_for(work.launch, chip.capability)
        instructions = loop_instructions(made.cubin) if work.rounds else 0
        if work.launch.constants.get("UNROLL", 1) > 1:
            instructions //= work.launch.constants["UNROLL"]
        times = seconds(chip, work, instructions)
        bound = max(times, key=lambda name: times[name])
        total_s += work.times * (times[bound] + node_s)
        if shows:
            print(
                f"  {work.times:3} x {work.launch.name:13} {made.registers:4} registers {made.shared_bytes:6} B shared"
                f" {work.num_bytes / 1e6:8.2f} MB {times[bound] * 1e6:8.1f} us, {bound}"
            )
    return total_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", action="store_true", help="print every launch as well")
    shows = parser.parse_args().launches
    if is_interpreted():
        parser.error("what is interpreted is not compiled: unset TRITON_INTERPRET")
    print(f"An 8B model in INT4 (groups of {GROUP}; head, keys and values in INT8): estimates, nothing measured.")
    print(
        f"{'':13} {'launches':>9} {'GB':>6} {'tok/s at ' + str(DEPTH):>12} {'prompt tok/s':>13} {'by dequantizing':>16}"
    )
    for chip in CHIPS:
        card, step = chip.card, forward(chip, 1, DEPTH)
        assert card.bf16_tflops is not None
        launches, num_bytes = sum(work.times for work in step), sum(work.times * work.num_bytes for work in step)
        step_s, chunk_s = (estimate(chip, rows, DEPTH, shows=shows) for rows in (1, CHUNK))
        weights = sum(N * K for N, K in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))) * LAYERS
        unpacked_s = (weights * 4.6) / (BANDWIDTH_SHARE * card.memory_gbs * 1e9) + 2 * weights * CHUNK / (
            card.bf16_tflops or 1.0
        ) / 1e12
        print(
            f"{card.name:13} {launches:9} {num_bytes / 1e9:6.2f} {1 / step_s:12.0f} {CHUNK / chunk_s:13.0f} "
            f"{CHUNK / unpacked_s:16.0f}"
        )


if __name__ == "__main__":
    main()
