"""Multi-head latent attention (arXiv:2405.04434)."""

from __future__ import annotations

from localllm.layers.config import LatentAttentionConfig
from localllm.models.layout import BlockLayout, Grouped, HeadCut, Interleaved, Matrix, Vector
from localllm.models.mixer_layouts.around import ATTENTION_NORMS, Around


def layout(layer: int, config: LatentAttentionConfig, around: Around) -> BlockLayout:
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
