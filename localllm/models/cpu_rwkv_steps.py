"""The blocks of RWKV-7 as steps of a tape, and the buffers that they have beside those of all models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from localllm.kernels import cpu_quantize
from localllm.kernels.cpu_layer_norm import layer_norm
from localllm.kernels.cpu_linear import Step, float_bits
from localllm.kernels.cpu_rwkv import TimeMixPlaces, time_mix_step
from localllm.kernels.cpu_shift import shift
from localllm.kernels.sizes import Glu
from localllm.kernels.state_shapes import RWKV7_MIXED, RWKV7_PROJECTED
from localllm.layers.norm import LayerNorm
from localllm.layers.rwkv7 import LowRankPair, Rwkv7ChannelMix, Rwkv7TimeMix
from localllm.models.cpu_products import Products, multiply, packed, product
from localllm.models.decoder import Block
from localllm.models.first_values import makes_first_values


def rwkv7_steps(write: Products, block: Block, blocks: Sequence[Block]) -> Iterator[Step]:
    """x += body(norm_in(x)); the first block's x is normed before. blocks: all that are computed."""
    room, body, norm = write.room, block.body, block.norm_in
    assert isinstance(norm, LayerNorm) and block.norm_out is None, "as the family has it"
    if isinstance(block.norm_embedding, LayerNorm):
        yield layer_norm_step(write, block.norm_embedding, room.x, room.x)
    yield layer_norm_step(write, norm, room.x, room.y)
    if isinstance(body, Rwkv7TimeMix):
        yield from _time_mix(write, body, is_first=makes_first_values(blocks, body))
    else:
        assert isinstance(body, Rwkv7ChannelMix)
        yield from _channel_mix(write, body)


def layer_norm_step(write: Products, norm: LayerNorm, x: Tensor, y: Tensor) -> Step:
    """Return the step of y = norm(x), rows of as many floats as the norm has weights."""
    return layer_norm(write.isa, has_bias=norm.bias is not None).step(
        x=x,
        weight=norm.weight,
        bias=0 if norm.bias is None else norm.bias,
        y=y,
        shape=write.room.activations.shape,
        features=len(norm.weight),
        eps=float_bits(norm.eps),
    )


def _shift(write: Products, body: Rwkv7TimeMix | Rwkv7ChannelMix, mixes: Tensor, *, keeps: bool) -> Step:
    room, shape, features = write.room, body.config.shape, body.config.shape.features
    place = room.states.place(body.layer)
    return shift(write.isa, shape, features, mixes.numel() // features, keeps=keeps).step(
        x=room.y,
        mixes=mixes,
        y=room.rwkv7.mixes,
        kept=room.rwkv7.wide,
        plane=room.rwkv7.plane,
        stride=len(RWKV7_PROJECTED) * features,
        state=place.state,
        snapshot=place.snapshot,
        **room.states.tables.words,
    )


def _time_mix(write: Products, body: Rwkv7TimeMix, *, is_first: bool) -> Iterator[Step]:
    room, own, shape = write.room, write.room.rwkv7, body.config.shape
    stride = len(RWKV7_PROJECTED) * shape.features

    def place(name: str) -> Tensor:
        return own.wide[RWKV7_PROJECTED.index(name) * shape.features :]

    def source(name: str) -> Tensor:
        return own.mixes[RWKV7_MIXED.index(name) * own.plane :]

    yield _shift(write, body, body.weights.mixes, keeps=False)
    for name, linear in (("r", body.r_proj), ("k", body.k_proj), ("v", body.v_proj)):
        yield from product(write, linear, source(name), place(name), stride)
    pairs = {"w": body.decay, "a": body.rate, "g": body.gate}
    for name, pair in pairs.items():
        yield from _pair(write, pair, source(name), place(name), stride)
    if body.value_gate is not None and not is_first:
        yield from _pair(write, body.value_gate, source("v"), place("value_gate"), stride)
    places = TimeMixPlaces(own.wide, stride, own.first, room.mixed)
    tables, state = room.states.tables, room.states.place(body.layer)
    yield time_mix_step(write.isa, shape, body.weights, tables, state, places, is_first=is_first)
    yield write.quantize(body.o_proj, room.mixed, None)
    yield from write.multiply(body.o_proj, room.x, adds=True)


def _channel_mix(write: Products, body: Rwkv7ChannelMix) -> Iterator[Step]:
    room, value = write.room, packed(body.value)
    yield _shift(write, body, body.mix, keeps=True)
    yield from product(write, body.key, room.rwkv7.mixes, room.wide, body.key.out_features)
    kernel = cpu_quantize.quantize(write.isa, value.group, "gated", Glu("relu2", has_gate=False))
    yield room.activations.quantize(kernel, room.wide, value.group, value.in_features)
    yield from write.multiply(body.value, room.x, adds=True)


def _pair(write: Products, pair: LowRankPair, x: Tensor, y: Tensor, stride: int) -> Iterator[Step]:
    """y = up(activation(down(x))), rows of `stride` floats."""
    low, up = write.room.rwkv7.low[pair.down.out_features], packed(pair.up)
    yield from product(write, pair.down, x, low, low.shape[1])
    glu = Glu(pair.activation or "", has_gate=False)
    kernel = cpu_quantize.quantize(write.isa, up.group, "gated" if pair.activation else "plain", glu)
    yield write.room.activations.quantize(kernel, low, up.group, up.in_features)
    yield from multiply(write, pair.up, y, stride)
