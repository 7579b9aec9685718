"""The buffers of a native forward: fixed places, so that a tape can point at them, and the batch that stands there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localllm.kernels import cpu_rope
from localllm.kernels.cpu_delta import DeltaRoom
from localllm.kernels.cpu_isa import MOST_ROWS, Isa
from localllm.kernels.cpu_linear import Activations
from localllm.kernels.cpu_low_rank_room import AdaptedRows, LowRankRoom
from localllm.kernels.cpu_mamba2 import Mamba2Room
from localllm.kernels.cpu_page_mass import MassRoom
from localllm.kernels.cpu_paged import AttentionRoom, AttentionTables, ChoiceRoom, Layouts, row_counts_of
from localllm.kernels.cpu_scan import ScanRoom
from localllm.kernels.cpu_short_conv import ConvRoom
from localllm.kernels.cpu_states import PlacedStates, StateTables
from localllm.kernels.kv_page import layer_groups
from localllm.kernels.sizes import TILE
from localllm.kernels.state_shapes import ConvShape, DeltaShape, Mamba2Shape, MambaShape, StatePlace, StateShape
from localllm.layers.attention import Attention
from localllm.layers.batch import Batch
from localllm.layers.beside import mixers_of
from localllm.layers.config import KeyValue
from localllm.layers.latent_attention import LatentAttention
from localllm.layers.linear import Linear
from localllm.layers.moe import MoE
from localllm.layers.native_attention import attention_tables, watched_tokens
from localllm.layers.native_states import placed_states
from localllm.layers.norm import as_rms
from localllm.layers.per_layer import INPUTS
from localllm.layers.recurrent import Recurrent
from localllm.layers.rotary import query_growth
from localllm.layers.segment import Segment
from localllm.models.architecture import HeadShape
from localllm.models.cpu_mixture import ExpertRooms, mixture_of
from localllm.models.cpu_rwkv_room import Rwkv7Room
from localllm.models.decoder import Block, Decoder

_SEGMENTS = 8  # of a batch, at first

AttendingKey = tuple[int, bool, Layouts | None, AttentionRoom]


class Attending:
    """The rows of a batch that attend together in layers with heads of one shape, and the room for that.

    rows: of a task, at most. room: another one where it had to grow, at which other tapes point.
    """

    def __init__(self, shape: HeadShape, layer: int, rows: int, *, chooses: bool = False) -> None:
        """layer: one of those with such heads, as caches count them. rows: the most tokens of a forward. chooses:
        tokens that do not attend to all pages choose theirs; the layer has no window then."""
        self._most_tokens, self._chooses = rows, chooses
        self._heads, self._kv = shape
        self._value_dim = shape.value_dim
        self._layer = layer
        tasks = 1 if chooses else rows * self._heads  # where none choose, no room is taken for it
        self.room = AttentionRoom(tasks, 1, 1, self._kv.num_heads, shape.value_dim)
        self.rows, self.is_split = 1, False
        self.layouts: Layouts | None = None

    def place(self, segments: Sequence[Segment], groups: int) -> AttentionTables:
        """Place a batch; return its tables. groups: of layers."""
        kv_heads, threads = self._kv.num_heads, torch.get_num_threads()
        self.layouts = segments[0].kv.layouts_of(self._layer)
        row_counts = row_counts_of(self.layouts[0])
        choosing = segments[0].kv.places[self._layer][0] if self._chooses else None
        tables = attention_tables(segments, self._heads, kv_heads, groups, threads, row_counts, choosing)
        if not self.room.holds(tables):
            tasks = max(self.room.tasks, 2 * len(tables.tasks))
            sizes = tasks, 2 * len(tables.merges), 2 * tables.num_parts
            choice = None if tables.chosen is None else ChoiceRoom(tables.chosen, self._most_tokens, kv_heads)
            self.room = AttentionRoom(*sizes, kv_heads, self._value_dim, choice)
        self.room.place(tables)
        self.rows, self.is_split = tables.rows, tables.is_split
        return tables

    @property
    def key(self) -> AttendingKey:
        """What a tape for this batch depends on."""
        return self.rows, self.is_split, self.layouts, self.room


class StateRooms:
    """The tables of a batch's states, and what kernels of layers of the same shape leave to each other."""

    def __init__(self, shapes: Sequence[StateShape], rows: int, segments: int, snapshots: int = 64) -> None:
        """shapes: of each layer. rows, segments, snapshots: of a batch, at most."""
        self.shapes, self._rows = tuple(shapes), rows
        self.tables = StateTables(rows, segments, snapshots)
        each = dict.fromkeys(shapes)
        self.deltas = {shape: DeltaRoom(shape, self.tables) for shape in each if isinstance(shape, DeltaShape)}
        self.mambas = {shape: Mamba2Room(shape, self.tables) for shape in each if isinstance(shape, Mamba2Shape)}
        self.scans = {shape: ScanRoom(shape, self.tables) for shape in each if isinstance(shape, MambaShape)}
        self.convs = {shape: ConvRoom(shape, self.tables) for shape in each if isinstance(shape, ConvShape)}

    def placed(self, segments: Sequence[PlacedStates]) -> StateRooms:
        """Place these segments in this room, or in another one where they need more than it has; return which."""
        room = self
        if not self.tables.holds(segments):
            snapshots = sum(len(segment.snapshots) for segment in segments)
            room = StateRooms(self.shapes, self._rows, 2 * len(segments), 2 * snapshots)
        room.tables.place(segments)
        return room

    def place(self, layer: int) -> StatePlace:
        """Return where a layer's part begins: the states of all layers are on the host. layer: its number among those
        with states."""
        before = self.shapes[:layer]
        return StatePlace(sum(each.state_bytes for each in before), sum(each.snapshot_bytes for each in before))


class Buffers:
    """The buffers of a forward of up to `rows` tokens: fixed places, so that a tape can point at them."""

    def __init__(self, decoder: Decoder, isa: Isa, rows: int) -> None:
        config = decoder.config
        self.rows = rows
        self.mixtures = {block.name: mixture_of(body, as_rms(block.norm_in)) for block, body in mixtures_of(decoder)}
        self.experts = ExpertRooms(isa, rows, [*self.mixtures.values()]) if self.mixtures else None
        self.groups = layer_groups(config.windows, config.kv_shapes)
        heads = max((each.heads_features for each in config.latents), default=0)
        mixed = max(heads, *(mixer.mixed_features for mixer in config.mixers))
        padded = rows + MOST_ROWS
        linears = [linear for block in decoder.blocks for linear in block.linears]
        matrices = [*linears, *(linear for block in decoder.blocks for linear in block.head_linears), decoder.head]
        groups = [part.group for linear in matrices for part in linear.packed_parts]
        self.x = torch.zeros(padded, config.hidden_size)
        self.wide = torch.zeros(padded * max(linear.out_features for linear in linears))  # qkv, gate and up
        self.mixed = torch.zeros(padded * mixed)
        self.y = torch.zeros(padded, config.hidden_size)  # before a norm that follows a body
        widest = max(heads, *(linear.in_features for linear in linears))
        self.activations = Activations(rows, widest, min(groups))
        self.queries = torch.zeros(padded * max((each.query_features for each in config.latents), default=0))
        self.absorbed = torch.zeros(padded * heads)  # queries in the space of latents
        self.token_ids = torch.zeros(rows, dtype=torch.int64)
        self.cos = [torch.zeros(rows, rotary.rotary_dim) for rotary in decoder.rotaries]
        self.sin = [torch.zeros(rows, rotary.rotary_dim) for rotary in decoder.rotaries]
        # What queries are multiplied by, where positions matter and where they do not.
        self.scales = {(each.scale, each.growth): torch.full((rows,), each.scale) for each in config.attentions}
        self.tokens = [torch.zeros(rows, len(cpu_rope.TOKEN_WORDS), dtype=torch.int64) for _ in self.groups]
        mixers = [body for block in decoder.blocks for body in block.mixers]
        bodies = [body for body in mixers if isinstance(body, Attention | LatentAttention)]
        layers = {head_shape(body.config): body.layer for body in reversed(bodies)}
        self._attending = {shape: Attending(shape, layer, rows) for shape, layer in layers.items()}
        # In layers without a window, where a token of a batch chooses its pages.
        whole = {head_shape(body.config): body.layer for body in reversed(bodies) if body.config.window is None}
        self._choosing = {shape: Attending(shape, layer, rows, chooses=True) for shape, layer in whole.items()}
        # Of each token and layer what a gate makes, and beside it what is gated.
        per_layer = config.per_layer
        per_layer_shape = (0, 0) if per_layer is None else (config.num_layers, per_layer.features)
        self.per_layer = torch.zeros(padded, per_layer_shape[0], 2, per_layer_shape[1])
        self.rwkv7 = Rwkv7Room(config.recurrents, padded)
        self._chooses = False
        self.masses: MassRoom | None = None  # where the attention is counted that pages get
        self.states = StateRooms(config.state_shapes, rows, _SEGMENTS)
        self.gates = torch.zeros(padded * max((each.gate_features for each in config.recurrents), default=0))
        self.low_rank = LowRankRoom(isa, native_sites(decoder))
        self.batch: Batch | None = None  # the one that was placed last, as long as all of it is there

    @property
    def rooms(self) -> tuple[AttentionRoom | MassRoom | None, ...]:
        attending = (*self._attending.values(), *self._choosing.values())
        return (*(each.room for each in attending), self.masses)

    @property
    def attending_keys(self) -> tuple[AttendingKey, ...]:
        """What a tape for the batch that was placed depends on."""
        choosing = self._choosing.values() if self._chooses else ()
        return tuple(each.key for each in (*self._attending.values(), *choosing))

    def attending(self, config: KeyValue) -> Attending:
        """Return which rows attend together in such a layer."""
        chooses = self._chooses and config.window is None
        return (self._choosing if chooses else self._attending)[head_shape(config)]

    def chosen_pages(self, block: Block) -> Tensor:
        """Return the addresses of the pages that tokens of the batch have chosen in a block, int64 [n]."""
        (body,) = [body for body in block.mixers if isinstance(body, Attention)]
        return self.attending(body.config).room.chosen

    def place(self, batch: Batch) -> None:
        """Place a batch: where each token's keys go, and which rows attend together."""
        self.token_ids[: len(batch)] = batch.token_ids
        for index, (cos, sin) in enumerate(batch.rotations):
            self.cos[index][: len(batch)] = cos[:, 0]
            self.sin[index][: len(batch)] = sin[:, 0]
        for (scale, growth), scales in self.scales.items():
            if growth is not None:
                scales[: len(batch)] = scale * query_growth(growth, batch.positions)
        placed = [attending.place(batch.segments, len(self.groups)) for attending in self._attending.values()]
        for own, words in zip(self.tokens, placed[0].tokens if placed else (), strict=True):  # for heads of any shape
            own[: len(words)] = torch.tensor(words)
        self._chooses = batch.chooses
        for attending in self._choosing.values() if self._chooses else ():
            attending.place(batch.segments, len(self.groups))
        if any(segment.kv.masses is not None for segment in batch.segments):
            room = self.masses or MassRoom(0, 0, 0)
            self.masses = room.placed(watched_tokens(batch.segments), torch.get_num_threads())
        if self.states.shapes:
            self.states = self.states.placed(placed_states(batch.segments))
        self.low_rank.place([_adapted_rows(segment) for segment in batch.adapted_segments])
        self.batch = batch

    def take_per_layer(self, batch: Batch) -> None:
        """Put the inputs of all layers that a batch carries where their gates find them."""
        self.per_layer[: len(batch), :, 1] = batch.carried[INPUTS]


def head_shape(config: KeyValue) -> HeadShape:
    return HeadShape(config.num_heads, config.kv_shape)


def native_sites(decoder: Decoder) -> tuple[str, ...]:
    """Return the layers to whose outputs native steps add what adapters make."""
    bodies = [block.body for block in decoder.blocks]
    linears = [linear for body in bodies for linear in body.linears if fills_groups(linear)]
    mixers = (mixer for body in bodies for mixer in mixers_of(body))
    exact = (linear for body in mixers if isinstance(body, Recurrent) for linear in body.exact_linears[:1])
    linears += filter(fills_tiles, exact)
    return tuple(linear.name for linear in linears)


def fills_groups(linear: Linear) -> bool:
    """Return whether columns of a packed matrix fill groups, of which adapters read whole ones."""
    return linear.packed is None or linear.packed.in_features == linear.in_features


def fills_tiles(linear: Linear) -> bool:
    """Return whether what comes out fills tiles, of which adapters add whole ones."""
    return linear.out_features % TILE == 0


def _adapted_rows(segment: Segment) -> AdaptedRows:
    adapters = [(each.adapter.records, each.scale) for each in segment.kv.adapters]
    return AdaptedRows(segment.begin, segment.end - segment.begin, adapters)


def mixtures_of(decoder: Decoder) -> list[tuple[Block, MoE]]:
    return [(block, block.body) for block in decoder.blocks if isinstance(block.body, MoE)]
