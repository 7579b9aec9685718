"""The meaning of a weight's bytes. It knows nothing of where they rest: that is the tier's business."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from localllm.errors import FETCH_ANEW, CheckpointError, Fix
from localllm.quant.layouts import WeightLayout


class NotCompactError(CheckpointError):
    """A matrix whose exponents are spread too widely for bf12; its weights in bf16 are as good."""


class WeightFormat(WeightLayout, Protocol):
    """A stateless meaning for the tensors of one matrix [out_features, in_features], rows in dimension 0.

    The tensors may be padded beyond the matrix; whoever holds them knows its true size and says it.
    """

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """weight [N, K], any float dtype, finite. Returns tensors as `specs` says, on the weight's device."""

    def dequantize(self, tensors: dict[str, Tensor], out_features: int, in_features: int) -> Tensor:
        """[N, K] fp32 (Dense: its own dtype, BF12: bf16): what the tensors mean."""

    def rows(self, tensors: dict[str, Tensor], indices: Tensor, in_features: int) -> Tensor:
        """Some rows of the matrix, [len(indices), K]: what an embedding looks up. As `dequantize` gives them."""

    def linear(self, x: Tensor, tensors: dict[str, Tensor], out_features: int, bias: Tensor | None) -> Tensor:
        """y = x @ W.T + bias. x [T, K], bias [N]. Returns [T, N] of x's dtype."""


def require_finite(weight: Tensor, largest: float = float("inf")) -> None:
    """Raise CheckpointError if weight [N, K] holds a NaN, an infinity, or a magnitude above `largest`.

    Whoever knows the matrix's name puts it before `what`.
    """
    if not weight.numel():
        return
    low, high = (value.item() for value in torch.aminmax(weight))  # both NaN where there is one
    extent = max(-low, high)
    if extent <= largest and extent < float("inf"):
        return
    finite = weight.isfinite()
    if bool(finite.all()):
        raise CheckpointError(
            f"a weight is too large for this format: {extent:.6g}",
            why=f"magnitudes of up to {largest:g} can be stored",
            fix=Fix.flag("--weights", "int8"),  # its scale is fp32, which reaches as far as bf16
        )
    row, column = (~finite).nonzero()[0].tolist()
    raise CheckpointError(
        "a weight is not a finite number",
        why=f"{(~finite).sum().item()} of {weight.numel()} values, the first at row {row}, column {column}",
        fix=FETCH_ANEW,
    )
