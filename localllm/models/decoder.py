"""The one decoder of all families: embed, a run of blocks, a final norm, the head.

A block is `x + body(norm(x))` around an attention or an MLP body. It is the unit of placement, of execution, of
streaming and of skipping; the decoder knows nothing of where a block's bytes rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from localllm.layers.adapted import add_to_embedding, add_to_logits
from localllm.layers.altup import AltUpEnd, AltUpStart
from localllm.layers.attention import Attention
from localllm.layers.batch import Batch, moved
from localllm.layers.beside import Beside, SingleMixer, mixers_of
from localllm.layers.latent_attention import LatentAttention
from localllm.layers.linear import Embedding, Linear
from localllm.layers.mlp import MLP, SplitMLP
from localllm.layers.moe import MoE
from localllm.layers.norm import Norm
from localllm.layers.per_layer import ROWS, PerLayerGate, PerLayerInputs
from localllm.layers.recurrent import Recurrent
from localllm.layers.rotary import Rotary
from localllm.layers.segment import SpilledPages, ring_of
from localllm.models.architecture import ModelConfig
from localllm.models.layout import EMBED, HEAD
from localllm.offload.streaming.disk_stream import StreamClock


@dataclass(frozen=True)
class Block:
    """x + norm_out(body(norm_in(x))); a family has one of the two norms, or both.

    is_parallel: the layer's two blocks read what came into the first of them: x + mixer(norm(x)) + mlp(norm(x)).
    norm_embedding: of what comes in; of the first block alone.
    per_layer_inputs: makes what `per_layer_gate`s read; of the first block alone.
    per_layer_gate: is added behind the body; of feed-forwards.
    scalar: fp32 [1], multiplies what comes out.
    altup: begins or ends a layer of several hidden states, of which x is the first.
    """

    name: str  # "layers.3.attention", "layers.3.mlp"
    body: SingleMixer | Beside | MLP | SplitMLP | MoE
    norm_in: Norm | None
    norm_out: Norm | None
    device: torch.device  # where it is computed, with its tensors and its input
    is_parallel: bool = False
    norm_embedding: Norm | None = None
    per_layer_inputs: PerLayerInputs | None = None
    per_layer_gate: PerLayerGate | None = None
    scalar: Tensor | None = None
    altup: AltUpStart | AltUpEnd | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Every matrix that every token is multiplied by, but those that choose and that make inputs of layers."""
        return (*self.body.linears, *(() if self.per_layer_gate is None else self.per_layer_gate.linears))

    @property
    def mixers(self) -> tuple[SingleMixer, ...]:
        """Return the mixers of its body; none where that is a feed-forward."""
        return mixers_of(self.body)

    @property
    def attended_layers(self) -> tuple[int, ...]:
        """Return the layers, as caches count them, whose pages it attends to: one at most."""
        return tuple(body.layer for body in self.mixers if isinstance(body, Attention | LatentAttention))

    @property
    def head_linears(self) -> tuple[Linear, ...]:
        """Matrices of which each head is multiplied by its own rows."""
        latents = (body for body in self.mixers if isinstance(body, LatentAttention))
        return tuple(linear for body in latents for linear in body.head_linears)

    @property
    def is_usual(self) -> bool:
        """Return whether it is nothing but a body between two norms, added to what comes in."""
        more = (self.norm_embedding, self.per_layer_inputs, self.per_layer_gate, self.scalar, self.altup)
        return not self.is_parallel and all(each is None for each in more)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        x = x if self.norm_embedding is None else self.norm_embedding(x)
        if self.per_layer_inputs is not None:
            self.per_layer_inputs.prepare(x, batch)
        if isinstance(self.altup, AltUpStart):
            assert self.norm_in is not None and self.norm_out is not None, "as Gemma 3n has it"
            norm_out = self.norm_out
            return self.altup(x, batch, self.norm_in, lambda normed: norm_out(self.body(normed, batch)))
        source = self._source(x, batch) if self.is_parallel else x
        y = self.body(source if self.norm_in is None else self.norm_in(source), batch)
        x = x + (y if self.norm_out is None else self.norm_out(y))
        if self.altup is not None:
            return self.altup(x, batch)
        if self.per_layer_gate is not None:
            x = x + self.per_layer_gate(x, batch)
        return x if self.scalar is None else x * self.scalar.to(x.dtype)

    def _source(self, x: Tensor, batch: Batch) -> Tensor:
        """Return what came into the layer; of its first block, keep that for the second one."""
        layer = self.name.rpartition(".")[0]
        if isinstance(self.body, MLP | SplitMLP | MoE):
            kept = batch.carried.pop(layer, None)
            return x if kept is None else moved(kept, self.device)
        batch.carried[layer] = x.clone()
        return x


class BlockStream(Protocol):
    """Brings blocks that do not stay in memory to where their layers expect them, in the order of a forward."""

    @property
    def clock(self) -> StreamClock:
        """The time that streaming has taken so far."""

    @property
    def names(self) -> frozenset[str]:
        """The names of the blocks that are streamed; all others are always there."""

    def begin(self) -> None:
        """A forward begins: the first block is next, however far the last one came. Raises LocalLLMError where what was
        begun for that one does not end."""

    def held(self, name: str) -> AbstractContextManager[None]:
        """Inside, the block's tensors are in place. Raises LocalLLMError where they cannot be brought."""


@dataclass(frozen=True)
class AllResident:
    """No block is streamed. clock: of what is read in the middle of one."""

    clock: StreamClock = field(default_factory=StreamClock)
    names: frozenset[str] = frozenset()

    def begin(self) -> None:
        """Every block is there."""

    def held(self, _name: str) -> AbstractContextManager[None]:
        return nullcontext()


ALL_RESIDENT = AllResident()


@dataclass(frozen=True)
class Decoder:
    """device: where batches are made and hidden states are between blocks that are computed there; a block, the
    embedding and the head may each be somewhere else. weights: the name of their recipe. per_layer_rows: the embeddings
    that tokens have for each layer."""

    config: ModelConfig
    weights: str
    embed: Embedding
    blocks: tuple[Block, ...]
    final_norm: Norm
    head: Linear
    rotaries: tuple[Rotary, ...]
    dtype: torch.dtype
    device: torch.device
    stream: BlockStream = ALL_RESIDENT
    per_layer_rows: Embedding | None = None

    @cached_property
    def devices(self) -> frozenset[torch.device]:
        """The devices of the blocks."""
        return frozenset(block.device for block in self.blocks)

    @cached_property
    def kv_devices(self) -> tuple[torch.device, ...]:
        """The device on which the keys and values of each layer that has them are used."""
        return tuple(block.device for block in self.blocks for body in block.mixers if keeps_pages(body))

    @cached_property
    def state_devices(self) -> tuple[torch.device, ...]:
        """The device on which the state of each layer that has one is used."""
        return tuple(block.device for block in self.blocks for body in block.mixers if isinstance(body, Recurrent))

    def ring_of(self, batches: Sequence[Batch], *, reads_chosen: bool = False) -> SpilledPages | None:
        """Begin a forward; return what brings pages for its layers that rest elsewhere, if any do. reads_chosen: as
        `layers.segment.ring_of` has it."""
        layers = [layer for block in self.blocks for layer in block.attended_layers]
        segments = [segment for batch in batches for segment in batch.segments]
        return ring_of(segments, layers, reads_chosen=reads_chosen)

    def embedded(self, batch: Batch) -> Tensor:
        """[T, hidden] on the embedding's device, with what adapters add. What tokens have for each layer is looked up,
        too."""
        x = self.looked_up(batch)
        add_to_embedding(self.embed, batch, x)
        return x

    def looked_up(self, batch: Batch) -> Tensor:
        """Return what `embedded` does, without adapters."""
        self.look_up_per_layer(batch)
        return self.embed(moved(batch.token_ids, self.embed.device))

    def look_up_per_layer(self, batch: Batch) -> None:
        """Have the batch carry the embeddings of its tokens for each layer, if there are any."""
        if self.per_layer_rows is not None:
            ids = moved(batch.token_ids, self.per_layer_rows.device)
            assert self.config.per_layer is not None
            known = torch.where(ids < self.config.per_layer.vocab_size, ids, 0)
            batch.carried[ROWS] = self.per_layer_rows(known)

    def logits(self, hidden_states: Tensor, batches: Sequence[Batch]) -> Tensor:
        """hidden_states [R, hidden] -> fp32 [R, V] on the head's device. batches: whose `logit_rows` they are."""
        logits = self.head(self.final_norm(hidden_states.to(self.head.device))).float()
        add_to_logits(batches, hidden_states, self.final_norm, logits)
        return self.capped(logits)

    def capped(self, logits: Tensor) -> Tensor:
        """Logits as the family scales and bounds them."""
        logits = logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale
        cap = self.config.final_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def hidden_states(
        self, batches: Sequence[Batch], on_block: Callable[[Block, Tensor], None] | None = None
    ) -> list[Tensor]:
        """Run the batches through every block, all of them through one before the next; each [T, hidden].

        A later batch may continue the sequence of an earlier one: in every block its keys come after the earlier's.
        `on_block` sees each block's output, and may raise to give the forward up: no cache has advanced by then.
        """
        self.stream.begin()
        ring = self.ring_of(batches)
        with self.stream.held(EMBED):
            states = [self.embedded(batch) for batch in batches]  # [T, hidden] each
        there = {device: [batch.on(device) for batch in batches] for device in self.devices}
        for block in self.blocks:
            with self.stream.held(block.name), pages_held(ring, block):
                for index, batch in enumerate(there[block.device]):
                    states[index] = block(moved(states[index], block.device), batch)
                    if on_block is not None:
                        on_block(block, states[index])
        return states

    def forward(
        self,
        batches: Sequence[Batch],
        on_block: Callable[[Block, Tensor], None] | None = None,
        on_states: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """fp32 logits [R, V] of the batches' `logit_rows`, in order. on_states: takes the hidden states of all rows in
        front of the final norm, [T, hidden], which may be written over afterwards."""
        states = self.hidden_states(batches, on_block)
        if on_states is not None:
            on_states(torch.cat(states))
        wanted = torch.cat([x[moved(batch.logit_rows, x.device)] for batch, x in zip(batches, states, strict=True)])
        with self.stream.held(HEAD):
            return self.logits(wanted, batches)


def pages_held(ring: SpilledPages | None, block: Block) -> AbstractContextManager[None]:
    """Inside, the pages that a block attends to are in memory."""
    layers = block.attended_layers
    return nullcontext() if ring is None or not layers else ring.held(layers[0])


def keeps_pages(body: object) -> bool:
    """Return whether a body has keys and values of its own, or latents."""
    return isinstance(body, LatentAttention) or (isinstance(body, Attention) and body.keeps)


def without(decoder: Decoder, names: frozenset[str]) -> Decoder:
    """Return the decoder without these attention and MLP blocks. names: must include every streamed block, so that no
    weight moves."""
    assert decoder.stream.names <= names, "streamed blocks must be left out"
    kept = tuple(block for block in decoder.blocks if block.name not in names)
    return replace(decoder, blocks=kept, stream=ALL_RESIDENT)
