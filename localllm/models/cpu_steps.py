"""The blocks of a decoder as steps of a tape, over a room in which a batch was placed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from localllm.kernels import cpu_embed, cpu_matmul, cpu_quantize
from localllm.kernels.cpu_expert_room import ExpertRoom
from localllm.kernels.cpu_linear import Step, float_bits
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.sizes import Glu
from localllm.kernels.tile16 import TILE
from localllm.layers.beside import Beside
from localllm.layers.draft_inputs import DraftInputs
from localllm.layers.linear import Linear
from localllm.layers.mlp import MLP, SplitMLP
from localllm.layers.moe import MoE, MoENorms
from localllm.layers.norm import LayerNorm, RMSNorm, as_rms
from localllm.layers.per_layer import PerLayerGate
from localllm.layers.rwkv7 import Rwkv7ChannelMix, Rwkv7TimeMix
from localllm.models.cpu_mixers import mixed_steps
from localllm.models.cpu_products import Products, packed_matrix, required
from localllm.models.cpu_rwkv_steps import layer_norm_step, rwkv7_steps
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
class Recorder(Products):
    """Writes blocks down as steps over a room as a batch was placed in it, for a number of rows a block."""

    decoder: Decoder
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
        if isinstance(body, Rwkv7TimeMix | Rwkv7ChannelMix):
            yield from rwkv7_steps(self, block, self.decoder.blocks)
            return
        if isinstance(body, Beside):
            yield from self._beside(block, body)
            return
        first, *_, last = body.linears
        yield from self.wide(first, as_rms(block.norm_in))
        if isinstance(body, MLP):
            yield self._gate(body)
        else:
            assert not isinstance(body, SplitMLP), "`supports` said so"
            yield from mixed_steps(self, body, as_rms(block.norm_in), self.decoder.config.norm_eps)
            yield self.quantize(last, self.room.mixed, None)
        norm_out, gate = as_rms(block.norm_out), block.per_layer_gate
        if norm_out is None:
            assert block.scalar is None, "no family has one without the other"
            yield from self.multiply(last, self.room.x, adds=True)
        else:
            yield from self.multiply(last, self.room.y, adds=False)
            yield self._add_norm(norm_out, block.scalar if gate is None else None)
        if gate is not None:
            yield from self._per_layer(gate, block.scalar)

    def _beside(self, block: Block, body: Beside) -> Iterator[Step]:
        """x += the sum of what several mixers make of norm_in(x)."""
        room, norm, eps = self.room, as_rms(block.norm_in), self.decoder.config.norm_eps
        assert block.norm_out is None, "no family has one there"
        for number, mixer in enumerate(body.mixers):
            first, last = mixer.linears[0], mixer.linears[-1]
            yield from self.wide(first, norm)
            yield from mixed_steps(self, mixer, norm, eps)
            yield self.quantize(last, room.mixed, None)
            yield from self.multiply(last, room.y, adds=number > 0)
        yield cpu_quantize.add(self.isa).step(
            x=room.y, y=room.x, shape=room.activations.shape, features=room.x.shape[1]
        )

    def _per_layer(self, body: PerLayerGate, scalar: Tensor | None) -> Iterator[Step]:
        """x = scalar * (x + norm(back(activation(gate(x)) * inputs of the layer)))."""
        room, gate, back = self.room, required(body.gate), required(body.back)
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
        return self.norm(norm, self.room.y, self.room.x, hidden, hidden, adds=True, scale=scale)

    def _gate(self, body: MLP) -> Step:
        """Quantize the features between the matrices of an MLP."""
        group, features = required(body.down_proj).group, body.down_proj.in_features
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
        yield self.norm(norms.shared_out, room.y, room.y, hidden, hidden, adds=False)
        yield from self.experts.steps(room.mixtures[block.name], room.x, mixed, adds=False)
        yield self.norm(norms.experts_out, mixed, room.y, hidden, hidden, adds=True)
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
        norm, room = self.decoder.final_norm, self.room
        if isinstance(norm, LayerNorm):
            yield layer_norm_step(self, norm, room.x, room.y)
            yield self.quantize(self.decoder.head, room.y, None)
        else:
            yield self.quantize(self.decoder.head, room.x, norm)
        head = required(self.decoder.head)
        kernel = cpu_matmul.matmul(self.isa, head.weights, self.block_rows)
        yield self.room.activations.multiply(kernel, head, logits, head.tiles * TILE, None)
