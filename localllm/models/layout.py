"""The tensors of each block of a family, their names in a checkpoint, and how they fuse.

The one description that loading, packing and random models share. Holds no bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from localllm.kernels.sizes import DeltaShape
from localllm.layers.config import (
    AltUpConfig,
    AttentionConfig,
    DeltaNetConfig,
    Mixer,
    MLPConfig,
    MoEConfig,
    PerLayerConfig,
)
from localllm.models.architecture import LayerConfig, ModelConfig, NormPlacement
from localllm.offload.streaming.ring import PAGE_BYTES
from localllm.quant.layouts import RecipeOf, Sizes, TensorSpec, WeightLayout

F = TypeVar("F", bound=WeightLayout)

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
EMBED, HEAD = "embed", "head"  # the names of the first block and of the last
EXPERTS = "experts"  # the name of the tensor of all records of a block
COEFFICIENTS = "coefficients"  # the name of what an activation has learnt
ALIGNMENT_BYTES = 64  # of tensors: a cache line, and an AVX-512 vector
SHARED_CHECKSUM = "shared_checksum"  # of a mixture: the XXH3-128 of all its tensors but the experts, in their order
CHECKSUM_BYTES = 16


@dataclass(frozen=True)
class Interleaved:
    """Some rows of a matrix belong to heads whose rotating features lie in pairs in a checkpoint. Here the first of all
    pairs come before the second ones, as RoPE turns them. first: that many rows are before them."""

    rows: int
    head_dim: int
    rotary_dim: int
    first: int = 0


@dataclass(frozen=True)
class Grouped:
    """The first `rows` of a matrix are stored in groups of runs of rows, by their lengths. Here the runs of one kind
    come together, those of the kind `order[0]` first. of_fused: parts that are stored apart have no groups."""

    rows: int
    runs: tuple[int, ...]
    order: tuple[int, ...]
    of_fused: bool = False


@dataclass(frozen=True)
class Matrix:
    """One linear layer. Its rows are those of the checkpoint's `parts`, or of `stored` where that is stored fused, and
    are multiplied by `scale` when they are read."""

    name: str  # inside its block: "qkv_proj"
    stored: str  # "model.layers.0.self_attn.qkv_proj"
    parts: Mapping[str, int]  # stored names -> rows, in order
    in_features: int
    has_bias: bool = False
    role: Literal["block", "embedding", "router"] = "block"  # embedding: the token embedding or the head
    interleaved: Interleaved | None = None
    grouped: Grouped | None = None
    scale: float = 1.0

    @property
    def out_features(self) -> int:
        return sum(self.parts.values())

    @property
    def num_weights(self) -> int:
        return self.out_features * self.in_features

    def format(self, recipe: RecipeOf[F]) -> F:
        by_role = {"block": recipe.blocks, "embedding": recipe.embedding, "router": recipe.router}
        return recipe.own.get(self.stored, by_role[self.role])

    def rows_of(self, first: int, rows: int) -> Matrix:
        """Return some of its rows, where they are whole parts, as a matrix without a bias."""
        begins = dict(zip(self.parts, itertools.accumulate(self.parts.values(), initial=0), strict=False))
        parts = {name: count for name, count in self.parts.items() if first <= begins[name] < first + rows}
        assert sum(parts.values()) == rows
        pairs, groups = self.interleaved, self.grouped
        if pairs is not None:
            begin, end = (min(max(row - first, 0), rows) for row in (pairs.first, pairs.first + pairs.rows))
            pairs = replace(pairs, rows=end - begin, first=begin)
        if groups is not None:
            groups = replace(groups, rows=min(max(groups.rows - first, 0), rows))
        return replace(self, parts=parts, has_bias=False, interleaved=pairs, grouped=groups)

    def specs(self, recipe: Sizes) -> dict[str, TensorSpec]:
        """Its tensors by their names inside the block: those of its format, and the bias."""
        tensors = self.format(recipe).specs(self.out_features, self.in_features)
        specs = {f"{self.name}.{name}": spec for name, spec in tensors.items()}
        if self.has_bias:
            specs[f"{self.name}.linear_bias"] = TensorSpec((self.out_features,), "float32")
        return specs


@dataclass(frozen=True)
class Vector:
    """A few numbers in fp32: a norm's weights or bias, what corrects a router's choice, a convolution's taps.

    stored: its name in a checkpoint. parts: names and features of what makes it up where that is not stored.
    taps: of a convolution, stored as [features / taps, 1, taps]; here all channels of one tap lie together.
    is_norm_weight: near one, not near zero. offset: what is stored lacks it.
    is_logarithm: -exp of it is stored.
    """

    name: str  # inside its block: "norm_in"
    stored: str  # "model.layers.0.input_layernorm.weight"
    features: int
    is_norm_weight: bool = True
    offset: float = 0.0
    taps: int = 1
    parts: tuple[tuple[str, int], ...] = ()
    is_logarithm: bool = False


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor, and the byte at which it begins in what holds it."""

    spec: TensorSpec
    begin: int

    @property
    def end(self) -> int:
        return self.begin + self.spec.nbytes


@dataclass(frozen=True)
class Record:
    """One expert as it lies in its block's file and in memory: tensors at multiples of 64 bytes, zeros, and in the last
    16 bytes the XXH3-128 of all before them."""

    tensors: Mapping[str, PlacedTensor]
    num_bytes: int


@dataclass(frozen=True)
class Residual:
    """The hidden state that blocks read and add to: its features, and what multiplies all that is added."""

    features: int
    scale: float


@dataclass(frozen=True)
class Experts:
    """The experts of one block: all of one shape. stored: of them all, "model.layers.0.mlp.experts". alternates: see
    `StoredForm.alternates_gates`."""

    stored: str
    num_experts: int
    top_k: int
    config: MLPConfig
    residual: Residual
    alternates: bool = False

    def matrices(self, index: int) -> tuple[Matrix, ...]:
        """Return an expert's matrices, by their names in its record."""
        return gated_matrices(self.config, f"{self.stored}.{index}", self.residual, alternates=self.alternates)

    @property
    def num_weights(self) -> int:
        """Weights of one expert."""
        return sum(matrix.num_weights for matrix in self.matrices(0))

    def record(self, recipe: Sizes) -> Record:
        """Return where the tensors of an expert lie in its record."""
        tensors, end = {}, 0
        for matrix in self.matrices(0):
            for name, spec in matrix.specs(recipe).items():
                tensors[name] = PlacedTensor(spec, rounded_up(end, ALIGNMENT_BYTES))
                end = tensors[name].end
        return Record(tensors, rounded_up(end + CHECKSUM_BYTES, PAGE_BYTES))


@dataclass(frozen=True)
class BlockLayout:
    """The tensors of one block: `{matrix}.{tensor of its format}`, `{matrix}.linear_bias`, `{vector}`; of a mixture
    also `shared_checksum` and `experts`, uint8 [number of experts, bytes of a record]."""

    name: str  # "embed", "layers.0.attention", "layers.0.mlp", "head"
    matrices: tuple[Matrix, ...]
    vectors: tuple[Vector, ...] = field(default=())
    experts: Experts | None = None

    def specs(self, recipe: Sizes) -> dict[str, TensorSpec]:
        """Every tensor of the block in the order in which it is packed; vectors and biases are fp32."""
        specs: dict[str, TensorSpec] = {}
        for matrix in self.matrices:
            specs |= matrix.specs(recipe)
        specs |= {vector.name: TensorSpec((vector.features,), "float32") for vector in self.vectors}
        if self.experts is not None:
            specs[SHARED_CHECKSUM] = TensorSpec((CHECKSUM_BYTES,), "uint8")
            specs[EXPERTS] = TensorSpec((self.experts.num_experts, self.experts.record(recipe).num_bytes), "uint8")
        return specs

    def small_tensors(self) -> list[str]:
        """Vectors and biases: a few kilobytes beside the megabytes of the matrices."""
        biases = [f"{matrix.name}.linear_bias" for matrix in self.matrices if matrix.has_bias]
        return [*biases, *(vector.name for vector in self.vectors)]

    def nbytes(self, recipe: Sizes) -> int:
        return sum(spec.nbytes for spec in self.specs(recipe).values())

    @property
    def num_weights(self) -> int:
        """Weights of the block's matrices, those of all experts among them."""
        experts = 0 if self.experts is None else self.experts.num_experts * self.experts.num_weights
        return experts + sum(matrix.num_weights for matrix in self.matrices)

    @property
    def num_active_weights(self) -> int:
        """Weights that one token is multiplied by."""
        experts = 0 if self.experts is None else self.experts.top_k * self.experts.num_weights
        return experts + sum(matrix.num_weights for matrix in self.matrices)


def block_layouts(config: ModelConfig) -> tuple[BlockLayout, ...]:
    """The embedding, every attention and MLP block, the head: in the order in which a forward needs them. Of a head
    that drafts, what it makes of an embedding and a hidden state comes first, and a norm alone last."""
    blocks = [_draft_inputs(config) if config.reads_states else _embedding(config)]
    for number, layer in enumerate(config.layers):
        root = "mtp" if config.reads_states else "model"
        around = _Around(f"{root}.layers.{number}", config, layer.norm_placement)
        body = layer.feed_forward
        blocks.append(_with_layer_begin(_mixer(number, layer.mixer, around), around))
        mlp = _mlp(number, body, around) if isinstance(body, MLPConfig) else _moe(number, body, around)
        blocks.append(_with_layer_end(mlp, layer, around))
    if config.per_layer is not None:
        blocks[1] = _with_per_layer_inputs(blocks[1], config, config.per_layer)
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


def _with_layer_begin(mixer: BlockLayout, around: _Around) -> BlockLayout:
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


def _altup(around: _Around, altup: AltUpConfig, name: str, rows: int) -> tuple[tuple[Matrix, ...], tuple[Vector, ...]]:
    """Return what AltUp predicts or corrects states by, in fp32. name: of the coefficients."""
    prefix, hidden = f"{around.prefix}.altup", around.model.hidden_size
    router, coefficients = f"{prefix}.modality_router", f"{prefix}.{name}"
    matrices = (
        Matrix("altup_router", router, {router: altup.num_states}, hidden, role="router"),
        Matrix("altup_coefficients", coefficients, {coefficients: rows}, altup.num_states, role="router"),
    )
    return matrices, (Vector("norm_altup", f"{prefix}.router_norm.weight", hidden),)


def _with_layer_end(mlp: BlockLayout, layer: LayerConfig, around: _Around) -> BlockLayout:
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
class _Around:
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


def _mixer(layer: int, config: Mixer, around: _Around) -> BlockLayout:
    if isinstance(config, DeltaNetConfig):
        return _delta_net(layer, config, around)
    return _attention(layer, config, around)


def _attention(layer: int, config: AttentionConfig, around: _Around) -> BlockLayout:
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


def _delta_net(layer: int, config: DeltaNetConfig, around: _Around) -> BlockLayout:
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


def _delta_rows(shape: DeltaShape) -> dict[str, int]:
    keys = shape.key_heads * shape.key_dim
    return {"q": keys, "k": keys, "v": shape.value_features}


def _mlp(layer: int, config: MLPConfig, around: _Around) -> BlockLayout:
    mlp, vectors = f"{around.prefix}.mlp", around.norms(MLP_NORMS)
    if config.activation == "xielu":
        names = ("alpha_p", "alpha_n", "beta", "eps")
        parts = tuple((f"{mlp}.act_fn.{name}", 1) for name in names)
        vectors += (Vector(COEFFICIENTS, f"{mlp}.act_fn", len(parts), is_norm_weight=False, parts=parts),)
    return BlockLayout(f"layers.{layer}.mlp", gated_matrices(config, mlp, around.residual), vectors)


def _moe(layer: int, config: MoEConfig, around: _Around) -> BlockLayout:
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


def _moe_norms(around: _Around) -> tuple[Vector, ...]:
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


def gated_matrices(
    config: MLPConfig, stored: str, residual: Residual, prefix: str = "", *, alternates: bool = False
) -> tuple[Matrix, ...]:
    """Return the matrices of a feed-forward: gate and up as one, or up alone, and down.

    stored: its name in a checkpoint.
    prefix: of the matrices' names inside their block.
    alternates: see `StoredForm.alternates_gates`.
    """
    width, bias = config.intermediate_size, config.has_bias
    gate_up = {f"{stored}.gate_proj": width} if config.has_gate else {}
    gate_up[f"{stored}.up_proj"] = width
    pairs = Grouped(2 * width, (1, 1), (0, 1), of_fused=True) if alternates else None
    return (
        Matrix(f"{prefix}gate_up_proj", f"{stored}.gate_up_proj", gate_up, residual.features, bias, grouped=pairs),
        Matrix(
            f"{prefix}down_proj",
            f"{stored}.down_proj",
            {f"{stored}.down_proj": residual.features},
            width,
            bias,
            scale=residual.scale,
        ),
    )


def rounded_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
