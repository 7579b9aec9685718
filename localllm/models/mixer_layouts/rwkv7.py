"""The tensors of a block of RWKV-7, by the names of flash-linear-attention's checkpoints."""

from __future__ import annotations

from functools import partial

from localllm.kernels.state_shapes import RWKV7_MIXED
from localllm.layers.config import Rwkv7ChannelMixConfig, Rwkv7TimeMixConfig
from localllm.models.layout import BlockLayout, Matrix, Vector
from localllm.models.mixer_layouts.around import Around, norm_vectors


def layout(layer: int, config: Rwkv7TimeMixConfig | Rwkv7ChannelMixConfig, around: Around) -> BlockLayout:
    """Return the block of a layer: a time mix and the channel mix behind it are one layer in a checkpoint."""
    stored = f"model.layers.{layer // 2}"
    norm = partial(norm_vectors, "norm_in", config=around.model)
    if isinstance(config, Rwkv7TimeMixConfig):
        return BlockLayout(
            f"layers.{layer}.attention",
            (*_projections(config, f"{stored}.attn"), *_small_matrices(config, f"{stored}.attn")),
            (*norm(f"{stored}.attn_norm"), *_time_vectors(config, f"{stored}.attn")),
        )
    hidden, width, ffn = config.shape.features, config.intermediate_size, f"{stored}.ffn"
    return BlockLayout(
        f"layers.{layer}.attention",
        (
            Matrix("key", f"{ffn}.key", {f"{ffn}.key": width}, hidden),
            Matrix("value", f"{ffn}.value", {f"{ffn}.value": hidden}, width),
        ),
        (*norm(f"{stored}.ffn_norm"), Vector("mix", f"{ffn}.x_k", hidden, is_norm_weight=False)),
    )


def _projections(config: Rwkv7TimeMixConfig, attn: str) -> list[Matrix]:
    size = config.shape.features
    return [Matrix(f"{name}_proj", f"{attn}.{name}_proj", {f"{attn}.{name}_proj": size}, size) for name in "rkvo"]


def _small_matrices(config: Rwkv7TimeMixConfig, attn: str) -> list[Matrix]:
    """Return the two of each pair, of which the second has a bias but for the gates of what comes out."""
    size, found = config.shape.features, list[Matrix]()
    ranks = {"w": config.decay_rank, "a": config.rate_rank, "g": config.gate_rank, "v": config.value_rank}
    for name, rank in ranks.items():
        if name == "v" and config.is_first:
            continue
        down, up = f"{attn}.{name}_lora.lora.0", f"{attn}.{name}_lora.lora.2"
        found.append(Matrix(f"{name}_down", down, {down: rank}, size, role="low_rank"))
        found.append(Matrix(f"{name}_up", up, {up: size}, rank, name != "g", role="low_rank"))
    return found


def _time_vectors(config: Rwkv7TimeMixConfig, attn: str) -> list[Vector]:
    size = config.shape.features
    parts = tuple((f"{attn}.x_{name}", size) for name in RWKV7_MIXED)
    stored = {"removal_key": "k_k", "rate_key": "k_a", "bonus": "r_k", "norm": "g_norm.weight"}
    stored["norm_bias"] = "g_norm.bias"
    return [
        Vector("mixes", f"{attn}.x_x", len(parts) * size, is_norm_weight=False, parts=parts),
        *(Vector(name, f"{attn}.{each}", size, is_norm_weight=name == "norm") for name, each in stored.items()),
    ]
