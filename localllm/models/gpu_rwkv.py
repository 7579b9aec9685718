"""The blocks of RWKV-7 on a GPU by fused kernels, with a residual in fp32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localllm.kernels.gpu.launch import run_all
from localllm.kernels.gpu.layer_norm import layer_norm
from localllm.kernels.gpu.rwkv import Projected, mix_time
from localllm.kernels.gpu.shift import shift
from localllm.kernels.sizes import Glu
from localllm.kernels.state_shapes import RWKV7_MIXED
from localllm.layers.gpu_block import GpuForward, adapted_product, room_for
from localllm.layers.native_states import place_of
from localllm.layers.norm import LayerNorm, Norm, RMSNorm
from localllm.layers.rwkv7 import LowRankPair, Rwkv7ChannelMix, Rwkv7TimeMix
from localllm.models.decoder import Block
from localllm.models.first_values import makes_first_values


def run_rwkv7(block: Block, blocks: Sequence[Block], x: Tensor, forward: GpuForward) -> None:
    """x fp32 [M, hidden] += body(norm_in(x)); the first block's x is normed before. blocks: all that are computed."""
    body = block.body
    if block.norm_embedding is not None:
        _normed(block.norm_embedding, x, x)
    y = _normed(block.norm_in, x, torch.empty_like(x))
    if isinstance(body, Rwkv7TimeMix):
        _mix_time(body, y, x, forward, is_first=makes_first_values(blocks, body))
    else:
        assert isinstance(body, Rwkv7ChannelMix), "`is_ours` said so"
        (mixed,) = _shifted(body, y, body.mix[None], forward, keeps=True)
        inner = adapted_product(body.key, mixed, forward)
        adapted_product(body.value, inner, forward, glu=Glu("relu2", has_gate=False), into=x)


def _normed(norm: Norm | None, x: Tensor, y: Tensor) -> Tensor:
    """x fp32 [M, hidden] -> y, which may be the same."""
    assert isinstance(norm, LayerNorm), "as the family has it"
    layer_norm(x, y, norm.weight, norm.bias, norm.eps).run()
    return y


def before_product(norm: Norm, x: Tensor) -> tuple[Tensor, int, RMSNorm | None]:
    """Return x fp32 [M, hidden], its features, and the norm that a product begins with. One with a mean is computed
    here."""
    if isinstance(norm, LayerNorm):
        return _normed(norm, x, torch.empty_like(x)), x.shape[1], None
    return x, x.shape[1], norm


def _shifted(
    body: Rwkv7TimeMix | Rwkv7ChannelMix, x: Tensor, mixes: Tensor, forward: GpuForward, *, keeps: bool
) -> Tensor:
    """x fp32 [M, features], mixes [N, features] -> [N, M, features]"""
    y = torch.empty((len(mixes), *x.shape), device=x.device)
    place = place_of(forward.batch.segments, body.layer)
    shift(x, mixes, y, forward.tables.states, body.config.shape, place, keeps=keeps).run()
    return y


def _mix_time(body: Rwkv7TimeMix, x: Tensor, into: Tensor, forward: GpuForward, *, is_first: bool) -> None:
    """x fp32 [M, features], normed; what comes out is added to `into`."""
    shape, place = body.config.shape, place_of(forward.batch.segments, body.layer)
    inputs = dict(zip(RWKV7_MIXED, _shifted(body, x, body.weights.mixes, forward, keeps=False), strict=True))
    r, k, v = (
        adapted_product(linear, inputs[name], forward).float()
        for name, linear in (("r", body.r_proj), ("k", body.k_proj), ("v", body.v_proj))
    )
    w, a, g = (
        _of_pair(pair, inputs[name], forward) for name, pair in (("w", body.decay), ("a", body.rate), ("g", body.gate))
    )
    value_gate = None
    if not is_first:
        assert body.value_gate is not None, "the model's first layer is the first of all"
        value_gate = _of_pair(body.value_gate, inputs["v"], forward)
    out = room_for(body.o_proj, len(x), shape.num_heads, shape.head_dim, forward)
    projected = Projected(x, k, v, w, a, r, g, value_gate)
    run_all(mix_time(projected, forward.first_values, out, forward.tables.states, body.weights, shape, place))
    adapted_product(body.o_proj, out, forward, into=into)


def _of_pair(pair: LowRankPair, x: Tensor, forward: GpuForward) -> Tensor:
    """x fp32 [M, K] -> fp32 [M, N]."""
    low = adapted_product(pair.down, x, forward)
    glu = None if pair.activation is None else Glu(pair.activation, has_gate=False)
    return adapted_product(pair.up, low, forward, glu=glu).float()
