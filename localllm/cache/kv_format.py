"""The formats of keys and values, by name: a coding of keys and one of values (see `kernels.kv_page`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from localllm.kernels.sizes import GROUP, PAGE_TOKENS, Coding, KVShape

if TYPE_CHECKING:
    import torch

    from localllm.kernels.kv_page import PageLayout

DENSE_PAGES = 3  # of a sequence in a coded format: its first, and the one or two that it is writing


class KVSizes(NamedTuple):
    """Bytes of some layers' parts of a page: of a dense one, and of a coded one where there are any."""

    dense: int
    coded: int | None

    @property
    def per_token(self) -> int:
        """Bytes of a token in the middle of a long sequence."""
        return (self.coded or self.dense) // PAGE_TOKENS

    @property
    def per_sequence(self) -> int:
        """Bytes that a sequence takes beside its tokens: its dense pages, and the last one, which is not full."""
        return self.dense if self.coded is None else DENSE_PAGES * self.dense + self.coded


@dataclass(frozen=True)
class KVFormat:
    name: str
    keys: Coding
    values: Coding

    def sizes(self, layers: Iterable[KVShape], item_bytes: int) -> KVSizes:
        """Return the sizes of all these layers together. item_bytes: of a number of what the model computes in."""
        shapes = Counter(layers)

        def page_bytes(keys: Coding, values: Coding) -> int:
            return sum(count * shape.page_bytes(keys, values, item_bytes) for shape, count in shapes.items())

        coded = None if self.keys == "dense" else page_bytes(self.keys, self.values)
        own = sum(count * shape.page_bytes(*self._own(shape), item_bytes) for shape, count in shapes.items())
        return KVSizes(own, coded)

    def _own(self, shape: KVShape) -> tuple[Coding, Coding]:
        """Return the codings of the pages that stay dense beside coded ones: of latents, whose kernels multiply bytes,
        they are INT8."""
        return ("int8", "int8") if shape.latent_dim and self.keys != "dense" else ("dense", "dense")

    def layouts(self, shape: KVShape, dtype: torch.dtype) -> tuple[PageLayout, PageLayout | None]:
        """Return the layouts of dense pages, and of coded ones where there are any. dtype: what the model computes
        in."""
        from localllm.kernels.kv_page import layout_of

        dense = layout_of(shape, *self._own(shape), dtype)
        return dense, None if self.keys == "dense" else layout_of(shape, self.keys, self.values, dtype)


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


def choose_format(name: str, layers: Iterable[KVShape], item_bytes: int) -> KVFormat:
    """Return the format of this name (see `wanted_format`). "auto" is INT8, and dense where the model computes in fp32:
    whoever asks for that wants every bit. item_bytes: of a number of what it computes in. All stay dense where
    groups of 32 do not divide the heads of a layer."""
    if name == "auto":
        name = "bf16" if item_bytes == 4 else "int8"
    return KV_FORMATS[name if _uncoded_head(layers) is None else "bf16"]


def dense_heads_note(name: str, layers: Iterable[KVShape], dtype: str) -> str:
    """Return a line for a format that was asked for by name and that these heads cannot have, "" where they can."""
    head_dim = _uncoded_head(layers)
    if name in ("auto", "bf16") or head_dim is None:
        return ""
    return f"keys and values stay in {dtype}: {name} codes groups of {GROUP} features, a head here has {head_dim}"


def _uncoded_head(layers: Iterable[KVShape]) -> int | None:
    """Return the features of a head that groups of 32 do not divide; None where there is none."""
    return next((shape.head_dim for shape in layers if not shape.can_be_coded), None)
