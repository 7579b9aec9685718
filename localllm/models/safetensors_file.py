"""One .safetensors file: its header believed only after every claim is checked, its tensors read by `preadv`.

Nothing is allocated from a number in the file before that number has been checked against the file's size, and nothing
is mapped: a mapped file that someone truncates kills the process. Knows no model and no tensor's meaning.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from localllm.errors import FETCH_ANEW, CheckpointError, DoesNotFitError
from localllm.models.fields import show
from localllm.models.strict_json import JsonLimits, open_plain_file, parse_json_object
from localllm.offload.host_buffer import host_buffer

_LENGTH_BYTES = 8
# 200,000 tensors, which take 2 s to check; published files have headers of a few MB. Text of n bytes can take 12 n in
# memory while it is parsed, so the format's own limit of 100 MB would be a way to fill it.
_MAX_HEADER_BYTES = 32 << 20
_LIMITS = JsonLimits(size_bytes=_MAX_HEADER_BYTES, containers=600_000, elements=2_400_000)
_MAX_DIMENSIONS = 16
_MAX_DIMENSION = 1 << 40
# Between two reads Ctrl-C is seen; larger reads are no faster.
_READ_BYTES = 32 << 20
_HUGE_PAGE_BYTES = 2 << 20  # what is smaller gains nothing from a mapping of its own

_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_BITS |= dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8)
_BITS |= dict.fromkeys(("I16", "U16", "F16", "BF16"), 16)
_BITS |= dict.fromkeys(("I32", "U32", "F32"), 32) | dict.fromkeys(("I64", "U64", "F64", "C64"), 64)
_READABLE = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Where a tensor lies: `begin` and `end` in bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """An open file whose header holds true: known dtypes, data filled without overlap, hole or remainder."""

    def __init__(self, path: Path, fd: int, specs: dict[str, TensorSpec], identity: tuple[int, int, int]) -> None:
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
            specs = _read_specs(fd, status.st_size, path)
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

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.specs)

    def spec(self, name: str) -> TensorSpec:
        if name not in self.specs:
            raise _refuse(self.path, f"it has no tensor {show(name)}")
        return self.specs[name]

    def dtype(self, name: str) -> torch.dtype:
        """Raises CheckpointError where it is one that is not read here."""
        dtype = self.spec(name).dtype
        if dtype not in _READABLE:
            raise _refuse(self.path, f"{show(name)} is stored as {dtype}; {', '.join(_READABLE)} are read")
        return _READABLE[dtype]

    def read(self, name: str) -> Tensor:
        """A new CPU tensor of the stored shape and dtype."""
        spec = self.spec(name)
        return self.read_into(name, allocate(spec.shape, self.dtype(name), name))

    def read_into(self, name: str, out: Tensor) -> Tensor:
        """Fill `out`, contiguous and of as many elements, converting to its dtype and device; returns it.

        Raises CheckpointError where the dtype is not read here, or the file has changed since it was opened.
        """
        spec = self.spec(name)
        stored = self.dtype(name)
        if not out.is_contiguous() or out.numel() != math.prod(spec.shape):
            raise ValueError(f"{name} has shape {spec.shape}; a contiguous tensor of as many elements is needed")
        flat = out.view(-1)
        if out.dtype == stored and out.device.type == "cpu":
            self._fill(flat, spec.begin)
        else:
            step = _READ_BYTES // stored.itemsize
            staging = torch.empty(min(step, flat.numel()), dtype=stored)
            for start in range(0, flat.numel(), step):
                part = flat[start : start + step]
                self._fill(staging[: part.numel()], spec.begin + start * stored.itemsize)
                part.copy_(staging[: part.numel()])
        self._check_unchanged()
        return out

    def chunks(self, name: str, chunk_bytes: int = _READ_BYTES) -> Iterator[bytes]:
        """The stored bytes of a tensor, in order."""
        spec = self.spec(name)
        for begin in range(spec.begin, spec.end, chunk_bytes):
            buffer = bytearray(min(chunk_bytes, spec.end - begin))
            self._fill_bytes(memoryview(buffer), begin)
            yield bytes(buffer)
        self._check_unchanged()

    def _fill(self, flat: Tensor, offset: int) -> None:
        if flat.numel():
            self._fill_bytes(flat.view(torch.uint8).numpy().data, offset)

    def _fill_bytes(self, buffer: memoryview, offset: int) -> None:
        """Python lets go of its lock in `preadv`, so that other threads compute while this one reads."""
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[done : done + _READ_BYTES]], offset + done)
            except OSError as error:
                raise _refuse(self.path, f"reading at byte {offset + done} failed: {error.strerror}") from None
            if count == 0:
                size = os.fstat(self._fd).st_size
                raise _refuse(self.path, f"{offset + len(buffer)} bytes are needed, it now has {size}", cut=True)
            done += count

    def _check_unchanged(self) -> None:
        """After a read: what was read before this is what the checked header described."""
        try:
            now = _identity(self.path.stat())
        except OSError as error:
            raise _refuse(self.path, f"it went away while it was read: {error.strerror}") from None
        if now != self._identity:
            why = f"inode, bytes, mtime were {self._identity}, now {now}"
            raise CheckpointError(f"{self.path} changed while it was read", why=why, fix="load the model again")


def _read_specs(fd: int, file_bytes: int, path: Path) -> dict[str, TensorSpec]:
    if file_bytes < _LENGTH_BYTES:
        raise _refuse(path, f"{_LENGTH_BYTES} bytes are the least, it has {file_bytes}", cut=True)
    header_bytes = int.from_bytes(os.pread(fd, _LENGTH_BYTES, 0), "little")
    if not 2 <= header_bytes <= _MAX_HEADER_BYTES:
        raise _refuse(path, f"its header claims {header_bytes} bytes; 2 to {_MAX_HEADER_BYTES} are accepted")
    data_begin = _LENGTH_BYTES + header_bytes
    if data_begin > file_bytes:
        raise _refuse(path, f"its header ends at byte {data_begin}, it has {file_bytes}", cut=True)
    header = os.pread(fd, header_bytes, _LENGTH_BYTES)
    if len(header) != header_bytes or header[:1] != b"{":
        raise _refuse(path, "its header does not start with an object")
    return parse_header(header, data_begin, file_bytes, path)


def parse_header(header: bytes, data_begin: int, file_bytes: int, path: Path) -> dict[str, TensorSpec]:
    """The tensors that a header describes, checked against each other and against the size of the file."""
    raw = parse_json_object(header, f"{path} (header)", _LIMITS)
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _refuse(path, "its __metadata__ is not a map of strings")
    specs = {name: _spec(name, entry, data_begin, path) for name, entry in raw.items()}
    end = data_begin
    for name, spec in sorted(specs.items(), key=lambda item: (item[1].begin, item[1].end)):
        if spec.begin != end:
            word = "overlaps the tensor before it" if spec.begin < end else "leaves a hole before it"
            raise _refuse(path, f"{show(name)} begins at byte {spec.begin}, not {end}: it {word}")
        end = spec.end
    if end > file_bytes:
        raise _refuse(path, f"its tensors end at byte {end}, it has {file_bytes}", cut=True)
    if end < file_bytes:
        raise _refuse(path, f"its tensors end at byte {end}, {file_bytes - end} bytes of no tensor follow")
    return specs


def _spec(name: str, entry: object, data_begin: int, path: Path) -> TensorSpec:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _refuse(path, f"{show(name)} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise _refuse(path, f"{show(name)} has the dtype {show(dtype)}, which the format does not know")
    if not _are_sizes(shape, _MAX_DIMENSION) or len(shape) > _MAX_DIMENSIONS:
        raise _refuse(path, f"{show(name)} has no shape of at most {_MAX_DIMENSIONS} sizes up to {_MAX_DIMENSION}")
    if not _are_sizes(offsets, 1 << 62) or len(offsets) != 2:
        raise _refuse(path, f"{show(name)} has no pair of data_offsets")
    begin, end = offsets
    bits = math.prod(shape) * _BITS[dtype]
    if (end - begin) * 8 != bits:
        raise _refuse(path, f"{show(name)} spans {end - begin} bytes; {dtype} {shape} takes {bits / 8:g}")
    return TensorSpec(dtype, tuple(shape), data_begin + begin, data_begin + end)


def _are_sizes(values: object, most: int) -> bool:
    # `type(x) is int`: True is an int to isinstance, and no size.
    return isinstance(values, list) and all(type(x) is int and 0 <= x <= most for x in values)


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def allocate(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> Tensor:
    """Room for a tensor on the CPU, zero or not. Raises DoesNotFitError."""
    needed = math.prod(shape) * dtype.itemsize
    try:
        if needed >= _HUGE_PAGE_BYTES:
            return host_buffer(needed).view(dtype).view(shape)
        return torch.empty(shape, dtype=dtype)
    except (MemoryError, RuntimeError):
        raise DoesNotFitError(
            f"no memory for {name}", why=f"{needed} bytes are needed", fix="choose a smaller model: localllm list"
        ) from None


def _refuse(path: Path, why: str, cut: bool = False) -> CheckpointError:
    what = f"{path} is cut short" if cut else f"{path} is not a safetensors file that can be read"
    return CheckpointError(what, why=why, fix=FETCH_ANEW)
