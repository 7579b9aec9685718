"""One tensor of a checkpoint: what every reader of a file format gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from localllm.quant.coded import CodedMatrix
    from localllm.quant.layouts import WeightLayout


class StoredTensor(Protocol):
    """A tensor in whatever form its file has it. Where the first dimension is that of experts, `part` chooses one."""

    @property
    def path(self) -> Path:
        """The file, for errors."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def form(self) -> str:
        """How it is stored, in the format's own words: "BF16", "Q4_K"."""
        ...

    @property
    def kept(self) -> WeightLayout | None:
        """The weight format that keeps its codes; None where it has none."""
        ...

    @property
    def comes_in_pieces(self) -> bool:
        """Return whether no more than a few megabytes of it are held beside what is made of it."""
        ...

    def dtype(self) -> str:
        """Return the type that its numbers are read in, as torch names it. Raises CheckpointError where it is none."""
        ...

    def read_into(self, out: Tensor, part: int | None = None) -> Tensor:
        """Fill `out`, contiguous and of as many elements, converting to its dtype and device; returns it.

        Raises CheckpointError where the file has changed since it was opened.
        """
        ...

    def codes(self, part: int | None, /) -> Iterator[CodedMatrix]:
        """Yield the codes of a matrix, none where it has no `kept` format, in pieces of its rows, in order: all but the
        last have a multiple of 16. Raises as `read_into` does."""
        ...

    def fill_tiles(self, part: int | None, order: Tensor | None, out: Mapping[str, Tensor], /) -> bool:
        """Fill the tensors of the `kept` format with the rows in this order, int64 [rows]; return whether that can be
        done without `codes`. Raises as `read_into` does."""
        ...

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes that are stored, in order."""
        ...
