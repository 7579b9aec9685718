"""Codes as other programs' files bring them, kept as they are: the formats of `CodedLayout`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from localllm.errors import CheckpointError, Fix
from localllm.kernels import int8, tile16
from localllm.kernels.packed_linear import packed_linear
from localllm.kernels.packed_matrix import packed_matrix
from localllm.kernels.sizes import TILE, Weights
from localllm.quant.layouts import INT8_SLAB, CodedLayout, WeightLayout
from localllm.quant.weight_format import require_finite

FP16_MAX = 65504.0


@dataclass(frozen=True)
class CodedMatrix:
    """A matrix [N, K] in groups of G columns: w = scale * value(q) + bias, each product and sum in fp32.

    q: uint8 [N, K] of 0..15, or int8 [N, K]. Their values are those of the format's table, else they themselves.
    scale: fp32 [N, K/G]. bias: likewise, or None.
    """

    q: Tensor
    scale: Tensor
    bias: Tensor | None = None

    def dequantize(self, table: Sequence[float] | None) -> Tensor:
        """Return the weights, fp32 [N, K]. table: the values of the codes; None where they are their own."""
        if table is None:
            values = self.q.float()
        else:  # indexing with brackets would widen the codes to 64 bits
            levels = torch.tensor(table, dtype=torch.float32, device=self.q.device)
            values = levels.index_select(0, self.q.flatten().int()).view(self.q.shape)
        groups = values.view(*self.scale.shape, -1).mul_(self.scale.unsqueeze(2))
        if self.bias is not None:
            groups.add_(self.bias.unsqueeze(2))
        return values

    def rows(self, order: Tensor) -> CodedMatrix:
        """Return these rows, in this order."""
        return CodedMatrix(self.q[order], self.scale[order], None if self.bias is None else self.bias[order])

    def times(self, factor: float | Tensor) -> CodedMatrix:
        """Return the codes of the matrix multiplied by a number, or each row by its own, [N, 1]."""
        return replace(self, scale=self.scale * factor, bias=None if self.bias is None else self.bias * factor)


def joined(pieces: Sequence[CodedMatrix]) -> CodedMatrix:
    """Return the codes of matrices one below the other."""
    biases = [piece.bias for piece in pieces if piece.bias is not None]
    q, scale = torch.cat([piece.q for piece in pieces]), torch.cat([piece.scale for piece in pieces])
    return CodedMatrix(q, scale, torch.cat(biases) if biases else None)


def pack_codes(layout: WeightLayout, codes: CodedMatrix) -> dict[str, Tensor]:
    """Return a matrix's tensors as `layout.specs` says. Scales and biases are rounded to fp16: by 2**-11 of themselves.

    Raises CheckpointError where one is not finite, or too large for fp16.
    """
    weights = layout.weights
    assert weights is not None and weights.group is not None
    rows = -len(codes.q) % TILE
    tensors = {"qweight": _tiled(codes.q, weights, rows)}
    for name, values in (("scale", codes.scale), ("bias", codes.bias)):
        if values is not None:
            require_fp16(values, name)
            tensors[name] = tile16.pack_groups(functional.pad(values, (0, 0, 0, rows)).half())
    return tensors


def _tiled(q: Tensor, weights: Weights, rows: int) -> Tensor:
    """q [N, K], and so many rows of padding, as `qweight`."""
    columns = -q.shape[1] % weights.columns
    padded = functional.pad(q, (0, columns, 0, rows)) if rows or columns else q.contiguous()
    return int8.pack(padded) if weights.bits == 8 else tile16.pack(padded)


def require_fp16(values: Tensor, name: str) -> None:
    """Raise CheckpointError where scales or biases are not finite, or too large for fp16. name: which they are."""
    low, high = (value.item() for value in torch.aminmax(values))
    if max(-low, high) <= FP16_MAX:
        return
    is_finite = bool(values.isfinite().all())
    raise CheckpointError(
        f"a {name} of its groups is " + (f"too large: {max(-low, high):.6g}" if is_finite else "not a finite number"),
        why=f"values of up to {FP16_MAX:g} can be kept",
        fix=Fix.flag("--weights", "int8"),
    )


@dataclass(frozen=True)
class Coded(CodedLayout):
    """|w - dequantized| is what rounding scales to fp16 costs, where codes are kept; else half a step of the table."""

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the nearest codes: of what a file keeps unquantized beside codes of this format.

        Raises CheckpointError where the weight is not finite.
        """
        require_finite(weight)
        N, K = weight.shape
        specs = self.specs(N, K)
        tensors = {name: torch.zeros(s.shape, dtype=s.torch_dtype, device=weight.device) for name, s in specs.items()}
        step = max(1, INT8_SLAB // max(1, TILE * K))
        for first in range(0, len(tensors["qweight"]), step):
            rows = weight[first * TILE : (first + step) * TILE].float()
            for name, tensor in pack_codes(self, self._nearest(rows)).items():
                tensors[name][first : first + step] = tensor
        return tensors

    def _nearest(self, rows: Tensor) -> CodedMatrix:
        """rows fp32 [N, K]."""
        N, K = rows.shape
        groups = functional.pad(rows, (0, -K % self.group)).view(N, -1, self.group)
        table = None if self.table is None else torch.tensor(self.table, dtype=torch.float32, device=rows.device)
        largest = 127.0 if table is None else float(table.abs().max())
        # As it is stored, so that codes are nearest to what they are multiplied with.
        scale = (groups.abs().amax(dim=2) / largest).half().float()
        position = groups / torch.where(scale > 0, scale, 1).unsqueeze(2)
        if table is None:
            q = position.round_().clamp_(-127, 127).to(torch.int8)
        else:
            values, order = table.sort()
            above = torch.bucketize(position, (values[1:] + values[:-1]) / 2)
            q = order[above].to(torch.uint8)
        return CodedMatrix(q.view(N, -1)[:, :K], scale, torch.zeros_like(scale) if self.has_bias else None)

    def dequantize(self, tensors: dict[str, Tensor], out_features: int, in_features: int) -> Tensor:
        return packed_matrix(tensors, self.table).dequantize(out_features, in_features, torch.float32)

    def rows(self, tensors: dict[str, Tensor], indices: Tensor, in_features: int) -> Tensor:
        return packed_matrix(tensors, self.table).rows(indices, in_features)

    def linear(self, x: Tensor, tensors: dict[str, Tensor], out_features: int, bias: Tensor | None) -> Tensor:
        y = packed_linear(x, packed_matrix(tensors, self.table), out_features)
        return y if bias is None else y + bias
