"""Mamba (arXiv:2312.00752)."""

from __future__ import annotations

from localllm.kernels.state_shapes import MambaShape
from localllm.layers.config import MambaConfig
from localllm.models.layout import BlockLayout, Matrix, Vector
from localllm.models.mixer_layouts.around import ATTENTION_NORMS, Around


def layout(layer: int, config: MambaConfig, around: Around) -> BlockLayout:
    shape, mamba, hidden = config.shape, f"{around.prefix}.mamba", around.model.hidden_size
    features = shape.features
    inside, low, steps, out = (f"{mamba}.{name}_proj" for name in ("in", "x", "dt", "out"))
    dt, *b_c = ((f"{mamba}{end}", rows) for end, rows in mamba_rows(shape))
    matrices = (
        Matrix("in_proj", inside, {inside: config.in_features}, hidden, config.has_bias),
        # What makes the steps comes last: zeros behind it fill a group.
        Matrix("x_proj", low, dict([*b_c, dt]), features, role="low_rank"),
        Matrix("steps_proj", steps, {steps: features}, shape.step_rank, role="low_rank"),
        Matrix("out_proj", out, {out: hidden}, features, config.has_bias, scale=around.model.residual_scale),
    )
    states, taps, negated = shape.state_size, shape.conv_width, around.model.stored.negates_rates
    vectors = [
        Vector("conv", f"{mamba}.conv1d.weight", taps * features, is_norm_weight=False, taps=taps),
        Vector("a_log", f"{mamba}.A_log", features * states, is_norm_weight=False, is_logarithm=negated),
        Vector("dt_bias", f"{mamba}.dt_proj.bias", features, is_norm_weight=False),
        Vector("d", f"{mamba}.D", features),
    ]
    if config.has_conv_bias:
        vectors.append(Vector("conv_bias", f"{mamba}.conv1d.bias", features, is_norm_weight=False))
    if config.has_norm_weights:
        vectors.append(Vector("steps_norm", f"{mamba}.dt_layernorm.weight", shape.step_rank))
        vectors += [Vector(f"{name}_norm", f"{mamba}.{name}_layernorm.weight", states) for name in "bc"]
    return BlockLayout(f"layers.{layer}.attention", matrices, (*around.norms(ATTENTION_NORMS), *vectors))


def mamba_rows(shape: MambaShape) -> tuple[tuple[str, int], ...]:
    """Return the ends of the names of what Mamba's second projection makes, in a checkpoint's order, and the rows of
    each: what makes the steps, B and C."""
    return (".x_proj_dt", shape.step_rank), (".x_proj_b", shape.state_size), (".x_proj_c", shape.state_size)
