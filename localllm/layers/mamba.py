"""The body of Mamba: project, make steps, B and C of what a convolution sees, scan, project back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels.cpu_jit import best_isa
from localllm.kernels.cpu_scan import ScanRoom
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.selective_scan import ScanWeights, convolved, scan
from localllm.layers.adapted import adapted
from localllm.layers.batch import Batch
from localllm.layers.body_parts import BodyParts
from localllm.layers.config import MambaConfig
from localllm.layers.linear import Linear
from localllm.layers.native_states import is_native, place_of, tables_of
from localllm.layers.norm import RMSNorm
from localllm.layers.segment import by_sequence
from localllm.layers.state_rows import state_rows


@dataclass(eq=False)
class Mamba:
    """layer: its number among those with states. in_proj: what the convolution sees, and gates of what comes out.
    x_proj: B, C and what makes the steps. norms: of those three, or none."""

    config: MambaConfig
    layer: int
    in_proj: Linear
    x_proj: Linear
    steps_proj: Linear
    out_proj: Linear
    weights: ScanWeights
    norms: tuple[RMSNorm, ...]

    @classmethod
    def loaded(cls, parts: BodyParts, config: MambaConfig, number: int) -> Mamba:
        """Return the body that a block's parts make. number: of the layer, among those of its kind."""
        tensors, shape = parts.tensors, config.shape
        bias, a_log = tensors.get("conv_bias"), tensors["a_log"].view(shape.features, shape.state_size)
        weights = ScanWeights(
            conv=tensors["conv"].view(shape.conv_width, shape.features),
            conv_bias=tensors["conv"].new_zeros(shape.features) if bias is None else bias,
            dt_bias=tensors["dt_bias"],
            d=tensors["d"],
            rates=-a_log.T.double().exp().float().contiguous(),
        )
        inside, low, steps, outside = map(parts.linear, ("in_proj", "x_proj", "steps_proj", "out_proj"))
        return cls(config, number, inside, low, steps, outside, weights, _norms(parts, config))

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices that are not read in fp32."""
        return self.in_proj, self.x_proj, self.steps_proj, self.out_proj

    @property
    def exact_linears(self) -> tuple[Linear, ...]:
        return ()

    @property
    def device(self) -> torch.device:
        return self.in_proj.device

    @property
    def low_parts(self) -> list[int]:
        """Features of what `x_proj` makes: B, C, and what makes the steps."""
        shape = self.config.shape
        return [shape.state_size, shape.state_size, shape.step_rank]

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        shape, segments = self.config.shape, by_sequence(batch.segments)
        wide = adapted(self.in_proj, x, batch).float()
        if is_native(shape, x):
            return adapted(self.out_proj, self._native(wide.contiguous(), x.dtype, batch).to(x.dtype), batch)
        raw, z = wide.chunk(2, dim=-1)
        parts = (state_rows(each, shape, self.layer, raw[each.begin : each.end]) for each in segments)
        b, c, steps = self._low(torch.cat([convolved(rows, self.weights) for rows in parts]).to(x.dtype), batch)
        raw = torch.cat((raw, adapted(self.steps_proj, steps, batch).float(), b.float()), dim=-1)
        mixed = torch.cat(
            [
                scan(state_rows(each, shape, self.layer, raw[own]), c[own].float(), self.weights)
                for each, own in ((each, slice(each.begin, each.end)) for each in segments)
            ]
        )
        mixed = (mixed.double() * functional.silu(z.double())).float()
        return adapted(self.out_proj, mixed.to(x.dtype), batch)

    def _native(self, wide: Tensor, dtype: torch.dtype, batch: Batch) -> Tensor:
        """wide fp32 [T, in_features] -> fp32 [T, features], by CPU kernels. dtype: of activations."""
        shape, place, isa = self.config.shape, place_of(batch.segments, self.layer), best_isa()
        T, own, stride = len(wide), ScanRoom(shape, tables_of(batch.segments)), wide.shape[1]
        Tape([own.convolution(isa, self.weights, place, wide, stride)]).run()
        b, c, steps = self._low(own.x[:T].to(dtype), batch)
        own.low[:T, : 2 * shape.state_size] = torch.cat((b, c), dim=-1)
        own.steps[:T] = adapted(self.steps_proj, steps, batch)
        mixed = torch.empty(T, shape.features)
        Tape(own.scan(isa, self.weights, place, wide, stride, mixed)).run()
        return mixed

    def _low(self, x: Tensor, batch: Batch) -> list[Tensor]:
        """x [T, features] -> B, C, and what makes the steps, normed where they are."""
        parts = torch.split(adapted(self.x_proj, x, batch), self.low_parts, dim=-1)
        return [norm(part) for norm, part in zip(self.norms, parts, strict=True)] if self.norms else list(parts)


def _norms(parts: BodyParts, config: MambaConfig) -> tuple[RMSNorm, ...]:
    if config.norm_eps is None:
        return ()
    shape, ones = config.shape, parts.tensors["d"].new_ones
    sizes = {"b_norm": shape.state_size, "c_norm": shape.state_size, "steps_norm": shape.step_rank}
    return tuple(RMSNorm(parts.tensors.get(name, ones(size)), config.norm_eps) for name, size in sizes.items())
