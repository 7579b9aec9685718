"""Scale and bias of 4-bit groups from the weights alone: no text is read, nothing is trained.

Half-quadratic quantization (https://mobiusml.github.io/hqq_blog) alternates between the best codes for a scale and bias
and the best bias for the codes. Its published form keeps the scale of the extremes, and its l_p shrinkage takes every
error below 0.17 for zero, which on the weights of language models is every error: a least-squares fit of the bias is
left. Here scale and bias are both fitted, from several starts around the best found so far, and codes are the nearest
for the fp16 values that are stored. Squared error on normal weights, round-to-nearest = 1: published 0.89, 0.92, 0.94
in groups of 32, 64, 128; here 0.78, 0.82, 0.83.

The same weights give the same bytes for any number of threads, any slab and any device, and as `cpu_calibrate` gives:
all is elementwise arithmetic that IEEE 754 defines to the last bit, the order of sums included.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

LEVELS = 15  # codes are 0..15
FP16_MAX = 65504.0
SUM_LANES = 8

# Where fits start, in the order of their gain over the tiny model's weights and normal, Laplace and Student-t ones: the
# best step so far grows by the first part, the middle of its range moves by the second part of a step. (0, 0) is the
# plain alternation. After these 12 the squared error is within 1.5 % of what 450 starts find.
STARTS = (
    (-0.04, -0.2),
    (-0.02, 0.2),
    (0.0, -0.1),
    (0.0, 0.1),
    (0.0, 0.0),
    (0.08, 0.5),
    (-0.02, 0.0),
    (0.02, 0.0),
    (0.08, -0.3),
    (0.0, 0.0),
    (0.04, 0.2),
    (0.02, -0.1),
)

Affine = tuple[Tensor, Tensor]  # scale and bias fp16 [R]


def round_to_nearest(groups: Tensor) -> Affine:
    """The least and the greatest weight of a group become codes 0 and 15.

    groups fp32 [G, R]: a group is a column; magnitudes up to FP16_MAX.
    """
    low, high = groups.amin(dim=0), groups.amax(dim=0)
    return ((high - low) * (1 / LEVELS)).half(), low.half()  # not `/`, which CUDA rounds otherwise than a CPU


def half_quadratic(groups: Tensor) -> Affine:
    """Quantize from where `round_to_nearest` starts: with less squared error in a group, or the same scale and bias."""
    nearest = round_to_nearest(groups)
    centre = _sum(groups.clone()) * (1 / len(groups))
    centred = groups - centre
    scratch = torch.empty_like(groups)
    codes = encode(groups, *nearest)
    scale, bias, explained = _fit(codes, centred, scratch)
    for growth, shift in STARTS:
        step = scale * (1 + growth)
        start = bias + (scale - step) * (LEVELS / 2) + scale * shift
        inverse = 1 / step
        torch.mul(centred, inverse, out=codes).sub_(start * inverse).round_().clamp_(0, LEVELS)
        found = _fit(codes, centred, scratch)
        better = found[2] > explained  # false for a NaN: weights that are all alike have no scale
        scale, bias, explained = (
            torch.where(better, new, old) for new, old in zip(found, (scale, bias, explained), strict=True)
        )
    fitted = scale.half(), (bias + centre).half()
    scale, bias, _ = _fit(encode(groups, *fitted), centred, scratch)
    refitted = scale.half(), (bias + centre).half()
    return _better(groups, _better(groups, nearest, fitted), refitted)


def encode(groups: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """The nearest codes for scale and bias as they are stored: fp32 [G, R], 0 where the scale is zero."""
    step = torch.where(scale == 0, torch.inf, scale.float())
    return (groups - bias.float()).div_(step).round_().clamp_(0, LEVELS)


def _fit(codes: Tensor, centred: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The least-squares scale and bias for codes, and the squares that they explain: fp32 [R] each."""
    mean = codes.sum(dim=0) * (1 / len(codes))  # sums of codes and of their squares are exact in any order
    squares = torch.mul(codes, codes, out=scratch).sum(dim=0)
    covariance = _sum(torch.mul(codes, centred, out=scratch))
    scale = covariance / (squares - mean * mean * len(codes))
    return scale, -scale * mean, covariance * scale


def _better(groups: Tensor, first: Affine, second: Affine) -> Affine:
    """Group by group, the one of less squared error; the first where they are equal or the second has overflowed."""
    chosen = _squared_error(groups, *second) < _squared_error(groups, *first)
    scale, bias = (torch.where(chosen, mine, other) for mine, other in zip(second, first, strict=True))
    return scale, bias


def _squared_error(groups: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    met = encode(groups, scale, bias).mul_(scale.float()).add_(bias.float())
    return _sum(met.sub_(groups).square_())


def _sum(x: Tensor) -> Tensor:
    """Over dimension 0, overwriting x, always in one order: torch.sum's depends on how many columns there are."""
    x = functional.pad(x, (0, 0, 0, -len(x) % SUM_LANES)) if len(x) % SUM_LANES else x
    total = x[:SUM_LANES]
    for first in range(SUM_LANES, len(x), SUM_LANES):
        total += x[first : first + SUM_LANES]
    for half in (4, 2, 1):
        total[:half] += total[half : 2 * half]
    return total[0]
