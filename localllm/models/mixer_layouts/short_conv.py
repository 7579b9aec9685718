"""A short convolution between two gates."""

from __future__ import annotations

from localllm.layers.config import ShortConvConfig
from localllm.models.layout import BlockLayout, Matrix, Vector
from localllm.models.mixer_layouts.around import ATTENTION_NORMS, Around


def layout(layer: int, config: ShortConvConfig, around: Around) -> BlockLayout:
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
