"""One .safetensors file: its header believed only after every claim is checked (`safetensors_header`), its tensors read
by `preadv`.

Nothing is mapped: a mapped file that someone truncates kills the process. Knows no model and no tensor's meaning.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.errors import CheckpointError, DoesNotFitError
from localllm.models.fields import show
from localllm.models.safetensors_header import StoredTensor, read_specs, refused
from localllm.models.strict_json import open_plain_file
from localllm.offload.streaming.host_buffer import host_buffer
from localllm.quant.layouts import torch_dtype

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Between two reads Ctrl-C is seen; larger reads are no faster.
_READ_BYTES = 32 << 20
_HUGE_PAGE_BYTES = 2 << 20  # what is smaller gains nothing from a mapping of its own

_READABLE = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}  # to torch's names


class SafetensorsFile:
    """An open file whose header holds true: known dtypes, data filled without overlap, hole or remainder."""

    def __init__(self, path: Path, fd: int, specs: dict[str, StoredTensor], identity: tuple[int, int, int]) -> None:
        self.path = path
        self.specs = specs
        self._fd = fd
        self._identity = identity
        self._close = weakref.finalize(self, os.close, fd)

    @classmethod
    def open(cls, path: Path) -> SafetensorsFile:
        """Raises CheckpointError that names the file and what is wrong with it."""
        fd = open_plain_file(path)
        try:
            status = os.fstat(fd)
            specs = read_specs(fd, status.st_size, path)
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, specs, _identity(status))

    def close(self) -> None:
        self._close()

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def spec(self, name: str) -> StoredTensor:
        if name not in self.specs:
            raise refused(self.path, f"it has no tensor {show(name)}")
        return self.specs[name]

    def dtype(self, name: str) -> str:
        """Return the dtype as torch names it. Raises CheckpointError for one that is not read here."""
        dtype = self.spec(name).dtype
        if dtype not in _READABLE:
            raise refused(self.path, f"{show(name)} is stored as {dtype}; {', '.join(_READABLE)} are read")
        return _READABLE[dtype]

    def read(self, name: str) -> Tensor:
        """Read a tensor into a new one on the CPU, of the stored shape and dtype."""
        spec = self.spec(name)
        return self.read_into(name, allocate(spec.shape, torch_dtype(self.dtype(name)), name))

    def read_into(self, name: str, out: Tensor, part: int | None = None) -> Tensor:
        """Fill `out`, contiguous and of as many elements, converting to its dtype and device; returns it.

        part: of the tensor's first dimension, which is all that is read.

        Raises CheckpointError where the dtype is not read here, or the file has changed since it was opened.
        """
        spec = self.spec(name)
        stored = torch_dtype(self.dtype(name))
        shape = spec.shape if part is None else spec.shape[1:]
        if not out.is_contiguous() or out.numel() != math.prod(shape):
            raise ValueError(f"{name} has shape {shape}; a contiguous tensor of as many elements is needed")
        begin = spec.begin + (part or 0) * math.prod(shape) * stored.itemsize
        flat = out.view(-1)
        if out.dtype == stored and out.device.type == "cpu":
            self._fill(flat, begin)
        else:
            step = _READ_BYTES // stored.itemsize
            staging = allocate((min(step, flat.numel()),), stored, name)
            for start in range(0, flat.numel(), step):
                piece = flat[start : start + step]
                self._fill(staging[: piece.numel()], begin + start * stored.itemsize)
                piece.copy_(staging[: piece.numel()])
        self._check_unchanged()
        return out

    def chunks(self, name: str, chunk_bytes: int = _READ_BYTES) -> Iterator[bytes]:
        """Yield the stored bytes of a tensor, in order."""
        spec = self.spec(name)
        for begin in range(spec.begin, spec.end, chunk_bytes):
            buffer = bytearray(min(chunk_bytes, spec.end - begin))
            self._fill_bytes(memoryview(buffer), begin)
            yield bytes(buffer)
        self._check_unchanged()

    def _fill(self, flat: Tensor, offset: int) -> None:
        if flat.numel():
            self._fill_bytes(flat.view(torch_dtype("uint8")).numpy().data, offset)

    def _fill_bytes(self, buffer: memoryview, offset: int) -> None:
        """Python lets go of its lock in `preadv`, so that other threads compute while this one reads."""
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[done : done + _READ_BYTES]], offset + done)
            except OSError as error:
                raise refused(self.path, f"reading at byte {offset + done} failed: {error.strerror}") from None
            if count == 0:
                size = os.fstat(self._fd).st_size
                raise refused(self.path, f"{offset + len(buffer)} bytes are needed, it now has {size}", cut=True)
            done += count

    def _check_unchanged(self) -> None:
        """Check after a read that the file is still the one whose header was checked."""
        try:
            now = _identity(self.path.stat())
        except OSError as error:
            raise refused(self.path, f"it went away while it was read: {error.strerror}") from None
        if now != self._identity:
            why = f"inode, bytes, mtime were {self._identity}, now {now}"
            raise CheckpointError(f"{self.path} changed while it was read", why=why, fix="load the model again")


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


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
