"""A token drawn from logits on a GPU: argmax(logits / temperature + Gumbel noise), the noise of `engine.sampler`.

The noise is a hash of (seed, position, token), so that a draw needs no state, and nothing that is on the host but 16
bytes a row. Three launches: the largest logit of each block, the best token of each block, the best of all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.kernels.gpu.launch import KernelLaunch, after_previous

BLOCK = 2048  # logits of a program
NOT_FINITE = -1  # instead of a token, where a logit is a NaN or an infinity


@dataclass(frozen=True)
class SampleRoom:
    """The buffers between the launches. peaks fp32, best fp64, winners int64: [rows, blocks of the vocabulary]."""

    peaks: Tensor
    best: Tensor
    winners: Tensor

    @classmethod
    def empty(cls, rows: int, vocab_size: int, device: torch.device) -> SampleRoom:
        shape = (rows, triton.cdiv(vocab_size, BLOCK))
        return cls(
            torch.empty(shape, device=device),
            torch.empty(shape, dtype=torch.float64, device=device),
            torch.empty(shape, dtype=torch.int64, device=device),
        )


@triton.jit(do_not_specialize=["vocab_size", "stride", "blocks"])
def _block_peaks(logits, peaks, vocab_size, stride, blocks, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    after_previous(OVERLAPS)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocab_size
    values = tl.load(logits + row * stride + token, mask=is_token, other=float("-inf"))
    not_a_number = tl.sum(tl.where(is_token, values * 0.0, 0.0), axis=0)  # 0 unless one of them is not finite
    tl.store(peaks + row * blocks + block, tl.max(values, axis=0) + not_a_number)


@triton.jit
def _gumbel(key, token):
    """Standard Gumbel noise, fp64: splitmix64 over the tokens, from a key of seed and position."""
    x = token.to(tl.uint64) * 0x9E3779B97F4A7C15 + key.to(tl.uint64, bitcast=True)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    uniform = ((x >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16  # 2^-53
    return -tl.log(-tl.log(uniform))


@triton.jit(do_not_specialize=["vocab_size", "stride", "blocks"])
def _block_winners(
    logits, peaks, keys, temperatures, thresholds, best, winners, vocab_size, stride, blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAPS)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token, all_blocks = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCKS)
    own_peaks = tl.load(peaks + row * blocks + all_blocks, mask=all_blocks < blocks, other=float("-inf"))
    peak = tl.max(own_peaks, axis=0)
    temperature = tl.load(temperatures + row)
    values = tl.load(logits + row * stride + token, mask=token < vocab_size, other=float("-inf"))
    if temperature > 0:
        scores = tl.div_rn(values - peak, temperature + tl.zeros_like(values))
        noisy = scores.to(tl.float64) + _gumbel(tl.load(keys + row), token)
        noisy = tl.where(scores < tl.load(thresholds + row), float("-inf"), noisy)
    else:
        noisy = values.to(tl.float64)
    noisy = tl.where(token < vocab_size, noisy, float("-inf"))
    highest = tl.max(noisy, axis=0)
    tl.store(best + row * blocks + block, highest)
    tl.store(winners + row * blocks + block, tl.min(tl.where(noisy == highest, token, 2147483647), axis=0).to(tl.int64))


@triton.jit(do_not_specialize=["blocks"])
def _winner(peaks, best, winners, tokens, blocks, BLOCKS: tl.constexpr, OVERLAPS: tl.constexpr):
    after_previous(OVERLAPS)
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    at, is_block = row * blocks + block, block < blocks
    values = tl.load(best + at, mask=is_block, other=float("-inf"))
    candidates = tl.load(winners + at, mask=is_block, other=0)
    wrong = tl.sum(tl.load(peaks + at, mask=is_block, other=0) * 0.0, axis=0)
    first = tl.min(tl.where(values == tl.max(values, axis=0), candidates, 2147483647), axis=0)
    tl.store(tokens + row, tl.where(wrong == 0, first, -1))


def sample(
    logits: Tensor, keys: Tensor, temperatures: Tensor, thresholds: Tensor, tokens: Tensor, room: SampleRoom
) -> list[KernelLaunch]:
    """logits fp32 [R, V] in rows of any stride. keys int64 [R]: `noise_key` of seed and position. temperatures
    fp32 [R]: 0 is greedy. thresholds fp32 [R]: log(min_p), -inf for none. tokens int64 [R]: what was drawn, the lowest
    of equals, or NOT_FINITE."""
    rows, vocab_size = logits.shape
    blocks = triton.cdiv(vocab_size, BLOCK)
    most = triton.next_power_of_2(blocks)
    shape = {"vocab_size": vocab_size, "stride": logits.stride(0), "blocks": blocks}
    return [
        KernelLaunch(_block_peaks, (rows, blocks), {"logits": logits, "peaks": room.peaks, **shape}, {"BLOCK": BLOCK}),
        KernelLaunch(
            _block_winners,
            (rows, blocks),
            {
                "logits": logits, "peaks": room.peaks, "keys": keys, "temperatures": temperatures,
                "thresholds": thresholds, "best": room.best, "winners": room.winners, **shape,
            },
            {"BLOCK": BLOCK, "BLOCKS": most},
        ),
        KernelLaunch(
            _winner,
            (rows,),
            {"peaks": room.peaks, "best": room.best, "winners": room.winners, "tokens": tokens, "blocks": blocks},
            {"BLOCKS": most},
            num_warps=1,
        ),
    ]  # fmt: skip
