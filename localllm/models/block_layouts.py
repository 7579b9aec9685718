"""The tensors of each block of a model, their names in a checkpoint, and how they fuse.

The one description that loading, packing and random models share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from localllm.layers.config import (
    AltUpConfig,
    AttentionConfig,
    BesideConfig,
    DeltaNetConfig,
    LatentAttentionConfig,
    Mamba2Config,
    MambaConfig,
    Mixer,
    MLPConfig,
    MoEConfig,
    PerLayerConfig,
    Rwkv7ChannelMixConfig,
    Rwkv7TimeMixConfig,
    ShortConvConfig,
)
from localllm.models.architecture import LayerConfig, ModelConfig
from localllm.models.layout import (
    COEFFICIENTS,
    EMBED,
    HEAD,
    BlockLayout,
    Experts,
    Matrix,
    Vector,
    gated_matrices,
)
from localllm.models.mixer_layouts import attention, delta_net, latent_attention, mamba, mamba2, rwkv7, short_conv
from localllm.models.mixer_layouts.around import Around, norm_vectors
from localllm.quant.layouts import Sizes

# The norms around a feed-forward, by the family's placement: (before, after), in Hugging Face's names.
MLP_NORMS = {
    "pre": ("post_attention_layernorm", None),
    "post": (None, "post_feedforward_layernorm"),
    "sandwich": ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    "parallel": ("input_layernorm", None),
}


_LAYOUTS: Mapping[type, Callable[[int, Any, Around], BlockLayout]] = MappingProxyType(
    {
        AttentionConfig: attention.layout,
        LatentAttentionConfig: latent_attention.layout,
        DeltaNetConfig: delta_net.layout,
        MambaConfig: mamba.layout,
        Mamba2Config: mamba2.layout,
        ShortConvConfig: short_conv.layout,
        Rwkv7TimeMixConfig: rwkv7.layout,
        Rwkv7ChannelMixConfig: rwkv7.layout,
    }
)


def block_layouts(config: ModelConfig) -> tuple[BlockLayout, ...]:
    """The embedding, every attention and MLP block, the head: in the order in which a forward needs them. Of a head
    that drafts, what it makes of an embedding and a hidden state comes first, and a norm alone last."""
    return tuple(_multiplied(block, config.stored.multipliers) for block in _blocks(config))


def _blocks(config: ModelConfig) -> tuple[BlockLayout, ...]:
    blocks = [_draft_inputs(config) if config.reads_states else _embedding(config)]
    for number, layer in enumerate(config.layers):
        root = "mtp" if config.reads_states else "model"
        around = Around(f"{root}.layers.{number}", config, layer.norm_placement)
        if layer.mixer is not None:
            blocks.append(_with_layer_begin(_mixer(number, layer.mixer, around), around))
        if (body := layer.feed_forward) is not None:
            mlp = _mlp(number, body, around) if isinstance(body, MLPConfig) else _moe(number, body, around)
            blocks.append(_with_layer_end(mlp, layer, around))
    if config.per_layer is not None:
        blocks[1] = _with_per_layer_inputs(blocks[1], config, config.per_layer)
    if config.has_embedding_norm:
        norm = norm_vectors("norm_embedding", "model.embedding_norm", config)
        blocks[1] = replace(blocks[1], vectors=(*norm, *blocks[1].vectors))
    if config.altup is not None:
        blocks[1] = _with_state_projections(blocks[1], "altup_projections", config, config.altup)
        blocks[-1] = _with_state_projections(blocks[-1], "altup_unembed_projections", config, config.altup)
    if config.reads_states:
        return (*blocks, BlockLayout(HEAD, (), norm_vectors("final_norm", "mtp.norm", config)))
    stored = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    head = () if config.is_tied else (_vocabulary("lm_head", stored, config),)
    vectors = norm_vectors("final_norm", "model.norm", config, config.final_norm_offset)
    if config.has_head_bias:
        vectors += (Vector("head_bias", "lm_head.bias", config.vocab_size, is_norm_weight=False),)
    return (*blocks, BlockLayout(HEAD, head, vectors))


def _multiplied(block: BlockLayout, multipliers: tuple[tuple[str, float], ...]) -> BlockLayout:
    """Return a block whose matrices are multiplied where `StoredForm.multipliers` says so."""
    if not multipliers:
        return block
    matrices = []
    for matrix in block.matrices:
        scales = {name: math.prod(by for part, by in multipliers if part in f"{name}.") for name in matrix.parts}
        matrices.append(replace(matrix, part_scales={name: by for name, by in scales.items() if by != 1.0}))
    return replace(block, matrices=tuple(matrices))


def _embedding(config: ModelConfig) -> BlockLayout:
    if config.per_layer is None:
        return BlockLayout(EMBED, (_vocabulary("embed_tokens", "model.embed_tokens", config),))
    name, features = "embed_tokens_per_layer", config.num_layers * config.per_layer.features
    parts = {f"model.{name}": config.per_layer.vocab_size}
    return BlockLayout(EMBED, (Matrix(name, f"model.{name}", parts, features, role="embedding"),))


def _with_per_layer_inputs(first: BlockLayout, config: ModelConfig, per_layer: PerLayerConfig) -> BlockLayout:
    """Return the first block behind the embedding with what makes each layer's inputs of that."""
    stored, rows = "model.per_layer_model_projection", config.num_layers * per_layer.features
    scale = config.hidden_size**-0.5
    projection = Matrix("per_layer_inputs", stored, {stored: rows}, config.hidden_size, scale=scale)
    norm = Vector("norm_per_layer_inputs", "model.per_layer_projection_norm.weight", per_layer.features)
    return replace(first, matrices=(*first.matrices, projection), vectors=(*first.vectors, norm))


def _with_state_projections(block: BlockLayout, name: str, config: ModelConfig, altup: AltUpConfig) -> BlockLayout:
    """Return a block with the matrices between the first of several hidden states and the others."""
    stored = [f"model.{name}.{number}" for number in range(altup.num_states - 1)]
    hidden = config.hidden_size
    matrices = (Matrix(f"{name}.{i}", each, {each: hidden}, hidden) for i, each in enumerate(stored))
    return replace(block, matrices=(*block.matrices, *matrices))


def _with_layer_begin(mixer: BlockLayout, around: Around) -> BlockLayout:
    """Return a mixer's block with what AltUp and LAuReL add at the beginning of a layer."""
    altup, hidden = around.model.altup, around.model.hidden_size
    if altup is None:
        return mixer
    left, right = (f"{around.prefix}.laurel.linear_{side}" for side in ("left", "right"))
    small, vectors = _altup(around, altup, "prediction_coefs", altup.num_states**2)
    laurel = (
        Matrix("laurel_left", left, {left: altup.laurel_rank}, hidden),
        Matrix("laurel_right", right, {right: hidden}, altup.laurel_rank),
    )
    vectors += (Vector("norm_laurel", f"{around.prefix}.laurel.post_laurel_norm.weight", hidden),)
    return replace(mixer, matrices=(*mixer.matrices, *small, *laurel), vectors=(*mixer.vectors, *vectors))


def _altup(around: Around, altup: AltUpConfig, name: str, rows: int) -> tuple[tuple[Matrix, ...], tuple[Vector, ...]]:
    """Return what AltUp predicts or corrects states by, in fp32. name: of the coefficients."""
    prefix, hidden = f"{around.prefix}.altup", around.model.hidden_size
    router, coefficients = f"{prefix}.modality_router", f"{prefix}.{name}"
    matrices = (
        Matrix("altup_router", router, {router: altup.num_states}, hidden, role="router"),
        Matrix("altup_coefficients", coefficients, {coefficients: rows}, altup.num_states, role="router"),
    )
    return matrices, (Vector("norm_altup", f"{prefix}.router_norm.weight", hidden),)


def _with_layer_end(mlp: BlockLayout, layer: LayerConfig, around: Around) -> BlockLayout:
    """Return a feed-forward's block with what comes behind it at the end of a layer."""
    matrices, vectors, hidden = mlp.matrices, mlp.vectors, around.model.hidden_size
    if (per_layer := around.model.per_layer) is not None:
        gate, back = f"{around.prefix}.per_layer_input_gate", f"{around.prefix}.per_layer_projection"
        matrices += (
            Matrix("per_layer_gate", gate, {gate: per_layer.features}, hidden),
            Matrix("per_layer_proj", back, {back: hidden}, per_layer.features),
        )
        vectors += (Vector("norm_per_layer", f"{around.prefix}.post_per_layer_input_norm.weight", hidden),)
    if (altup := around.model.altup) is not None:
        small, norms = _altup(around, altup, "correction_coefs", altup.num_states)
        matrices, vectors = matrices + small, vectors + norms
        if altup.scales_output:
            vectors += (Vector("altup_scale", f"{around.prefix}.altup.correct_output_scale", hidden),)
    if layer.has_scalar:
        vectors += (Vector("scalar", f"{around.prefix}.layer_scalar", 1),)
    return replace(mlp, matrices=matrices, vectors=vectors)


def _draft_inputs(config: ModelConfig) -> BlockLayout:
    joined = Matrix("joined_proj", "mtp.fc", {"mtp.fc": config.hidden_size}, 2 * config.hidden_size)
    norms = norm_vectors("norm_embedding", "mtp.pre_fc_norm_embedding", config)
    return BlockLayout(EMBED, (joined,), (*norms, *norm_vectors("norm_hidden", "mtp.pre_fc_norm_hidden", config)))


def model_bytes(config: ModelConfig, recipe: Sizes) -> int:
    """Bytes of all tensors of the model."""
    return sum(block.nbytes(recipe) for block in block_layouts(config))


def _vocabulary(name: str, stored: str, config: ModelConfig) -> Matrix:
    return Matrix(name, stored, {stored: config.vocab_size}, config.hidden_size, role="embedding")


def _mixer(layer: int, config: Mixer, around: Around) -> BlockLayout:
    if isinstance(config, BesideConfig):
        parts = [_mixer(layer, each, around) for each in config.mixers]
        matrices = tuple(matrix for part in parts for matrix in part.matrices)
        vectors = {vector.name: vector for part in parts for vector in part.vectors}  # all have one norm in front
        return BlockLayout(parts[0].name, matrices, tuple(vectors.values()))
    return _LAYOUTS[type(config)](layer, config, around)


def _mlp(layer: int, config: MLPConfig, around: Around) -> BlockLayout:
    mlp, vectors = f"{around.prefix}.mlp", around.norms(MLP_NORMS)
    if config.activation == "xielu":
        names = ("alpha_p", "alpha_n", "beta", "eps")
        parts = tuple((f"{mlp}.act_fn.{name}", 1) for name in names)
        vectors += (Vector(COEFFICIENTS, f"{mlp}.act_fn", len(parts), is_norm_weight=False, parts=parts),)
    return BlockLayout(f"layers.{layer}.mlp", gated_matrices(config, mlp, around.residual), vectors)


def _moe(layer: int, config: MoEConfig, around: Around) -> BlockLayout:
    router, mlp, hidden = config.router, f"{around.prefix}.mlp", around.model.hidden_size
    logits = {f"{mlp}.gate": router.num_experts}
    matrices = [Matrix("router", f"{mlp}.gate", logits, hidden, config.has_router_bias, role="router")]
    if config.shared is not None:
        matrices += gated_matrices(config.shared, f"{mlp}.shared_expert", around.residual, prefix="shared.")
    if config.gates_shared:
        gate = f"{mlp}.shared_expert_gate"
        matrices.append(Matrix("shared_gate", gate, {gate: 1}, hidden, role="router"))
    vectors = _moe_norms(around) if config.has_own_norms else around.norms(MLP_NORMS)
    if router.has_expert_scales:
        scales = f"{around.prefix}.router.per_expert_scale"
        vectors += (Vector("expert_scales", scales, router.num_experts),)
    if router.has_correction:
        stored = f"{mlp}.gate.e_score_correction_bias"
        vectors += (Vector("correction", stored, router.num_experts, is_norm_weight=False),)
    alternates = around.model.stored.alternates_gates
    experts = Experts(f"{mlp}.experts", router.num_experts, router.top_k, config.expert, around.residual, alternates)
    return BlockLayout(f"layers.{layer}.mlp", tuple(matrices), vectors, experts)


def _moe_norms(around: Around) -> tuple[Vector, ...]:
    """Return the norms of a mixture whose parts have their own: see `MoEConfig.has_own_norms`."""
    stored = {
        "norm_router": "router.scale",
        "norm_experts_in": "pre_feedforward_layernorm_2.weight",
        "norm_experts_out": "post_feedforward_layernorm_2.weight",
        "norm_shared_in": "pre_feedforward_layernorm.weight",
        "norm_shared_out": "post_feedforward_layernorm_1.weight",
        "norm_out": "post_feedforward_layernorm.weight",
    }
    return tuple(Vector(name, f"{around.prefix}.{each}", around.model.hidden_size) for name, each in stored.items())
