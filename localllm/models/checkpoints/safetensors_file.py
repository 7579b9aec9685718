"""One .safetensors file: its header believed only after every claim is checked (`safetensors_header`).

Knows no model and no tensor's meaning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.errors import DoesNotFitError, show
from localllm.models.checkpoints.safetensors_header import HeaderEntry, read_entries, refused
from localllm.models.checkpoints.weight_file import READ_BYTES, WeightFile
from localllm.offload.streaming.host_buffer import host_buffer
from localllm.quant.layouts import torch_dtype

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from localllm.quant.coded import CodedMatrix

_HUGE_PAGE_BYTES = 2 << 20  # what is smaller gains nothing from a mapping of its own

_READABLE = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}  # to torch's names
# To torch's names of numbers of as many bits.
_RAW = {
    **_READABLE,
    **dict.fromkeys(("I64", "U64"), "int64"),
    **dict.fromkeys(("I32", "U32"), "int32"),
    **dict.fromkeys(("I16", "U16"), "int16"),
    "I8": "int8",
    **dict.fromkeys(("U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), "uint8"),
}


class SafetensorsFile:
    """An open file whose header holds true: known dtypes, data filled without overlap, hole or remainder."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError that names the file and what is wrong with it."""
        self.path = path
        self._file = WeightFile(path)
        try:
            self.entries: Mapping[str, HeaderEntry] = read_entries(self._file.descriptor, self._file.size_bytes, path)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def entry(self, name: str) -> HeaderEntry:
        if name not in self.entries:
            raise refused(self.path, f"it has no tensor {show(name)}")
        return self.entries[name]

    def dtype(self, name: str) -> str:
        """Return the dtype as torch names it. Raises CheckpointError for one that is not read here."""
        dtype = self.entry(name).dtype
        if dtype not in _READABLE:
            raise refused(self.path, f"{show(name)} is stored as {dtype}; {', '.join(_READABLE)} are read")
        return _READABLE[dtype]

    def read_slab(self, name: str, first: int, out: Tensor) -> Tensor:
        """Fill `out`, contiguous, with rows from number `first` on. Raises as `read_into` does."""
        entry = self.entry(name)
        stored = torch_dtype(self.dtype(name))
        if out.shape[1:] != entry.shape[1:] or first + len(out) > entry.shape[0]:
            raise ValueError(f"{name} has shape {entry.shape}; rows of it are needed")
        read_numbers(self._file, entry.begin + first * math.prod(entry.shape[1:]) * stored.itemsize, stored, out)
        return out

    def read_into(self, name: str, out: Tensor, part: int | None = None) -> Tensor:
        """Fill `out`, contiguous and of as many elements, converting to its dtype and device; returns it.

        part: of the tensor's first dimension, which is all that is read.

        Raises CheckpointError where the dtype is not read here, or the file has changed since it was opened.
        """
        entry = self.entry(name)
        stored = torch_dtype(self.dtype(name))
        shape = entry.shape if part is None else entry.shape[1:]
        if out.numel() != math.prod(shape):
            raise ValueError(f"{name} has shape {shape}; a tensor of as many elements is needed")
        read_numbers(self._file, entry.begin + (part or 0) * math.prod(shape) * stored.itemsize, stored, out)
        return out

    def read_raw(self, name: str, first: int = 0, end: int | None = None) -> Tensor:
        """Return some rows of the first dimension, or all of a tensor without one, in the stored dtype; as bits where
        torch has no such integers, or where they are floats of 8 bits: U32 as int32, F8_E4M3 as uint8.

        Raises CheckpointError where the dtype is of less than a byte, or the file has changed since it was opened.
        """
        entry = self.entry(name)
        if entry.dtype not in _RAW:
            raise refused(self.path, f"{show(name)} is stored as {entry.dtype}, which is not read")
        stored, shape = torch_dtype(_RAW[entry.dtype]), entry.shape
        count = 0
        if shape:
            end = shape[0] if end is None else end
            shape, count = (end - first, *shape[1:]), first * math.prod(shape[1:])
        out = allocate(shape, stored, name)
        read_numbers(self._file, entry.begin + count * stored.itemsize, stored, out)
        return out

    def chunks(self, name: str, chunk_bytes: int = READ_BYTES) -> Iterator[bytes]:
        """Yield the stored bytes of a tensor, in order."""
        entry = self.entry(name)
        return self._file.chunks(entry.begin, entry.end, chunk_bytes)


@dataclass(frozen=True)
class PlainTensor:
    """A tensor of numbers in a safetensors file."""

    file: SafetensorsFile
    name: str
    kept: None = None
    comes_in_pieces: bool = True

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def shape(self) -> tuple[int, ...]:
        return self.file.entry(self.name).shape

    @property
    def form(self) -> str:
        return self.file.entry(self.name).dtype

    def dtype(self) -> str:
        return self.file.dtype(self.name)

    def read_into(self, out: Tensor, part: int | None = None) -> Tensor:
        return self.file.read_into(self.name, out, part)

    def codes(self, _part: int | None, /) -> Iterator[CodedMatrix]:
        return iter(())

    def fill_tiles(self, _part: int | None, _order: Tensor | None, _out: Mapping[str, Tensor], /) -> bool:
        return False

    def chunks(self) -> Iterator[bytes]:
        return self.file.chunks(self.name)


def read_numbers(file: WeightFile, begin: int, stored: torch.dtype, out: Tensor) -> None:
    """Fill `out`, contiguous, from numbers of the type `stored`, converting to its dtype and device. Raises
    CheckpointError."""
    if not out.is_contiguous():
        raise ValueError("a contiguous tensor is needed")
    flat = out.view(-1)
    if out.dtype == stored and out.device.type == "cpu":
        _fill(file, flat, begin)
    else:
        step = READ_BYTES // stored.itemsize
        staging = allocate((min(step, flat.numel()),), stored, file.path.name)
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step]
            _fill(file, staging[: piece.numel()], begin + start * stored.itemsize)
            piece.copy_(staging[: piece.numel()])
    file.check_unchanged()


def _fill(file: WeightFile, flat: Tensor, offset: int) -> None:
    if flat.numel():
        file.fill(flat.view(torch_dtype("uint8")).numpy().data, offset)


def allocate(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> Tensor:
    """Return room for a tensor on the CPU, zero or not. Raises DoesNotFitError."""
    import torch

    needed = math.prod(shape) * dtype.itemsize
    try:
        if needed >= _HUGE_PAGE_BYTES:
            return host_buffer(needed).view(dtype).view(shape)
        return torch.empty(shape, dtype=dtype)
    except (MemoryError, RuntimeError):
        raise DoesNotFitError(
            f"no memory for {name}", why=f"{needed} bytes are needed", fix="choose a smaller model: localllm list"
        ) from None
