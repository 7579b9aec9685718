"""A hint that shows a few attention heads, early in the training, how to copy.

Owns an extra loss: one head each of two lower layers shall look at the token before, one head
each of two higher layers at the token that followed the same token earlier. Together they copy whatever was said
before, a name for instance. A model of this size finds this by itself only after many more tokens than tales need
otherwise. Knows nothing of text; the hint leaves no trace in the finished model's shape.
"""

from __future__ import annotations

import torch
from tiny_model import Attention, Layer, TinyLM, rotate
from torch import Tensor

PREVIOUS_HEADS = ((1, 0), (2, 0))
INDUCTION_HEADS = ((4, 0), (6, 0))


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
