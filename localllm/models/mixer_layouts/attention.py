"""Attention: queries, keys and values as one matrix."""

from __future__ import annotations

from collections.abc import Iterator

from localllm.layers.config import AttentionConfig
from localllm.models.layout import BlockLayout, Grouped, Interleaved, Matrix, Vector
from localllm.models.mixer_layouts.around import ATTENTION_NORMS, Around


def layout(layer: int, config: AttentionConfig, around: Around) -> BlockLayout:
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
