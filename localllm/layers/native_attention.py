"""Attention of a batch by the CPU's compiled kernels, where torch's operators compute the rest of the layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from localllm.kernels import cpu_rope
from localllm.kernels.cpu_ir import LANES
from localllm.kernels.cpu_jit import best_isa
from localllm.kernels.cpu_linear import float_bits, is_available
from localllm.kernels.cpu_paged import AttentionPlace, AttentionRoom
from localllm.kernels.cpu_tape import Tape
from localllm.layers.attention_tables import attention_tables

if TYPE_CHECKING:
    from localllm.layers.attention import AttentionShape
    from localllm.layers.batch import Segment


def is_native(segments: Sequence[Segment], x: Tensor) -> bool:
    """Whether the kernels can: the layer and all pages are on the host, and heads fill whole vectors."""
    return (
        x.device.type == "cpu"
        and x.shape[-1] % LANES == 0
        and is_available()
        and all(segment.kv.is_on_host for segment in segments)
    )


class NativeAttention:
    """The tables of one batch, for all of its layers."""

    def __init__(self, segments: Sequence[Segment], heads: int) -> None:
        kv = segments[0].kv
        self.layouts = kv.layouts
        self._places = kv.places
        groups = 1 + max(group for group, _ in kv.places)
        kv_heads, head_dim = self.layouts[0].num_kv_heads, self.layouts[0].head_dim
        tables = attention_tables(segments, heads, kv_heads, groups, torch.get_num_threads())
        self._room = AttentionRoom(len(tables.tasks), len(tables.merges), tables.num_parts, kv_heads, head_dim)
        self._room.place(tables)
        self._tokens = [torch.tensor(words) for words in tables.tokens]
        self._rows, self._is_split = tables.rows, tables.is_split

    def __call__(self, qkv: Tensor, shape: AttentionShape) -> Tensor:
        """qkv fp32 [T, H + 2 KH, D], rotated already; written over. Keys and values go to their pages. Returns fp32
        [T, H, D]."""
        T, heads, D = qkv.shape
        group, layer = self._places[shape.layer]
        isa, out, tokens = best_isa(), torch.empty(T, shape.num_heads, D), self._tokens[group]
        store = cpu_rope.rope(isa, *self.layouts, 0, has_norms=False)
        arguments = store.arguments(
            qkv=qkv,
            cos=0,
            sin=0,
            q_norm=0,
            k_norm=0,
            tokens=tokens,
            shape=torch.tensor([T]),
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            layer=layer,
            scale=float_bits(shape.scale),
            eps=0,
        )
        place = AttentionPlace(qkv, heads * D, out, tokens, layer, shape.num_heads, shape.window, shape.softcap)
        steps = self._room.steps(isa, self.layouts, place, rows=self._rows, is_split=self._is_split)
        Tape([(store, arguments), *steps]).run()
        return out
