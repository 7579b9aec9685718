"""What a layer computes: attention, a feed-forward, a mixture of them. Plain data: no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localllm.kernels.sizes import Glu, KVShape, OutputGate, RouterConfig
from localllm.kernels.state_shapes import (
    RWKV7_PROJECTED,
    ConvShape,
    DeltaShape,
    Mamba2Shape,
    MambaShape,
    Rwkv7Shape,
    ShiftShape,
)

Activation = Literal["silu", "gelu_tanh", "gelu", "quick_gelu", "relu2", "xielu"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding and its scaling; names as in Hugging Face's `rope_parameters`."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    attention_factor: float | None = None  # yarn, longrope
    short_factor: tuple[float, ...] = ()  # longrope
    long_factor: tuple[float, ...] = ()  # longrope
    share: float = 1.0  # proportional: of the features that do turn


@dataclass(frozen=True)
class QueryGrowth:
    """Queries at a position are multiplied by 1 + beta * ln(1 + floor(position / length)), as Llama 4 has it."""

    beta: float
    length: int


@dataclass(frozen=True)
class AttentionConfig:
    """Attention of one layer.

    rotary_dim: the leading features of a head that rotate; the others pass. 0: positions are not told.
    window: keys that a query sees, itself included; None: all.
    qk_norm: over each head's features, over all heads' together (`full`), or over each head's, which has weights of
        its own (`own`).
    has_norm_weights: False where those norms have no weights.
    rotates_first: queries and keys rotate before they are normalised.
    clip: bounds the magnitude of queries, keys and values before they rotate.
    has_sinks: each head has one more logit, which takes a share of the attention and has no value (arXiv:2309.17453).
    growth: queries are multiplied by more the longer what is in front of them.
    has_output_gate: what is attended to is multiplied by the sigmoid of as many more rows of the projection.
    gates_heads: by that of one more row for each head.
    value_from_key: the values are the keys as they are projected.
    norms_values: by the root mean square of each head.
    kv_of_layer: the layer whose keys and values are attended to; None: its own.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    rotary_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    qk_norm: Literal["head", "full", "own"] | None = None
    has_norm_weights: bool = True
    rotates_first: bool = False
    clip: float | None = None
    has_sinks: bool = False
    growth: QueryGrowth | None = None
    has_bias: bool = False  # of q, k, v
    has_output_bias: bool = False
    has_output_gate: bool = False
    gates_heads: bool = False
    value_from_key: bool = False
    norms_values: bool = False
    kv_of_layer: int | None = None

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(self.num_kv_heads, self.head_dim)

    @property
    def key_heads(self) -> int:
        """Heads of keys that the projection makes."""
        return self.num_kv_heads if self.kv_of_layer is None else 0

    @property
    def value_heads(self) -> int:
        """Heads of values that the projection makes."""
        return 0 if self.value_from_key else self.key_heads

    @property
    def gate_features(self) -> int:
        """Rows of the projection that come before those of queries, keys and values."""
        if self.gates_heads:
            return self.num_heads
        return self.mixed_features if self.has_output_gate else 0

    @property
    def qkv_features(self) -> int:
        return self.gate_features + (self.num_heads + self.key_heads + self.value_heads) * self.head_dim

    @property
    def mixed_features(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class LatentAttentionConfig:
    """Multi-head latent attention of one layer (MLA, arXiv:2405.04434): all heads make their keys and values of one
    latent a token, and share a key that rotates.

    query_rank: features that queries pass through, with a norm; None: they are projected at once.
    plain_dim, shared_dim: features of a query that meet the head's own key, and the shared one.
    rotary_dim: the leading features of `shared_dim` that rotate. 0: positions are not told.
    window: keys that a query sees, itself included; None: all.
    norm_eps: of the norms of queries and latents.
    """

    num_heads: int
    query_rank: int | None
    latent_dim: int
    plain_dim: int
    shared_dim: int
    value_dim: int
    rope: RopeConfig
    rotary_dim: int
    scale: float
    window: int | None = None
    norm_eps: float = 1e-6
    has_bias: bool = False  # of what is projected down
    has_output_bias: bool = False

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(1, self.latent_dim + self.shared_dim, self.latent_dim)

    @property
    def in_features(self) -> int:
        """What the first projection makes of a token: the reduced query, the latent, the shared key."""
        return (self.query_rank or 0) + self.latent_dim + self.shared_dim

    @property
    def query_features(self) -> int:
        return self.num_heads * (self.plain_dim + self.shared_dim)

    @property
    def absorbed_features(self) -> int:
        """Features of all heads in the space of the latents."""
        return self.num_heads * self.latent_dim

    @property
    def heads_features(self) -> int:
        """The most features of all heads that products by head take or make."""
        return self.num_heads * max(self.latent_dim, self.plain_dim, self.value_dim)

    @property
    def mixed_features(self) -> int:
        return self.num_heads * self.value_dim


@dataclass(frozen=True)
class DeltaNetConfig:
    """Gated DeltaNet or Kimi Delta Attention of one layer: attention whose memory is a matrix a head. See
    `kernels.delta_rule`.

    beta_scale: 2 where a state may change its sign.
    norm_eps: of the norm behind the heads; None: the model's.
    gate: of what comes out.
    rank: of two matrices that make the decays, and of two that make the gates of what comes out; None: of one each.
    """

    shape: DeltaShape
    beta_scale: float = 1.0
    norm_eps: float | None = None
    gate: OutputGate = "silu"
    rank: int | None = None

    @property
    def mixed_features(self) -> int:
        return self.shape.value_features

    @property
    def gate_features(self) -> int:
        """What is made of a token in fp32: the gates of each state, and what those are made of."""
        return self.shape.value_heads + self.shape.decay_features + (self.rank or 0)

    @property
    def in_features(self) -> int:
        """What the projection makes of a token: queries, keys and values, and the gates of what comes out, or what
        those are made of."""
        return self.shape.channels + (self.rank or self.shape.value_features)


@dataclass(frozen=True)
class ShortConvConfig:
    """A short convolution between two gates, in place of attention. See `kernels.short_conv`.

    has_bias: of the convolution and of both projections.
    """

    shape: ConvShape
    has_bias: bool = False

    @property
    def mixed_features(self) -> int:
        return self.shape.channels

    @property
    def gate_features(self) -> int:
        """What is made of a token in fp32."""
        return 0

    @property
    def in_features(self) -> int:
        """What the projection makes of a token: the gate in front, the one behind, and what they are gates of."""
        return 3 * self.shape.channels


@dataclass(frozen=True)
class MambaConfig:
    """Mamba of one layer. See `kernels.selective_scan`.

    norm_eps: of the norms of B, C and what makes the steps; None: there are none. has_norm_weights: of those.
    has_bias: of the projections in front and behind.
    """

    shape: MambaShape
    norm_eps: float | None = None
    has_norm_weights: bool = False
    has_conv_bias: bool = True
    has_bias: bool = False

    @property
    def mixed_features(self) -> int:
        return self.shape.features

    @property
    def gate_features(self) -> int:
        """What is made of a token in fp32."""
        return 0

    @property
    def in_features(self) -> int:
        """What the projection makes of a token: what the convolution sees, and gates of what comes out."""
        return 2 * self.shape.features


@dataclass(frozen=True)
class Mamba2Config:
    """Mamba 2 of one layer. See `kernels.mamba2_rule`.

    least_step, most_step: bounds of a token's step; None: it has no upper one.
    norm: of what comes out, in as many parts as there are groups: of what the gate z leaves of it (`gated`), or before
        the gate multiplies it (`plain`); None: there is none.
    has_bias: of the projection in front.
    """

    shape: Mamba2Shape
    least_step: float = 0.0
    most_step: float | None = None
    norm: Literal["gated", "plain"] | None = "gated"
    has_conv_bias: bool = True
    has_bias: bool = False
    has_output_bias: bool = False

    @property
    def mixed_features(self) -> int:
        return self.shape.features

    @property
    def gate_features(self) -> int:
        """What is made of a token in fp32: the length of a step a head."""
        return self.shape.num_heads

    @property
    def in_features(self) -> int:
        """What the projection makes of a token: gates of what comes out, and what the convolution sees."""
        return self.shape.features + self.shape.channels


@dataclass(frozen=True)
class Rwkv7TimeMixConfig:
    """The time mix of one layer of RWKV-7: see `kernels.rwkv7`.

    decay_rank, rate_rank, value_rank, gate_rank: of the pairs of small matrices that make the decays, the rates in
        context, the gates of values, and those of what comes out.
    is_first: its values are what those of the other layers are mixed with.
    """

    shape: Rwkv7Shape
    decay_rank: int
    rate_rank: int
    value_rank: int
    gate_rank: int
    is_first: bool = False

    @property
    def mixed_features(self) -> int:
        return self.shape.features

    @property
    def gate_features(self) -> int:
        return 0

    @property
    def in_features(self) -> int:
        """What is made of a token: see `RWKV7_PROJECTED`."""
        return len(RWKV7_PROJECTED) * self.shape.features


@dataclass(frozen=True)
class Rwkv7ChannelMixConfig:
    """The channel mix of one layer of RWKV-7: a feed-forward of a token and the one before it.

    value(relu(key(x + mix * (before - x)))**2).
    """

    shape: ShiftShape
    intermediate_size: int

    @property
    def mixed_features(self) -> int:
        return self.shape.features

    @property
    def gate_features(self) -> int:
        return 0

    @property
    def in_features(self) -> int:
        return self.intermediate_size


# Keeps a state of its `shape`.
Recurrent = DeltaNetConfig | MambaConfig | Mamba2Config | ShortConvConfig | Rwkv7TimeMixConfig | Rwkv7ChannelMixConfig
KeyValue = AttentionConfig | LatentAttentionConfig  # keeps keys and values, or latents, in pages
SingleMixer = KeyValue | Recurrent


@dataclass(frozen=True)
class BesideConfig:
    """Mixers beside each other: all read the same norm, and what they make is added up. At most one keeps a state, at
    most one keys and values."""

    mixers: tuple[SingleMixer, ...]


Mixer = SingleMixer | BesideConfig


@dataclass(frozen=True)
class MLPConfig:
    """down(activation(gate(x)) * (up(x) + up_offset)), or down(activation(up(x))) without a gate.

    limit: bounds the gate from above, and what goes up on both sides, before anything else is done with them.
    sparsity: the share of gates that are zero before their activation, of as many as a normal distribution has.
    """

    intermediate_size: int
    activation: Activation = "silu"
    has_bias: bool = False
    has_gate: bool = True
    limit: float | None = None
    up_offset: float = 0.0
    sparsity: float = 0.0

    @property
    def glu(self) -> Glu:
        return Glu(self.activation, self.has_gate, self.limit, self.up_offset)

    @property
    def is_plain(self) -> bool:
        """Return whether native programs know what it computes between its matrices, as `glu` says it."""
        return self.activation != "xielu" and not self.sparsity

    @property
    def wide_features(self) -> int:
        """Return the rows of its first matrix."""
        return (2 if self.has_gate else 1) * self.intermediate_size


@dataclass(frozen=True)
class PerLayerConfig:
    """Small embeddings that a token has for each layer (Gemma 3n's PLE): behind a layer's feed-forward, they are
    multiplied by what a gate makes of the hidden state, and projected back.

    vocab_size: tokens beyond it have none. features: of a token for one layer.
    """

    vocab_size: int
    features: int
    activation: Activation = "gelu_tanh"


@dataclass(frozen=True)
class AltUpConfig:
    """Several hidden states a token (`layers.altup`). laurel_rank: of the small matrix beside attention.
    scales_output: the first state is multiplied by a vector where the layer's embeddings read it."""

    num_states: int
    laurel_rank: int
    scales_output: bool = True


MAX_EXPERTS = 4096  # of a layer: eight times what the largest published models have


@dataclass(frozen=True)
class MoEConfig:
    """The weighted sum of the experts that the router chooses for a token, and of one that computes every token.

    gates_shared: the shared expert's output is multiplied by sigmoid(its own gate's product with x).
    has_router_bias: of the logits.
    has_own_norms: the router, the experts and the shared expert each have a norm in front, the last two one behind.
    """

    router: RouterConfig
    expert: MLPConfig
    shared: MLPConfig | None = None
    gates_shared: bool = False
    has_router_bias: bool = False
    has_own_norms: bool = False
