"""A decoder from a checkpoint: which tensors a family has, under which names, and how they fuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from localllm.errors import CheckpointError
from localllm.layers.attention import Attention, AttentionShape
from localllm.layers.embedding import Embedding
from localllm.layers.linear import Linear
from localllm.layers.mlp import MLP
from localllm.layers.norm import RMSNorm
from localllm.layers.rotary import Rotary
from localllm.models.config import ModelConfig
from localllm.models.decoder import Block, Decoder
from localllm.quant.dense import Dense

# The norms around a block's body, by the family's placement: (before, after), in Hugging Face's names.
ATTENTION_NORMS = {
    "pre": ("input_layernorm", None),
    "post": (None, "post_attention_layernorm"),
    "sandwich": ("input_layernorm", "post_attention_layernorm"),
}
MLP_NORMS = {
    "pre": ("post_attention_layernorm", None),
    "post": (None, "post_feedforward_layernorm"),
    "sandwich": ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
}

Progress = Callable[[int, int], None]  # bytes done, bytes in all


class TensorSource(Protocol):
    """Where tensors come from by name: a Checkpoint, or random weights of a real shape. See Checkpoint's methods."""

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor: ...

    def read_fused(
        self, fused: str, parts: Mapping[str, int], features: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor: ...

    def unused(self) -> tuple[str, ...]: ...


def load_decoder(
    source: TensorSource,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress = lambda _done, _total: None,
) -> Decoder:
    """Read every tensor once, block by block, straight into its fused place.

    Raises CheckpointError naming a tensor that is missing, misshapen, or that this family does not have.
    """
    decoder = _Loader(source, config, dtype, device, progress).decoder()
    unused = source.unused()
    if unused:
        raise CheckpointError(
            f"the checkpoint holds tensors that a {config.model_type} model has no use for",
            why=f"{len(unused)} of them, the first: {unused[0]}; config.json and weights do not belong together",
            fix="download the model anew: localllm pull MODEL",
        )
    return decoder


@dataclass
class _Loader:
    source: TensorSource
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    progress: Progress
    done_bytes: int = 0

    def decoder(self) -> Decoder:
        config = self.config
        ropes = tuple(dict.fromkeys(config.ropes))
        embedding = self._embedding("model.embed_tokens")
        blocks: list[Block] = []
        for layer in range(config.num_layers):
            blocks += [self._attention_block(layer, ropes.index(config.ropes[layer])), self._mlp_block(layer)]
        head = embedding if config.tie_word_embeddings else self._embedding("lm_head")
        return Decoder(
            config=config,
            embed=Embedding(embedding, config.embedding_scale),
            blocks=tuple(blocks),
            final_norm=self._norm("model.norm", config.hidden_size),
            head=Linear(Dense(self.dtype), {"weight": head}),
            rotaries=tuple(Rotary(rope, config.rotary_dim, self.device) for rope in ropes),
            dtype=self.dtype,
            device=self.device,
        )

    def _attention_block(self, layer: int, rotation: int) -> Block:
        config, name = self.config, f"model.layers.{layer}"
        D, H, KH = config.head_dim, config.num_heads, config.num_kv_heads
        shape = AttentionShape(
            layer=layer,
            num_heads=H,
            num_kv_heads=KH,
            head_dim=D,
            scale=config.attention_scale or D**-0.5,
            rotation=rotation,
            window=config.windows[layer],
            softcap=config.attention_softcap,
            norm_each_head=config.qk_norm == "head",
        )
        attn = f"{name}.self_attn"
        parts = {f"{attn}.q_proj": H * D, f"{attn}.k_proj": KH * D, f"{attn}.v_proj": KH * D}
        qkv = self._linear(f"{attn}.qkv_proj", parts, config.hidden_size, bias=config.attention_bias)
        o_proj = f"{attn}.o_proj"
        out = self._linear(o_proj, {o_proj: config.hidden_size}, H * D, bias=config.output_bias)
        q_norm = k_norm = None
        if config.qk_norm is not None:
            wide = config.qk_norm == "full"
            q_norm = self._norm(f"{attn}.q_norm", H * D if wide else D)
            k_norm = self._norm(f"{attn}.k_norm", KH * D if wide else D)
        return self._block(
            f"layers.{layer}.attention", Attention(shape, qkv, out, q_norm, k_norm), name, ATTENTION_NORMS
        )

    def _mlp_block(self, layer: int) -> Block:
        config, name = self.config, f"model.layers.{layer}"
        hidden, intermediate, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        parts = {f"{name}.mlp.gate_proj": intermediate, f"{name}.mlp.up_proj": intermediate}
        gate_up = self._linear(f"{name}.mlp.gate_up_proj", parts, hidden, bias=bias)
        down_proj = f"{name}.mlp.down_proj"
        down = self._linear(down_proj, {down_proj: hidden}, intermediate, bias=bias)
        return self._block(f"layers.{layer}.mlp", MLP(gate_up, down, config.activation), name, MLP_NORMS)

    def _block(
        self, name: str, body: Attention | MLP, prefix: str, norms: dict[str, tuple[str | None, str | None]]
    ) -> Block:
        before, after = norms[self.config.norm_placement]
        hidden = self.config.hidden_size
        return Block(
            name=name,
            body=body,
            norm_in=None if before is None else self._norm(f"{prefix}.{before}", hidden),
            norm_out=None if after is None else self._norm(f"{prefix}.{after}", hidden),
        )

    def _linear(self, fused: str, parts: dict[str, int], in_features: int, *, bias: bool) -> Linear:
        """One matrix: from the checkpoint's parts (name to rows), or from `fused` where the checkpoint stores that."""
        weight = self._stacked(fused, parts, "weight", (in_features,))
        offset = self._stacked(fused, parts, "bias", ()) if bias else None
        return Linear(Dense(self.dtype), {"weight": weight}, offset)

    def _norm(self, name: str, features: int) -> RMSNorm:
        weight = self.source.read(f"{name}.weight", (features,), torch.float32)
        return RMSNorm((weight + self.config.norm_weight_offset).to(self.device), self.config.rms_norm_eps)

    def _embedding(self, name: str) -> Tensor:
        return self._stacked(name, {name: self.config.vocab_size}, "weight", (self.config.hidden_size,))

    def _stacked(self, fused: str, parts: dict[str, int], kind: str, features: tuple[int, ...]) -> Tensor:
        rows = {f"{name}.{kind}": count for name, count in parts.items()}
        tensor = self.source.read_fused(f"{fused}.{kind}", rows, features, self.dtype)
        self.done_bytes += tensor.nbytes
        self.progress(self.done_bytes, weight_bytes(self.config, self.dtype))
        return tensor.to(self.device)


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of all matrices and biases; the norms' are too few to count."""
    D, H, KH, hidden = config.head_dim, config.num_heads, config.num_kv_heads, config.hidden_size
    attention = hidden * D * (2 * H + 2 * KH)
    attention += D * (H + 2 * KH) * config.attention_bias + hidden * config.output_bias
    mlp = 3 * hidden * config.intermediate_size + (2 * config.intermediate_size + hidden) * config.mlp_bias
    embeddings = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    return (config.num_layers * (attention + mlp) + embeddings) * dtype.itemsize
