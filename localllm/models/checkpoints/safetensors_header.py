"""The header of a .safetensors file, believed only after every claim is checked: nothing is allocated from a number in
it before that number has been checked against the file's size. Imports no torch."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import FETCH_ANEW, CheckpointError, show
from localllm.models.strict_json import JsonLimits, parse_json_object
from localllm.present import open_plain_file

_LENGTH_BYTES = 8
# 200,000 tensors, which take 2 s to check; published files have headers of a few MB. Text of n bytes can take 12 n in
# memory while it is parsed, so the format's own limit of 100 MB would be a way to fill it.
_MAX_HEADER_BYTES = 32 << 20
_LIMITS = JsonLimits(size_bytes=_MAX_HEADER_BYTES, containers=600_000, elements=2_400_000)
_MAX_DIMENSIONS = 16
_MAX_DIMENSION = 1 << 40

_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_BITS |= dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8)
_BITS |= dict.fromkeys(("I16", "U16", "F16", "BF16"), 16)
_BITS |= dict.fromkeys(("I32", "U32", "F32"), 32) | dict.fromkeys(("I64", "U64", "F64", "C64"), 64)


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """The place of a tensor: `begin` and `end` in bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def tensors_of(path: Path) -> dict[str, HeaderEntry]:
    """Return the tensors by name. Raises CheckpointError that names the file and what is wrong with it."""
    fd = open_plain_file(path)
    try:
        return read_entries(fd, os.fstat(fd).st_size, path)
    finally:
        os.close(fd)


def read_entries(fd: int, file_bytes: int, path: Path) -> dict[str, HeaderEntry]:
    """Return the tensors of an open file by name. Raises CheckpointError."""
    if file_bytes < _LENGTH_BYTES:
        raise refused(path, f"{_LENGTH_BYTES} bytes are the least, it has {file_bytes}", cut=True)
    header_bytes = int.from_bytes(os.pread(fd, _LENGTH_BYTES, 0), "little")
    if not 2 <= header_bytes <= _MAX_HEADER_BYTES:
        raise refused(path, f"its header claims {header_bytes} bytes; 2 to {_MAX_HEADER_BYTES} are accepted")
    data_begin = _LENGTH_BYTES + header_bytes
    if data_begin > file_bytes:
        raise refused(path, f"its header ends at byte {data_begin}, it has {file_bytes}", cut=True)
    header = os.pread(fd, header_bytes, _LENGTH_BYTES)
    if len(header) != header_bytes or header[:1] != b"{":
        raise refused(path, "its header does not start with an object")
    return parse_header(header, data_begin, file_bytes, path)


def parse_header(header: bytes, data_begin: int, file_bytes: int, path: Path) -> dict[str, HeaderEntry]:
    """The tensors that a header describes, checked against each other and against the size of the file."""
    raw = parse_json_object(header, f"{path} (header)", _LIMITS)
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise refused(path, "its __metadata__ is not a map of strings")
    specs = {name: _spec(name, entry, data_begin, path) for name, entry in raw.items()}
    end = data_begin
    for name, spec in sorted(specs.items(), key=lambda item: (item[1].begin, item[1].end)):
        if spec.begin != end:
            word = "overlaps the tensor before it" if spec.begin < end else "leaves a hole before it"
            raise refused(path, f"{show(name)} begins at byte {spec.begin}, not {end}: it {word}")
        end = spec.end
    if end > file_bytes:
        raise refused(path, f"its tensors end at byte {end}, it has {file_bytes}", cut=True)
    if end < file_bytes:
        raise refused(path, f"its tensors end at byte {end}, {file_bytes - end} bytes of no tensor follow")
    return specs


def _spec(name: str, entry: object, data_begin: int, path: Path) -> HeaderEntry:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise refused(path, f"{show(name)} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise refused(path, f"{show(name)} has the dtype {show(dtype)}, which the format does not know")
    if not _are_sizes(shape, _MAX_DIMENSION) or len(shape) > _MAX_DIMENSIONS:
        raise refused(path, f"{show(name)} has no shape of at most {_MAX_DIMENSIONS} sizes up to {_MAX_DIMENSION}")
    if not _are_sizes(offsets, 1 << 62) or len(offsets) != 2:
        raise refused(path, f"{show(name)} has no pair of data_offsets")
    begin, end = offsets
    bits = math.prod(shape) * _BITS[dtype]
    if (end - begin) * 8 != bits:
        raise refused(path, f"{show(name)} spans {end - begin} bytes; {dtype} {shape} takes {bits / 8:g}")
    return HeaderEntry(dtype, tuple(shape), data_begin + begin, data_begin + end)


def _are_sizes(values: object, most: int) -> bool:
    # `type(x) is int`: True is an int to isinstance, and no size.
    return isinstance(values, list) and all(type(x) is int and 0 <= x <= most for x in values)


def refused(path: Path, why: str, cut: bool = False) -> CheckpointError:
    """cut: it ends too early."""
    what = f"{path} is cut short" if cut else f"{path} is not a safetensors file that can be read"
    return CheckpointError(what, why=why, fix=FETCH_ANEW)
