"""4-bit weights in groups along K, each with a scale and a bias: the format of the int4 kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels import cpu_calibrate, tile16
from localllm.kernels.packed_linear import packed_linear
from localllm.kernels.packed_matrix import packed_matrix
from localllm.kernels.tile16 import TILE, WORD
from localllm.quant import hqq
from localllm.quant.layouts import INT4_SLAB, Calibration, Int4Layout
from localllm.quant.weight_format import require_finite

_FITS: dict[Calibration, Callable[[Tensor], hqq.Affine]] = {"hqq": hqq.half_quadratic, "rtn": hqq.round_to_nearest}
_STARTS: dict[Calibration, tuple[tuple[float, float], ...]] = {"hqq": hqq.STARTS, "rtn": ()}
# Calibrated at once: a few fp32 copies in the cores' L2 for torch's operations, enough for each to be worth its launch
# on a GPU; the native kernel copies nothing.
_SLAB_WEIGHTS = {"torch": 1 << 17, "cuda": 1 << 22, "native": INT4_SLAB}


@dataclass(frozen=True)
class Int4(Int4Layout):
    """A weight is met within s/2 + |b|/2048, s and b being its group's, unless the calibration clips it."""

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """Raises CheckpointError where a weight is not finite, or larger than the fp16 of a bias: 65504."""
        require_finite(weight, hqq.FP16_MAX)
        K = weight.shape[1]
        whole = K - K % self.group
        specs = self.specs(*weight.shape)
        tensors = {name: torch.empty(s.shape, dtype=s.torch_dtype, device=weight.device) for name, s in specs.items()}
        native = weight.device.type == "cpu" and cpu_calibrate.supports(self.group)
        slab_weights = _SLAB_WEIGHTS["native" if native else "cuda" if weight.is_cuda else "torch"]
        step = max(1, slab_weights // (TILE * K))
        for first in range(0, len(tensors["qweight"]), step):
            slab = {name: tensor[first : first + step] for name, tensor in tensors.items()}
            rows = weight[first * TILE : (first + step) * TILE].float()
            rows = (functional.pad(rows, (0, 0, 0, -len(rows) % TILE)) if len(rows) % TILE else rows).contiguous()
            if native:
                cpu_calibrate.calibrate(rows, **slab, group=self.group, starts=_STARTS[self.calibration])
            elif whole:
                self._fill(rows[:, :whole], slab, 0)
            if whole < K:  # a group that K ends within is calibrated as the smaller group that it is
                self._fill(rows[:, whole:], slab, whole // self.group)
        return tensors

    def _fill(self, rows: Tensor, tensors: dict[str, Tensor], first_group: int) -> None:
        """rows fp32 [R, C], C a multiple of the group or less than one: their part of the tensors."""
        R, C = rows.shape
        columns = rows.reshape(-1, min(C, self.group)).T.contiguous()
        scale, bias = _FITS[self.calibration](columns)
        codes = hqq.encode(columns, scale, bias).T.reshape(R, C).to(torch.uint8)
        packed = tile16.pack(functional.pad(codes, (0, -C % self.group)))
        groups = slice(first_group, first_group + scale.numel() // R)
        first_word = first_group * self.group // WORD
        tensors["qweight"][:, first_word : first_word + packed.shape[1]] = packed
        tensors["scale"][:, groups] = tile16.pack_groups(scale.view(R, -1))
        tensors["bias"][:, groups] = tile16.pack_groups(bias.view(R, -1))

    def dequantize(self, tensors: dict[str, Tensor], out_features: int, in_features: int) -> Tensor:
        return packed_matrix(tensors).dequantize(out_features, in_features, torch.float32)

    def rows(self, tensors: dict[str, Tensor], indices: Tensor, in_features: int) -> Tensor:
        return packed_matrix(tensors).rows(indices, in_features)

    def linear(self, x: Tensor, tensors: dict[str, Tensor], out_features: int, bias: Tensor | None) -> Tensor:
        y = packed_linear(x, packed_matrix(tensors), out_features)
        return y if bias is None else y + bias
