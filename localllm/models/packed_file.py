"""The file of one packed block: what stands at which byte, how it is written, and whether it is whole.

It is a safetensors file whose every byte but those of the tensors follows from the block's layout, the recipe and the
source: reading one compares the header instead of believing it.

    8 bytes    length of the header
    header     JSON, padded with spaces so that data begins at a multiple of 4096; the checksum of the data is in it
    data       tensors at multiples of 64, padding between them and up to a multiple of 4096 as tensors of their own
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import xxhash

from localllm.errors import CheckpointError
from localllm.hub.packed import PACKED_INDEX, is_whole
from localllm.hub.repo_cache import sync_directory
from localllm.models.layout import ALIGNMENT_BYTES, EXPERTS, BlockLayout, PlacedTensor, rounded_up
from localllm.models.strict_json import JsonLimits, read_json_object
from localllm.offload.streaming.ring import PAGE_BYTES
from localllm.quant.layouts import Sizes, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

LAYOUT_VERSION = 1  # of these files and of the index: grows when older bytes can no longer be read
CHECKSUM = re.compile(r"[0-9a-f]{32}")  # XXH3-128 of all data: 20 GB/s, where blake2b has 0.9 and would slow a load
TEMPORARY = re.compile(r"\..+\.tmp")
DTYPES: Mapping[str, str] = MappingProxyType(
    {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int32": "I32", "int8": "I8", "uint8": "U8"}
)
_LIMITS = JsonLimits(size_bytes=16 << 20)
_LENGTH_BYTES = 8
_NO_CHECKSUM = "0" * 32
_READ_BYTES = 8 << 20
_CHECK_BYTES = 1 << 20


def read_tensor(placed: PlacedTensor, descriptor: int, data_begin: int) -> Tensor:
    """Read a tensor from an open file. Raises OSError, and EOFError where the file ends before."""
    import torch

    content = bytearray(os.pread(descriptor, placed.spec.nbytes, data_begin + placed.begin))
    if len(content) < placed.spec.nbytes:
        raise EOFError(f"it ends before byte {data_begin + placed.end}")
    return torch.frombuffer(content, dtype=placed.spec.torch_dtype).view(placed.spec.shape)


@dataclass(frozen=True)
class PackedFile:
    """The places of all tensors of a block in its file. They begin so many bytes behind `data_begin`."""

    name: str  # the block's
    metadata: Mapping[str, str]
    tensors: Mapping[str, PlacedTensor]  # in the order of their bytes
    padding: Mapping[str, PlacedTensor]
    data_begin: int  # in bytes from the start of the file
    file_bytes: int

    @classmethod
    def of(cls, layout: BlockLayout, recipe: Sizes, source: str) -> PackedFile:
        """source: what identifies the checkpoint."""
        metadata = {
            "format": "localllm-packed",
            "layout_version": str(LAYOUT_VERSION),
            "block": layout.name,
            "recipe": recipe.name,
            "blocks": recipe.blocks.name,
            "embedding": recipe.embedding.name,
            "source": source,
        }
        tensors, padding, end = _placed(layout.specs(recipe))
        data_begin = rounded_up(_LENGTH_BYTES + len(_json(metadata, _NO_CHECKSUM, tensors, padding)), PAGE_BYTES)
        return cls(layout.name, metadata, tensors, padding, data_begin, data_begin + end)

    @property
    def file_name(self) -> str:
        return f"{self.name}.safetensors"

    def header(self, checksum: str) -> bytes:
        """Return the first `data_begin` bytes of the file."""
        text = _json(self.metadata, checksum, self.tensors, self.padding)
        length = self.data_begin - _LENGTH_BYTES
        return length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length)

    def views(self, buffer: Tensor, without: str = "") -> dict[str, Tensor]:
        """Return the tensors in the bytes of a whole file, uint8 [file_bytes], or of its beginning, where the last one
        is left out: nothing is copied."""
        data = buffer[self.data_begin :]
        return {
            name: data[placed.begin : placed.end].view(placed.spec.torch_dtype).view(placed.spec.shape)
            for name, placed in self.tensors.items()
            if name != without
        }

    def checksum_of(self, path: Path) -> str | None:
        """Return the checksum of the file at `path`; None where it is not exactly this block, whole and undamaged."""
        if not path.is_file():  # a pipe would be waited for
            return None
        digest = xxhash.xxh3_128()
        try:
            with path.open("rb", buffering=0) as file:
                header = file.read(self.data_begin)
                chunk = bytearray(_CHECK_BYTES)  # one for all: this also runs where memory is short
                while count := file.readinto(chunk):
                    digest.update(memoryview(chunk)[:count])
        except OSError:
            return None
        checksum = digest.hexdigest()
        return checksum if header == self.header(checksum) else None


def needs_conversion(directory: Path) -> bool:
    """Return whether there is no finished packed model, or one whose layout is older than what is read here."""
    if not is_whole(directory):
        return True
    try:
        version = read_index(directory).get("layout_version")
    except CheckpointError:
        return False  # damage is for `PackedModel.open` to tell
    return type(version) is int and version < LAYOUT_VERSION


def read_index(directory: Path) -> dict[str, object]:
    """Return whatever index.json holds. Raises CheckpointError where that is not a JSON object, or nothing."""
    return read_json_object(directory / PACKED_INDEX, _LIMITS)


def write_block(
    file: PackedFile, directory: Path, parts: Iterable[Mapping[str, Tensor]], written: Callable[[int], None]
) -> str:
    """Write the block from `parts`, its tensors in order, each whole or in pieces of its first dimension, and give it
    its name when it is whole; returns its checksum.

    `written` hears of each part's bytes. Raises OSError; then, and when `parts` raises, nothing is left behind.
    """
    import torch

    digest = xxhash.xxh3_128()
    position = 0
    with NewFile(directory / file.file_name) as new:
        new.seek(file.data_begin)

        def append(data: memoryview) -> None:
            nonlocal position
            new.write(data)
            digest.update(data)
            position += len(data)

        names = iter(file.tensors)
        current = ""
        for part in parts:
            for name, tensor in part.items():
                if name != current:
                    assert not current or position == file.tensors[current].end, f"{current} is not whole"
                    current = next(names)
                    append(memoryview(bytes(file.tensors[current].begin - position)))
                spec = file.tensors[current].spec
                assert (name, tensor.shape[1:], tensor.dtype) == (current, spec.shape[1:], spec.torch_dtype)
                append(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            written(sum(tensor.nbytes for tensor in part.values()))
        assert next(names, None) is None and position == file.tensors[current].end
        append(memoryview(bytes(file.file_bytes - file.data_begin - position)))
        checksum = digest.hexdigest()
        new.seek(0)
        new.write(memoryview(file.header(checksum)))
        new.publish()
    return checksum


class NewFile:
    """A file that gets its name when it is whole and on the disk; until then, and if it fails, no other file changes.

    Writing raises OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")

    def __enter__(self) -> NewFile:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(self._temporary, flags, 0o644)
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)
        self._temporary.unlink(missing_ok=True)

    def seek(self, position: int) -> None:
        os.lseek(self._descriptor, position, os.SEEK_SET)

    def write(self, data: memoryview) -> None:
        while data:
            data = data[os.write(self._descriptor, data[:_READ_BYTES]) :]

    def publish(self) -> None:
        os.fsync(self._descriptor)
        self._temporary.replace(self._path)
        sync_directory(self._path.parent)


def _placed(specs: Mapping[str, TensorSpec]) -> tuple[dict[str, PlacedTensor], dict[str, PlacedTensor], int]:
    """Return tensors, padding, and where the data ends. The format allows no bytes that belong to no tensor."""
    tensors: dict[str, PlacedTensor] = {}
    padding: dict[str, PlacedTensor] = {}
    position = 0

    def pad_to(multiple: int) -> int:
        end = rounded_up(position, multiple)
        if end > position:
            padding[f"padding.{len(padding)}"] = PlacedTensor(TensorSpec((end - position,), "uint8"), position)
        return end

    for name, spec in specs.items():
        tensors[name] = PlacedTensor(spec, pad_to(PAGE_BYTES if name == EXPERTS else ALIGNMENT_BYTES))
        position = tensors[name].end
    return tensors, padding, pad_to(PAGE_BYTES)


def _json(
    metadata: Mapping[str, str],
    checksum: str,
    tensors: Mapping[str, PlacedTensor],
    padding: Mapping[str, PlacedTensor],
) -> bytes:
    entries: dict[str, object] = {"__metadata__": {**metadata, "checksum": checksum}}
    for name, placed in sorted({**tensors, **padding}.items(), key=lambda item: item[1].begin):
        offsets = [placed.begin, placed.end]
        entries[name] = {"dtype": DTYPES[placed.spec.dtype], "shape": placed.spec.shape, "data_offsets": offsets}
    return json.dumps(entries, separators=(",", ":")).encode("ascii")
