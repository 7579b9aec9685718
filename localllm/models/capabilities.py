"""What can be done with a model of a shape in a recipe, as far as is known before it is loaded. Needs no torch."""

from __future__ import annotations

from localllm.kernels.cpu_matmul import is_available
from localllm.kernels.sizes import MOST_LATENT_FEATURES, MOST_SLOTS, TASK_WORDS, TILE, TOKEN_WORDS
from localllm.layers.config import (
    AttentionConfig,
    LatentAttentionConfig,
    MoEConfig,
    Rwkv7ChannelMixConfig,
    Rwkv7TimeMixConfig,
)
from localllm.models.architecture import ModelConfig
from localllm.quant.layouts import Sizes, can_be_cut, cut_step

_NORMED_BY_MEAN = (Rwkv7TimeMixConfig, Rwkv7ChannelMixConfig)  # in whose blocks native steps know such norms
MOST_LATENT_HEADS = 128  # that share a task on a GPU
_HALF_VECTOR = 32  # of head and rotary dimensions: pairs of bf16 fill whole registers


def runs_natively(config: ModelConfig, recipe: Sizes, dtype: str) -> bool:
    """Return whether a CPU computes such a decoder by native steps. dtype: of activations."""
    return is_packed(recipe) and fills_vectors(config, dtype)


def is_packed(recipe: Sizes) -> bool:
    """Return whether our kernels compute with all matrices of a recipe but routers."""
    return all(form.weights is not None for form in recipe.formats)


def fills_vectors(config: ModelConfig, dtype: str) -> bool:
    is_whole = all(
        each.head_dim % _HALF_VECTOR == 0 == each.rotary_dim % _HALF_VECTOR for each in set(config.attentions)
    )
    return dtype == "bf16" and is_whole and has_plain_steps(config) and is_available()


def is_plain(attention: AttentionConfig) -> bool:
    """Return whether all native programs know what such attention computes."""
    has_own_keys = attention.kv_of_layer is None and not attention.value_from_key
    is_usual = not (attention.rotates_first or attention.norms_values)
    return _is_plain_on_cpu(attention) and has_own_keys and is_usual


def _is_plain_on_cpu(attention: AttentionConfig) -> bool:
    """Return whether a CPU's steps do: they norm heads behind the rotation too, where that changes no length."""
    stretches = attention.rope.kind in ("yarn", "longrope")
    norms_last = attention.rotates_first and attention.qk_norm == "head" and not stretches
    return (norms_last or not attention.rotates_first) and attention.clip is None and attention.qk_norm != "own"


def _is_latent_on_cpu(attention: LatentAttentionConfig) -> bool:
    """Return whether a CPU's steps know such latent attention: vectors fill each part, tiles each head's values, and
    what is computed of a task fits a thread's stack."""
    parts = attention.latent_dim, attention.shared_dim, attention.rotary_dim
    is_whole = all(part % _HALF_VECTOR == 0 for part in parts) and attention.value_dim % TILE == 0
    return is_whole and attention.latent_dim <= MOST_LATENT_FEATURES


def is_latent_for_gpu(attention: LatentAttentionConfig) -> bool:
    """Return whether a GPU's kernels know such latent attention: it sees all tokens, tasks hold all heads of one,
    groups fill each part, and the parts of each head fill tiles and groups of packed matrices."""
    parts = attention.latent_dim, attention.shared_dim
    is_whole = all(part % _HALF_VECTOR == 0 for part in parts) and attention.value_dim % TILE == 0
    return is_whole and attention.window is None and attention.num_heads <= MOST_LATENT_HEADS


def has_one_head_shape(config: ModelConfig) -> bool:
    """Return whether one table of pages and tasks serves all layers, as native programs have it."""
    return len(config.head_shapes) <= 1


def has_plain_steps(config: ModelConfig) -> bool:
    """Return whether a CPU's native steps know all that the model computes. Torch computes any other model."""
    return (
        all(shape.fills_vectors for shape in config.state_shapes)
        and all(map(_is_plain_on_cpu, config.attentions))
        and all(mlp.is_plain for mlp in config.mlps)
        and all(layer.norm_placement != "parallel" for layer in config.layers)
        and all(map(_is_latent_on_cpu, config.latents))
        and config.altup is None
        and (config.norm_kind == "rms" or all(isinstance(each, _NORMED_BY_MEAN) for each in config.mixers))
        and not config.has_head_bias
    )


def native_row_bytes(config: ModelConfig, recipe: Sizes) -> int:
    """Bytes of the buffers of native steps for one more row."""
    hidden, intermediate = config.hidden_size, max((mlp.intermediate_size for mlp in config.mlps), default=0)
    heads = max((each.heads_features for each in config.latents), default=0)
    mixed = max(heads, *(mixer.mixed_features for mixer in config.mixers))
    widest_in = max(hidden, intermediate, mixed)
    projected = [each.qkv_features for each in config.attentions]
    projected += [each.in_features for each in config.latents] + [each.in_features for each in config.recurrents]
    widest_out = max(hidden, *(mlp.wide_features for mlp in config.mlps), *projected)
    group = min(form.weights.columns for form in recipe.formats if form.weights is not None)
    floats = 2 * hidden + widest_out + mixed + 3 * (widest_in // group)
    floats += max((each.gate_features for each in config.recurrents), default=0)
    floats += max((each.query_features + each.heads_features for each in config.latents), default=0)
    floats += sum(shape.prepared_floats for shape in set(config.state_shapes))
    if config.per_layer is not None:
        floats += 4 * config.num_layers * config.per_layer.features
    floats += 2 * sum(rotary_dim for _, rotary_dim in config.rotations)
    floats += max((_mixture_row_floats(mixture, hidden) for mixture in config.mixtures), default=0)
    heads = max((each.num_heads for each in config.head_shapes), default=0)
    words = len(TOKEN_WORDS) + heads * len(TASK_WORDS) + 1
    return 4 * floats + 8 * words + widest_in


def _mixture_row_floats(mixture: MoEConfig, hidden_size: int) -> int:
    """Return the floats of the buffers of a mixture for one more row: what each chosen expert makes of it, in blocks
    of rows that are not all full."""
    wide = 2 * mixture.expert.intermediate_size
    return 3 * mixture.router.top_k * (wide + hidden_size + max(wide, hidden_size) // 2) + mixture.router.num_experts


def is_for_gpu(mixture: MoEConfig) -> bool:
    """Return whether a GPU's kernels know what such a mixture computes: experts with gates that fill whole tiles."""
    expert = mixture.expert
    is_gated = expert.is_plain and expert.has_gate and expert.intermediate_size % TILE == 0
    return is_gated and mixture.router.top_k <= MOST_SLOTS and not mixture.has_own_norms


def can_have_slots(config: ModelConfig, recipe: Sizes) -> bool:
    """Return whether a GPU's kernels compute all of the model's mixtures, with those experts that are in slots."""
    fits_tables = config.norm_kind == "rms" and has_one_head_shape(config)
    return bool(config.mixtures) and all(map(is_for_gpu, config.mixtures)) and is_packed(recipe) and fits_tables


def can_be_split(config: ModelConfig, recipe: Sizes) -> bool:
    """Return whether two devices can share each MLP block. Of a mixture, each expert is computed by one."""
    sizes = {mlp.intermediate_size for mlp in config.mlps}
    step = cut_step(recipe.blocks)
    is_whole = all(size % step == 0 and size > step for size in sizes) and all(mlp.has_gate for mlp in config.mlps)
    is_alone = config.per_layer is None and not config.mixtures  # no other matrix in its block
    return is_whole and can_be_cut(recipe.blocks) and not recipe.own and is_alone
