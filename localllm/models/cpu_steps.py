"""The blocks of a decoder as steps of a tape, over a room in which a batch was placed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from localllm.kernels import cpu_embed, cpu_matmul, cpu_quantize, cpu_rope, cpu_router
from localllm.kernels.cpu_expert_room import ExpertRoom
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_linear import Step, float_bits
from localllm.kernels.cpu_paged import AttentionPlace
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.packed_matrix import PackedMatrix
from localllm.kernels.sizes import Glu
from localllm.kernels.tile16 import TILE
from localllm.layers.attention import Attention
from localllm.layers.delta_net import DeltaNet
from localllm.layers.draft_inputs import DraftInputs
from localllm.layers.linear import Linear
from localllm.layers.mlp import MLP
from localllm.layers.moe import MoE, MoENorms
from localllm.layers.norm import RMSNorm, as_rms
from localllm.layers.per_layer import PerLayerGate
from localllm.models.cpu_buffers import Buffers, head_shape
from localllm.models.decoder import Block, Decoder
from localllm.models.expert_records import PooledExperts
from localllm.offload.streaming.lru_slots import Expert

NORM_STEPS = 2  # of a mixture whose parts have their own norms, behind the experts


class Guesser(NamedTuple):
    """Guesses the experts of a mixture by what goes into the block before it. top_k: how many."""

    bank: PooledExperts
    top_k: int
    tape: Tape

    @property
    def is_of_use(self) -> bool:
        return self.bank.pool.is_read_by_kernel(self.bank.block)

    def guess(self, room: ExpertRoom) -> list[Expert]:
        """Return them, the most likely one first. room: which the tape was recorded for."""
        self.tape.run()
        return [(self.bank.block, expert) for expert in room.guessed(self.top_k)]


@dataclass(frozen=True)
class Recorder:
    """Writes blocks down as steps over a room as a batch was placed in it, for a number of rows a block."""

    decoder: Decoder
    isa: Isa
    room: Buffers
    block_rows: int
    experts: ExpertRoom | None = None

    def embed(self) -> Iterator[Step]:
        """Yield the step that looks the embedding up; none where it is not in INT8 or on the disk: torch does it."""
        embedding = self.decoder.embed
        if isinstance(embedding, DraftInputs) or not isinstance(embedding.matrix, Linear) or embedding.norm_eps:
            return
        packed = packed_matrix(embedding.matrix)
        if packed is None or packed.weights.group is not None:
            return
        kernel = cpu_embed.embed(self.isa)
        yield kernel.step(
            qweight=packed.qweight,
            scale=packed.scale,
            token_ids=self.room.token_ids,
            x=self.room.x,
            shape=self.room.activations.shape,
            vocab=embedding.matrix.out_features,
            features=embedding.matrix.in_features,
            factor=float_bits(float(torch.tensor(embedding.scale, dtype=embedding.dtype))),
        )

    def block(self, block: Block) -> Iterator[Step]:
        """x += norm_out(body(norm_in(x)))."""
        body = block.body
        if isinstance(body, MoE):
            yield from self._mixture(block, body)
            return
        first, last = body.linears
        yield from self.wide(first, as_rms(block.norm_in))
        if isinstance(body, Attention):
            yield from self._attention(body)
            yield self.quantize(last, self.room.mixed, None)
        elif isinstance(body, DeltaNet):
            yield from self._delta_net(body, as_rms(block.norm_in))
            yield self.quantize(last, self.room.mixed, None)
        else:
            assert isinstance(body, MLP), "`supports` said so"
            yield self._gate(body)
        norm_out, gate = as_rms(block.norm_out), block.per_layer_gate
        if norm_out is None:
            assert block.scalar is None, "no family has one without the other"
            yield from self.multiply(last, self.room.x, adds=True)
        else:
            yield from self.multiply(last, self.room.y, adds=False)
            yield self._add_norm(norm_out, block.scalar if gate is None else None)
        if gate is not None:
            yield from self._per_layer(gate, block.scalar)

    def _per_layer(self, body: PerLayerGate, scalar: Tensor | None) -> Iterator[Step]:
        """x = scalar * (x + norm(back(activation(gate(x)) * inputs of the layer)))."""
        room, gate, back = self.room, _required(body.gate), _required(body.back)
        yield self.quantize(body.gate, room.x, None)
        stride, own = room.per_layer[0].numel(), room.per_layer[0, body.layer]
        kernel = cpu_matmul.matmul(self.isa, gate.weights, self.block_rows)
        yield room.activations.multiply(kernel, gate, own, stride, None)
        kernel = cpu_quantize.quantize(self.isa, back.group, "gated", Glu(body.activation))
        yield room.activations.quantize(kernel, own, back.group, back.in_features, stride=stride)
        yield from self.multiply(body.back, room.y, adds=False)
        norm = as_rms(body.norm)
        assert norm is not None, "`supports` said so"
        yield self._add_norm(norm, scalar)

    def _add_norm(self, norm: RMSNorm, scalar: Tensor | None = None) -> Step:
        """x = scalar * (x + norm(y))."""
        hidden, scale = len(norm.weight), 1.0 if scalar is None else float(scalar)
        return self._norm(norm, self.room.y, self.room.x, hidden, hidden, adds=True, scale=scale)

    def _gate(self, body: MLP) -> Step:
        """Quantize the features between the matrices of an MLP."""
        group, features = _required(body.down_proj).group, body.down_proj.in_features
        kernel = cpu_quantize.quantize(self.isa, group, "gated", body.config.glu)
        stride = body.gate_up_proj.out_features
        return self.room.activations.quantize(kernel, self.room.wide, group, features, stride=stride)

    def _mixture(self, block: Block, body: MoE) -> Iterator[Step]:
        room, shared = self.room, body.shared
        assert self.experts is not None
        if body.norms is not None:
            yield from self._mixture_beside(block, body, body.norms)
            return
        if shared is not None:
            yield from self.wide(shared.gate_up_proj, as_rms(block.norm_in))
            yield self._gate(shared)
            yield from self.multiply(shared.down_proj, room.y, adds=False)
        rows = None if shared is None else room.y
        yield from self.experts.steps(room.mixtures[block.name], room.x, room.x, adds=True, shared=rows)

    def _mixture_beside(self, block: Block, body: MoE, norms: MoENorms) -> Iterator[Step]:
        """A mixture beside an MLP, with norms around each: NORM_STEPS come behind the experts."""
        room, shared, norm_out = self.room, body.shared, as_rms(block.norm_out)
        assert self.experts is not None and shared is not None and norm_out is not None, "`supports` said so"
        hidden, mixed = self.decoder.config.hidden_size, room.wide
        yield from self.wide(shared.gate_up_proj, norms.shared_in)
        yield self._gate(shared)
        yield from self.multiply(shared.down_proj, room.y, adds=False)
        yield self._norm(norms.shared_out, room.y, room.y, hidden, hidden, adds=False)
        yield from self.experts.steps(room.mixtures[block.name], room.x, mixed, adds=False)
        yield self._norm(norms.experts_out, mixed, room.y, hidden, hidden, adds=True)
        yield self._add_norm(norm_out, block.scalar)

    def guessers(self) -> dict[int, Guesser]:
        """Of each mixture but the last, what guesses the next one's experts of a token, if they come from the disk."""
        found: dict[int, Guesser] = {}
        if self.experts is None or self.experts.block_rows > 1:
            return found
        mixtures = [pair for pair in enumerate(self.decoder.blocks) if isinstance(pair[1].body, MoE)]
        for (number, _), (_, block) in itertools.pairwise(mixtures):
            body = block.body
            if isinstance(body, MoE) and isinstance(body.experts, PooledExperts):
                tape = Tape([*self.experts.guess_steps(self.room.mixtures[block.name], self.room.x)])
                found[number] = Guesser(body.experts, body.config.router.top_k, tape)
        return found

    def head(self, logits: Tensor) -> Iterator[Step]:
        """logits: rows of whole tiles."""
        yield self.quantize(self.decoder.head, self.room.x, as_rms(self.decoder.final_norm))
        head = _required(self.decoder.head)
        kernel = cpu_matmul.matmul(self.isa, head.weights, self.block_rows)
        yield self.room.activations.multiply(kernel, head, logits, head.tiles * TILE, None)

    def wide(self, linear: Linear, norm: RMSNorm | None) -> Iterator[Step]:
        """The rows of x into `wide`: by one matrix, or by those whose rows make it up."""
        room, first = self.room, 0
        group = 0
        for part in packed_parts(linear):
            if part.group != group:
                group = part.group
                yield self.quantize_for(part, room.x, norm)
            rows = part.tiles * TILE
            kernel = cpu_matmul.matmul(self.isa, part.weights, self.block_rows, has_bias=linear.bias is not None)
            bias = None if linear.bias is None else linear.bias[first : first + rows].float()
            yield room.activations.multiply(kernel, part, room.wide[first:], linear.out_features, bias)
            first += rows
        yield from self._adapters(linear, group, room.wide)

    def quantize(self, linear: Linear, x: Tensor, norm: RMSNorm | None) -> Step:
        return self.quantize_for(_required(linear), x, norm)

    def quantize_for(self, matrix: PackedMatrix, x: Tensor, norm: RMSNorm | None) -> Step:
        kernel = cpu_quantize.quantize(self.isa, matrix.group, "plain" if norm is None else "norm")
        rest: dict[str, Tensor | int] = {} if norm is None else {"weight": norm.weight, "eps": float_bits(norm.eps)}
        return self.room.activations.quantize(kernel, x, matrix.group, matrix.in_features, **rest)

    def multiply(self, linear: Linear, y: Tensor, *, adds: bool) -> Iterator[Step]:
        packed, has_bias = _required(linear), linear.bias is not None
        kernel = cpu_matmul.matmul(self.isa, packed.weights, self.block_rows, adds=adds, has_bias=has_bias)
        bias = None if linear.bias is None else linear.bias.float()
        yield self.room.activations.multiply(kernel, packed, y, linear.out_features, bias)
        yield from self._adapters(linear, packed.group, y)

    def _adapters(self, linear: Linear, group: int, y: Tensor) -> list[Step]:
        """Add to a layer's output y what adapters make of its input, which is there in INT8, in groups of `group`."""
        room, columns = self.room, linear.in_features
        return room.low_rank.steps(
            linear.name, room.activations, self.block_rows, group, columns, y, linear.out_features
        )

    def _attention(self, body: Attention) -> Iterator[Step]:
        room, config = self.room, body.config
        H, KH, D = config.num_heads, config.num_kv_heads, config.head_dim
        stride, gates = config.qkv_features, config.gate_features
        qkv = room.wide[gates:]
        q_norm, k_norm = as_rms(body.q_norm), as_rms(body.k_norm)
        if q_norm is not None and k_norm is not None and config.qk_norm == "full":
            keys = qkv[H * D :]
            yield self._norm(q_norm, qkv, qkv, H * D, stride, adds=False)
            yield self._norm(k_norm, keys, keys, KH * D, stride, adds=False)
        norms = (q_norm, k_norm) if config.qk_norm == "head" else (None, None)
        where: cpu_rope.Norms = "none" if norms[0] is None else "last" if config.rotates_first else "first"
        attending = room.attending[head_shape(config)]
        assert attending.layouts is not None, "a batch was placed"
        dense, coded = attending.layouts
        group, index = next(
            (g, layers.index(body.layer)) for g, layers in enumerate(room.groups) if body.layer in layers
        )
        values: cpu_rope.Values = "keys" if config.value_from_key else "normed" if config.norms_values else "plain"
        rope = cpu_rope.rope(self.isa, dense, coded, config.rotary_dim, where, values)
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
            eps=float_bits(self.decoder.config.norm_eps),
        )
        options = config.window, config.softcap, body.sinks
        place = AttentionPlace(qkv, stride, room.mixed, room.tokens[group], index, H, *options)
        rows, is_split = attending.rows, attending.is_split
        yield from attending.room.steps(self.isa, attending.layouts, place, rows=rows, is_split=is_split)
        if gates:
            yield cpu_quantize.sigmoid_gate(self.isa).step(
                x=room.wide,
                y=room.mixed,
                shape=room.activations.shape,
                features=gates,
                x_stride=stride,
                y_stride=gates,
            )

    def _delta_net(self, body: DeltaNet, norm: RMSNorm | None) -> Iterator[Step]:
        room, gates = self.room, body.gates_proj
        assert room.delta is not None, "the model has such layers"
        yield cpu_router.logits(self.isa, has_norm=norm is not None).step(
            x=room.x,
            weight=0 if norm is None else norm.weight,
            matrix=gates.tensors["weight"],
            bias=0,
            y=room.gates,
            shape=room.activations.shape,
            features=gates.in_features,
            stride=gates.in_features,
            outputs=gates.out_features,
            eps=float_bits(0.0 if norm is None else norm.eps),
        )
        yield from self._adapters(gates, packed_parts(body.in_proj)[-1].group, room.gates)
        yield from room.delta.steps(
            self.isa,
            body.weights,
            body.layer,
            wide=room.wide,
            stride=body.in_proj.out_features,
            gates=room.gates,
            mixed=room.mixed,
        )

    def _norm(
        self, norm: RMSNorm, x: Tensor, y: Tensor, features: int, stride: int, *, adds: bool, scale: float = 1.0
    ) -> Step:
        strides, shape = {"x_stride": stride, "y_stride": stride}, self.room.activations.shape
        rest: dict[str, Tensor | int]
        rest = {"weight": norm.weight, "features": features, "eps": float_bits(norm.eps), "scale": float_bits(scale)}
        return cpu_quantize.norm(self.isa, adds=adds).step(x=x, y=y, shape=shape, **strides, **rest)


def packed_parts(linear: Linear) -> list[PackedMatrix]:
    """Return the matrices that make up a linear layer as the kernels take them; none where a format or its columns are
    not theirs."""
    parts = linear.packed_parts
    return parts if all(part.in_features == linear.in_features for part in parts) else []


def packed_matrix(linear: Linear) -> PackedMatrix | None:
    """Return the matrix as the kernels take it; None where its format or its columns are not theirs."""
    packed = linear.packed
    return packed if packed is not None and packed.in_features == linear.in_features else None


def _required(linear: Linear) -> PackedMatrix:
    packed = packed_matrix(linear)
    assert packed is not None, "CpuProgram.supports said so"
    return packed
