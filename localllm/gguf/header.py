"""The header of a GGUF file, believed only after every claim is checked: nothing is allocated or counted through from a
number in it before that number has been compared with the bytes that are left.

Reads versions 2 and 3, which differ in nothing that is little-endian. Knows the sizes of the types, not their meaning.
"""

from __future__ import annotations

import math
import os
import re
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from localllm.errors import FETCH_ANEW, CheckpointError, Fixes, show
from localllm.present import is_file, open_plain_file

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Published headers have up to 20 MB, most of it a vocabulary of 262,144 tokens and twice as many merges. A short string
# takes 60 bytes of memory for the 10 in the file, so the numbers of things are limited as well.
_MAX_HEADER_BYTES = 64 << 20
_MAX_STRINGS = 2_000_000
_MAX_TENSORS = 100_000
_MAX_KEYS = 100_000
_MAX_FILES = 1000
_MAX_DIMENSIONS = 4
_LEAST_KEY_BYTES = 8 + 4 + 1  # an empty name, a type, and a value of one byte
_LEAST_TENSOR_BYTES = 8 + 4 + 4 + 8  # an empty name, no dimension, a type, and an offset
_DEFAULT_ALIGNMENT = 32
_MAX_LIST_BYTES = 1 << 16
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})", re.DOTALL)

_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_SCALARS = {kind: struct.Struct(f"<{code}") for kind, code in _NUMBERS.items()}
_U32, _U64 = _SCALARS[4], _SCALARS[10]

# Number of a type -> (its name, weights of a block, bytes of a block). Missing ones were removed from the format.
TENSOR_TYPES: Mapping[int, tuple[str, int, int]] = MappingProxyType(
    {
        0: ("F32", 1, 4),
        1: ("F16", 1, 2),
        2: ("Q4_0", 32, 18),
        3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34),
        9: ("Q8_1", 32, 36),
        10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210),
        15: ("Q8_K", 256, 292),
        16: ("IQ2_XXS", 256, 66),
        17: ("IQ2_XS", 256, 74),
        18: ("IQ3_XXS", 256, 98),
        19: ("IQ1_S", 256, 50),
        20: ("IQ4_NL", 32, 18),
        21: ("IQ3_S", 256, 110),
        22: ("IQ2_S", 256, 82),
        23: ("IQ4_XS", 256, 136),
        24: ("I8", 1, 1),
        25: ("I16", 1, 2),
        26: ("I32", 1, 4),
        27: ("I64", 1, 8),
        28: ("F64", 1, 8),
        29: ("IQ1_M", 256, 56),
        30: ("BF16", 1, 2),
        34: ("TQ1_0", 256, 54),
        35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17),
        40: ("NVFP4", 64, 36),
        41: ("Q1_0", 128, 18),
    }
)


@dataclass(frozen=True, slots=True)
class GgufEntry:
    """The place of a tensor. type: "Q4_K". shape: rows first, so a matrix is [out features, in features]. begin: in
    bytes from the start of the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.begin + self.num_bytes


@dataclass(frozen=True)
class GgufHeader:
    """What stands in front of the weights.

    metadata: numbers, texts, and arrays of one kind of them by their keys.
    begins: of arrays of numbers, by their keys: the bytes from the start of the file at which they begin.
    """

    path: Path
    metadata: Mapping[str, object]
    tensors: Mapping[str, GgufEntry]
    begins: Mapping[str, int]


def read_model(path: Path) -> tuple[GgufHeader, ...]:
    """Return the headers of the files of a model in their order; the metadata of the first is the model's.

    Raises CheckpointError for a file that is absent or not readable, and where the files do not fit together.
    """
    headers = tuple(read_header(file) for file in split_files(path))
    first = headers[0].metadata
    names: dict[str, Path] = {}
    for number, header in enumerate(headers):
        place, count = header.metadata.get("split.no", 0), header.metadata.get("split.count", 1) or 1
        if (place, count) != (number, len(headers)):
            why = f"it says it is file {show(place)} of {show(count)}, counted from 0, not {number} of {len(headers)}"
            fix = "give each file of a split model the name that it was published with"
            raise refused(header.path, why, fix)
        for name in header.tensors:
            if name in names:
                raise refused(header.path, f"{show(name)} is also in {names[name]}")
            names[name] = header.path
    wanted = first.get("split.tensors.count", len(names))
    if wanted != len(names):
        raise refused(
            headers[0].path, f"it announces {show(wanted)} tensors, its {len(headers)} files have {len(names)}"
        )
    return headers


def split_files(path: Path) -> tuple[Path, ...]:
    """Return all files of the model that `path` is a file of, in their order: those beside "name-00002-of-00003.gguf",
    else the one. Raises CheckpointError naming one that is missing."""
    stem, number, count = split_name(path.name)
    if not count:
        return (path,)
    if not 1 <= number <= count <= _MAX_FILES:
        raise refused(path, f"its name says file {number} of {count}; at most {_MAX_FILES} files are read")
    files = tuple(path.with_name(f"{stem}-{each:05}-of-{count:05}{path.suffix}") for each in range(1, count + 1))
    for file in files:
        if not is_file(file):
            raise CheckpointError(f"{file} is missing", why=f"the model is split into {count} files", fix=FETCH_ANEW)
    return files


def is_later_part(path: Path) -> bool:
    """Return whether a file is by its name one of a split model's, and not the first."""
    return split_name(path.name)[1] > 1


def split_name(name: str) -> tuple[str, int, int]:
    """Return a file's name without its ending and its number, the number, and of how many; 1 and 0 where the name is
    not one of a split model's."""
    stem = name[: -len(SUFFIX)] if name.casefold().endswith(SUFFIX) else name
    found = _SPLIT.fullmatch(stem)
    return (found[1], int(found[2]), int(found[3])) if found else (stem, 1, 0)


def read_header(path: Path) -> GgufHeader:
    """Return the header of one file.

    Raises CheckpointError that names the file and what is wrong with it.
    """
    with os.fdopen(open_plain_file(path), "rb", buffering=1 << 20) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        reader = _Reader(file, path, file_bytes)
        tensor_count, key_count = _read_counts(reader, path)
        metadata, begins = _read_metadata(reader, key_count, path)
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise refused(path, f"general.alignment is {show(alignment)}; a power of two is needed")
        described = [_read_tensor(reader, path) for _ in range(tensor_count)]
    data_begin = -(-reader.position // alignment) * alignment
    tensors: dict[str, GgufEntry] = {}
    for name, stored, shape, offset, num_bytes in described:
        if name in tensors:
            raise refused(path, f"it has two tensors {show(name)}")
        if offset % alignment:
            raise refused(path, f"{show(name)} begins at {offset}, no multiple of the alignment {alignment}")
        tensors[name] = GgufEntry(name, stored, shape, data_begin + offset, num_bytes)
    _check_places(tensors, file_bytes, path)
    return GgufHeader(path, MappingProxyType(metadata), MappingProxyType(tensors), MappingProxyType(begins))


def read_floats(header: GgufHeader, name: str) -> tuple[float, ...]:
    """Return the numbers of a short list in fp32, such as the factors of a rotary embedding. Raises CheckpointError for
    a tensor of any other kind."""
    tensor = header.tensors[name]
    if tensor.type != "F32" or len(tensor.shape) != 1 or tensor.num_bytes > _MAX_LIST_BYTES:
        why = f"{show(name)} is stored as {tensor.type} and has the shape {tensor.shape}; a short list in F32 is needed"
        raise refused(header.path, why)
    fd = open_plain_file(header.path)
    try:
        data = os.pread(fd, tensor.num_bytes, tensor.begin)
    finally:
        os.close(fd)
    if len(data) < tensor.num_bytes:
        raise refused(header.path, f"{show(name)} ends behind the end of the file", cut=True)
    return tuple(number for (number,) in _SCALARS[6].iter_unpack(data))


def _check_places(tensors: Mapping[str, GgufEntry], file_bytes: int, path: Path) -> None:
    end = 0
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.begin):
        if tensor.begin < end:
            raise refused(path, f"{show(tensor.name)} begins at byte {tensor.begin}, inside another tensor")
        end = tensor.end
    if end > file_bytes:
        raise refused(path, f"its tensors end at byte {end}, it has {file_bytes}", cut=True)


def _read_counts(reader: _Reader, path: Path) -> tuple[int, int]:
    """Return the numbers of tensors and of keys, once the version is known to be readable."""
    magic = reader.take(4)
    if magic != _MAGIC:
        raise refused(path, f"it begins with {show(magic.decode('latin-1'))}, not with {_MAGIC.decode()!r}")
    version = reader.number(_U32)
    if version & 0xFFFF == 0 and version:
        raise refused(path, "it is big-endian; little-endian files are read", "choose a file that is little-endian")
    if version not in _VERSIONS:
        raise refused(path, f"it is of version {version}; 2 and 3 are read", "choose a newer file of this model")
    tensor_count, key_count = reader.number(_U64), reader.number(_U64)
    reader.require(key_count, _LEAST_KEY_BYTES, "keys", _MAX_KEYS)
    reader.require(tensor_count, _LEAST_TENSOR_BYTES, "tensors", _MAX_TENSORS)
    return tensor_count, key_count


def _read_metadata(reader: _Reader, count: int, path: Path) -> tuple[dict[str, object], dict[str, int]]:
    """Return the values, and where arrays of numbers begin, by their keys."""
    metadata: dict[str, object] = {}
    begins: dict[str, int] = {}
    for _ in range(count):
        key = reader.string()
        if key in metadata:
            raise refused(path, f"it has the key {show(key)} twice")
        metadata[key] = value = reader.value(key)
        if isinstance(value, array):
            begins[key] = reader.position - len(value) * value.itemsize
    return metadata, begins


def _read_tensor(reader: _Reader, path: Path) -> tuple[str, str, tuple[int, ...], int, int]:
    """Return a tensor's name, type, shape, offset from the first, and bytes."""
    name, dimensions = reader.string(), reader.number(_U32)
    if dimensions > _MAX_DIMENSIONS:
        raise refused(path, f"{show(name)} has {dimensions} dimensions; at most {_MAX_DIMENSIONS}")
    shape = tuple(reader.number(_U64) for _ in range(dimensions))[::-1]
    kind, offset = reader.number(_U32), reader.number(_U64)
    if kind not in TENSOR_TYPES:
        raise refused(path, f"{show(name)} has the type {kind}, which is not known here")
    stored, block_weights, block_bytes = TENSOR_TYPES[kind]
    row = shape[-1] if shape else 1
    if 0 in shape or row % block_weights:
        why = f"{show(name)} has the shape {shape}; rows of {stored} are blocks of {block_weights}"
        raise refused(path, why)
    num_bytes = math.prod(shape) // block_weights * block_bytes
    if num_bytes + offset > reader.file_bytes:
        why = f"{show(name)} takes {num_bytes} bytes from byte {offset} on, the file has {reader.file_bytes}"
        raise refused(path, why, cut=True)
    return name, stored, shape, offset, num_bytes


class _Reader:
    """Reads the header from front to back, and nothing that the file or the limits have no room for."""

    def __init__(self, file: BinaryIO, path: Path, file_bytes: int) -> None:
        self.file_bytes = file_bytes
        self.position = 0
        self._read = file.read
        self._path = path
        self._end = min(file_bytes, _MAX_HEADER_BYTES)
        self._strings_left = _MAX_STRINGS

    def require(self, count: int, least_bytes: int, what: str, most: int) -> None:
        """Raise CheckpointError unless `count` things of at least so many bytes can follow."""
        if count > most:
            raise refused(self._path, f"it claims {count} {what}; at most {most} are read")
        if count * least_bytes > self._end - self.position:
            raise self._too_short(f"{count} {what}")

    def take(self, size: int) -> bytes:
        self.position += size
        if self.position > self._end:
            self.position -= size
            raise self._too_short(f"{size} bytes")
        data = self._read(size)
        if len(data) < size:
            raise refused(self._path, "it became shorter while it was read", cut=True)
        return data

    def number(self, form: struct.Struct) -> int:
        value: int = form.unpack(self.take(form.size))[0]
        return value

    def string(self) -> str:
        data = self.take(self.number(_U64))
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self._not_utf8(error) from None

    def value(self, key: str) -> object:
        kind = self.number(_U32)
        return self._array(key) if kind == _ARRAY else self._scalar(key, kind)

    def _scalar(self, key: str, kind: int) -> object:
        if kind == _STRING:
            return self.string()
        if kind == _BOOL:
            return self._flags(key, 1)[0]
        if kind not in _SCALARS:
            raise refused(self._path, f"{show(key)} has a value of the type {kind}, which is not known here")
        return self.number(_SCALARS[kind])

    def _array(self, key: str) -> Sequence[object]:
        kind, count = self.number(_U32), self.number(_U64)
        if kind == _STRING:
            return self._strings(count)
        if kind == _BOOL:
            return self._flags(key, count)
        if kind not in _NUMBERS:
            what = "an array of arrays" if kind == _ARRAY else f"an array of the type {kind}"
            raise refused(self._path, f"{show(key)} is {what}, which is not read")
        values = array(_NUMBERS[kind])
        self.require(count, values.itemsize, f"values of {show(key)}", _MAX_HEADER_BYTES)
        values.frombytes(self.take(count * values.itemsize))
        if sys.byteorder == "big":
            values.byteswap()
        return values

    def _flags(self, key: str, count: int) -> list[bool]:
        self.require(count, 1, f"values of {show(key)}", _MAX_STRINGS)
        data = self.take(count)
        if data.strip(b"\0\1"):
            raise refused(self._path, f"{show(key)} has a flag that is neither 0 nor 1")
        return [value == 1 for value in data]

    def _strings(self, count: int) -> list[str]:
        """Return an array of strings. A vocabulary has half a million, so this is `string` with all in local names."""
        self.require(count, _U64.size, "strings", self._strings_left)
        self._strings_left -= count
        read, length, left = self._read, _U64.unpack, self._end - self.position
        found: list[str] = []
        try:
            for _ in range(count):
                size = length(read(8))[0]
                left -= 8 + size
                if left < 0:
                    raise self._too_short(f"a string of {size} bytes")
                found.append(read(size).decode())
        except UnicodeDecodeError as error:
            raise self._not_utf8(error) from None
        except struct.error:
            raise self._too_short("a string") from None
        self.position = self._end - left
        return found

    def _too_short(self, wanted: str) -> CheckpointError:
        if self._end < self.file_bytes:
            return refused(self._path, f"its header has no end within {self._end} bytes: {wanted} should follow")
        why = f"{wanted} should follow in its header at byte {self.position}, it has {self.file_bytes}"
        return refused(self._path, why, cut=True)

    def _not_utf8(self, error: UnicodeDecodeError) -> CheckpointError:
        return refused(self._path, f"a string in its header is not UTF-8: {error.reason}")


def refused(path: Path, why: str, fix: Fixes = FETCH_ANEW, *, cut: bool = False) -> CheckpointError:
    """Return the error of a file that cannot be read. cut: it ends too early."""
    what = f"{path} is cut short" if cut else f"{path} is not a GGUF file that can be read"
    return CheckpointError(what, why=why, fix=fix)
