"""A short convolution between two gates by torch's operators: the reference, and what computes it where no kernel does.

LFM2 (arXiv:2511.23404) has it in place of most attention: of a token's B, C and x, B * x passes a causal convolution,
each channel by itself, and what comes out is multiplied by C. A sequence's state is what the convolution still sees:
the last rows of B * x. They are kept far enough back that rejected drafts are written over, so that nothing is ever
computed again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.kernels.layer_state import StateRows
from localllm.kernels.state_shapes import STEP_ROWS, ConvShape


@dataclass(frozen=True, eq=False)
class ConvWeights:
    """fp32: taps [conv_width, channels], the last one for the token itself; bias [channels]."""

    taps: Tensor
    bias: Tensor | None = None


def convolve(rows: StateRows[ConvShape], weights: ConvWeights) -> Tensor:
    """Return the convolution, fp32 [T, channels], of a sequence's tokens, and bring its state up to date.

    rows.raw: B * x.
    """
    state, shape, count = rows.state, rows.state.shape, len(rows.raw)
    before, kept = shape.conv_width - 1, shape.kept_rows
    raw = torch.cat((state.rows(rows.past - kept, rows.past), rows.raw))
    convolved = torch.zeros_like(rows.raw)
    for tap in range(shape.conv_width):
        begin = kept - before + tap
        convolved += raw[begin : begin + count] * weights.taps[tap]
    if weights.bias is not None:
        convolved += weights.bias
    for position, snapshot in rows.snapshots.items():
        end = position - rows.past + kept
        if kept - STEP_ROWS <= end <= len(raw):  # an older one was written when its tokens were new
            state.write_snapshot(snapshot, state.matrices, raw[end - before : end])
    state.keep_rows(rows.past, rows.raw)
    return convolved
