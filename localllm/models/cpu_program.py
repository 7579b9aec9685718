"""A decoder on the CPU as one native call: no Python and no torch operator between two matrices.

At 15 ms a token, 22 layers of torch operators would take 4. The decoder is written down once as a tape of kernels;
a forward fills in what is new (token ids, rotations, where each token's keys go) and runs it. Every row is computed
alike however many there are: a prompt in chunks, a batch of answers and the verification of a draft give the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from localllm.kernels.cpu_expert_room import COMBINE_STEP, GROUP_STEP, ExpertRoom
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import best_isa
from localllm.kernels.cpu_linear import Step
from localllm.kernels.cpu_page_mass import MassRoom
from localllm.kernels.cpu_paged import AttentionRoom, is_choice
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.tile16 import TILE
from localllm.layers.adapted import add_to_embedding, add_to_logits
from localllm.layers.batch import Batch
from localllm.layers.mamba import Mamba
from localllm.layers.mlp import SplitMLP
from localllm.layers.moe import MoE
from localllm.layers.per_layer import INPUTS, looked_up_alone
from localllm.layers.rwkv7 import FIRST_VALUES, Rwkv7ChannelMix, Rwkv7TimeMix
from localllm.layers.segment import SpilledPages
from localllm.models.capabilities import fills_vectors
from localllm.models.cpu_buffers import AttendingKey, Buffers, StateRooms, mixtures_of
from localllm.models.cpu_mixture import is_native
from localllm.models.cpu_products import has_native_matrices, packed_matrix, packed_parts
from localllm.models.cpu_steps import NORM_STEPS, Guesser, Recorder
from localllm.models.decoder import Block, Decoder, pages_held
from localllm.models.expert_records import PooledExperts
from localllm.models.first_values import makes_first_values
from localllm.models.layout import EMBED, HEAD
from localllm.quant.dense import dense_name

_ADAPTED_TAPES = 32  # that are kept: one for each set of layers that adapters change, and number of rows

_TapeKey = tuple[
    int,
    frozenset[str],
    tuple[AttendingKey, ...],
    ExpertRoom | None,
    StateRooms,
    tuple[AttentionRoom | MassRoom | None, ...],
]


class CpuProgram:
    """Built once for a decoder; `supports` says for which. One forward at a time."""

    def __init__(self, decoder: Decoder, isa: Isa | None = None) -> None:
        """isa: None takes the best that this machine has."""
        self.decoder = decoder
        self.isa = isa or best_isa()
        # Whether a step waits for the disk between two blocks, or in one.
        self._waits = bool(decoder.stream.names) or any(
            isinstance(body.experts, PooledExperts) for _, body in mixtures_of(decoder)
        )
        self._room: Buffers | None = None
        self._tapes: dict[_TapeKey, _WholeTape] = {}

    @staticmethod
    def supports(decoder: Decoder) -> bool:
        """Return whether every block is of INT4 or INT8 matrices whose sizes fill whole tiles and groups, on a CPU."""
        return (
            decoder.device.type == "cpu"
            and fills_vectors(decoder.config, dense_name(decoder.dtype))
            and not any(isinstance(block.body, SplitMLP) for block in decoder.blocks)
            and all(
                is_native(body.experts) and (block.norm_out is None) == (body.norms is None)
                for block, body in mixtures_of(decoder)
            )
            and all(map(_has_native_matrices, decoder.blocks))
            and all(
                (packed := packed_matrix(linear)) is not None and packed.tiles * TILE == linear.out_features
                for block in decoder.blocks
                for linear in block.head_linears
            )
        )

    def logits(
        self,
        batches: Sequence[Batch],
        on_block: Callable[[Block, Tensor], None] | None = None,
        on_states: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """fp32 [R, V] of the batches' `logit_rows`, as from `Decoder.forward`, whose `on_block` and `on_states` these
        are.

        Without it, and with one batch of a decoder of which nothing is streamed, the step is a single call.
        """
        rows = max(map(len, batches))
        if self._room is None or rows > self._room.rows:
            self._tapes.clear()
            self._room = Buffers(self.decoder, self.isa, rows)
        room = self._room
        ring = self.decoder.ring_of(batches, reads_chosen=True)
        if on_block is None and len(batches) == 1 and not self._waits and ring is None:
            return self._in_one_call(room, batches[0], on_states)
        # A guess is judged by the pool's next call, which is another batch's where there are several.
        foresees = sum(map(len, batches)) == 1
        self.decoder.stream.begin()
        states = self._embedded(room, batches)
        for index, block in enumerate(self.decoder.blocks):
            with self.decoder.stream.held(block.name), pages_held(ring, block):
                for batch, x in zip(batches, states, strict=True):
                    self._run_block(room, batch, index, x, ring, foresees=foresees)
                    if on_block is not None:
                        on_block(block, x)
        if on_states is not None:
            on_states(torch.cat(states))
        wanted = torch.cat([x[batch.logit_rows] for batch, x in zip(batches, states, strict=True)])
        return self._head(room, wanted, batches)

    def _in_one_call(self, room: Buffers, batch: Batch, on_states: Callable[[Tensor], None] | None) -> Tensor:
        T, R = len(batch), len(batch.logit_rows)
        whole = self._placed(room, batch)
        first = self._begun(room, batch, whole)
        if R < T or whole.head is None:
            whole.tape.run(first, whole.starts[-1])
            if on_states is not None:
                on_states(room.x[:T])  # before the head takes their room
            return self._head(room, room.x[batch.logit_rows], [batch])
        logits = self._new_logits(T, room.activations.block_rows)
        words, y = whole.head
        words[y] = logits.data_ptr()
        whole.tape.run(first)
        if on_states is not None:
            on_states(room.x[:T])
        return self._finished(logits, room.x[:T], [batch])

    def _begun(self, room: Buffers, batch: Batch, whole: _WholeTape) -> int:
        """Embed a batch as far as the tape does not; return the first step to run."""
        first = self.decoder.blocks[0] if self.decoder.blocks else None
        if not batch.adapted_segments and whole.starts[0] and (self.decoder.per_layer_rows is None or first is None):
            return 0
        self._embed(room, batch, whole)
        if self.decoder.per_layer_rows is None or first is None:
            return whole.starts[0]
        self.decoder.look_up_per_layer(batch)
        self._prepare_layers(room, batch, first)
        return whole.starts[0]

    def _embed(self, room: Buffers, batch: Batch, whole: _WholeTape) -> None:
        """Fill the room with the embeddings of a batch."""
        x = room.x[: len(batch)]
        if whole.starts[0]:
            whole.tape.run(0, whole.starts[0])
        else:
            x.copy_(self.decoder.embed(batch.token_ids))
        add_to_embedding(self.decoder.embed, batch, x)

    def _prepare_layers(self, room: Buffers, batch: Batch, first: Block) -> None:
        """Make what the gates of all layers read, from what comes into the first block."""
        if first.per_layer_inputs is not None:
            first.per_layer_inputs.prepare(room.x[: len(batch)], batch)
        else:  # a draft without that block
            batch.carried[INPUTS] = looked_up_alone(batch, room.per_layer.shape[-1])
        room.take_per_layer(batch)

    def _embedded(self, room: Buffers, batches: Sequence[Batch]) -> list[Tensor]:
        """Return the hidden states [T, hidden] of each batch: the room's own where there is but one."""
        states = []
        with self.decoder.stream.held(EMBED):
            for batch in batches:
                x = room.x[: len(batch)]
                self._embed(room, batch, self._placed(room, batch))
                self.decoder.look_up_per_layer(batch)
                states.append(x if len(batches) == 1 else x.clone())
        return states

    def _run_block(
        self, room: Buffers, batch: Batch, index: int, x: Tensor, ring: SpilledPages | None, *, foresees: bool
    ) -> None:
        """Run x [T, hidden] through a block, in place. ring: of pages on the disk. foresees: whether the next block's
        experts are guessed."""
        is_in_room = x.data_ptr() == room.x.data_ptr()
        whole = self._placed(room, batch)
        if not is_in_room:
            room.x[: len(x)] = x
        block, body = self.decoder.blocks[index], self.decoder.blocks[index].body
        begin, end = whole.starts[index], whole.starts[index + 1]
        if self.decoder.per_layer_rows is not None:
            if index == 0:
                self._prepare_layers(room, batch, block)
            elif block.per_layer_gate is not None and not is_in_room:  # another batch's may be there
                room.take_per_layer(batch)
        if isinstance(body, MoE) and isinstance(body.experts, PooledExperts):
            self._run_pooled(room, whole, index, body, foresees=foresees)
        elif isinstance(body, Rwkv7TimeMix) and not is_in_room:
            self._run_time_mix(room, whole, index, body, batch)
        else:
            if ring is not None and ring.brings and index in whole.chosen:
                whole.tape.run(begin, whole.chosen[index])
                (layer,), begin = block.attended_layers, whole.chosen[index]
                ring.bring(layer, room.chosen_pages(block))
            whole.tape.run(begin, end)
        if not is_in_room:
            x.copy_(room.x[: len(x)])

    def _run_time_mix(self, room: Buffers, whole: _WholeTape, index: int, body: Rwkv7TimeMix, batch: Batch) -> None:
        """Run a time mix where other batches are between it and the first one, whose values it looks at."""
        first, makes = room.rwkv7.first[: len(batch)], makes_first_values(self.decoder.blocks, body)
        if not makes:
            first.copy_(batch.carried[FIRST_VALUES])
        whole.tape.run(whole.starts[index], whole.starts[index + 1])
        if makes:
            batch.carried[FIRST_VALUES] = first.clone()

    def _run_pooled(self, room: Buffers, whole: _WholeTape, index: int, body: MoE, *, foresees: bool) -> None:
        """Run a mixture whose experts come from the disk: those that are here while the others are read."""
        begin, last = whole.starts[index], whole.starts[index + 1]
        end = last if body.norms is None else last - NORM_STEPS
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
        tape.run(end + COMBINE_STEP, last)

    def _placed(self, room: Buffers, batch: Batch) -> _WholeTape:
        """Place a batch in the room, and return the tape for it."""
        if room.batch is not batch:
            if room.activations.rows != len(batch):
                room.activations.resize(len(batch), self.isa)
            room.place(batch)
        return self._tape(room)

    def _head(self, room: Buffers, x: Tensor, batches: Sequence[Batch]) -> Tensor:
        """fp32 [R, V] of hidden states [R, hidden] of the batches' `logit_rows`."""
        with self.decoder.stream.held(HEAD):
            if packed_matrix(self.decoder.head) is None:
                return self.decoder.logits(x, batches)
            logits = torch.cat([self._packed_head(room, part) for part in torch.split(x, room.rows)])
            return self._finished(logits, x, batches)

    def _packed_head(self, room: Buffers, x: Tensor) -> Tensor:
        R = len(x)
        room.x[:R] = x
        room.batch = None
        block_rows = room.activations.resize(R, self.isa)
        logits = self._new_logits(R, block_rows)
        Tape(list(Recorder(self.isa, room, block_rows, self.decoder).head(logits))).run()
        return logits[:R]

    def _new_logits(self, rows: int, block_rows: int) -> Tensor:
        """Return room for whole blocks of rows and whole tiles of the vocabulary."""
        return torch.empty(rows + block_rows, -(-self.decoder.head.out_features // TILE) * TILE)

    def _finished(self, logits: Tensor, x: Tensor, batches: Sequence[Batch]) -> Tensor:
        """Return logits as the adapters and the family have them, of hidden states x [R, hidden]; those that were
        computed may have more rows and columns."""
        own = logits[: len(x), : self.decoder.head.out_features]
        add_to_logits(batches, x, self.decoder.final_norm, own)
        return self.decoder.capped(own)

    def _tape(self, room: Buffers) -> _WholeTape:
        # A tape points at the attention's room, which is another one where it had to grow.
        experts = None if room.experts is None else room.experts.room(room.activations.rows)
        rows = room.activations.block_rows
        key = (rows, room.low_rank.changed, room.attending_keys, experts, room.states, room.rooms)
        if key not in self._tapes:
            if room.low_rank.changed and sum(bool(kept[1]) for kept in self._tapes) >= _ADAPTED_TAPES:
                self._tapes = {kept: tape for kept, tape in self._tapes.items() if not kept[1]}
            self._tapes = {kept: tape for kept, tape in self._tapes.items() if kept[-2:] == key[-2:]}
            recorder = Recorder(self.isa, room, rows, self.decoder, experts)
            steps: list[Step] = [*recorder.embed()]
            starts, chosen = [len(steps)], {}
            for index, block in enumerate(self.decoder.blocks):
                for step in recorder.block(block):
                    steps.append(step)
                    if is_choice(step):
                        chosen[index] = len(steps)
                starts.append(len(steps))
            head = [] if packed_matrix(self.decoder.head) is None else [*recorder.head(room.wide)]
            output = (head[-1][1], head[-1][0].pointers.index("y")) if head else None
            self._tapes[key] = _WholeTape(Tape(steps + head), tuple(starts), output, recorder.guessers(), chosen)
        return self._tapes[key]


def _has_native_matrices(block: Block) -> bool:
    if isinstance(block.body, Rwkv7TimeMix | Rwkv7ChannelMix | Mamba):
        return has_native_matrices(block.body)
    return all(
        (parts := packed_parts(linear)) and sum(part.tiles for part in parts) * TILE == linear.out_features
        for linear in block.linears
    )


@dataclass(frozen=True)
class _WholeTape:
    tape: Tape
    starts: tuple[int, ...]  # of each block, in steps, and of the head; before the first is the embedding, if anything
    head: tuple[ctypes.Array[ctypes.c_int64], int] | None  # the last step's words, and the one of y: each forward's own
    guessers: Mapping[int, Guesser]  # by the number of the block whose input tells
    chosen: Mapping[int, int]  # the step behind the choice of pages, by the number of the block
