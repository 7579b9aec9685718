"""Gated DeltaNet (arXiv:2412.06464), and Kimi Delta Attention (arXiv:2510.26692)."""

from __future__ import annotations

from localllm.kernels.state_shapes import DeltaShape
from localllm.layers.config import DeltaNetConfig
from localllm.models.architecture import ModelConfig
from localllm.models.layout import BlockLayout, Grouped, Matrix, Vector
from localllm.models.mixer_layouts.around import ATTENTION_NORMS, Around


def layout(layer: int, config: DeltaNetConfig, around: Around) -> BlockLayout:
    if config.rank is not None:
        return _kimi_delta(layer, config, config.rank, around)
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
        Vector("a_log", f"{net}.A_log", heads, is_norm_weight=False, is_logarithm=around.model.stored.negates_rates),
        Vector("dt_bias", f"{net}.dt_bias", shape.decay_features, is_norm_weight=False),
        Vector("norm", f"{net}.o_norm.weight", shape.value_dim),
    )
    return BlockLayout(f"layers.{layer}.attention", matrices, (*around.norms(ATTENTION_NORMS), *vectors))


def _delta_rows(shape: DeltaShape) -> dict[str, int]:
    keys = shape.key_heads * shape.key_dim
    return {"q": keys, "k": keys, "v": shape.value_features}
