"""Mamba 2 (arXiv:2405.21060)."""

from __future__ import annotations

from localllm.kernels.state_shapes import Mamba2Shape
from localllm.layers.config import Mamba2Config
from localllm.models.layout import BlockLayout, Matrix, Vector
from localllm.models.mixer_layouts.around import ATTENTION_NORMS, Around


def layout(layer: int, config: Mamba2Config, around: Around) -> BlockLayout:
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
