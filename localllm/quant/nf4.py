"""nf4: bitsandbytes' 4-bit normal floats, in blocks of 64 along the flattened matrix, by its own operators.

bitsandbytes is imported when the first matrix is quantized or used. Its `gemv_4bit` is never called: on the CPU it
returns wrong numbers without an error (0.50.2).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from localllm.errors import UsageError
from localllm.kernels.cpu_gemv import dense_linear
from localllm.quant.layouts import NF4_BLOCK, NF4_SLAB, NF4Layout, whole_blocks
from localllm.quant.weight_format import require_finite

BLOCK = NF4_BLOCK
SLAB_WEIGHTS = NF4_SLAB  # dequantized for one matrix product, too: 8 MiB of bf16


class MissingBitsandbytesError(UsageError):
    """nf4 was asked for where bitsandbytes cannot be imported."""


@dataclass(frozen=True)
class NF4(NF4Layout):
    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """Raises CheckpointError where the weight is not finite, MissingBitsandbytesError."""
        require_finite(weight)
        N, K = weight.shape
        tensors = {
            name: torch.empty(spec.shape, dtype=spec.torch_dtype, device=weight.device)
            for name, spec in self.specs(N, K).items()
        }
        step = whole_blocks(K, SLAB_WEIGHTS)
        for first in range(0, N, step):
            slab = weight[first : first + step].float().contiguous()
            packed, state = _bitsandbytes().quantize_4bit(slab, blocksize=BLOCK, quant_type="nf4")
            begin = first * K
            tensors["qweight"][begin // 2 :][: packed.numel()] = packed.view(-1)
            tensors["absmax"][begin // BLOCK :][: state.absmax.numel()] = state.absmax
        return tensors

    def dequantize(self, tensors: dict[str, Tensor], out_features: int, in_features: int) -> Tensor:
        return _dequantize(tensors, 0, out_features * in_features, torch.float32).view(out_features, in_features)

    def rows(self, tensors: dict[str, Tensor], indices: Tensor, in_features: int) -> Tensor:
        """Gathered code by code: a row need not begin where a block or a byte does."""
        position = indices.unsqueeze(1) * in_features + torch.arange(in_features, device=indices.device)  # [R, K]
        byte = tensors["qweight"][position // 2]
        code = torch.where(position % 2 == 0, byte >> 4, byte & 0x0F)
        values: Tensor = _bitsandbytes().get_4bit_type("nf4", device=byte.device)
        return values[code.long()] * tensors["absmax"][position // BLOCK]

    def linear(self, x: Tensor, tensors: dict[str, Tensor], out_features: int, bias: Tensor | None) -> Tensor:
        T, K = x.shape
        y = torch.empty((T, out_features), dtype=x.dtype, device=x.device)
        # In fp32 a quarter is four times as fast for one row, and leaves 60 MiB in the heap where a whole one left 114.
        step = whole_blocks(K, SLAB_WEIGHTS // 4 if x.dtype is torch.float32 else SLAB_WEIGHTS)
        for first in range(0, out_features, step):
            N = min(step, out_features - first)
            weight = _dequantize(tensors, first * K, N * K, x.dtype).view(N, K)
            y[:, first : first + N] = dense_linear(x, weight)
        return y if bias is None else y + bias


def _dequantize(tensors: dict[str, Tensor], begin: int, count: int, dtype: torch.dtype) -> Tensor:
    """`count` weights from `begin`, a multiple of BLOCK: [count] of dtype."""
    qweight = tensors["qweight"][begin // 2 : -(-(begin + count) // 2)]
    absmax = tensors["absmax"][begin // BLOCK : -(-(begin + count) // BLOCK)]
    # In whole blocks: bitsandbytes compiles a kernel of its own for odd shapes, and gives each row one thread.
    blocks = len(absmax)
    padded = torch.nn.functional.pad(qweight, (0, blocks * BLOCK // 2 - len(qweight)))
    bnb = _bitsandbytes()
    state = bnb.QuantState(absmax, shape=(blocks, BLOCK), dtype=dtype, blocksize=BLOCK, quant_type="nf4")
    weights: Tensor = bnb.dequantize_4bit(padded.unsqueeze(1), state)
    return weights.view(-1)[:count]


def _bitsandbytes() -> Any:
    try:
        with _alone():
            from bitsandbytes import functional
    except (ImportError, OSError) as error:
        raise MissingBitsandbytesError(
            "nf4 weights need bitsandbytes",
            why=f"it cannot be imported here: {error}",
            fix="pip install 'bitsandbytes>=0.49,<0.51' 'torch>=2.11,<2.14'",
        ) from error
    return functional


@contextmanager
def _alone() -> Iterator[None]:
    """Import bitsandbytes without its wish for the package `kernels`, which would fetch code from the hub for the one
    operator that is never called, and without the warning that it is missing."""
    hidden = "kernels" not in sys.modules
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    if hidden:
        sys.modules["kernels"] = None  # type: ignore[assignment]  # Python's own way to make an import fail
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        if hidden:
            del sys.modules["kernels"]
