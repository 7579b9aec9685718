"""The formats of keys and values, by name: a coding of keys and one of values (see `kernels.kv_page`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from localllm.kernels.sizes import GROUP, PAGE_TOKENS, Coding, coding_bytes

if TYPE_CHECKING:
    import torch

    from localllm.kernels.kv_page import PageLayout

DENSE_PAGES = 3  # of a sequence in a coded format: its first, and the one or two that it is writing


class KVSizes(NamedTuple):
    """Bytes of a layer's part of a page: of a dense one, and of a coded one where there are any."""

    dense: int
    coded: int | None

    def per_token(self, num_layers: int) -> int:
        """Bytes of a token in the middle of a long sequence."""
        return num_layers * (self.coded or self.dense) // PAGE_TOKENS

    def per_sequence(self, num_layers: int) -> int:
        """Bytes that a sequence takes beside its tokens: its dense pages, and the last one, which is not full."""
        return num_layers * (self.dense if self.coded is None else DENSE_PAGES * self.dense + self.coded)


@dataclass(frozen=True)
class KVFormat:
    name: str
    keys: Coding
    values: Coding

    def sizes(self, num_kv_heads: int, head_dim: int, item_bytes: int) -> KVSizes:
        """item_bytes: of a number of what the model computes in."""

        def layer_bytes(keys: Coding, values: Coding) -> int:
            parts = (coding_bytes(coding, head_dim, item_bytes) for coding in (keys, values))
            return num_kv_heads * sum(map(sum, parts))

        coded = None if self.keys == "dense" else layer_bytes(self.keys, self.values)
        return KVSizes(layer_bytes("dense", "dense"), coded)

    def layouts(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[PageLayout, PageLayout | None]:
        """Return the layouts of dense pages, and of coded ones where there are any. dtype: what the model computes
        in."""
        from localllm.kernels.kv_page import PageLayout

        dense = PageLayout(num_kv_heads, head_dim, "dense", "dense", dtype)
        if self.keys == "dense":
            return dense, None
        return dense, PageLayout(num_kv_heads, head_dim, self.keys, self.values, dtype)


KV_FORMATS = {
    "bf16": KVFormat("bf16", "dense", "dense"),  # as the model computes: in fp32 where that is its dtype
    "int8": KVFormat("int8", "int8", "int8"),
    "k8v4": KVFormat("k8v4", "int8", "int4"),
    "int4": KVFormat("int4", "int4", "int4"),
}


def wanted_format(kv: str, dtype: str, weights: str) -> str:
    """Return the name for `choose_format` of what a user wants: settings of those names, "auto" where they say nothing.

    Keys and values are INT8 where nobody has asked for fp32: also where a model computes in that by `--dtype auto`, on
    a GPU that lacks bf16 (RTX 20, GTX 16, T4).
    """
    return "int8" if kv == dtype == "auto" and weights != "fp32" else kv


def choose_format(name: str, head_dim: int, item_bytes: int) -> KVFormat:
    """Return the format of this name (see `wanted_format`). "auto" is INT8, and dense where the model computes in fp32:
    whoever asks for that wants every bit. item_bytes: of a number of what it computes in. Heads that groups of 32 do
    not divide stay dense."""
    if name == "auto":
        name = "bf16" if item_bytes == 4 else "int8"
    return KV_FORMATS[name if head_dim % GROUP == 0 else "bf16"]


def dense_heads_note(name: str, head_dim: int, dtype: str) -> str:
    """Return a line for a format that was asked for by name and that these heads cannot have, "" where they can."""
    if name in ("auto", "bf16") or head_dim % GROUP == 0:
        return ""
    return f"keys and values stay in {dtype}: {name} codes groups of {GROUP} features, a head here has {head_dim}"
