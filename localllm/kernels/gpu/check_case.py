"""One kernel beside its reference: how far apart they are, and how far they may be."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.ready import WRONG
from localllm.kernels.sizes import Weights

EXACT = 2e-6  # of the norm: sums of whole numbers, and what fp32 loses of some hundred terms
ROUNDED = 5e-3  # where bf16 is multiplied
SUMMED = 2e-5  # tensor cores do not round the sums of floats, they cut them


class Case(NamedTuple):
    """error: of the norm of what is right; NaN where the kernel left something unwritten, None where this card does not
    take it. A model that needs such a one finds that out when it is loaded."""

    name: str
    error: float | None
    tolerance: float

    @property
    def is_right(self) -> bool:
        return self.error is None or self.error <= self.tolerance  # false of a NaN

    def line(self) -> str:
        if self.error is None:
            return f"left: {self.name}"
        state = "ok:" if self.is_right else WRONG
        return f"{state} {self.name}, error {self.error:.1e}, at most {self.tolerance:.0e}"


def error_of(found: Tensor, right: Tensor) -> float:
    """Return the error of the norm of what is right."""
    found, right = found.double().cpu(), right.double().cpu()
    return float((found - right).norm() / right.norm())


def poisoned(*shape: int, device: torch.device) -> Tensor:
    """Return fp32 of this shape in which a value that no kernel writes is found: NaN."""
    return torch.full(shape, torch.nan, device=device)


def codes_for(weights: Weights, rows: int, columns: int, device: torch.device) -> Codes:
    """Return a buffer for the codes that such a matrix is multiplied with."""
    length = weights.columns
    return Codes.empty(rows, -(-columns // length) * length, length, device, weights.bits)


def differing(found: Codes, right: Codes) -> float:
    """Return how many codes, scales and sums differ."""
    return sum(float((getattr(found, part) != getattr(right, part)).sum()) for part in ("q", "scale", "bias"))
