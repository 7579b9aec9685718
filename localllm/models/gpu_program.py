"""A decoder on a GPU by fused kernels, its steps of a few tokens as graphs of launches that are replayed.

Blocks that rest on the device run here; one that the host computes, or in a way that no kernel knows, runs as `Decoder`
has it, between two graphs. A block that is streamed has a graph of its own: its place in the ring is always the same.
A forward of many tokens launches the same kernels one by one, and so does one of rows with adapters. Every row of a
short forward is computed alike, however many there are: batches and the verification of drafts give the bits of a
single token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from localllm.kernels.gpu import product, sample
from localllm.kernels.gpu.embedding import embed
from localllm.kernels.gpu.expert_record import ExpertTable
from localllm.kernels.gpu.launch import run_all
from localllm.kernels.kv_page import PAGE_TOKENS
from localllm.kernels.page_locked import copy_event, page_locked
from localllm.layers.attention import Attention
from localllm.layers.batch import Batch, Draw, moved
from localllm.layers.beside import Beside, SingleMixer
from localllm.layers.delta_net import DeltaNet
from localllm.layers.gpu_block import GpuForward, floats_of, multiply, run_block
from localllm.layers.gpu_low_rank import AdapterTables
from localllm.layers.gpu_tables import (
    GpuTables,
    Groups,
    HostStage,
    TableShape,
    seen_pages,
    table_pages,
    table_shape,
    task_tokens,
)
from localllm.layers.latent_attention import LatentAttention
from localllm.layers.linear import Linear
from localllm.layers.low_rank import Adapter, AppliedAdapter
from localllm.layers.mamba2 import Mamba2
from localllm.layers.mlp import MLP
from localllm.layers.moe import MoE
from localllm.layers.norm import as_rms
from localllm.layers.recurrent import Recurrent
from localllm.layers.rwkv7 import Rwkv7ChannelMix, Rwkv7TimeMix
from localllm.layers.segment import KVStore
from localllm.layers.short_conv import ShortConv
from localllm.models.capabilities import has_one_head_shape
from localllm.models.decoder import Block, Decoder, pages_held
from localllm.models.first_values import first_value_features, first_values_shared
from localllm.models.gpu_capabilities import is_ours
from localllm.models.gpu_graphs import Graphs
from localllm.models.gpu_mixture import run_mixture, table_of
from localllm.models.gpu_runs import Run, ended_by, joined_runs, without_head
from localllm.models.gpu_rwkv import before_product, run_rwkv7
from localllm.models.gpu_slots import BlockPart, SlottedMixtures, is_slotted, parts_of
from localllm.models.layout import EMBED, HEAD
from localllm.quant.dense import Dense

_COPIES = 4  # of drawn tokens on the host, as many as forwards can be on their way
_LOGIT_ROWS = 64  # of the head at once
_MOST_PADDED = 64  # rows up to which a graph is padded to a power of two
CHUNK_ROWS = 512  # of a long prompt's chunks

OnBlock = Callable[[Block, Tensor], None]


@dataclass(frozen=True)
class Drawn:
    """Tokens on their way to the host: `on_device` int64 [rows], until the next draw."""

    on_device: Tensor
    on_host: Tensor
    arrived: Any  # an event; None where the device is the host

    def tokens(self) -> list[int]:
        """Waits for them. `sample.NOT_FINITE` where a row's logits are no numbers."""
        if self.arrived is not None:
            self.arrived.synchronize()
        found: list[int] = self.on_host.tolist()
        return found


class _Rows:
    """The buffers that forwards of all shapes write: at the same addresses each time."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        device, vocab_size = decoder.device, decoder.head.out_features
        self.x = torch.zeros((product.FEW_ROWS, decoder.config.hidden_size), device=device)
        self.logits = torch.zeros((product.FEW_ROWS, vocab_size), device=device)
        self.drawn = torch.zeros(product.FEW_ROWS, dtype=torch.int64, device=device)
        self.sampling = sample.SampleRoom.empty(product.FEW_ROWS, vocab_size, device)
        self.first_values = torch.zeros((CHUNK_ROWS, first_value_features(decoder.config)), device=device)

    @cached_property
    def long_x(self) -> Tensor:
        return torch.zeros((CHUNK_ROWS, self._decoder.config.hidden_size), device=self._decoder.device)


class _ForwardRoom:
    """The buffers that forwards of one shape read and write. Logits are of a step's rows."""

    def __init__(self, tables: GpuTables, x: Tensor, rows: _Rows) -> None:
        count = tables.shape.rows
        self.tables, self.x = tables, x
        self.logits, self.drawn, self.sampling = rows.logits[:count], rows.drawn[:count], rows.sampling
        self.first_values = rows.first_values[:count]
        self.graphs: dict[int, Any] = {}
        self.forwards = 0


class GpuProgram:
    """Logits as `Decoder.forward` has them. One forward at a time; the device is the decoder's."""

    def __init__(self, decoder: Decoder, graphs: Graphs | None = None, *, chooses: bool = False) -> None:
        """graphs: of the model; without them nothing is captured. chooses: launch also what chooses pages where no row
        does."""
        self.decoder, self.device = decoder, decoder.device
        self._graphs, self.name_in_graphs = graphs or Graphs(self.device), object()
        self._captures = graphs is not None and graphs.captures
        self._on_host = page_locked((_COPIES, product.FEW_ROWS), torch.int64, self.device)
        self._long_stage = HostStage(self.device)
        self._num_draws, self._chooses = 0, chooses
        self._joined_runs: tuple[Run, ...] | None = None
        self._adds: WeakKeyDictionary[Adapter, bool] = WeakKeyDictionary()

    @staticmethod
    def supports(decoder: Decoder) -> bool:
        """Return whether any part of the decoder is for our kernels."""
        return has_one_head_shape(decoder.config) and any(is_ours(block, decoder.device) for block in decoder.blocks)

    @property
    def is_whole(self) -> bool:
        """Return whether a forward needs nothing of the host, once it has begun, from the token to the token."""
        return len(self._runs) == 1 and self._runs[0].is_ours and not self._runs[0].is_streamed

    def logits(self, batches: Sequence[Batch], on_block: OnBlock | None = None, *, sees_each: bool = True) -> Tensor:
        """fp32 [R, V]. batches: on the host. on_block: called behind each block, or, unless it sees what each has
        computed, behind several."""
        if max(map(len, batches)) > product.dispatch_for(self.device).most_rows:
            return self.decoder.forward(batches, on_block)
        is_plain = len(batches) == 1 and not batches[0].adapted_segments
        if is_plain and not (on_block is not None and sees_each):
            batch = batches[0]
            if self.has_pages([segment.kv for segment in batch.segments]):
                if len(batch) <= product.FEW_ROWS:
                    return self._few(batch, ()).logits[batch.logit_rows.to(self.device)]
                if (rows := graph_rows(len(batch))) is not None:
                    return self._long(batch, rows, on_block)
        return self._many(batches, on_block)

    def draw(self, batch: Batch, draws: Sequence[Draw], previous: Tensor | None = None) -> Drawn:
        """A token behind each row of a batch of FEW_ROWS rows at most. previous int64 [>= rows], on the device: its
        token ids, which the host need not know then."""
        room, rows = self._few(batch, draws, previous), len(batch)
        on_host = self._on_host[self._num_draws % _COPIES][:rows]
        self._num_draws += 1
        on_host.copy_(room.drawn[:rows], non_blocking=True)
        arrived = None
        if self.device.type == "cuda":
            arrived = copy_event()
            arrived.record(torch.cuda.current_stream(self.device))
        return Drawn(room.drawn, on_host, arrived)

    def has_pages(self, kvs: Sequence[KVStore]) -> bool:
        """Return whether keys and values are where they are used: with too little memory on a GPU they are not."""
        homes = kvs[0].homes  # as all have them
        is_here = all(homes[layer][0] == self.device for layer in self._layers)
        return is_here and all(kv.ring is None for kv in kvs)

    def computes_all(self, kvs: Sequence[KVStore]) -> bool:
        """Return whether every block is for our kernels, with the keys and values where they are."""
        return all(is_ours(block, self.device, kvs[0]) for block in self.decoder.blocks)

    def adds(self, adapters: Iterable[AppliedAdapter]) -> bool:
        """Return whether our kernels add what these adapters change, but for what is in blocks of operators."""
        for each in adapters:
            if each.adapter not in self._adds:
                self._adds[each.adapter] = self._adds_all_of(each.adapter)
        return all(self._adds[each.adapter] for each in adapters)

    def _adds_all_of(self, adapter: Adapter) -> bool:
        own = tuple(f"{block.name}." for block in self._ours)
        left = (site for site in adapter.parts if site not in self._adapters.sites)
        return not adapter.records and not any(site.startswith(own) for site in left)

    # A few rows

    def _few(self, batch: Batch, draws: Sequence[Draw], previous: Tensor | None = None) -> _ForwardRoom:
        runs, rows = self._runs, 1 << (len(batch) - 1).bit_length()
        room = self._room(batch, rows, draws)
        if previous is not None:
            room.tables.views["token_ids"][: len(batch)].copy_(previous[: len(batch)], non_blocking=True)
        forward = GpuForward(batch, room.tables, self._places(batch), self.decoder.dtype, room.first_values)
        self.decoder.stream.begin()
        draws_now = bool(draws) or self._captures  # one graph serves both: a token that nobody asked for takes 20 us
        for index, run in enumerate(runs):
            with self._held(run), self._attended(run, room, len(batch)):
                self._run(index, run, room, forward, draws=draws_now)
        room.tables.mark_made()
        return room

    def _long(self, batch: Batch, rows: int, on_block: OnBlock | None) -> Tensor:
        """Compute more rows than a step has. Logits are wanted of few of them: the head is in no graph."""
        runs = without_head(self._runs)
        room = self._room(batch, rows, ())
        forward = GpuForward(batch, room.tables, self._places(batch), self.decoder.dtype, room.first_values)
        self.decoder.stream.begin()
        for index, run in enumerate(runs):
            with self._held(run), self._attended(run, room, len(batch)):
                self._run(index, run, room, forward, draws=False)
            for block in map(ended_by, run.stages):
                if on_block is not None and block is not None:
                    on_block(block, room.x[: len(batch)])
        room.tables.mark_made()
        with self.decoder.stream.held(HEAD):
            wanted = room.x[moved(batch.logit_rows, self.device)]
            return torch.cat([self._head(part) for part in torch.split(wanted, _LOGIT_ROWS)])

    def _room(self, batch: Batch, rows: int, draws: Sequence[Draw]) -> _ForwardRoom:
        """Return the room for a batch, with its tables filled."""
        layouts = batch.segments[0].kv.layouts
        groups = self._groups(batch)
        pages = table_pages(PAGE_TOKENS * seen_pages(batch, groups, self.device), rows)
        shape, tokens = self._shape(batch, rows, pages)

        def new_room() -> _ForwardRoom:
            x = self._rows.x if rows <= product.FEW_ROWS else self._rows.long_x
            return _ForwardRoom(GpuTables(shape, self.device, layouts), x[:rows], self._rows)

        room = self._graphs.room(self.name_in_graphs, (shape, layouts), new_room)
        room.tables.fill(batch, groups, tokens, draws)
        room.forwards += 1
        return room

    @contextmanager
    def _held(self, run: Run) -> Iterator[None]:
        """Inside, a streamed block is in its place."""
        if not run.is_streamed:
            yield
            return
        (stage,) = run.stages
        assert not isinstance(stage, BlockPart), "what is in slots is not streamed"
        with self.decoder.stream.held(stage.name if isinstance(stage, Block) else stage):
            yield

    @contextmanager
    def _attended(self, run: Run, room: _ForwardRoom, tokens: int) -> Iterator[None]:
        """Inside, the run is launched; the host does what it has to do of its parts."""
        for part in run.parts:
            self._slotted.before(part)
        yield
        for part in run.parts:
            self._slotted.behind(part, room.tables.shape.rows, tokens)

    def _run(self, index: int, run: Run, room: _ForwardRoom, forward: GpuForward, *, draws: bool) -> None:
        graph = room.graphs.get(index)
        if graph is not None:
            graph.replay()
            return
        self._launch(run, room, forward, draws)
        # Many a prompt has one chunk of a shape, for which a graph would cost more than it saves.
        comes_again = room.tables.shape.rows <= product.FEW_ROWS or room.forwards > 1
        is_free = index not in room.graphs and run.is_ours and self._captures and comes_again
        if is_free and self._is_capturable(run) and self._has_pinned(run, room):
            room.graphs[index] = self._graphs.captured(partial(self._launch, run, room, forward, draws))

    def _launch(self, run: Run, room: _ForwardRoom, forward: GpuForward, draws: bool) -> None:
        for stage in run.stages:
            if isinstance(stage, Block):
                if run.is_ours:
                    self._run_ours(stage, room.x, forward)
                else:
                    T = len(forward.batch)
                    room.x[:T] = self._by_operators(stage, room.x[:T], forward)
            elif isinstance(stage, BlockPart):
                self._slotted.launch(stage, room.x, forward)
            elif stage == EMBED:
                self._embed(room.tables.views["token_ids"], forward.batch, room.x, is_ours=run.is_ours)
            else:
                room.logits.copy_(self._head(room.x))
                if draws:
                    views = room.tables.views
                    how = views["keys"], views["temperatures"], views["thresholds"]
                    run_all(sample.sample(room.logits, *how, room.drawn, room.sampling))

    # Many rows

    def _many(self, batches: Sequence[Batch], on_block: OnBlock | None) -> Tensor:
        decoder, features = self.decoder, first_value_features(self.decoder.config)
        decoder.stream.begin()
        ring, forwards = decoder.ring_of(batches, reads_chosen=True), []
        for batch in batches:
            groups = self._groups(batch)
            shape, tokens = self._shape(batch, len(batch), seen_pages(batch, groups, self.device))
            tables = GpuTables(shape, self.device, batch.segments[0].kv.layouts, self._long_stage)
            tables.fill(batch, groups, tokens)
            adapters, first = self._adapters.rows_of(batch), torch.empty((len(batch), features), device=self.device)
            forwards.append(GpuForward(batch, tables, self._places(batch), decoder.dtype, first, adapters))
        states = [torch.empty((len(b), decoder.config.hidden_size), device=self.device) for b in batches]
        with decoder.stream.held(EMBED):
            for forward, x in zip(forwards, states, strict=True):
                token_ids = forward.tables.views["token_ids"]
                self._embed(token_ids, forward.batch, x, is_ours=self._embeds)
                if forward.adapters is not None and forward.adapters.changes(EMBED):
                    forward.adapters.add_to_embedding(forward.batch, token_ids, decoder.embed.scale, x)
        for block in decoder.blocks:
            with decoder.stream.held(block.name), pages_held(ring, block):
                for forward, x in zip(forwards, states, strict=True):
                    kv = forward.batch.segments[0].kv
                    if is_ours(block, self.device, kv):
                        if ring is not None:
                            for layer in block.attended_layers:
                                forward.tables.rebase(kv.places[layer][0], ring.base)
                        self._run_ours(block, x, forward)
                    else:
                        x.copy_(self._by_operators(block, x, forward))
                    if on_block is not None:
                        on_block(block, x)
        for forward in forwards:
            forward.tables.mark_made()
        with decoder.stream.held(HEAD):
            return self._logits_of(forwards, states)

    def _logits_of(self, forwards: Sequence[GpuForward], states: Sequence[Tensor]) -> Tensor:
        """states: fp32 [M, hidden] of each forward."""
        batches = [forward.batch for forward in forwards]
        rows = [moved(batch.logit_rows, self.device) for batch in batches]
        wanted = torch.cat([x[own] for x, own in zip(states, rows, strict=True)])
        if not any(batch.adapted_segments for batch in batches):
            return torch.cat([self._head(part) for part in torch.split(wanted, _LOGIT_ROWS)])
        if not self._has_head:
            return moved(self.decoder.logits(wanted.to(self.decoder.dtype), batches), self.device)
        logits = torch.cat([self._product_with_head(part) for part in torch.split(wanted, _LOGIT_ROWS)])
        first = 0
        for forward, own in zip(forwards, rows, strict=True):
            part = slice(first, first + len(own))
            if len(own) and forward.adapters is not None and forward.adapters.changes(HEAD):
                floats = floats_of(*before_product(self.decoder.final_norm, wanted[part]))
                forward.adapters.of_rows(own).add(HEAD, floats, logits[part])
            first += len(own)
        return self.decoder.capped(logits)

    def _shape(self, batch: Batch, rows: int, pages: int) -> tuple[TableShape, int]:
        """Return the shape of a batch's tables, and the most tokens of a task."""
        shared = max((each.num_heads // each.kv_shape.num_heads for each in self.decoder.config.head_shapes), default=1)
        tokens = task_tokens(shared, rows)
        groups = 1 + max((group for group, _ in batch.segments[0].kv.places), default=0)
        chooses = self._chooses or any(segment.chooses for segment in batch.segments)
        options = {"keeps_states": self._keeps_states, "chooses": chooses}
        return table_shape(batch, rows, pages, groups, tokens, **options), tokens

    # Stages

    def _embed(self, token_ids: Tensor, batch: Batch, x: Tensor, *, is_ours: bool) -> None:
        embedding = self.decoder.embed
        if is_ours:
            assert isinstance(embedding.matrix, Linear)
            factor = float(torch.tensor(embedding.scale, dtype=embedding.dtype))
            packed = embedding.matrix.packed
            assert packed is not None, "`_embeds` said so"
            embed(packed.qweight, packed.scale, token_ids, x, factor, packed.bias, packed.table).run()
        else:
            x[: len(batch)] = moved(self.decoder.looked_up(batch), self.device)

    def _head(self, x: Tensor) -> Tensor:
        """x fp32 [R, hidden] -> fp32 [R, V]."""
        if not self._has_head:
            return moved(self.decoder.logits(x.to(self.decoder.dtype), ()), self.device)
        return self.decoder.capped(self._product_with_head(x))

    def _product_with_head(self, x: Tensor) -> Tensor:
        x, _, norm = before_product(self.decoder.final_norm, x)
        return multiply(self.decoder.head, x, self.decoder.dtype, norm=norm).float()

    @property
    def _has_head(self) -> bool:
        return self.decoder.head.device == self.device

    def _run_ours(self, block: Block, x: Tensor, forward: GpuForward) -> None:
        body = block.body
        if isinstance(body, Rwkv7TimeMix | Rwkv7ChannelMix):
            run_rwkv7(block, self.decoder.blocks, x, forward)
            return
        norms = as_rms(block.norm_in), as_rms(block.norm_out)
        if is_slotted(block):
            for part in parts_of(block):
                self._slotted.before(part)
                self._slotted.launch(part, x, forward)
                self._slotted.behind(part, len(x), len(forward.batch))
        elif isinstance(body, MoE):
            run_mixture(body, self._tables[block.name], *norms, x, forward)
        else:
            assert isinstance(body, Attention | LatentAttention | DeltaNet | Mamba2 | ShortConv | MLP | Beside)
            run_block(body, *norms, x, forward)

    def _by_operators(self, block: Block, x: Tensor, forward: GpuForward) -> Tensor:
        batch, first = forward.on(block.device), forward.first_values[: len(x)]
        with first_values_shared(block, self.decoder.blocks, batch, first):
            y = block(moved(x.to(self.decoder.dtype), block.device), batch)
        return moved(y, self.device).float()

    # What there is

    @property
    def _ours(self) -> Iterator[Block]:
        """The blocks for our kernels."""
        return (block for block in self.decoder.blocks if is_ours(block, self.device))

    @property
    def _mixers(self) -> Iterator[SingleMixer]:
        return (mixer for block in self._ours for mixer in block.mixers)

    @cached_property
    def _rows(self) -> _Rows:
        return _Rows(self.decoder)

    @cached_property
    def _slotted(self) -> SlottedMixtures:
        return SlottedMixtures(self.decoder)

    @cached_property
    def _tables(self) -> dict[str, ExpertTable]:
        """The experts of each mixture that is ours. Made when one is launched for the first time, which is in no
        graph."""
        ours = (block for block in self._ours if not is_slotted(block))
        return {block.name: table_of(block.body) for block in ours if isinstance(block.body, MoE)}

    @cached_property
    def _adapters(self) -> AdapterTables:
        """The adapters that rows have, of what our kernels compute, of the embedding, and of the head where it is."""
        dtypes = {EMBED: self.decoder.dtype, **({HEAD: self.decoder.dtype} if self._has_head else {})}
        for block in self._ours:
            dtypes |= {linear.name: self.decoder.dtype for linear in block.body.linears}
            for body in block.mixers:
                exact = body.exact_linears if isinstance(body, Recurrent) else ()
                dtypes |= {linear.name: torch.float32 for linear in exact}
        return AdapterTables(dtypes, self.device)

    @cached_property
    def _layers(self) -> tuple[int, ...]:
        """Return the layers whose attention is ours."""
        return tuple(body.layer for body in self._mixers if isinstance(body, Attention | LatentAttention))

    def _groups(self, batch: Batch) -> Groups:
        """Return the groups of layers of which we compute some, and those layers of each in which rows may choose their
        pages."""
        kv, groups = batch.segments[0].kv, dict[int, list[int]]()
        for layer in self._layers:
            if kv.homes[layer][0] == self.device:
                rows = [kv.homes[layer][1]] if layer in self._unwindowed else []
                groups.setdefault(kv.places[layer][0], []).extend(rows)
        return groups

    @cached_property
    def _unwindowed(self) -> frozenset[int]:
        mixers = [body for body in self._mixers if isinstance(body, Attention)]
        return frozenset(body.layer for body in mixers if body.config.window is None)

    @cached_property
    def _keeps_states(self) -> bool:
        return any(isinstance(body, Recurrent) for body in self._mixers)

    def _places(self, batch: Batch) -> tuple[tuple[int, int], ...]:
        kv = batch.segments[0].kv
        return tuple((group, row) for (group, _), (_, row) in zip(kv.places, kv.homes, strict=True))

    @property
    def _embeds(self) -> bool:
        """Return whether our kernel looks the embedding's rows up: on the device, or in pinned memory of the host."""
        matrix = self.decoder.embed.matrix
        if not isinstance(matrix, Linear) or matrix.packed is None:
            return False
        is_near = matrix.device == self.device or all(tensor.is_pinned() for tensor in matrix.tensors.values())
        return is_near and self._is_plain_embedding and EMBED not in self.decoder.stream.names

    @property
    def _is_plain_embedding(self) -> bool:
        return self.decoder.embed.norm_eps is None and self.decoder.per_layer_rows is None

    @property
    def _runs(self) -> tuple[Run, ...]:
        """Memory is pinned beside everything else: once the embedding is, the runs are others."""
        if self._joined_runs is None or (not self._joined_runs[0].is_ours and self._embeds):
            self._joined_runs = tuple(joined_runs(self._stages()))
            self._graphs.forget(self.name_in_graphs)
        return self._joined_runs

    def _stages(self) -> Iterator[Run]:
        streamed = self.decoder.stream.names
        yield Run((EMBED,), self._embeds, EMBED in streamed)
        for block in self.decoder.blocks:
            if is_slotted(block) and is_ours(block, self.device):
                yield from (Run((part,), True, False) for part in parts_of(block))
            else:
                yield Run((block,), is_ours(block, self.device), block.name in streamed)
        yield Run((HEAD,), self.decoder.head.device == self.device, HEAD in streamed)

    def _has_pinned(self, run: Run, room: _ForwardRoom) -> bool:
        """Return whether what is copied to the host is copied by the device alone."""
        return all(self._slotted.is_capturable(part, room.tables.shape.rows) for part in run.parts)

    def _is_capturable(self, run: Run) -> bool:
        """Return whether nothing that is launched depends on what the host would have to see."""
        blocks = (stage.block if isinstance(stage, BlockPart) else stage for stage in run.stages)
        ours = [block for block in blocks if isinstance(block, Block)]
        linears = [linear for block in ours for linear in (*block.body.linears, *block.head_linears)]
        linears += [self.decoder.head] if HEAD in run.stages else []
        return all(linear.packed_parts or isinstance(linear.format, Dense) for linear in linears)


def graph_rows(count: int) -> int | None:
    """Return the rows of the graph for a forward of more than a step's: enough for 64, or a whole chunk. None for
    other numbers, as a graph for each would take more memory than it is worth."""
    if count <= _MOST_PADDED:
        return 1 << (count - 1).bit_length()
    return count if count == CHUNK_ROWS else None
