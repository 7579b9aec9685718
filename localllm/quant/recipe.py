"""Which format each kind of matrix gets: a model's blocks in one, its embedding and head in another."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.quant.weight_format import WeightFormat


@dataclass(frozen=True)
class Recipe:
    """`name` is what a person asks for and what a packed model is kept under: "bf16", "int4-g64"."""

    name: str
    blocks: WeightFormat
    embedding: WeightFormat  # of the token embedding, and of the head, tied to it or not
