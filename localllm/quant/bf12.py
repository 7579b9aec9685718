"""bf16 without loss in three quarters of its bytes: see kernels/bf12.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.errors import Fix
from localllm.kernels import bf12, cpu_bf12
from localllm.kernels.cpu_gemv import dense_linear
from localllm.kernels.sizes import TILE, UNIT, units
from localllm.quant.layouts import BF12_SLAB, BF12Layout
from localllm.quant.weight_format import NotCompactError

SLAB_WEIGHTS = 1 << 19  # unpacked for one matrix product: 1 MiB, which the second cache keeps
_LOOKED_UP = 16  # rows at once: by plain operators they take 40 bytes a column


@dataclass(frozen=True)
class BF12(BF12Layout):
    """Every product has the bits that bf16 has."""

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """Pack the weight in bf16. Raises NotCompactError."""
        N, K = weight.shape
        specs = self.specs(N, K)
        tensors = {name: torch.empty(s.shape, dtype=s.torch_dtype, device=weight.device) for name, s in specs.items()}
        step = max(1, BF12_SLAB // (TILE * max(1, units(K) * UNIT)))
        for first in range(0, specs["row"].shape[0], step):
            slab = weight[first * TILE : (first + step) * TILE].to(torch.bfloat16)
            try:
                parts = bf12.pack(slab)
            except bf12.ManyExceptionsError as error:
                raise NotCompactError(
                    "the exponents of its weights do not fit into 4 bits",
                    why=str(error),
                    fix=Fix.command("run", "MODEL", "--weights", "bf16"),
                ) from None
            for tensor, part in zip(tensors.values(), parts, strict=True):
                tensor[first : first + step] = part
        return tensors

    def dequantize(self, tensors: dict[str, Tensor], out_features: int, in_features: int) -> Tensor:
        return _unpacked(tensors, slice(None), in_features)[:out_features]

    def rows(self, tensors: dict[str, Tensor], indices: Tensor, in_features: int) -> Tensor:
        found = []
        for some in torch.split(indices, _LOOKED_UP):
            tile, place = some // TILE, some % TILE
            packed, row = (tensors[name][tile, place].unsqueeze(1) for name in ("packed", "row"))
            found.append(bf12.unpack(packed, row, tensors["exceptions"][tile], in_features))
        return torch.cat(found)

    def linear(self, x: Tensor, tensors: dict[str, Tensor], out_features: int, bias: Tensor | None) -> Tensor:
        T, K = x.shape
        if x.dtype is torch.bfloat16 and x.device.type == "cpu" and cpu_bf12.supports(T, out_features, K):
            y = cpu_bf12.gemv(x.contiguous(), tensors["packed"], tensors["row"], tensors["exceptions"], out_features)
            return y if bias is None else y + bias
        y = torch.empty((T, out_features), dtype=x.dtype, device=x.device)
        step = max(1, SLAB_WEIGHTS // (TILE * max(1, K)))
        for first in range(0, len(tensors["row"]), step):
            rows = slice(first * TILE, min((first + step) * TILE, out_features))
            slab = _unpacked(tensors, slice(first, first + step), K)[: rows.stop - rows.start].to(x.dtype)
            y[:, rows] = dense_linear(x, slab, None if bias is None else bias[rows])
        return y


def _unpacked(tensors: dict[str, Tensor], tiles: slice, in_features: int) -> Tensor:
    """bf16 [rows of these tiles, K]."""
    packed, row, exceptions = (tensors[name][tiles] for name in ("packed", "row", "exceptions"))
    if packed.device.type == "cpu" and cpu_bf12.is_available():
        return cpu_bf12.unpack(packed, row, exceptions)[:, :in_features]
    return bf12.unpack(packed, row, exceptions, in_features)
