"""The numbers of a model's architecture, read from Hugging Face's config.json by `families.parse_config`.

Knows no tensors and no files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localllm.layers.config import RopeConfig, RopeKind

Activation = Literal["silu", "gelu_tanh", "gelu"]
NormPlacement = Literal["pre", "post", "sandwich"]
StoredDtype = Literal["bfloat16", "float16", "float32", "float64"]

__all__ = ["Activation", "ModelConfig", "NormPlacement", "RopeConfig", "RopeKind", "StoredDtype"]


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of attention and MLP blocks. `windows` and `ropes` have one entry a layer."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    windows: tuple[int | None, ...]  # keys that a query sees, itself included; None: all
    ropes: tuple[RopeConfig, ...]
    rotary_dim: int  # leading features of a head that rotate; the rest pass
    rms_norm_eps: float = 1e-6
    norm_placement: NormPlacement = "pre"  # post: x + norm(block(x)); sandwich: x + norm(block(norm(x)))
    norm_weight_offset: float = 0.0  # gemma stores w - 1
    activation: Activation = "silu"
    attention_bias: bool = False  # q, k, v
    output_bias: bool = False  # o
    mlp_bias: bool = False
    qk_norm: Literal["head", "full"] | None = None  # head: over each head's features; full: over all heads' together
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embedding_scale: float = 1.0  # rounded to the weights' dtype before it multiplies
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: StoredDtype | None = None  # what the file says that its weights are; the tensors' own headers decide

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
