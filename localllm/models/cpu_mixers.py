"""Mixers between their first product and their last one, as steps of a tape."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from localllm.kernels import cpu_quantize, cpu_rope, cpu_router
from localllm.kernels.cpu_delta import Strided
from localllm.kernels.cpu_heads import by_head_step
from localllm.kernels.cpu_linear import Step, float_bits
from localllm.kernels.cpu_paged import AttentionPlace, LatentPlace
from localllm.layers.attention import Attention
from localllm.layers.delta_net import DeltaNet
from localllm.layers.latent_attention import LatentAttention
from localllm.layers.linear import Linear
from localllm.layers.mamba import Mamba
from localllm.layers.mamba2 import Mamba2
from localllm.layers.norm import RMSNorm, as_rms
from localllm.layers.recurrent import Recurrent
from localllm.layers.short_conv import ShortConv
from localllm.models.cpu_mamba_steps import mamba_steps
from localllm.models.cpu_products import Products, packed_parts, required


def mixed_steps(
    write: Products, body: Attention | LatentAttention | Recurrent, norm: RMSNorm | None, norm_eps: float
) -> Iterator[Step]:
    """Yield the steps from `wide`, which the first product has filled, to `mixed`, which the last one reads.

    norm: in front of the block. norm_eps: of the norms of queries and keys.
    """
    if isinstance(body, Attention):
        yield from _attention(write, body, norm_eps)
    elif isinstance(body, LatentAttention):
        yield from _latent_attention(write, body, norm)
    elif isinstance(body, ShortConv):
        yield from _short_conv(write, body)
    elif isinstance(body, Mamba):
        yield from mamba_steps(write, body)
    elif isinstance(body, DeltaNet):
        yield from _delta_net(write, body, norm)
    else:
        assert isinstance(body, Mamba2), "others have blocks of their own"
        yield from _mamba2(write, body, norm)


def _attention(write: Products, body: Attention, norm_eps: float) -> Iterator[Step]:
    room, config = write.room, body.config
    H, KH, D = config.num_heads, config.num_kv_heads, config.head_dim
    stride, gates = config.qkv_features, config.gate_features
    qkv = room.wide[gates:]
    q_norm, k_norm = as_rms(body.q_norm), as_rms(body.k_norm)
    if q_norm is not None and k_norm is not None and config.qk_norm == "full":
        keys = qkv[H * D :]
        yield write.norm(q_norm, qkv, qkv, H * D, stride, adds=False)
        yield write.norm(k_norm, keys, keys, KH * D, stride, adds=False)
    norms = (q_norm, k_norm) if config.qk_norm == "head" else (None, None)
    where: cpu_rope.Norms = "none" if norms[0] is None else "last" if config.rotates_first else "first"
    attending = room.attending(config)
    assert attending.layouts is not None, "a batch was placed"
    dense, coded = attending.layouts
    group, index = next((g, layers.index(body.layer)) for g, layers in enumerate(room.groups) if body.layer in layers)
    values: cpu_rope.Values = "keys" if config.value_from_key else "normed" if config.norms_values else "plain"
    rope = cpu_rope.rope(write.isa, dense, coded, config.rotary_dim, where, values)
    yield rope.step(
        qkv=qkv,
        cos=room.cos[body.rotation],
        sin=room.sin[body.rotation],
        q_norm=0 if norms[0] is None else norms[0].weight,
        k_norm=0 if norms[1] is None else norms[1].weight,
        tokens=room.tokens[group],
        shape=room.activations.shape,
        stride=stride,
        heads=H,
        kv_heads=config.key_heads,
        layer=index,
        scales=room.scales[config.scale, config.growth],
        eps=float_bits(norm_eps),
    )
    options = config.window, config.softcap, body.sinks
    place = AttentionPlace(qkv, stride, room.mixed, room.tokens[group], index, H, *options)
    rows, is_split = attending.rows, attending.is_split
    yield from attending.room.steps(write.isa, attending.layouts, place, rows=rows, is_split=is_split)
    if room.masses is not None and config.window is None:
        yield room.masses.step(write.isa, attending.layouts, place)
    if gates:
        yield cpu_quantize.sigmoid_gate(write.isa, D if config.gates_heads else 1).step(
            x=room.wide,
            y=room.mixed,
            shape=room.activations.shape,
            features=H * D,
            x_stride=stride,
            y_stride=H * D,
        )


def _latent_attention(write: Products, body: LatentAttention, norm: RMSNorm | None) -> Iterator[Step]:
    room, config, H = write.room, body.config, body.config.num_heads
    rank, stride = config.query_rank or 0, config.in_features
    k_up, v_up = required(body.k_up), required(body.v_up)
    if body.q_norm is None:
        yield write.quantize(body.q_proj, room.x, norm)
    else:
        yield write.quantize(body.q_proj, room.wide, body.q_norm, stride)
    yield from write.multiply(body.q_proj, room.queries, adds=False)
    attending = room.attending(config)
    assert attending.layouts is not None, "a batch was placed"
    group, index = write.page_place(body.layer)
    turning, width = room.queries[H * config.plain_dim :], config.query_features
    latents, tokens = room.wide[rank:], room.tokens[group]
    place = LatentPlace(room.absorbed, H, turning, width, latents, stride, room.mixed, tokens, index, config.window)
    norms = body.latent_norm.weight, body.latent_norm.eps
    rotation = (room.cos[body.rotation], room.sin[body.rotation]) if config.rotary_dim else None
    yield place.step(write.isa, attending.layouts, room.activations.shape, rotation, norms)
    yield write.quantize_columns(k_up, room.queries, H * config.plain_dim, width)
    yield by_head_step(write.isa, room.activations, k_up, H, write.block_rows, room.absorbed)
    rows, is_split, layouts = attending.rows, attending.is_split, attending.layouts
    yield from attending.room.latent_steps(write.isa, layouts, place, config.scale, rows=rows, is_split=is_split)
    yield write.quantize_columns(v_up, room.mixed, config.absorbed_features)
    yield by_head_step(write.isa, room.activations, v_up, H, write.block_rows, room.mixed)


def _delta_net(write: Products, body: DeltaNet, norm: RMSNorm | None) -> Iterator[Step]:
    room, shape = write.room, body.config.shape
    wide = Strided(room.wide, body.in_proj.out_features)
    gates = Strided(room.gates, body.gates_proj.out_features)
    yield from _gates(write, body.gates_proj, packed_parts(body.in_proj)[-1].group, norm)
    decays = z = None
    if body.decay_proj is not None:  # behind all rows of what it reads
        decays = Strided(room.gates[len(room.x) * gates.stride :], shape.decay_features)
        yield _exact(write, body.decay_proj, gates.behind(shape.value_heads), decays.rows, None)
    if body.z_proj is not None:
        z = Strided(room.mixed, shape.value_features)
        yield write.quantize(body.z_proj, room.wide[shape.channels :], None, wide.stride)
        yield from write.multiply(body.z_proj, z.rows, adds=False)
    yield from room.states.deltas[shape].steps(
        write.isa,
        body.weights,
        room.states.place(body.layer),
        wide,
        gates=gates,
        decays=decays or gates.behind(shape.value_heads),
        z=z or wide.behind(shape.channels),
        mixed=room.mixed,
    )


def _short_conv(write: Products, body: ShortConv) -> list[Step]:
    room, stride = write.room, body.in_proj.out_features
    place, convs = room.states.place(body.layer), room.states.convs[body.config.shape]
    return convs.steps(write.isa, body.weights, place, wide=room.wide, stride=stride, mixed=room.mixed)


def _mamba2(write: Products, body: Mamba2, norm: RMSNorm | None) -> Iterator[Step]:
    room = write.room
    yield from _gates(write, body.steps_proj, packed_parts(body.in_proj)[-1].group, norm)
    yield from room.states.mambas[body.config.shape].steps(
        write.isa,
        body.weights,
        room.states.place(body.layer),
        wide=room.wide,
        stride=body.in_proj.out_features,
        steps=room.gates,
        mixed=room.mixed,
        num_rows=room.activations.shape,
    )


def _gates(write: Products, gates: Linear, group: int, norm: RMSNorm | None) -> Iterator[Step]:
    """Yield the steps of what a recurrent layer makes of x in fp32. group: in which what goes in is there in INT8."""
    yield _exact(write, gates, Strided(write.room.x, gates.in_features), write.room.gates, norm)
    yield from write.adapters(gates, group, write.room.gates)


def _exact(write: Products, linear: Linear, x: Strided, y: Tensor, norm: RMSNorm | None) -> Step:
    """Return the step y = norm(x) @ matrix.T + bias, in fp32."""
    return cpu_router.logits(write.isa, has_norm=norm is not None, has_bias=linear.bias is not None).step(
        x=x.rows,
        weight=0 if norm is None else norm.weight,
        matrix=linear.tensors["weight"],
        bias=0 if linear.bias is None else linear.bias,
        y=y,
        shape=write.room.activations.shape,
        features=linear.in_features,
        stride=x.stride,
        outputs=linear.out_features,
        eps=float_bits(0.0 if norm is None else norm.eps),
    )
