"""Attention, to latents too, delta rules, short convolutions and MLP blocks on a GPU by fused kernels: what `Block`
computes by operators, with a residual in fp32.

A packed matrix is multiplied with activations in INT8 that the norm, the gate or the attention before it wrote; one in
another format by the library, with activations in the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from localllm.kernels.gpu import activations, delta, mamba2, product, short_conv
from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.attention import ChosenTables, attend, block_rows
from localllm.kernels.gpu.attention_merge import can_code, new_parts
from localllm.kernels.gpu.latent_attention import attend_latents, new_queries
from localllm.kernels.gpu.latent_store import latent_store
from localllm.kernels.gpu.launch import run_all
from localllm.kernels.gpu.page_choice import choose, new_chosen
from localllm.kernels.gpu.page_masses import watch
from localllm.kernels.gpu.product_end import Gate
from localllm.kernels.gpu.rope import Rope, rope_store
from localllm.kernels.gpu.routing import RouterWeights, logits_of
from localllm.kernels.packed_matrix import PackedMatrix
from localllm.kernels.sizes import Glu
from localllm.kernels.state_shapes import StatePlace
from localllm.kernels.tile16 import TILE
from localllm.layers.attention import Attention
from localllm.layers.batch import Batch
from localllm.layers.beside import Beside, SingleMixer
from localllm.layers.delta_net import DeltaNet
from localllm.layers.gpu_low_rank import RowAdapters
from localllm.layers.gpu_tables import GpuTables
from localllm.layers.latent_attention import LatentAttention
from localllm.layers.latent_attention import by_head as by_head_of_floats
from localllm.layers.linear import Linear
from localllm.layers.mamba2 import Mamba2
from localllm.layers.mlp import MLP
from localllm.layers.norm import RMSNorm
from localllm.layers.recurrent import Recurrent
from localllm.layers.short_conv import ShortConv
from localllm.quant.stacked import Stacked


@dataclass(frozen=True)
class GpuForward:
    """One forward as a block sees it. places: of each layer, its group and its number among those on the device.
    adapters: what is added to its rows, if anything is. first_values: fp32 [M, features], of the first time mix of
    RWKV-7; without features where there is none."""

    batch: Batch
    tables: GpuTables
    places: tuple[tuple[int, int], ...]
    dtype: torch.dtype  # of activations for the library's products
    first_values: Tensor
    adapters: RowAdapters | None = None
    _elsewhere: dict[torch.device, Batch] = field(default_factory=dict)

    def on(self, device: torch.device) -> Batch:
        """The batch for operators there: moved once, with what layers share in it."""
        if device not in self._elsewhere:
            self._elsewhere[device] = self.batch.on(device)
        return self._elsewhere[device]

    def changes(self, *linears: Linear) -> bool:
        """Return whether adapters change any of these."""
        return self.adapters is not None and any(self.adapters.changes(linear.name) for linear in linears)


def multiply(
    linear: Linear,
    x: Tensor | Codes,
    dtype: torch.dtype,
    *,
    norm: RMSNorm | None = None,
    glu: Glu | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """x [M, K], through the norm, or what a first matrix made, gated, or codes for the matrix, times the matrix:
    [M, N], fp32 where it is packed, else `dtype`. into fp32 [M, N]: is added to, and returned."""
    parts = linear.packed_parts
    if len(parts) > 1:
        assert isinstance(x, Tensor) and into is None, "only the first matrix of a block has several parts"
        return _multiply_parts(linear, parts, x, norm)
    if linear.packed is None:
        assert isinstance(x, Tensor)
        return _multiply_floats(linear, x, dtype, norm, glu, into)
    codes = x if isinstance(x, Codes) else _coded(x, linear.packed, linear.in_features, norm, glu)
    y = torch.empty((len(codes.q), linear.out_features), device=codes.q.device) if into is None else into
    product.multiply(codes, linear.packed, y, linear.out_features, linear.bias, adds=into is not None)
    return y


def _multiply_parts(linear: Linear, parts: list[PackedMatrix], x: Tensor, norm: RMSNorm | None) -> Tensor:
    """Do as `multiply`, with matrices that have the rows one below the other."""
    y = torch.empty((len(x), linear.out_features), device=x.device)
    codes: dict[tuple[int, int], Codes] = {}
    first = 0
    assert isinstance(linear.format, Stacked)
    for part, (_, rows) in zip(parts, linear.format.parts, strict=True):
        form = part.group, part.bits
        if form not in codes:
            codes[form] = _coded(x, part, linear.in_features, norm)
        bias = None if linear.bias is None else linear.bias[first : first + rows]
        product.multiply(codes[form], part, y[:, first : first + rows], rows, bias, adds=False)
        first += rows
    return y


def _coded(
    x: Tensor, matrix: PackedMatrix, features: int, norm: RMSNorm | None = None, glu: Glu | None = None
) -> Codes:
    """Return the codes for this matrix. features: of x, those of the matrix without its padding."""
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    codes = Codes.of(len(x), matrix)
    activations.to_codes(x, codes, features, weight=weight, eps=eps, glu=glu).run()
    return codes


def _multiply_floats(
    linear: Linear, x: Tensor, dtype: torch.dtype, norm: RMSNorm | None, glu: Glu | None, into: Tensor | None
) -> Tensor:
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    rows, features = len(x), linear.in_features
    # The library sums in another order for other numbers of rows: with one number for all, a row's bits stay.
    padded = max(rows, product.FEW_ROWS)
    floats = (torch.zeros if padded > rows else torch.empty)((padded, features), dtype=dtype, device=x.device)
    activations.to_floats(x, floats[:rows], features, weight=weight, eps=eps, glu=glu).run()
    y = linear.format.linear(floats, linear.tensors, linear.out_features, linear.bias)[:rows]
    return y if into is None else into.add_(y)


def adapted_product(
    linear: Linear,
    x: Tensor | Codes,
    forward: GpuForward,
    *,
    norm: RMSNorm | None = None,
    glu: Glu | None = None,
    into: Tensor | None = None,
    floats: Tensor | None = None,
) -> Tensor:
    """Do as `multiply`, and add what adapters make of the same x. floats: what codes were made of."""
    y = multiply(linear, x, forward.dtype, norm=norm, glu=glu, into=into)
    if forward.adapters is not None and forward.changes(linear):
        if floats is None:
            assert isinstance(x, Tensor), "floats come with codes"
            floats = floats_of(x, linear.in_features, norm, glu)
        forward.adapters.add(linear.name, floats, y)
    return y


def floats_of(x: Tensor, features: int, norm: RMSNorm | None, glu: Glu | None = None) -> Tensor:
    """Return fp32 [M, features]: what a matrix is multiplied with, before it is rounded for that."""
    if norm is None and glu is None and x.dtype is torch.float32:
        return x[:, :features]
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    floats = torch.empty((len(x), features), device=x.device)
    activations.to_floats(x, floats, features, weight=weight, eps=eps, glu=glu).run()
    return floats


def _gated(body: MLP, x: Tensor | Codes, norm: RMSNorm | None) -> Codes | None:
    """Return the input of the second matrix, where the first one's product can end in it: both are packed, and there is
    a gate, which ends with a tile."""
    wide, down = body.gate_up_proj, body.down_proj
    if wide.packed is None or down.packed is None or down.in_features % TILE or not body.config.has_gate:
        return None
    x = x if isinstance(x, Codes) else _coded(x, wide.packed, wide.in_features, norm)
    codes = Codes.of(len(x.q), down.packed)
    gate = Gate(codes, body.config.glu, down.in_features)
    product.multiply(x, wide.packed, gate, wide.out_features, wide.bias, adds=False)
    return codes


def run_mlp(
    body: MLP,
    x: Tensor | Codes,
    norm: RMSNorm | None,
    forward: GpuForward,
    into: Tensor | None = None,
    floats: Tensor | None = None,
) -> Tensor:
    """Do as `adapted_product` with a whole MLP: x [M, hidden], through the norm, or codes for its first matrix."""
    if not forward.changes(*body.linears):
        codes = _gated(body, x, norm)
        if codes is not None:
            return multiply(body.down_proj, codes, forward.dtype, into=into)
    wide = adapted_product(body.gate_up_proj, x, forward, norm=norm, floats=floats)
    return adapted_product(body.down_proj, wide, forward, glu=body.config.glu, into=into)


def run_block(
    body: Attention | LatentAttention | DeltaNet | Mamba2 | ShortConv | MLP | Beside,
    norm_in: RMSNorm | None,
    norm_out: RMSNorm | None,
    x: Tensor,
    forward: GpuForward,
) -> None:
    """x fp32 [M, hidden] += norm_out(body(norm_in(x)))."""
    if isinstance(body, Beside):
        assert norm_out is None, "no family has one there"
        first, *others = body.mixers
        total = _run_mixer(first, norm_in, x, forward, None)
        for mixer in others:
            total = _run_mixer(mixer, norm_in, x, forward, total)
        x += total
        return
    into = x if norm_out is None else None
    if isinstance(body, MLP):
        y = run_mlp(body, x, norm_in, forward, into)
    else:
        y = _run_mixer(body, norm_in, x, forward, into)
    if norm_out is not None:
        activations.to_floats(y, x, x.shape[1], weight=norm_out.weight, eps=norm_out.eps, adds=True).run()


def _run_mixer(body: SingleMixer, norm: RMSNorm | None, x: Tensor, forward: GpuForward, into: Tensor | None) -> Tensor:
    """Return what a mixer makes of norm(x), fp32 [M, hidden]; into: is added to, and returned."""
    if isinstance(body, DeltaNet):
        return adapted_product(body.out_proj, _taken_in(body, norm, x, forward), forward, into=into)
    if isinstance(body, Mamba2):
        return adapted_product(body.out_proj, _read_out(body, norm, x, forward), forward, into=into)
    if isinstance(body, ShortConv):
        return adapted_product(body.out_proj, _convolved(body, norm, x, forward), forward, into=into)
    if isinstance(body, LatentAttention):
        return adapted_product(body.o_proj, _of_latents(body, norm, x, forward), forward, into=into)
    assert isinstance(body, Attention), "`is_ours` said so"
    qkv = adapted_product(body.qkv_proj, x, forward, norm=norm)
    return adapted_product(body.o_proj, _mixed(body, qkv, forward), forward, into=into)


def _taken_in(body: DeltaNet, norm: RMSNorm | None, x: Tensor, forward: GpuForward) -> Tensor | Codes:
    """x fp32 [M, hidden] -> fp32 [M, value features], or its codes for the matrix that follows; the states of the
    sequences are brought up to date."""
    shape, M = body.config.shape, len(x)
    gates, own = torch.empty((M, body.config.gate_features), device=x.device), body.gates_proj.out_features
    _exact(body.gates_proj, norm, x, forward, gates[:, :own])
    if body.decay_proj is not None:
        _exact(body.decay_proj, None, gates[:, shape.value_heads : own], forward, gates[:, own:])
    wide = adapted_product(body.in_proj, x, forward, norm=norm)
    z = wide[:, shape.channels :]
    if body.z_proj is not None:
        z = adapted_product(body.z_proj, z, forward)
    out = room_for(body.out_proj, M, shape.value_heads, shape.value_dim, forward)
    run_all(delta.mix(wide, gates, z, out, forward.tables.states, body.weights, shape, _place(body, forward)))
    return out


def _convolved(body: ShortConv, norm: RMSNorm | None, x: Tensor, forward: GpuForward) -> Tensor | Codes:
    """Do as `_taken_in` with a short convolution."""
    shape, wide = body.config.shape, adapted_product(body.in_proj, x, forward, norm=norm)
    block = short_conv.block_of(shape)
    out = room_for(body.out_proj, len(x), shape.channels // block, block, forward)
    short_conv.convolve(wide, out, forward.tables.states, body.weights, shape, _place(body, forward)).run()
    return out


def _place(body: Recurrent, forward: GpuForward) -> StatePlace:
    """Return where a layer's part of the states begins, which is the same in every sequence."""
    store = forward.batch.segments[0].kv.state
    assert store is not None, "its layer keeps a state"
    return store.place(body.layer)


def _read_out(body: Mamba2, norm: RMSNorm | None, x: Tensor, forward: GpuForward) -> Tensor:
    """x fp32 [M, hidden] -> fp32 [M, features]; the states of the sequences are brought up to date."""
    steps = torch.empty((len(x), body.steps_proj.out_features), device=x.device)
    _exact(body.steps_proj, norm, x, forward, steps)
    wide = adapted_product(body.in_proj, x, forward, norm=norm)
    out = torch.empty((len(x), body.config.shape.features), device=x.device)
    place, shape = _place(body, forward), body.config.shape
    run_all(mamba2.mix(wide, steps, out, forward.tables.states, body.weights, shape, place))
    return out


def _exact(linear: Linear, norm: RMSNorm | None, x: Tensor, forward: GpuForward, y: Tensor) -> None:
    """y fp32 [M, N] = x fp32 [M, K], through the norm, times a matrix in fp32; each in rows of any stride."""
    own_norm, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    logits_of(x, RouterWeights(linear.tensors["weight"], linear.bias, norm=own_norm, eps=eps), y).run()
    if forward.adapters is not None and forward.changes(linear):
        forward.adapters.add(linear.name, floats_of(x, x.shape[1], norm), y)


def room_for(linear: Linear, rows: int, heads: int, head_dim: int, forward: GpuForward) -> Tensor | Codes:
    """Return room for heads that a matrix is multiplied with: codes for it where they fill its groups and no adapter
    takes them, else floats."""
    packed = linear.packed
    if packed is not None and can_code(head_dim, packed.group) and not forward.changes(linear):
        return Codes.of(rows, packed)
    return torch.empty((rows, heads * head_dim), device=linear.device)


def _mixed(body: Attention, projected: Tensor, forward: GpuForward) -> Tensor | Codes:
    """projected [M, gates and (H + 2 KH) D] -> fp32 [M, H D], or its codes for the matrix that follows; keys and values
    go to their pages."""
    config, tables = body.config, forward.tables
    H, KH, D, M = config.num_heads, config.num_kv_heads, config.head_dim, len(projected)
    gate, qkv = projected[:, : config.gate_features], projected[:, config.gate_features :]
    group, row = forward.places[body.layer]
    tokens, history = tables.tokens[group], tables.histories[group]
    if body.q_norm is not None and body.k_norm is not None and config.qk_norm == "full":
        for norm, part in ((body.q_norm, qkv[:, : H * D]), (body.k_norm, qkv[:, H * D : (H + KH) * D])):
            activations.to_floats(part, part, part.shape[1], weight=norm.weight, eps=norm.eps).run()
    q_norm, k_norm = (body.q_norm, body.k_norm) if config.qk_norm == "head" else (None, None)
    rope = replace(
        _rope(body, forward),
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        eps=0.0 if q_norm is None else q_norm.eps,
        growth=None if config.growth is None else config.growth.beta,
        growth_length=1 if config.growth is None else config.growth.length,
    )
    q, mixed = torch.empty((M, H, D), device=qkv.device), room_for(body.o_proj, M, H, D, forward)
    rope_store(qkv.view(M, H + 2 * KH, D), q, tokens, rope, tables.dense, tables.coded, row).run()
    attended, chosen, sections = tables.attended[group], None, tables.shape.sections
    layouts: dict[str, Any] = {"dense": tables.dense, "coded": tables.coded, "layer": row}
    scoring: dict[str, Any] = {"scale": config.scale, "softcap": config.softcap, "sinks": body.sinks}
    if tables.choices and config.window is None:
        sections, choices = tables.shape.chosen_sections, tables.choices[group]
        chosen = ChosenTables(choices.rows, new_chosen(len(choices.choosers), KH, choices.pages, qkv.device))
        run_all(choose(q, chosen.tables, tokens, history, choices, **layouts, scale=config.scale))
    parts = new_parts(sections, M, H, D, qkv.device)
    launches = attend(
        q,
        mixed,
        attended,
        history,
        parts,
        **layouts,
        **scoring,
        window=config.window,
        rows=block_rows(H // KH, is_prefill=M > product.FEW_ROWS),
        gate=gate if config.gate_features else None,
        chosen=chosen,
    )
    run_all(launches)
    if tables.watched is not None and config.window is None:
        own, pages = parts if tables.shape.sections > 1 else None, tables.shape.pages
        run_all(watch(q, attended, history, tables.watched, own, pages, **layouts, **scoring))
    return mixed


def _rope(body: Attention | LatentAttention, forward: GpuForward) -> Rope:
    """Return how its rotation turns, with no norm."""
    frequencies = forward.tables.frequencies(body.rotation, forward.batch)
    return Rope(frequencies, forward.batch.rotaries[body.rotation].scale)


def _of_latents(body: LatentAttention, norm: RMSNorm | None, x: Tensor, forward: GpuForward) -> Tensor:
    """x fp32 [M, hidden] -> [M, value features of all heads]; latents and shared keys go to their pages."""
    config, tables = body.config, forward.tables
    H, M, latent = config.num_heads, len(x), config.latent_dim
    down = adapted_product(body.in_proj, x, forward, norm=norm)
    reduced, kept = down[:, : -latent - config.shared_dim], down[:, -latent - config.shared_dim :]
    to_heads, own_norm = (x, norm) if body.q_norm is None else (reduced, body.q_norm)
    query = adapted_product(body.q_proj, to_heads, forward, norm=own_norm)
    plain, turning = query[:, : H * config.plain_dim], query[:, H * config.plain_dim :]
    group, row = forward.places[body.layer]
    tokens, layouts = tables.tokens[group], (tables.dense, tables.coded)
    rope = replace(_rope(body, forward), k_norm=body.latent_norm.weight, eps=body.latent_norm.eps)
    q = new_queries(M, H, tables.dense, x.device)
    latent_store(_by_head(body.k_up, plain, H), turning, kept, q, tokens, rope, *layouts, row).run()
    packed = body.v_up.packed
    mixed: Tensor | Codes = torch.empty((M, H * latent), device=x.device)
    if packed is not None and can_code(latent, packed.group):
        mixed = _codes_of_heads(M, H, packed)
    launches = attend_latents(
        q,
        mixed,
        tables.attended[group],
        tables.histories[group],
        new_parts(tables.shape.sections, M, H, latent, x.device),
        *layouts,
        row,
        scale=config.scale,
        rows=block_rows(H, is_prefill=M > product.FEW_ROWS),
    )
    run_all(launches)
    return _by_head(body.v_up, mixed, H)


def _by_head(linear: Linear, x: Tensor | Codes, heads: int) -> Tensor:
    """x [M, heads * K], or its codes -> fp32 [M, rows of the matrix]: each head by its own rows."""
    packed = linear.packed
    if packed is None:
        assert isinstance(x, Tensor)
        return _floats_by_head(linear, x, heads)
    if isinstance(x, Tensor):
        codes = _codes_of_heads(len(x), heads, packed)
        activations.to_codes(x, codes, x.shape[1]).run()
    else:
        codes = x
    y = torch.empty((len(codes.q), linear.out_features), device=codes.q.device)
    product.by_head(codes, packed, y, heads)
    return y


def _codes_of_heads(rows: int, heads: int, matrix: PackedMatrix) -> Codes:
    """Return a buffer for the columns of all heads."""
    return Codes.empty(rows, heads * matrix.in_features, matrix.group, matrix.qweight.device, matrix.bits)


def _floats_by_head(linear: Linear, x: Tensor, heads: int) -> Tensor:
    """As `_multiply_floats`."""
    rows, weight = len(x), linear.tensors["weight"]
    floats = torch.zeros((max(rows, product.FEW_ROWS), x.shape[1]), dtype=weight.dtype, device=x.device)
    floats[:rows] = x
    return by_head_of_floats(linear, floats.view(len(floats), heads, -1)).flatten(1)[:rows].float()
