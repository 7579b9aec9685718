"""The shape of attention, and how positions rotate queries and keys. Plain data: no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding and its scaling; names as in Hugging Face's `rope_parameters`."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    attention_factor: float | None = None  # yarn, longrope
    short_factor: tuple[float, ...] = ()  # longrope
    long_factor: tuple[float, ...] = ()  # longrope


@dataclass(frozen=True)
class AttentionShape:
    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rotation: int  # index into Batch.rotations
    window: int | None = None
    softcap: float | None = None
    norm_each_head: bool = True  # qwen3, gemma3; olmo2 normalises the features of all heads together
