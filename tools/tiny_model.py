"""The network that `train_tiny.py` trains: Llama's, or Mixtral's where it has experts.

Owns the forward pass, the dropping of blocks and a hint that shows a few heads, early in the training, how to copy:
one head each of two lower layers shall look at the token before, one head each of two higher layers at the token that
followed the same token earlier. Together they copy whatever was said before, a name for instance. A model of this size
finds this by itself only after many more tokens than tales need otherwise. Knows nothing about text, files or
optimizers.

Parameter names are those of a Hugging Face checkpoint, but for the experts of a layer, which lie in one tensor.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ATTENTION_BLOCK = 128
# (layer, head) of the hint
PREVIOUS_HEADS = ((1, 0), (2, 0))
INDUCTION_HEADS = ((4, 0), (6, 0))


@dataclass(frozen=True)
class TinyConfig:
    """Sizes of the network. All are multiples of 64, so that 4-bit groups of 64 fit. num_experts: 0 for one MLP."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 384
    num_layers: int = 12
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    max_positions: int = 1024
    rope_theta: float = 10000.0
    rms_eps: float = 1e-5
    num_experts: int = 0
    top_k: int = 2


WITH_EXPERTS = TinyConfig(num_layers=8, intermediate_size=64, num_experts=16)  # 9 million parameters, 3 of them active


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        scale = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x32 * scale).to(x.dtype)


def rope_tables(config: TinyConfig) -> tuple[Tensor, Tensor]:
    """cos and sin, each [max_positions, head_dim], in the half-rotated layout of Hugging Face Llama."""
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(config.max_positions, dtype=torch.float32), config.rope_theta**-steps)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, heads, T, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of q [B, H, T, D] on k, v [B, KH, T, D].

    Whole blocks of rows are computed as plain matrix products: compiled, forward and backward of [8, 4, 512, 64] in
    bf16 take 60 ms against 187 ms for scaled_dot_product_attention (2 cores of a Zen 5 without AMX).
    """
    batch, heads, length, size = q.shape
    kv_heads = k.shape[1]
    if length % ATTENTION_BLOCK:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    grouped = q.view(batch, kv_heads, heads // kv_heads, length, size) * size**-0.5
    mixed = []
    for start in range(0, length, ATTENTION_BLOCK):
        end = start + ATTENTION_BLOCK
        rows = grouped[:, :, :, start:end].flatten(2, 3)  # [B, KH, G * block, D]
        scores = (rows @ k[:, :, :end].transpose(-1, -2)).view(batch, kv_heads, -1, ATTENTION_BLOCK, end)
        past = torch.arange(start, end)[:, None] >= torch.arange(end)[None]
        weights = torch.where(past, scores.float(), -1e9).softmax(-1).to(v.dtype)
        mixed.append((weights.flatten(2, 3) @ v[:, :, :end]).view(batch, kv_heads, -1, ATTENTION_BLOCK, size))
    return torch.cat(mixed, dim=3).flatten(1, 2)  # [B, H, T, D]


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.config = config
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        c = self.config
        q = self.q_proj(x).view(batch, length, c.num_heads, c.head_dim).transpose(1, 2)  # [B, H, T, D]
        k = self.k_proj(x).view(batch, length, c.num_kv_heads, c.head_dim).transpose(1, 2)  # [B, KH, T, D]
        v = self.v_proj(x).view(batch, length, c.num_kv_heads, c.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        mixed = causal_attention(q, k, v)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """SwiGLU experts, of which each token has the `top_k` that its router finds most likely, weighed by that."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        shape = config.num_experts, config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(shape[0], 2 * shape[2], shape[1]))
        self.down_proj = nn.Parameter(torch.empty(shape[0], shape[1], shape[2]))
        self.chosen = torch.empty(0, dtype=torch.int64)  # [B * T, top_k], of the last forward
        self.imbalance = torch.zeros(())  # of the last forward: 1 where all experts have as much to do

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        shares = self.gate(rows).float().softmax(-1)  # [N, E]
        weights, self.chosen = shares.topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        experts = self.chosen.flatten()
        counts = experts.bincount(minlength=shares.shape[1])
        # The loss of Switch Transformers (arXiv 2101.03961, equation 4), for several experts a token.
        self.imbalance = (counts / len(experts) * shares.mean(0)).sum() * shares.shape[1]
        order = experts.argsort(stable=True)
        parts = torch.split(rows[order // self.top_k], counts.tolist())
        mixed = torch.cat([self._expert(number, part) for number, part in enumerate(parts)])
        scaled = mixed * weights.flatten()[order, None].to(mixed.dtype)
        return torch.zeros_like(rows).index_add(0, order // self.top_k, scaled.to(rows.dtype)).view_as(x)

    def _expert(self, number: int, rows: Tensor) -> Tensor:
        gate, up = F.linear(rows, self.gate_up_proj[number]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down_proj[number])


class Layer(nn.Module):
    """One attention block and one MLP block, either of which may be skipped."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_eps)
        self.mlp = Experts(config) if config.num_experts else MLP(config)

    def attention_block(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        mixed: Tensor = self.self_attn(self.input_layernorm(x), cos, sin)
        return x + mixed

    def mlp_block(self, x: Tensor) -> Tensor:
        changed: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + changed


class TinyModel(nn.Module):
    """The layers between the embedding and the final norm; `TinyLM` holds it as `model`."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_eps)


class TinyLM(nn.Module):
    """The whole language model; the output projection is the embedding (tied)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: TinyConfig, seed: int) -> None:
        super().__init__()
        self.config = config
        self.model = TinyModel(config)
        cos, sin = rope_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._reset(seed)

    def _reset(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shrink = (2 * self.config.num_layers) ** -0.5  # keeps the residual stream's size at any depth
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                continue
            std = 0.02 if "embed" in name else weight.shape[-1] ** -0.5 * 0.6
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                std *= shrink
            nn.init.normal_(weight, std=std, generator=generator)

    def hidden(
        self, tokens: Tensor, skipped: frozenset[int] = frozenset(), taps: dict[int, Tensor] | None = None
    ) -> Tensor:
        """Last hidden states [B, T, hidden] of tokens [B, T].

        `skipped` holds block numbers: 2 * layer for attention, 2 * layer + 1 for the MLP. `taps`, if given, receives
        the input of every layer.
        """
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.model.embed_tokens(tokens)
        for number, layer in enumerate(self.model.layers):
            assert isinstance(layer, Layer)
            if taps is not None:
                taps[number] = x
            if 2 * number not in skipped:
                x = layer.attention_block(x, cos, sin)
            if 2 * number + 1 not in skipped:
                x = layer.mlp_block(x)
        return self.model.norm(x)  # type: ignore[no-any-return]

    def logits(self, tokens: Tensor, skipped: frozenset[int] = frozenset()) -> Tensor:
        """Logits [B, T, vocab] of tokens [B, T]."""
        return F.linear(self.hidden(tokens, skipped), self.model.embed_tokens.weight)

    def compile_blocks(self) -> None:
        """Compile the two kinds of block; the whole network would be compiled anew for each set of skipped blocks."""
        for layer in self.model.layers:
            assert isinstance(layer, Layer)
            layer.attention_block = torch.compile(layer.attention_block, dynamic=False)  # type: ignore[method-assign]
            if not self.config.num_experts:  # of which each has another number of rows every time
                layer.mlp_block = torch.compile(layer.mlp_block, dynamic=False)  # type: ignore[method-assign]

    def experts(self) -> list[Experts]:
        return [module for module in self.modules() if isinstance(module, Experts)]

    def checkpoint(self) -> dict[str, Tensor]:
        """The parameters by the names of a Llama checkpoint, or of a Mixtral one."""
        tensors: dict[str, Tensor] = {}
        for name, value in self.state_dict().items():
            place, _, kind = name.partition("mlp.")
            if not self.config.num_experts or not kind:
                tensors[name] = value
            elif kind == "gate.weight":
                tensors[f"{place}block_sparse_moe.gate.weight"] = value
            else:
                parts = [("w2", value)] if kind == "down_proj" else zip(("w1", "w3"), value.chunk(2, 1), strict=True)
                for part, experts in parts:
                    for number, matrix in enumerate(experts):
                        tensors[f"{place}block_sparse_moe.experts.{number}.{part}.weight"] = matrix
        return tensors


def dropped_blocks(num_layers: int, highest_rate: float, rng: random.Random) -> frozenset[int]:
    """Blocks to drop in one training step: the rate grows with depth, the first and last layer stay."""
    dropped: set[int] = set()
    for layer in range(1, num_layers - 1):
        rate = highest_rate * layer / (num_layers - 2)
        dropped.update(block for block in (2 * layer, 2 * layer + 1) if rng.random() < rate)
    return frozenset(dropped)


def middle_blocks(num_layers: int, fraction: float) -> frozenset[int]:
    """About `fraction` of all blocks, spread evenly over the middle layers, for measuring self-speculation."""
    candidates: Sequence[int] = range(2, 2 * num_layers - 2)
    count = round(fraction * 2 * num_layers)
    return frozenset(candidates[int((i + 0.5) * len(candidates) / count)] for i in range(count))


def head_scores(attention: Attention, x: Tensor, cos: Tensor, sin: Tensor, head: int) -> Tensor:
    """Causal attention logits [B, T, T] of one head for the normed input x [B, T, hidden]."""
    c = attention.config
    batch, length, _ = x.shape
    group = head * c.num_kv_heads // c.num_heads
    q = attention.q_proj(x).view(batch, length, c.num_heads, c.head_dim)[:, :, head]  # [B, T, D]
    k = attention.k_proj(x).view(batch, length, c.num_kv_heads, c.head_dim)[:, :, group]
    q, k = rotate(q.float(), cos, sin), rotate(k.float(), cos, sin)
    scores = q @ k.transpose(1, 2) * c.head_dim**-0.5
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    masked: Tensor = scores.masked_fill(future, -1e9)
    return masked


def hint_loss(model: TinyLM, tokens: Tensor, taps: dict[int, Tensor], length: int = 256) -> Tensor:
    """Mean of -log(attention that falls where it should) over the chosen heads.

    tokens [B, T]; taps: the layers' inputs [B, T, hidden]. Only the first `length` positions are looked at.
    """
    tokens = tokens[:, :length]
    length = tokens.shape[1]
    steps = torch.arange(length)
    previous = (steps[:, None] - 1 == steps[None])[None]  # [1, T, T]
    after_same = torch.zeros(tokens.shape[0], length, length, dtype=torch.bool)
    after_same[:, :, 1:] = tokens[:, :, None] == tokens[:, None, :-1]
    after_same &= (steps[:, None] >= steps[None])[None]
    wanted = [(head, previous.expand_as(after_same)) for head in PREVIOUS_HEADS]
    wanted += [(head, after_same) for head in INDUCTION_HEADS]
    layers = [layer for layer in model.model.layers if isinstance(layer, Layer)]
    losses = []
    for (number, head), target in wanted:
        layer = layers[number]
        x = layer.input_layernorm(taps[number][:, :length])
        scores = head_scores(layer.self_attn, x, model.cos[:length], model.sin[:length], head)
        hit = torch.logsumexp(scores.masked_fill(~target, -1e9), -1) - torch.logsumexp(scores, -1)  # [B, T]
        losses.append(-hit[target.any(-1)].mean())
    return torch.stack(losses).mean()
