"""The formats of keys and values, by name: a coding of keys and one of values (see `kernels.kv_page`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from localllm.kernels.kv_page import GROUP, PAGE_TOKENS, Coding, PageLayout
from localllm.quant.dense import Dense

DENSE_PAGES = 3  # of a sequence in a coded format: its first, and the one or two that it is writing


@dataclass(frozen=True)
class KVFormat:
    name: str
    keys: Coding
    values: Coding

    def layouts(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[PageLayout, PageLayout | None]:
        """Return the layouts of dense pages, and of coded ones where there are any. dtype: what the model computes
        in."""
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


def choose_format(name: str, head_dim: int, dtype: torch.dtype) -> KVFormat:
    """Return the format of this name. "auto" is INT8, and dense where the model computes in fp32: whoever asks for
    that wants every bit. Heads that groups of 32 do not divide stay dense."""
    if name == "auto":
        name = "bf16" if dtype is torch.float32 else "int8"
    return KV_FORMATS[name if head_dim % GROUP == 0 else "bf16"]


def dense_heads_note(name: str, head_dim: int, dtype: torch.dtype) -> str:
    """Return a line for a format that was asked for by name and that these heads cannot have, "" where they can."""
    if name in ("auto", "bf16") or head_dim % GROUP == 0:
        return ""
    kept = Dense(dtype).name
    return f"keys and values stay in {kept}: {name} codes groups of {GROUP} features, a head here has {head_dim}"


def kv_bytes_per_token(layouts: tuple[PageLayout, PageLayout | None], num_layers: int) -> int:
    """Bytes of a token in the middle of a long sequence."""
    dense, coded = layouts
    return num_layers * (coded or dense).layer_bytes // PAGE_TOKENS


def kv_bytes_per_sequence(layouts: tuple[PageLayout, PageLayout | None], num_layers: int) -> int:
    """Bytes that a sequence takes beside its tokens: its dense pages, and the last one, which is not full."""
    dense, coded = layouts
    if coded is None:
        return num_layers * dense.layer_bytes
    return num_layers * (DENSE_PAGES * dense.layer_bytes + coded.layer_bytes)
