"""A model as a description: what each of its layers computes. Everything else is derived from it. Plain data: no torch.

`models/families/` makes one from a config.json.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeGuard

from localllm.kernels.sizes import KVShape
from localllm.kernels.state_shapes import StateShape
from localllm.layers.config import (
    AltUpConfig,
    AttentionConfig,
    BesideConfig,
    KeyValue,
    LatentAttentionConfig,
    Mixer,
    MLPConfig,
    MoEConfig,
    PerLayerConfig,
    Recurrent,
    RopeConfig,
    SingleMixer,
)

NormPlacement = Literal["pre", "post", "sandwich", "parallel"]
StoredDtype = Literal["bfloat16", "float16", "float32", "float64"]
DeltaRows = Literal["joined", "apart", "by_head", "gates_by_head"]
Body = Mixer | MLPConfig | MoEConfig


@dataclass(frozen=True)
class LayerConfig:
    """norm_placement, of both blocks: x + block(norm(x)), x + norm(block(x)), or x + norm(block(norm(x))). Where it is
    `parallel`, both blocks read the same norm of what comes into the layer: x + mixer(norm(x)) + mlp(norm(x)).

    mixer, feed_forward: a layer may lack one of them.
    has_scalar: a number multiplies what comes out of the layer.
    """

    mixer: Mixer | None
    feed_forward: MLPConfig | MoEConfig | None
    norm_placement: NormPlacement = "pre"
    has_scalar: bool = False

    @property
    def bodies(self) -> tuple[Body, ...]:
        """What its blocks compute, in their order."""
        return tuple(body for body in (self.mixer, self.feed_forward) if body is not None)

    @property
    def mixers(self) -> tuple[SingleMixer, ...]:
        """What its first block consists of, if it has that."""
        if self.mixer is None:
            return ()
        return self.mixer.mixers if isinstance(self.mixer, BesideConfig) else (self.mixer,)


@dataclass(frozen=True)
class StoredForm:
    """What a family's checkpoints do otherwise than Llama's.

    renames: parts of a tensor's name, and what they are called here.
    splits: ends of the names of matrices (".in_proj") whose rows have names of their own here, and how many rows each.
    multipliers: parts of a matrix's name, and what all that it makes is multiplied by.
    transposes_experts: the matrices of all experts are one tensor, which may have columns before rows; square ones
        have where it says `all`.
    alternates_gates: the rows of an expert's gate and of what goes up take turns.
    apart_gates: the gates of attention's output are a matrix of their own (`gate_proj`).
    interleaves_heads: the two features that rotate together lie side by side.
    delta_rows: how the projections of Gated DeltaNet lie: queries, keys and values in one matrix (`joined`), in three
        (`apart`), or all rows of one key head after those of the one before (`by_head`); `gates_by_head`: those of the
        gates of a state so, the others joined.
    negates_rates: -exp(A_log) is stored in place of the A_log of Gated DeltaNet and Mamba 2.
    num_extra_layers: layers behind the last that nobody computes with here: they draft tokens.
    """

    renames: tuple[tuple[str, str], ...] = ()
    splits: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = ()
    multipliers: tuple[tuple[str, float], ...] = ()
    transposes_experts: Literal["no", "oblong", "all"] = "no"
    alternates_gates: bool = False
    apart_gates: bool = False
    interleaves_heads: bool = False
    delta_rows: DeltaRows = "joined"
    negates_rates: bool = False
    num_extra_layers: int = 0

    def parts_of(self, matrix: str) -> list[tuple[str, int, int]]:
        """Return the parts of a matrix whose rows have names of their own: each name, its first row, and its rows;
        none of another matrix. matrix: its name here."""
        for end, parts in self.splits:
            if matrix.endswith(end):
                begins = itertools.accumulate((rows for _, rows in parts), initial=0)
                stem = matrix.removesuffix(end)
                return [(f"{stem}{name}", first, rows) for (name, rows), first in zip(parts, begins, strict=False)]
        return []


class HeadShape(NamedTuple):
    """Heads of queries, and of keys and values."""

    num_heads: int
    kv_shape: KVShape

    @property
    def value_dim(self) -> int:
        """Features of a head's value."""
        return self.kv_shape.latent_dim or self.kv_shape.head_dim

    @property
    def features(self) -> int:
        """Features of a token's queries, and of its keys."""
        return (self.num_heads + self.kv_shape.num_heads) * self.kv_shape.head_dim


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: an embedding, layers of a mixer and a feed-forward, a norm, a head.

    norm_kind: root mean square, or mean and variance (`layer`). has_norm_bias: of the second kind.
    norm_out_eps: of the norms behind blocks; None: as the others.
    norm_weight_offset: what a checkpoint's norm weights lack (gemma stores w - 1). final_norm_offset: what the last
        one's do; None: as much.
    normalizes_embeddings: by their root mean square. has_embedding_norm: by a norm like those of the layers.
    per_layer: embeddings that tokens have for each layer.
    altup: several hidden states a token.
    residual_scale: multiplies what a block adds to the hidden state; folded into the matrices that make it.
    embedding_scale: rounded to the weights' dtype before it multiplies.
    logit_scale: multiplies the logits, before final_softcap bounds them.
    published: what the family's checkpoints in Hugging Face's form do, where these weights are in another; None: they
        are `stored` so.
    dtype: what the file says that its weights are; the tensors' own headers decide.
    draft_head: the layer that drafts for this model (multi-token prediction, arXiv:2412.19437), as a model of its own.
    reads_states: it is such a layer: it reads the hidden states of the model that it drafts for, whose embedding and
        head it shares.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    max_position_embeddings: int
    norm_kind: Literal["rms", "layer"] = "rms"
    has_norm_bias: bool = True
    norm_eps: float = 1e-6
    norm_out_eps: float | None = None
    norm_weight_offset: float = 0.0
    final_norm_offset: float | None = None
    normalizes_embeddings: bool = False
    has_embedding_norm: bool = False
    per_layer: PerLayerConfig | None = None
    altup: AltUpConfig | None = None
    residual_scale: float = 1.0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    final_softcap: float | None = None
    has_head_bias: bool = False
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    stored: StoredForm = StoredForm()
    published: StoredForm | None = None
    dtype: StoredDtype | None = None
    draft_head: ModelConfig | None = None
    reads_states: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def is_tied(self) -> bool:
        """Return whether the first block has the head's matrix. A model with embeddings for each layer has those there,
        and looks its tokens up in the matrix of the head."""
        return self.tie_word_embeddings and self.per_layer is None

    @cached_property
    def _all_mixers(self) -> tuple[tuple[int, SingleMixer], ...]:
        """The mixers of all layers, each with the number of its layer."""
        return tuple((number, mixer) for number, layer in enumerate(self.layers) for mixer in layer.mixers)

    @cached_property
    def attentions(self) -> tuple[AttentionConfig, ...]:
        """The attention of each layer that has any."""
        return tuple(mixer for _, mixer in self._all_mixers if isinstance(mixer, AttentionConfig))

    @cached_property
    def latents(self) -> tuple[LatentAttentionConfig, ...]:
        """The latent attention of each layer that has any."""
        return tuple(mixer for _, mixer in self._all_mixers if isinstance(mixer, LatentAttentionConfig))

    @cached_property
    def head_shapes(self) -> frozenset[HeadShape]:
        """The different heads with which layers attend."""
        return frozenset(HeadShape(each.num_heads, each.kv_shape) for each in self.mixers if isinstance(each, KeyValue))

    @cached_property
    def keepers(self) -> tuple[KeyValue, ...]:
        """The mixer of each layer that keeps keys and values, or latents."""
        return tuple(mixer for _, mixer in self._all_mixers if _is_keeper(mixer))

    @cached_property
    def recurrents(self) -> tuple[Recurrent, ...]:
        """The mixer of each layer that keeps a state."""
        return tuple(mixer for _, mixer in self._all_mixers if isinstance(mixer, Recurrent))

    @cached_property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """What each of those keeps."""
        return tuple(mixer.shape for mixer in self.recurrents)

    def kept_number(self, layer: int, mixer: SingleMixer) -> int:
        """Return the number of what one of a layer's mixers reads, keys and values or a state, among what all layers
        keep of that."""
        before = [each for number, each in self._all_mixers if number < layer]
        if isinstance(mixer, Recurrent):
            return sum(isinstance(each, Recurrent) for each in before)
        if isinstance(mixer, AttentionConfig) and (other := mixer.kv_of_layer) is not None:
            return self.kept_number(other, next(filter(_is_keeper, self.layers[other].mixers)))
        return sum(map(_is_keeper, before))

    @cached_property
    def mixers(self) -> tuple[SingleMixer, ...]:
        """The different mixers of the model's layers."""
        return tuple(dict.fromkeys(mixer for _, mixer in self._all_mixers))

    @cached_property
    def blocks(self) -> tuple[tuple[int, Body], ...]:
        """The blocks between the embedding and the head, in their order: each the number of its layer, and what it
        computes."""
        return tuple((number, body) for number, layer in enumerate(self.layers) for body in layer.bodies)

    @cached_property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """What each layer with keys and values keeps of a token."""
        return tuple(attention.kv_shape for attention in self.keepers)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each of `keepers`."""
        return tuple(each.window for each in self.keepers)

    @cached_property
    def rotations(self) -> tuple[tuple[RopeConfig, int], ...]:
        """The different rotations of the model's layers: each with the features of a head that it turns."""
        mixers = [mixer for mixer in self.mixers if isinstance(mixer, KeyValue)]
        return tuple(dict.fromkeys((mixer.rope, mixer.rotary_dim) for mixer in mixers))

    @cached_property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The different RoPEs of the model's layers."""
        return tuple(dict.fromkeys(rope for rope, _ in self.rotations))

    @cached_property
    def mlps(self) -> tuple[MLPConfig, ...]:
        """The different feed-forwards of the model's layers, experts among them."""
        bodies = dict.fromkeys(layer.feed_forward for layer in self.layers if layer.feed_forward is not None)
        parts = [(body,) if isinstance(body, MLPConfig) else (body.expert, body.shared) for body in bodies]
        return tuple(dict.fromkeys(part for body in parts for part in body if part is not None))

    @cached_property
    def mixtures(self) -> tuple[MoEConfig, ...]:
        """The different mixtures of experts of the model's layers."""
        return tuple(
            dict.fromkeys(each.feed_forward for each in self.layers if isinstance(each.feed_forward, MoEConfig))
        )

    @property
    def longest_context(self) -> int:
        """Tokens that the model can attend to: what it was trained for, as far as its RoPE scaling stretches that."""
        stretched = [
            int(rope.factor * (rope.original_max_position_embeddings or 0))
            for rope in self.ropes
            if rope.kind in ("dynamic", "yarn")
        ]
        return max(self.max_position_embeddings, min(stretched, default=0))

    @property
    def rope_switch_length(self) -> int | None:
        """Tokens past which LongRoPE takes its long factors; None for every other scaling."""
        switches = {rope.original_max_position_embeddings for rope in self.ropes if rope.kind == "longrope"}
        return min((length for length in switches if length is not None), default=None)


def _is_keeper(mixer: SingleMixer) -> TypeGuard[KeyValue]:
    return isinstance(mixer, LatentAttentionConfig) or (
        isinstance(mixer, AttentionConfig) and mixer.kv_of_layer is None
    )
