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
from localllm.kernels.state_shapes import ConvShape


@dataclass(frozen=True, eq=False)
class ConvWeights:
    """fp32: taps [conv_width, channels], the last one for the token itself; bias [channels]."""

    taps: Tensor
    bias: Tensor | None = None


def convolve(rows: StateRows[ConvShape], weights: ConvWeights) -> Tensor:
    """Return the convolution, fp32 [T, channels], of a sequence's tokens, and bring its state up to date.

    rows.raw: B * x.
    """
    raw = torch.cat((rows.state.rows(rows.past - len(weights.taps) + 1, rows.past), rows.raw))
    convolved = torch.zeros_like(rows.raw)
    for n, tap in enumerate(weights.taps):
        convolved += raw[n : n + len(convolved)] * tap
    if weights.bias is not None:
        convolved += weights.bias
    rows.keep()
    return convolved
