"""What a layer computes: attention, a feed-forward, a mixture of them. Plain data: no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localllm.kernels.router import RouterConfig
from localllm.kernels.sizes import DeltaShape, KVShape

Activation = Literal["silu", "gelu_tanh", "gelu"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


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


@dataclass(frozen=True)
class AttentionConfig:
    """Attention of one layer.

    rotary_dim: the leading features of a head that rotate; the others pass.
    window: keys that a query sees, itself included; None: all.
    qk_norm: over each head's features, or over all heads' together (`full`).
    rotates_first: queries and keys rotate before they are normalised.
    clip: bounds the magnitude of queries, keys and values before they rotate.
    has_output_gate: what is attended to is multiplied by the sigmoid of as many more rows of the projection.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    rotary_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    qk_norm: Literal["head", "full"] | None = None
    rotates_first: bool = False
    clip: float | None = None
    has_bias: bool = False  # of q, k, v
    has_output_bias: bool = False
    has_output_gate: bool = False

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(self.num_kv_heads, self.head_dim)

    @property
    def gate_features(self) -> int:
        """Rows of the projection that come before those of queries, keys and values."""
        return self.mixed_features if self.has_output_gate else 0

    @property
    def qkv_features(self) -> int:
        return self.gate_features + (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def mixed_features(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class DeltaNetConfig:
    """Gated DeltaNet of one layer: attention whose memory is a matrix a head. See `kernels.delta_rule`.

    beta_scale: 2 where a state may change its sign.
    norm_eps: of the norm behind the heads; None: the model's.
    """

    shape: DeltaShape
    beta_scale: float = 1.0
    norm_eps: float | None = None

    @property
    def mixed_features(self) -> int:
        return self.shape.value_features

    @property
    def in_features(self) -> int:
        """What the projection makes of a token: queries, keys and values, and the gates of what comes out."""
        return self.shape.channels + self.shape.value_features


Mixer = AttentionConfig | DeltaNetConfig


@dataclass(frozen=True)
class MLPConfig:
    """down(activation(gate(x)) * up(x))."""

    intermediate_size: int
    activation: Activation = "silu"
    has_bias: bool = False


MAX_EXPERTS = 4096  # of a layer: eight times what the largest published models have


@dataclass(frozen=True)
class MoEConfig:
    """The weighted sum of the experts that the router chooses for a token, and of one that computes every token.

    gates_shared: the shared expert's output is multiplied by sigmoid(its own gate's product with x).
    """

    router: RouterConfig
    expert: MLPConfig
    shared: MLPConfig | None = None
    gates_shared: bool = False
