"""The tensors of each block of a family, their names in a checkpoint, and how they fuse.

The one description that loading, packing and random models share. Holds no bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from localllm.layers.config import AttentionConfig, MLPConfig
from localllm.models.architecture import ModelConfig, NormPlacement
from localllm.quant.layouts import RecipeOf, Sizes, TensorSpec, WeightLayout

F = TypeVar("F", bound=WeightLayout)

# The norms around a block's body, by the family's placement: (before, after), in Hugging Face's names.
ATTENTION_NORMS = {
    "pre": ("input_layernorm", None),
    "post": (None, "post_attention_layernorm"),
    "sandwich": ("input_layernorm", "post_attention_layernorm"),
}
MLP_NORMS = {
    "pre": ("post_attention_layernorm", None),
    "post": (None, "post_feedforward_layernorm"),
    "sandwich": ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
}
EMBED, HEAD = "embed", "head"  # the names of the first block and of the last


@dataclass(frozen=True)
class Matrix:
    """One linear layer. Its rows are those of the checkpoint's `parts`, or of `stored` where that is stored fused."""

    name: str  # inside its block: "qkv_proj"
    stored: str  # "model.layers.0.self_attn.qkv_proj"
    parts: Mapping[str, int]  # stored names -> rows, in order
    in_features: int
    has_bias: bool = False
    is_embedding: bool = False  # the token embedding or the head

    @property
    def out_features(self) -> int:
        return sum(self.parts.values())

    def format(self, recipe: RecipeOf[F]) -> F:
        return recipe.embedding if self.is_embedding else recipe.blocks


@dataclass(frozen=True)
class Norm:
    name: str  # inside its block: "norm_in"
    stored: str
    features: int


@dataclass(frozen=True)
class BlockLayout:
    """The tensors of one block: `{matrix}.{tensor of its format}`, `{matrix}.linear_bias`, `{norm}`."""

    name: str  # "embed", "layers.0.attention", "layers.0.mlp", "head"
    matrices: tuple[Matrix, ...]
    norms: tuple[Norm, ...] = field(default=())

    def specs(self, recipe: Sizes) -> dict[str, TensorSpec]:
        """Every tensor of the block in the order in which it is packed; norms and biases are fp32."""
        specs: dict[str, TensorSpec] = {}
        for matrix in self.matrices:
            tensors = matrix.format(recipe).specs(matrix.out_features, matrix.in_features)
            specs |= {f"{matrix.name}.{name}": spec for name, spec in tensors.items()}
            if matrix.has_bias:
                specs[f"{matrix.name}.linear_bias"] = TensorSpec((matrix.out_features,), "float32")
        return specs | {norm.name: TensorSpec((norm.features,), "float32") for norm in self.norms}

    def small_tensors(self) -> list[str]:
        """Norms and biases: a few kilobytes beside the megabytes of the matrices."""
        biases = [f"{matrix.name}.linear_bias" for matrix in self.matrices if matrix.has_bias]
        return [*biases, *(norm.name for norm in self.norms)]

    def nbytes(self, recipe: Sizes) -> int:
        return sum(spec.nbytes for spec in self.specs(recipe).values())


def block_layouts(config: ModelConfig) -> tuple[BlockLayout, ...]:
    """The embedding, every attention and MLP block, the head: in the order in which a forward needs them."""
    blocks = [BlockLayout(EMBED, (_vocabulary("embed_tokens", "model.embed_tokens", config),))]
    for number, layer in enumerate(config.layers):
        around = _Around(f"model.layers.{number}", config.hidden_size, layer.norm_placement)
        blocks += [_attention(number, layer.mixer, around), _mlp(number, layer.feed_forward, around)]
    head = () if config.tie_word_embeddings else (_vocabulary("lm_head", "lm_head", config),)
    return (*blocks, BlockLayout(HEAD, head, (Norm("final_norm", "model.norm", config.hidden_size),)))


def model_bytes(config: ModelConfig, recipe: Sizes) -> int:
    """Bytes of all tensors of the model."""
    return sum(block.nbytes(recipe) for block in block_layouts(config))


def _vocabulary(name: str, stored: str, config: ModelConfig) -> Matrix:
    return Matrix(name, stored, {stored: config.vocab_size}, config.hidden_size, is_embedding=True)


@dataclass(frozen=True)
class _Around:
    """What a block's tensors depend on beside its own body. prefix: of the layer's tensors in a checkpoint."""

    prefix: str
    hidden_size: int
    norm_placement: NormPlacement

    def norms(self, placements: Mapping[str, tuple[str | None, str | None]]) -> tuple[Norm, ...]:
        names = zip(("norm_in", "norm_out"), placements[self.norm_placement], strict=True)
        return tuple(
            Norm(name, f"{self.prefix}.{stored}", self.hidden_size) for name, stored in names if stored is not None
        )


def _attention(layer: int, config: AttentionConfig, around: _Around) -> BlockLayout:
    D, H, KH, hidden = config.head_dim, config.num_heads, config.num_kv_heads, around.hidden_size
    attn = f"{around.prefix}.self_attn"
    qkv = {f"{attn}.q_proj": H * D, f"{attn}.k_proj": KH * D, f"{attn}.v_proj": KH * D}
    matrices = (
        Matrix("qkv_proj", f"{attn}.qkv_proj", qkv, hidden, config.has_bias),
        Matrix("o_proj", f"{attn}.o_proj", {f"{attn}.o_proj": hidden}, H * D, config.has_output_bias),
    )
    norms = around.norms(ATTENTION_NORMS)
    if config.qk_norm is not None:
        wide = config.qk_norm == "full"
        norms += (
            Norm("q_norm", f"{attn}.q_norm", H * D if wide else D),
            Norm("k_norm", f"{attn}.k_norm", KH * D if wide else D),
        )
    return BlockLayout(f"layers.{layer}.attention", matrices, norms)


def _mlp(layer: int, config: MLPConfig, around: _Around) -> BlockLayout:
    matrices = gated_matrices(config, f"{around.prefix}.mlp", around.hidden_size)
    return BlockLayout(f"layers.{layer}.mlp", matrices, around.norms(MLP_NORMS))


def gated_matrices(config: MLPConfig, stored: str, hidden_size: int, prefix: str = "") -> tuple[Matrix, ...]:
    """Return the matrices of a gated feed-forward: gate and up as one, and down. stored: its name in a checkpoint.
    prefix: of the matrices' names inside their block."""
    width, bias = config.intermediate_size, config.has_bias
    gate_up = {f"{stored}.gate_proj": width, f"{stored}.up_proj": width}
    return (
        Matrix(f"{prefix}gate_up_proj", f"{stored}.gate_up_proj", gate_up, hidden_size, bias),
        Matrix(f"{prefix}down_proj", f"{stored}.down_proj", {f"{stored}.down_proj": hidden_size}, width, bias),
    )
