"""A decoder on the CPU as one native call: no Python and no torch operator between two matrices.

At 15 ms a token, 22 layers of torch operators would take 4. The decoder is written down once as a tape of kernels;
a forward fills in what is new (token ids, rotations, where each token's keys go) and runs it. Every row is computed
alike however many there are: a prompt in chunks, a batch of answers and the verification of a draft give the same bits.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from localllm.kernels import cpu_embed, cpu_matmul, cpu_quantize, cpu_rope
from localllm.kernels.cpu_expert_room import COMBINE_STEP, GROUP_STEP, ExpertRoom
from localllm.kernels.cpu_isa import MOST_ROWS, Isa
from localllm.kernels.cpu_jit import best_isa
from localllm.kernels.cpu_linear import Activations, Step, float_bits
from localllm.kernels.cpu_paged import AttentionPlace, AttentionRoom, Layouts
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.kv_page import layer_groups
from localllm.kernels.packed_matrix import PackedMatrix
from localllm.kernels.tile16 import TILE
from localllm.layers.attention import Attention
from localllm.layers.batch import Batch
from localllm.layers.linear import Linear
from localllm.layers.mlp import MLP, SplitMLP
from localllm.layers.moe import MoE
from localllm.layers.native_attention import attention_tables
from localllm.layers.norm import RMSNorm, as_rms
from localllm.models.capabilities import fills_vectors
from localllm.models.cpu_mixture import ExpertRooms, is_native, mixture_of
from localllm.models.decoder import Block, Decoder
from localllm.models.expert_records import PooledExperts
from localllm.models.layout import EMBED, HEAD
from localllm.offload.streaming.lru_slots import Expert
from localllm.quant.dense import dense_name

_TapeKey = tuple[int, int, bool, Layouts, ExpertRoom | None, AttentionRoom]


class CpuProgram:
    """Built once for a decoder; `supports` says for which. One forward at a time."""

    def __init__(self, decoder: Decoder, isa: Isa | None = None) -> None:
        """isa: None takes the best that this machine has."""
        self.decoder = decoder
        self.isa = isa or best_isa()
        # Whether a step waits for the disk between two blocks, or in one.
        self._waits = bool(decoder.stream.names) or any(
            isinstance(body.experts, PooledExperts) for _, body in _mixtures(decoder)
        )
        self._room: _Room | None = None
        self._tapes: dict[_TapeKey, _WholeTape] = {}

    @staticmethod
    def supports(decoder: Decoder) -> bool:
        """Return whether every block is of INT4 or INT8 matrices whose sizes fill whole tiles and groups, on a CPU."""
        return (
            decoder.device.type == "cpu"
            and fills_vectors(decoder.config, dense_name(decoder.dtype))
            and not any(isinstance(block.body, SplitMLP) for block in decoder.blocks)
            and all(is_native(body.experts) and block.norm_out is None for block, body in _mixtures(decoder))
            and all(
                (parts := _parts(linear)) and sum(part.tiles for part in parts) * TILE == linear.out_features
                for block in decoder.blocks
                for linear in block.body.linears
            )
        )

    def logits(self, batches: Sequence[Batch], on_block: Callable[[Block, Tensor], None] | None = None) -> Tensor:
        """fp32 [R, V] of the batches' `logit_rows`, as from `Decoder.hidden_states`, whose `on_block` this is.

        Without it, and with one batch of a decoder of which nothing is streamed, the step is a single call.
        """
        rows = max(map(len, batches))
        if self._room is None or rows > self._room.rows:
            self._tapes.clear()
            self._room = _Room(self.decoder, self.isa, rows)
        room = self._room
        if on_block is None and len(batches) == 1 and not self._waits:
            return self._in_one_call(room, batches[0])
        # A guess is judged by the pool's next call, which is another batch's where there are several.
        foresees = sum(map(len, batches)) == 1
        self.decoder.stream.begin()
        states = self._embedded(room, batches)
        for index, block in enumerate(self.decoder.blocks):
            with self.decoder.stream.held(block.name):
                for batch, x in zip(batches, states, strict=True):
                    self._run_block(room, batch, index, x, foresees=foresees)
                    if on_block is not None:
                        on_block(block, x)
        return self._head(room, torch.cat([x[batch.logit_rows] for batch, x in zip(batches, states, strict=True)]))

    def _in_one_call(self, room: _Room, batch: Batch) -> Tensor:
        T, R = len(batch), len(batch.logit_rows)
        whole = self._placed(room, batch)
        if not whole.starts[0]:
            room.x[:T] = self.decoder.embed(batch.token_ids)
        if R < T or whole.head is None:
            whole.tape.run(0, whole.starts[-1])
            return self._head(room, room.x[batch.logit_rows])
        logits = self._new_logits(T, room.activations.block_rows)
        words, y = whole.head
        words[y] = logits.data_ptr()
        whole.tape.run()
        return self._trimmed(logits, T)

    def _embedded(self, room: _Room, batches: Sequence[Batch]) -> list[Tensor]:
        """Return the hidden states [T, hidden] of each batch: the room's own where there is but one."""
        states = []
        with self.decoder.stream.held(EMBED):
            for batch in batches:
                x = room.x[: len(batch)]
                embed_steps = self._placed(room, batch).starts[0]
                if embed_steps:
                    self._placed(room, batch).tape.run(0, embed_steps)
                else:
                    x.copy_(self.decoder.embed(batch.token_ids))
                states.append(x if len(batches) == 1 else x.clone())
        return states

    def _run_block(self, room: _Room, batch: Batch, index: int, x: Tensor, *, foresees: bool) -> None:
        """Run x [T, hidden] through a block, in place. foresees: whether the next block's experts are guessed."""
        is_in_room = x.data_ptr() == room.x.data_ptr()
        whole = self._placed(room, batch)
        if not is_in_room:
            room.x[: len(x)] = x
        body = self.decoder.blocks[index].body
        begin, end = whole.starts[index], whole.starts[index + 1]
        if isinstance(body, MoE) and isinstance(body.experts, PooledExperts):
            self._run_pooled(room, whole, index, body, foresees=foresees)
        else:
            whole.tape.run(begin, end)
        if not is_in_room:
            x.copy_(room.x[: len(x)])

    def _run_pooled(self, room: _Room, whole: _WholeTape, index: int, body: MoE, *, foresees: bool) -> None:
        """Run a mixture whose experts come from the disk: those that are here while the others are read."""
        begin, end = whole.starts[index], whole.starts[index + 1]
        assert room.experts is not None and isinstance(body.experts, PooledExperts)
        experts, tape = room.experts.room(room.activations.rows), whole.tape
        tape.run(begin, end + GROUP_STEP)
        chosen = experts.chosen(body.config.router.top_k)
        pool, wanted = body.experts.pool, sorted({*chosen.flatten().tolist()})
        guesser = whole.guessers.get(index) if foresees else None
        foresee = None if guesser is None or not guesser.is_of_use else partial(guesser.guess, experts)
        held = pool.held(body.experts.block, wanted, foresee)
        with closing(held), closing(experts.arrange(chosen, held)) as groups:
            for _ in groups:
                tape.run(end + GROUP_STEP + 1, end + COMBINE_STEP)
        tape.run(end + COMBINE_STEP, end)

    def _placed(self, room: _Room, batch: Batch) -> _WholeTape:
        """Place a batch in the room, and return the tape for it."""
        if room.batch is not batch:
            config = self.decoder.config
            if room.activations.rows != len(batch):
                room.activations.resize(len(batch), self.isa)
            room.place(batch, config.attentions[0].num_heads, config.attentions[0].num_kv_heads)
        return self._tape(room)

    def _head(self, room: _Room, x: Tensor) -> Tensor:
        """fp32 [R, V] of hidden states [R, hidden]."""
        with self.decoder.stream.held(HEAD):
            if _packed(self.decoder.head) is None:
                return self.decoder.logits(x)
            return torch.cat([self._packed_head(room, part) for part in torch.split(x, room.rows)])

    def _packed_head(self, room: _Room, x: Tensor) -> Tensor:
        R = len(x)
        room.x[:R] = x
        room.batch = None
        block_rows = room.activations.resize(R, self.isa)
        logits = self._new_logits(R, block_rows)
        Tape(list(_Recorder(self.decoder, self.isa, room, block_rows).head(logits))).run()
        return self._trimmed(logits, R)

    def _new_logits(self, rows: int, block_rows: int) -> Tensor:
        """Return room for whole blocks of rows and whole tiles of the vocabulary."""
        return torch.empty(rows + block_rows, -(-self.decoder.head.out_features // TILE) * TILE)

    def _trimmed(self, logits: Tensor, rows: int) -> Tensor:
        own = logits[:rows, : self.decoder.head.out_features]
        return self.decoder.capped(own)

    def _tape(self, room: _Room) -> _WholeTape:
        assert room.layouts is not None, "a batch was placed"
        # A tape points at the attention's room, which is another one where it had to grow.
        experts = None if room.experts is None else room.experts.room(room.activations.rows)
        key = (room.activations.block_rows, room.attention_rows, room.is_split, room.layouts, experts, room.attention)
        if key not in self._tapes:
            self._tapes = {kept: tape for kept, tape in self._tapes.items() if kept[-1] is room.attention}
            recorder = _Recorder(self.decoder, self.isa, room, room.activations.block_rows, experts)
            steps: list[Step] = [*recorder.embed()]
            starts = [len(steps)]
            for block in self.decoder.blocks:
                steps += recorder.block(block)
                starts.append(len(steps))
            head = [] if _packed(self.decoder.head) is None else [*recorder.head(room.wide)]
            output = (head[-1][1], head[-1][0].pointers.index("y")) if head else None
            self._tapes[key] = _WholeTape(Tape(steps + head), tuple(starts), output, recorder.guessers())
        return self._tapes[key]


class _Guesser(NamedTuple):
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
class _WholeTape:
    tape: Tape
    starts: tuple[int, ...]  # of each block, in steps, and of the head; before the first is the embedding, if anything
    head: tuple[ctypes.Array[ctypes.c_int64], int] | None  # the last step's words, and the one of y: each forward's own
    guessers: Mapping[int, _Guesser]  # by the number of the block whose input tells


class _Room:
    """The buffers of a forward of up to `rows` tokens: fixed places, so that a tape can point at them."""

    def __init__(self, decoder: Decoder, isa: Isa, rows: int) -> None:
        config = decoder.config
        self.rows = rows
        self.mixtures = {block.name: mixture_of(body, as_rms(block.norm_in)) for block, body in _mixtures(decoder)}
        self.experts = ExpertRooms(isa, rows, [*self.mixtures.values()]) if self.mixtures else None
        self.groups = layer_groups(config.windows, config.kv_shapes)
        attention = config.attentions[0]  # the others have the same heads: see `has_plain_steps`
        padded = rows + MOST_ROWS
        linears = [linear for block in decoder.blocks for linear in block.body.linears]
        matrices = [*linears, decoder.head]
        groups = [part.group for linear in matrices for part in _parts(linear)]
        self.x = torch.zeros(padded, config.hidden_size)
        self.wide = torch.zeros(padded * max(linear.out_features for linear in linears))  # qkv, gate and up
        self.mixed = torch.zeros(padded, attention.mixed_features)
        self.y = torch.zeros(padded, config.hidden_size)  # before a norm that follows a body
        self.activations = Activations(rows, max(linear.in_features for linear in linears), min(groups))
        self.token_ids = torch.zeros(rows, dtype=torch.int64)
        self.cos = [torch.zeros(rows, rotary.rotary_dim) for rotary in decoder.rotaries]
        self.sin = [torch.zeros(rows, rotary.rotary_dim) for rotary in decoder.rotaries]
        self.tokens = [torch.zeros(rows, len(cpu_rope.TOKEN_WORDS), dtype=torch.int64) for _ in self.groups]
        self.head_dim = attention.head_dim
        self.attention = AttentionRoom(rows * attention.num_heads, 1, 1, attention.num_kv_heads, attention.head_dim)
        self.attention_rows = 1  # of a task, at most
        self.is_split = False
        self.layouts: Layouts | None = None
        self.batch: Batch | None = None  # the one that was placed last, as long as all of it is there

    def place(self, batch: Batch, heads: int, kv_heads: int) -> None:
        """Place a batch: where each token's keys go, and which rows attend together."""
        self.token_ids[: len(batch)] = batch.token_ids
        for index, (cos, sin) in enumerate(batch.rotations):
            self.cos[index][: len(batch)] = cos[:, 0]
            self.sin[index][: len(batch)] = sin[:, 0]
        tables = attention_tables(batch.segments, heads, kv_heads, len(self.groups), torch.get_num_threads())
        for own, words in zip(self.tokens, tables.tokens, strict=True):
            own[: len(words)] = torch.tensor(words)
        if not self.attention.holds(tables):
            self.attention = AttentionRoom(
                max(self.attention.tasks, 2 * len(tables.tasks)),
                2 * len(tables.merges),
                2 * tables.num_parts,
                kv_heads,
                self.head_dim,
            )
        self.attention.place(tables)
        self.layouts = batch.segments[0].kv.layouts
        self.attention_rows, self.is_split, self.batch = tables.rows, tables.is_split, batch


@dataclass(frozen=True)
class _Recorder:
    """Writes blocks down as steps over a room as a batch was placed in it, for a number of rows a block."""

    decoder: Decoder
    isa: Isa
    room: _Room
    block_rows: int
    experts: ExpertRoom | None = None

    def embed(self) -> Iterator[Step]:
        """Yield the step that looks the embedding up; none where it is not in INT8 or on the disk: torch does it."""
        embedding = self.decoder.embed
        if not isinstance(embedding.matrix, Linear):
            return
        packed = _packed(embedding.matrix)
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
        else:
            assert isinstance(body, MLP), "`supports` said so"
            yield self._gate(body)
        if (norm_out := as_rms(block.norm_out)) is None:
            yield self.multiply(last, self.room.x, adds=True)
        else:
            yield self.multiply(last, self.room.y, adds=False)
            hidden = last.out_features
            yield self._norm(norm_out, self.room.y, self.room.x, hidden, hidden, adds=True)

    def _gate(self, body: MLP) -> Step:
        """Quantize the features between the matrices of an MLP."""
        group, features = _required(body.down_proj).group, body.down_proj.in_features
        kernel = cpu_quantize.quantize(self.isa, group, "gated", body.activation_name)
        stride = body.gate_up_proj.out_features
        return self.room.activations.quantize(kernel, self.room.wide, group, features, stride=stride)

    def _mixture(self, block: Block, body: MoE) -> Iterator[Step]:
        room, shared = self.room, body.shared
        assert self.experts is not None
        if shared is not None:
            yield from self.wide(shared.gate_up_proj, as_rms(block.norm_in))
            yield self._gate(shared)
            yield self.multiply(shared.down_proj, room.y, adds=False)
        rows = None if shared is None else room.y
        yield from self.experts.steps(room.mixtures[block.name], room.x, room.x, adds=True, shared=rows)

    def guessers(self) -> dict[int, _Guesser]:
        """Of each mixture but the last, what guesses the next one's experts of a token, if they come from the disk."""
        found: dict[int, _Guesser] = {}
        if self.experts is None or self.experts.block_rows > 1:
            return found
        mixtures = [pair for pair in enumerate(self.decoder.blocks) if isinstance(pair[1].body, MoE)]
        for (number, _), (_, block) in itertools.pairwise(mixtures):
            body = block.body
            if isinstance(body, MoE) and isinstance(body.experts, PooledExperts):
                tape = Tape([*self.experts.guess_steps(self.room.mixtures[block.name], self.room.x)])
                found[number] = _Guesser(body.experts, body.config.router.top_k, tape)
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
        for part in _parts(linear):
            if part.group != group:
                group = part.group
                yield self.quantize_for(part, room.x, norm)
            rows = part.tiles * TILE
            kernel = cpu_matmul.matmul(self.isa, part.weights, self.block_rows, has_bias=linear.bias is not None)
            bias = None if linear.bias is None else linear.bias[first : first + rows].float()
            yield room.activations.multiply(kernel, part, room.wide[first:], linear.out_features, bias)
            first += rows

    def quantize(self, linear: Linear, x: Tensor, norm: RMSNorm | None) -> Step:
        return self.quantize_for(_required(linear), x, norm)

    def quantize_for(self, matrix: PackedMatrix, x: Tensor, norm: RMSNorm | None) -> Step:
        kernel = cpu_quantize.quantize(self.isa, matrix.group, "plain" if norm is None else "norm")
        rest: dict[str, Tensor | int] = {} if norm is None else {"weight": norm.weight, "eps": float_bits(norm.eps)}
        return self.room.activations.quantize(kernel, x, matrix.group, matrix.in_features, **rest)

    def multiply(self, linear: Linear, y: Tensor, *, adds: bool) -> Step:
        packed, has_bias = _required(linear), linear.bias is not None
        kernel = cpu_matmul.matmul(self.isa, packed.weights, self.block_rows, adds=adds, has_bias=has_bias)
        bias = None if linear.bias is None else linear.bias.float()
        return self.room.activations.multiply(kernel, packed, y, linear.out_features, bias)

    def _attention(self, body: Attention) -> Iterator[Step]:
        room, config = self.room, body.config
        H, KH, D = config.num_heads, config.num_kv_heads, config.head_dim
        stride = (H + 2 * KH) * D
        if body.q_norm is not None and body.k_norm is not None and config.qk_norm == "full":
            keys = room.wide[H * D :]
            yield self._norm(body.q_norm, room.wide, room.wide, H * D, stride, adds=False)
            yield self._norm(body.k_norm, keys, keys, KH * D, stride, adds=False)
        norms = (body.q_norm, body.k_norm) if config.qk_norm == "head" else (None, None)
        where: cpu_rope.Norms = "none" if norms[0] is None else "last" if config.rotates_first else "first"
        assert room.layouts is not None
        dense, coded = room.layouts
        group, index = next(
            (g, layers.index(body.layer)) for g, layers in enumerate(room.groups) if body.layer in layers
        )
        rope = cpu_rope.rope(self.isa, dense, coded, config.rotary_dim, where)
        yield rope.step(
            qkv=room.wide,
            cos=room.cos[body.rotation],
            sin=room.sin[body.rotation],
            q_norm=0 if norms[0] is None else norms[0].weight,
            k_norm=0 if norms[1] is None else norms[1].weight,
            tokens=room.tokens[group],
            shape=room.activations.shape,
            heads=H,
            kv_heads=KH,
            layer=index,
            scale=float_bits(config.scale),
            eps=float_bits(self.decoder.config.norm_eps),
        )
        place = AttentionPlace(
            room.wide, stride, room.mixed, room.tokens[group], index, H, config.window, config.softcap
        )
        yield from room.attention.steps(self.isa, room.layouts, place, rows=room.attention_rows, is_split=room.is_split)

    def _norm(self, norm: RMSNorm, x: Tensor, y: Tensor, features: int, stride: int, *, adds: bool) -> Step:
        strides, shape = {"x_stride": stride, "y_stride": stride}, self.room.activations.shape
        rest: dict[str, Tensor | int]
        rest = {"weight": norm.weight, "features": features, "eps": float_bits(norm.eps)}
        return cpu_quantize.norm(self.isa, adds=adds).step(x=x, y=y, shape=shape, **strides, **rest)


def _mixtures(decoder: Decoder) -> list[tuple[Block, MoE]]:
    return [(block, block.body) for block in decoder.blocks if isinstance(block.body, MoE)]


def _parts(linear: Linear) -> list[PackedMatrix]:
    """Return the matrices that make up a linear layer as the kernels take them; none where a format or its columns are
    not theirs."""
    parts = linear.packed_parts
    return parts if all(part.in_features == linear.in_features for part in parts) else []


def _packed(linear: Linear) -> PackedMatrix | None:
    """Return the matrix as the kernels take it; None where its format or its columns are not theirs."""
    packed = linear.packed
    return packed if packed is not None and packed.in_features == linear.in_features else None


def _required(linear: Linear) -> PackedMatrix:
    packed = _packed(linear)
    assert packed is not None, "CpuProgram.supports said so"
    return packed
