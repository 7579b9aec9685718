"""Which blocks of a decoder a GPU's kernels compute."""

from __future__ import annotations

import torch

from localllm.layers.attention import Attention
from localllm.layers.beside import SingleMixer
from localllm.layers.delta_net import DeltaNet
from localllm.layers.latent_attention import LatentAttention
from localllm.layers.linear import Linear
from localllm.layers.mamba2 import Mamba2
from localllm.layers.mlp import MLP
from localllm.layers.moe import MoE
from localllm.layers.norm import LayerNorm
from localllm.layers.rwkv7 import Rwkv7ChannelMix, Rwkv7TimeMix
from localllm.layers.segment import KVStore
from localllm.layers.short_conv import ShortConv
from localllm.models.capabilities import is_latent_for_gpu, is_plain
from localllm.models.decoder import Block
from localllm.models.gpu_mixture import is_for_kernels
from localllm.quant.dense import Dense


def is_ours(block: Block, device: torch.device, kv: KVStore | None = None) -> bool:
    """Return whether our kernels know the block, and it is computed where they are. kv: its pages must be there,
    too."""
    body, norms = block.body, (block.norm_in, block.norm_out)
    if isinstance(body, Rwkv7TimeMix | Rwkv7ChannelMix):  # whose norms have a mean, that of embeddings too
        return block.device == device and body.config.shape.fills_vectors
    if block.device != device or not block.is_usual or any(isinstance(norm, LayerNorm) for norm in norms):
        return False
    if isinstance(body, MoE):
        return is_for_kernels(body)
    if isinstance(body, MLP):
        return body.config.is_plain
    return bool(block.mixers) and all(_is_ours(mixer, device, kv) for mixer in block.mixers)


def _is_ours(mixer: SingleMixer, device: torch.device, kv: KVStore | None) -> bool:
    if isinstance(mixer, Attention | LatentAttention):
        return _is_known(mixer) and (kv is None or kv.homes[mixer.layer][0] == device)
    return isinstance(mixer, DeltaNet | Mamba2 | ShortConv) and mixer.config.shape.fills_vectors


def _is_known(mixer: Attention | LatentAttention) -> bool:
    if isinstance(mixer, Attention):
        return is_plain(mixer.config)
    return is_latent_for_gpu(mixer.config) and all(map(_is_by_head, mixer.head_linears))


def _is_by_head(linear: Linear) -> bool:
    """Return whether our kernels, or the library's products, know a matrix of which each head has its own rows."""
    if linear.packed is None:
        return isinstance(linear.format, Dense)
    return linear.packed.in_features == linear.in_features
