"""y += scale * (x @ a.T) @ b.T behind the product with a layer's matrix, for the rows that have adapters.

The matrix stays as it is packed and placed. Which adapters a row has says its sequence: its keys and values were
computed with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localllm.layers.batch import Batch, moved
from localllm.layers.linear import Embedding, Linear
from localllm.layers.low_rank import EMBED, HEAD
from localllm.layers.norm import Norm


def adapted(linear: Linear, x: Tensor, batch: Batch, rows: Tensor | None = None) -> Tensor:
    """x [T, K] -> [T, N], with the adapters of each row. rows: of the batch, ascending, where x is not all of it."""
    y = linear(x)
    add_adapters(linear.name, x, y, batch, rows)
    return y


def add_adapters(site: str, x: Tensor, y: Tensor, batch: Batch, rows: Tensor | None = None) -> None:
    """Add to y [T, N] what the adapters of each row make of x [T, K]. rows: as `adapted` has them."""
    for segment in batch.adapted_segments:
        begin, end = segment.begin, segment.end
        if rows is not None:
            borders = torch.tensor([begin, end], dtype=rows.dtype, device=rows.device)
            begin, end = torch.searchsorted(rows, borders).tolist()
        for each in segment.kv.adapters if begin < end else ():
            each.add(site, x[begin:end], y[begin:end])


def add_to_embedding(embed: Embedding, batch: Batch, y: Tensor) -> None:
    """Add to the embeddings y [T, hidden] of a batch what adapters have for its tokens."""
    for segment in batch.adapted_segments:
        own = slice(segment.begin, segment.end)
        for each in segment.kv.adapters:
            for part in each.adapter.parts_of(EMBED, y):
                looked_up = part.a[:, moved(batch.token_ids[own], y.device)].T
                y[own] += (looked_up @ part.b.T * (each.scale * embed.scale)).to(y.dtype)


def add_to_logits(batches: Sequence[Batch], states: Tensor, norm: Norm, y: Tensor) -> None:
    """Add to logits y [R, V] what adapters make of the hidden states [R, hidden] of the batches' `logit_rows`, behind
    the norm."""
    first = 0
    for batch in batches:
        rows, count = moved(batch.logit_rows, y.device), len(batch.logit_rows)
        if any(HEAD in each.adapter.parts for segment in batch.adapted_segments for each in segment.kv.adapters):
            own = slice(first, first + count)
            add_adapters(HEAD, norm(states[own].to(y.device)), y[own], batch, rows)
        first += count
