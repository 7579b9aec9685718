"""The tensors of each block of a model, their names in a checkpoint, and how they fuse.

The one description that loading, packing and random models share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from localllm.kernels.sizes import DeltaShape, Mamba2Shape
from localllm.layers.config import (
    AltUpConfig,
    AttentionConfig,
    BesideConfig,
    DeltaNetConfig,
    LatentAttentionConfig,
    Mamba2Config,
    Mixer,
    MLPConfig,
    MoEConfig,
    PerLayerConfig,
    Rwkv7ChannelMixConfig,
    Rwkv7TimeMixConfig,
    ShortConvConfig,
)
from localllm.models.architecture import LayerConfig, ModelConfig, NormPlacement
from localllm.models.layout import (
    COEFFICIENTS,
    EMBED,
    HEAD,
    BlockLayout,
    Experts,
    Grouped,
    HeadCut,
    Interleaved,
    Matrix,
    Residual,
    Vector,
    gated_matrices,
)
from localllm.models.rwkv7_layout import rwkv7_block
from localllm.quant.layouts import Sizes

# The norms around a block's body, by the family's placement: (before, after), in Hugging Face's names.
ATTENTION_NORMS = {
    "pre": ("input_layernorm", None),
    "post": (None, "post_attention_layernorm"),
    "sandwich": ("input_layernorm", "post_attention_layernorm"),
    "parallel": ("input_layernorm", None),
}
MLP_NORMS = {
    "pre": ("post_attention_layernorm", None),
    "post": (None, "post_feedforward_layernorm"),
    "sandwich": ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    "parallel": ("input_layernorm", None),
}


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
        norm = _norm("norm_embedding", "model.embedding_norm", config)
        blocks[1] = replace(blocks[1], vectors=(*norm, *blocks[1].vectors))
    if config.altup is not None:
        blocks[1] = _with_state_projections(blocks[1], "altup_projections", config, config.altup)
        blocks[-1] = _with_state_projections(blocks[-1], "altup_unembed_projections", config, config.altup)
    if config.reads_states:
        return (*blocks, BlockLayout(HEAD, (), _norm("final_norm", "mtp.norm", config)))
    stored = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    head = () if config.is_tied else (_vocabulary("lm_head", stored, config),)
    vectors = _norm("final_norm", "model.norm", config, config.final_norm_offset)
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
    norms = _norm("norm_embedding", "mtp.pre_fc_norm_embedding", config)
    return BlockLayout(EMBED, (joined,), (*norms, *_norm("norm_hidden", "mtp.pre_fc_norm_hidden", config)))


def model_bytes(config: ModelConfig, recipe: Sizes) -> int:
    """Bytes of all tensors of the model."""
    return sum(block.nbytes(recipe) for block in block_layouts(config))


def _vocabulary(name: str, stored: str, config: ModelConfig) -> Matrix:
    return Matrix(name, stored, {stored: config.vocab_size}, config.hidden_size, role="embedding")


def _norm(name: str, stored: str, config: ModelConfig, offset: float | None = None) -> tuple[Vector, ...]:
    offset = config.norm_weight_offset if offset is None else offset
    weight = Vector(name, f"{stored}.weight", config.hidden_size, offset=offset)
    if config.norm_kind == "rms" or not config.has_norm_bias:
        return (weight,)
    return weight, Vector(f"{name}_bias", f"{stored}.bias", config.hidden_size, is_norm_weight=False)


@dataclass(frozen=True)
class Around:
    """What a block's tensors depend on beside its own body. prefix: of the layer's tensors in a checkpoint."""

    prefix: str
    model: ModelConfig
    norm_placement: NormPlacement

    @property
    def residual(self) -> Residual:
        return Residual(self.model.hidden_size, self.model.residual_scale)

    def norms(self, placements: Mapping[str, tuple[str | None, str | None]]) -> tuple[Vector, ...]:
        names = zip(("norm_in", "norm_out"), placements[self.norm_placement], strict=True)
        return tuple(
            vector
            for name, stored in names
            if stored is not None
            for vector in _norm(name, f"{self.prefix}.{stored}", self.model)
        )


def _mixer(layer: int, config: Mixer, around: Around) -> BlockLayout:
    if isinstance(config, BesideConfig):
        parts = [_mixer(layer, each, around) for each in config.mixers]
        matrices = tuple(matrix for part in parts for matrix in part.matrices)
        vectors = {vector.name: vector for part in parts for vector in part.vectors}  # all have one norm in front
        return BlockLayout(parts[0].name, matrices, tuple(vectors.values()))
    if isinstance(config, DeltaNetConfig):
        if config.rank is not None:
            return _kimi_delta(layer, config, config.rank, around)
        return _delta_net(layer, config, around)
    if isinstance(config, LatentAttentionConfig):
        return _latent_attention(layer, config, around)
    if isinstance(config, ShortConvConfig):
        return _short_conv(layer, config, around)
    if isinstance(config, Mamba2Config):
        return _mamba2(layer, config, around)
    if isinstance(config, Rwkv7TimeMixConfig | Rwkv7ChannelMixConfig):
        return rwkv7_block(layer, config, partial(_norm, "norm_in", config=around.model))
    return _attention(layer, config, around)


def _attention(layer: int, config: AttentionConfig, around: Around) -> BlockLayout:
    D, H, KH, hidden = config.head_dim, config.num_heads, config.key_heads, around.model.hidden_size
    attn = f"{around.prefix}.self_attn"
    qkv = {
        f"{attn}.q_proj": config.gate_features + H * D,
        f"{attn}.k_proj": config.key_heads * D,
        f"{attn}.v_proj": config.value_heads * D,
    }
    qkv = {name: rows for name, rows in qkv.items() if rows}
    stored = around.model.stored
    gates = None
    if stored.apart_gates:
        qkv = {f"{attn}.gate_proj": config.gate_features, **qkv, f"{attn}.q_proj": H * D}
    elif config.has_output_gate:
        # Stored is each head's query with its gate behind it; here all gates come before the queries.
        gates = Grouped(2 * H * D, (D, D), (1, 0))
    pairs = None
    if stored.interleaves_heads:
        pairs = Interleaved((H + KH) * D, D, config.rotary_dim, first=config.gate_features)
    matrices = (
        Matrix("qkv_proj", f"{attn}.qkv_proj", qkv, hidden, config.has_bias, interleaved=pairs, grouped=gates),
        Matrix(
            "o_proj",
            f"{attn}.o_proj",
            {f"{attn}.o_proj": hidden},
            H * D,
            config.has_output_bias,
            scale=around.model.residual_scale,
        ),
    )
    vectors = (*around.norms(ATTENTION_NORMS), *_head_norms(config, attn, around.model.norm_weight_offset))
    if config.has_sinks:
        vectors += (Vector("sinks", f"{attn}.sinks", H, is_norm_weight=False),)
    return BlockLayout(f"layers.{layer}.attention", matrices, vectors)


def _latent_attention(layer: int, config: LatentAttentionConfig, around: Around) -> BlockLayout:
    attn, hidden, H, rank = f"{around.prefix}.self_attn", around.model.hidden_size, config.num_heads, config.query_rank
    query = f"{attn}.q_proj" if rank is None else f"{attn}.q_b_proj"
    down = {} if rank is None else {f"{attn}.q_a_proj": rank}
    down[f"{attn}.kv_a_proj_with_mqa"] = config.latent_dim + config.shared_dim
    query_pairs = key_pairs = None
    if around.model.stored.interleaves_heads and config.rotary_dim:
        sizes = config.shared_dim, config.rotary_dim
        query_pairs = Interleaved(H * config.shared_dim, *sizes, first=H * config.plain_dim)
        key_pairs = Interleaved(config.shared_dim, *sizes, first=(rank or 0) + config.latent_dim)
    # Stored is each head's query whole; here what meets the shared key comes behind all else.
    groups = Grouped(config.query_features, (config.plain_dim, config.shared_dim), (0, 1))
    matrices = (
        Matrix("in_proj", f"{attn}.in_proj", down, hidden, config.has_bias, interleaved=key_pairs),
        Matrix("q_proj", query, {query: groups.rows}, rank or hidden, interleaved=query_pairs, grouped=groups),
        *_up_matrices(config, attn),
        Matrix(
            "o_proj",
            f"{attn}.o_proj",
            {f"{attn}.o_proj": hidden},
            config.mixed_features,
            config.has_output_bias,
            scale=around.model.residual_scale,
        ),
    )
    norms = {"latent_norm": ("kv_a_layernorm", config.latent_dim)}
    norms |= {} if rank is None else {"q_norm": ("q_a_layernorm", rank)}
    vectors = (Vector(name, f"{attn}.{stored}.weight", features) for name, (stored, features) in norms.items())
    return BlockLayout(f"layers.{layer}.attention", matrices, (*around.norms(ATTENTION_NORMS), *vectors))


def _up_matrices(config: LatentAttentionConfig, attn: str) -> tuple[Matrix, Matrix]:
    """Return what brings queries to latents and latents to values. Most checkpoints store both as one matrix, the first
    turned round."""
    rows = config.plain_dim + config.value_dim
    keys = HeadCut(f"{attn}.kv_b_proj", config.num_heads, rows, 0, transposes=True)
    values = HeadCut(f"{attn}.kv_b_proj", config.num_heads, rows, config.plain_dim)
    k_up, v_up = f"{attn}.k_b_proj", f"{attn}.v_b_proj"
    return (
        Matrix("k_up", k_up, {k_up: config.absorbed_features}, config.plain_dim, cut=keys),
        Matrix("v_up", v_up, {v_up: config.mixed_features}, config.latent_dim, cut=values),
    )


def _head_norms(config: AttentionConfig, attn: str, offset: float) -> Iterator[Vector]:
    """Yield the weights of the norms of queries and keys. attn: the attention's name in a checkpoint."""
    if config.qk_norm is None or not config.has_norm_weights:
        return
    for name, heads in (("q_norm", config.num_heads), ("k_norm", config.key_heads)):
        if not heads:
            continue
        own = 1 if config.qk_norm == "head" else heads
        parts = tuple((f"{attn}.{name}.{head}.weight", config.head_dim) for head in range(own))
        features, parts = own * config.head_dim, parts if config.qk_norm == "own" else ()
        yield Vector(name, f"{attn}.{name}.weight", features, offset=offset, parts=parts)


def _delta_net(layer: int, config: DeltaNetConfig, around: Around) -> BlockLayout:
    shape, net, hidden = config.shape, f"{around.prefix}.linear_attn", around.model.hidden_size
    taps, heads = shape.conv_width, shape.value_heads
    out = {f"{net}.out_proj": hidden}
    matrices = (
        *_delta_projections(config, net, around.model),
        Matrix("out_proj", f"{net}.out_proj", out, shape.value_features, scale=around.model.residual_scale),
    )
    parts = tuple((f"{net}.{part}_conv1d.weight", rows) for part, rows in _delta_rows(shape).items())
    vectors = (
        Vector("conv", f"{net}.conv1d.weight", taps * shape.channels, is_norm_weight=False, taps=taps, parts=parts),
        Vector("a_log", f"{net}.A_log", heads, is_norm_weight=False, is_logarithm=around.model.stored.negates_rates),
        Vector("dt_bias", f"{net}.dt_bias", heads, is_norm_weight=False),
        Vector("norm", f"{net}.norm.weight", shape.value_dim, is_norm_weight=False),
    )
    return BlockLayout(f"layers.{layer}.attention", matrices, (*around.norms(ATTENTION_NORMS), *vectors))


def _delta_projections(config: DeltaNetConfig, net: str, model: ModelConfig) -> tuple[Matrix, Matrix]:
    """Return the matrices of queries, keys, values and the gates of what comes out, and of the two gates of a state."""
    shape, heads, form = config.shape, config.shape.value_heads, model.stored.delta_rows
    wide, gates = f"{net}.in_proj_qkvz", f"{net}.in_proj_ba"
    own = heads // shape.key_heads
    wide_groups = gate_groups = None
    if form == "by_head":
        runs = (shape.key_dim, shape.key_dim, own * shape.value_dim, own * shape.value_dim)
        wide_rows, wide_groups = {wide: config.in_features}, Grouped(config.in_features, runs, (0, 1, 2, 3))
    else:
        joined = _delta_rows(shape) if form == "apart" else {"qkv": shape.channels}
        wide_rows = {f"{net}.in_proj_{part}": rows for part, rows in {**joined, "z": shape.value_features}.items()}
    if form in ("by_head", "gates_by_head"):
        gate_rows, gate_groups = {gates: 2 * heads}, Grouped(2 * heads, (own, own), (0, 1))
    else:
        gate_rows = {f"{net}.in_proj_b": heads, f"{net}.in_proj_a": heads}
    return (
        Matrix("in_proj", wide, wide_rows, model.hidden_size, grouped=wide_groups),
        Matrix("gates_proj", gates, gate_rows, model.hidden_size, role="router", grouped=gate_groups),
    )


def _kimi_delta(layer: int, config: DeltaNetConfig, rank: int, around: Around) -> BlockLayout:
    """Return Kimi Delta Attention, whose tensors have names of their own."""
    shape, net, hidden = config.shape, f"{around.prefix}.self_attn", around.model.hidden_size
    taps, heads = shape.conv_width, shape.value_heads
    rows = {f"{net}.{part}_proj": count for part, count in _delta_rows(shape).items()}
    gates = {f"{net}.b_proj": heads, f"{net}.f_a_proj": rank}
    decays, z, out = f"{net}.f_b_proj", f"{net}.g_b_proj", f"{net}.o_proj"
    matrices = (
        Matrix("in_proj", f"{net}.in_proj", {**rows, f"{net}.g_a_proj": rank}, hidden),
        Matrix("gates_proj", f"{net}.gates_proj", gates, hidden, role="router"),
        Matrix("decay_proj", decays, {decays: shape.decay_features}, rank, role="router"),
        Matrix("z_proj", z, {z: shape.value_features}, rank),
        Matrix("out_proj", out, {out: hidden}, shape.value_features, scale=around.model.residual_scale),
    )
    parts = tuple((f"{net}.{part}_conv1d.weight", count) for part, count in _delta_rows(shape).items())
    vectors = (
        Vector("conv", f"{net}.conv1d.weight", taps * shape.channels, is_norm_weight=False, taps=taps, parts=parts),
        Vector("a_log", f"{net}.A_log", heads, is_norm_weight=False),
        Vector("dt_bias", f"{net}.dt_bias", shape.decay_features, is_norm_weight=False),
        Vector("norm", f"{net}.o_norm.weight", shape.value_dim),
    )
    return BlockLayout(f"layers.{layer}.attention", matrices, (*around.norms(ATTENTION_NORMS), *vectors))


def _delta_rows(shape: DeltaShape) -> dict[str, int]:
    keys = shape.key_heads * shape.key_dim
    return {"q": keys, "k": keys, "v": shape.value_features}


def _short_conv(layer: int, config: ShortConvConfig, around: Around) -> BlockLayout:
    stored, hidden, bias = f"{around.prefix}.conv", around.model.hidden_size, config.has_bias
    taps, channels = config.shape.conv_width, config.shape.channels
    inside, outside = f"{stored}.in_proj", f"{stored}.out_proj"
    matrices = (
        Matrix("in_proj", inside, {inside: config.in_features}, hidden, bias),
        Matrix("out_proj", outside, {outside: hidden}, channels, bias, scale=around.model.residual_scale),
    )
    vectors = (
        *around.norms(ATTENTION_NORMS),
        Vector("conv", f"{stored}.conv.weight", taps * channels, is_norm_weight=False, taps=taps),
    )
    if bias:
        vectors += (Vector("conv_bias", f"{stored}.conv.bias", channels, is_norm_weight=False),)
    return BlockLayout(f"layers.{layer}.attention", matrices, vectors)


def _mamba2(layer: int, config: Mamba2Config, around: Around) -> BlockLayout:
    shape, mamba, hidden = config.shape, f"{around.prefix}.mamba", around.model.hidden_size
    inside, steps, out = f"{mamba}.in_proj", f"{mamba}.dt_proj", f"{mamba}.out_proj"
    *wide, last = ((f"{mamba}{end}", rows) for end, rows in mamba2_rows(shape))
    scale = around.model.residual_scale
    matrices = (
        Matrix("in_proj", inside, dict(wide), hidden, config.has_bias),
        Matrix("steps_proj", steps, dict([last]), hidden, config.has_bias, role="router"),
        Matrix("out_proj", out, {out: hidden}, shape.features, config.has_output_bias, scale=scale),
    )
    taps, channels, heads = shape.conv_width, shape.channels, shape.num_heads
    vectors = [
        Vector("conv", f"{mamba}.conv1d.weight", taps * channels, is_norm_weight=False, taps=taps),
        Vector("a_log", f"{mamba}.A_log", heads, is_norm_weight=False, is_logarithm=around.model.stored.negates_rates),
        Vector("dt_bias", f"{mamba}.dt_bias", heads, is_norm_weight=False),
        Vector("d", f"{mamba}.D", heads),
    ]
    if config.has_conv_bias:
        vectors.append(Vector("conv_bias", f"{mamba}.conv1d.bias", channels, is_norm_weight=False))
    if config.norm is not None:
        vectors.append(Vector("norm", f"{mamba}.norm.weight", shape.features))
    return BlockLayout(f"layers.{layer}.attention", matrices, (*around.norms(ATTENTION_NORMS), *vectors))


def mamba2_rows(shape: Mamba2Shape) -> tuple[tuple[str, int], ...]:
    """Return the ends of the names of what Mamba 2's projection makes, in a checkpoint's order, and the rows of each:
    gates, x, B and C, and the steps."""
    groups = shape.num_groups * shape.state_size
    rows = {"z": shape.features, "x": shape.features, "b": groups, "c": groups, "dt": shape.num_heads}
    return tuple((f".in_proj_{part}", count) for part, count in rows.items())


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
