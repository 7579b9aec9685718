"""A GGUF model as a model folder: the files that all else reads of a model, made of its header.

    config.json, tokenizer.json, tokenizer_config.json    as Hugging Face's would be
    gguf.json                                             where each tensor is, and how it is stored

The weights stay where they are. Whoever reads them needs no header any more, whose vocabulary takes a second to read.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import CheckpointError
from localllm.gguf.header import split_files

DESCRIPTION = "gguf.json"
_VERSION = 6  # of what is made of a file: grows when something else would be


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor is. file: its number among the model's. type: "Q4_K". begin: in bytes from the start of the
    file."""

    file: int
    type: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


@dataclass(frozen=True)
class GgufModel:
    """The weights of a GGUF model: its files, and its tensors by Hugging Face's names.

    pairs_heads, norm_offset, tiles_value_heads: see `names.GgufForm`.
    num_extra_layers: behind the last, to predict further tokens.
    """

    files: tuple[Path, ...]
    tensors: Mapping[str, TensorPlace]
    pairs_heads: bool
    norm_offset: float
    tiles_value_heads: bool
    num_extra_layers: int

    @classmethod
    def read(cls, folder: Path) -> GgufModel:
        """Read it from a folder with the files of `conversion.model_files`. Raises CheckpointError."""
        path = folder / DESCRIPTION
        try:
            found = json.loads(path.read_bytes())
            tensors = {
                name: TensorPlace(file, kind, tuple(shape), begin, num_bytes)
                for name, (file, kind, shape, begin, num_bytes) in found["tensors"].items()
            }
            files = tuple(map(Path, found["files"]))
            form = (found[name] for name in ("pairs_heads", "norm_offset", "tiles_value_heads", "num_extra_layers"))
            return cls(files, tensors, *form)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            fix = f"rm -r {shlex.quote(str(folder))}"
            raise CheckpointError(f"{path} cannot be read", why=str(error)[:200], fix=fix) from None


def fingerprint(path: Path) -> str:
    """Hash the place, sizes and times of a model's files to 32 hexadecimal digits. Raises CheckpointError."""
    seen: list[object] = [_VERSION]
    for file in split_files(path):
        try:
            state = file.stat()
        except OSError as error:
            why = error.strerror or "unknown"
            raise CheckpointError(f"{file} cannot be read", why=why, fix=f"ls -l {shlex.quote(str(file))}") from None
        seen.append((str(file), state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino))
    return hashlib.blake2b(json.dumps(seen).encode(errors="surrogateescape"), digest_size=16).hexdigest()
