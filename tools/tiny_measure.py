"""Perplexity of the tiny model on the held-out book, whole and with blocks skipped.

Owns the measuring; knows nothing of training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tiny_model import TinyLM, middle_blocks
from torch import Tensor


@dataclass(frozen=True)
class Measurement:
    """Mean loss in nats per token, and the perplexities that follow from it."""

    blocks_skipped: int
    loss: float
    per_token: float
    per_byte: float
    per_word: float


@torch.no_grad()
def window_loss(model: TinyLM, windows: Tensor, skipped: frozenset[int] = frozenset(), batch: int = 4) -> float:
    """Mean loss over windows [N, T + 1]: every window is read from its first token, without earlier context."""
    total, count = 0.0, 0
    for part in torch.split(windows, batch):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model.logits(part[:, :-1], skipped)
        total += float(F.cross_entropy(logits.float().flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
        count += part[:, 1:].numel()
    return total / count


def cut(tokens: Tensor, length: int) -> Tensor:
    """Windows [N, length + 1] that share their border tokens, so that each token but the first is predicted once."""
    count = (len(tokens) - 1) // length
    return torch.stack([tokens[i * length : (i + 1) * length + 1] for i in range(count)])


def quick_loss(model: TinyLM, tokens: Tensor, length: int = 512, num_windows: int = 48) -> float:
    """A loss good enough for a curve: windows spread over the book."""
    windows = cut(tokens, length)
    return window_loss(model, windows[:: max(1, len(windows) // num_windows)][:num_windows])


def held_out_report(model: TinyLM, ids: list[int], text: str) -> list[Measurement]:
    """The whole book in windows of the full context, with none, a quarter and 40 % of the blocks skipped."""
    windows = cut(torch.tensor(ids), model.config.max_positions)
    num_bytes, num_words = len(text.encode()), len(text.split())
    report = []
    for fraction in (0.0, 0.25, 0.4):
        skipped = middle_blocks(model.config.num_layers, fraction) if fraction else frozenset[int]()
        loss = window_loss(model, windows, skipped)
        nats = loss * len(ids)
        report.append(Measurement(len(skipped), loss, math.exp(loss), math.exp(nats / num_bytes),
                                  math.exp(nats / num_words)))  # fmt: skip
    return report


def format_report(report: list[Measurement]) -> str:
    lines = ["blocks skipped | loss/token | ppl/token | ppl/byte | ppl/word"]
    lines += [
        f"{m.blocks_skipped:14d} | {m.loss:10.4f} | {m.per_token:9.2f} | {m.per_byte:8.4f} | {m.per_word:8.1f}"
        for m in report
    ]
    return "\n".join(lines)
