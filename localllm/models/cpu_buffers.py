"""The buffers of a native forward: fixed places, so that a tape can point at them, and the batch that stands there."""

from __future__ import annotations

import torch

from localllm.kernels import cpu_rope
from localllm.kernels.cpu_delta import DeltaRoom, DeltaSegment
from localllm.kernels.cpu_isa import MOST_ROWS, Isa
from localllm.kernels.cpu_linear import Activations
from localllm.kernels.cpu_paged import AttentionRoom, Layouts
from localllm.kernels.kv_page import layer_groups
from localllm.layers.batch import Batch
from localllm.layers.moe import MoE
from localllm.layers.native_attention import attention_tables
from localllm.layers.native_delta import delta_segments
from localllm.layers.norm import as_rms
from localllm.layers.rotary import query_growth
from localllm.models.cpu_mixture import ExpertRooms, mixture_of
from localllm.models.decoder import Block, Decoder

_SEGMENTS = 8  # of a batch, at first


class Buffers:
    """The buffers of a forward of up to `rows` tokens: fixed places, so that a tape can point at them."""

    def __init__(self, decoder: Decoder, isa: Isa, rows: int) -> None:
        config = decoder.config
        self.rows = rows
        self.mixtures = {block.name: mixture_of(body, as_rms(block.norm_in)) for block, body in mixtures_of(decoder)}
        self.experts = ExpertRooms(isa, rows, [*self.mixtures.values()]) if self.mixtures else None
        self.groups = layer_groups(config.windows, config.kv_shapes)
        attention = config.attentions[0]  # the others have the same heads: see `has_plain_steps`
        mixed = max(mixer.mixed_features for mixer in config.mixers)
        padded = rows + MOST_ROWS
        linears = [linear for block in decoder.blocks for linear in block.body.linears]
        matrices = [*linears, decoder.head]
        groups = [part.group for linear in matrices for part in linear.packed_parts]
        self.x = torch.zeros(padded, config.hidden_size)
        self.wide = torch.zeros(padded * max(linear.out_features for linear in linears))  # qkv, gate and up
        self.mixed = torch.zeros(padded * mixed)
        self.y = torch.zeros(padded, config.hidden_size)  # before a norm that follows a body
        self.activations = Activations(rows, max(linear.in_features for linear in linears), min(groups))
        self.token_ids = torch.zeros(rows, dtype=torch.int64)
        self.cos = [torch.zeros(rows, rotary.rotary_dim) for rotary in decoder.rotaries]
        self.sin = [torch.zeros(rows, rotary.rotary_dim) for rotary in decoder.rotaries]
        # What queries are multiplied by, where positions matter and where they do not.
        self.scales = {(each.scale, each.growth): torch.full((rows,), each.scale) for each in config.attentions}
        self.tokens = [torch.zeros(rows, len(cpu_rope.TOKEN_WORDS), dtype=torch.int64) for _ in self.groups]
        self.head_dim = attention.head_dim
        self.attention = AttentionRoom(rows * attention.num_heads, 1, 1, attention.num_kv_heads, attention.head_dim)
        self.delta_shape = config.delta_shape
        self.delta = None if self.delta_shape is None else DeltaRoom(self.delta_shape, rows, _SEGMENTS)
        self.gates = torch.zeros(padded, 0 if self.delta_shape is None else 2 * self.delta_shape.value_heads)
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
        for (scale, growth), scales in self.scales.items():
            if growth is not None:
                scales[: len(batch)] = scale * query_growth(growth, batch.positions)
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
        if self.delta is not None:
            self.delta = self._placed_states(self.delta, delta_segments(batch.segments))
        self.layouts = batch.segments[0].kv.layouts
        self.attention_rows, self.is_split, self.batch = tables.rows, tables.is_split, batch

    def _placed_states(self, room: DeltaRoom, segments: list[DeltaSegment]) -> DeltaRoom:
        """Return a room in which these segments were placed: another one where they need more than this one has."""
        if not room.holds(segments):
            snapshots = sum(len(segment.snapshots) for segment in segments)
            room = DeltaRoom(room.shape, self.rows, 2 * len(segments), 2 * snapshots)
        room.place(segments)
        return room


def mixtures_of(decoder: Decoder) -> list[tuple[Block, MoE]]:
    return [(block, block.body) for block in decoder.blocks if isinstance(block.body, MoE)]
