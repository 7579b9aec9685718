"""A weight that no format can hold is refused, before anything is made of it."""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.errors import FETCH_ANEW, CheckpointError, Fix


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
