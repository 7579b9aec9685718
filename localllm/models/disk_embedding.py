"""Rows of a packed matrix read from its file when they are asked for: an embedding of which every token needs one."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from localllm.errors import CheckpointError
from localllm.kernels.tile16 import TILE
from localllm.models.layout import PlacedTensor
from localllm.models.packed_file import PackedFile, read_tensor
from localllm.quant.weight_format import WeightFormat

_AT_ONCE = 64  # tokens: their tiles, of 64 kB each in INT8 at a width of 4096, are no burden then


class DiskEmbedding:
    """The rows of a matrix [V, K] in a file that is open until this is closed.

    Read through the page cache, which keeps what is asked for often without being the process's own memory.
    """

    def __init__(
        self, path: Path, file: PackedFile, matrix: str, weight_format: WeightFormat, in_features: int, fix: str
    ) -> None:
        """matrix: its name in the block. fix: the command that makes the file anew. Raises CheckpointError."""
        self.device = torch.device("cpu")
        self._path, self._fix = path, fix
        self._format, self._in_features = weight_format, in_features
        # Rows that a part of the tensors belongs to: a tile of them, where the format has tiles.
        one, tile = (sum(spec.nbytes for spec in weight_format.specs(rows, in_features).values()) for rows in (1, TILE))
        self._unit = TILE if one == tile else 1
        self._specs = weight_format.specs(self._unit, in_features)
        self._begins = {name: file.data_begin + file.tensors[f"{matrix}.{name}"].begin for name in self._specs}
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._stamp = self._stamped()
        except OSError as error:
            raise self._refusal("cannot be read", error.strerror or "unknown") from None

    def close(self) -> None:
        os.close(self._descriptor)

    def rows(self, indices: Tensor) -> Tensor:
        """[len(indices), K] as the format gives them. Raises CheckpointError where the file has changed or is gone."""
        first, *rest = torch.split(indices, _AT_ONCE)
        some = self._some(first)
        if not rest:
            return some
        found = some.new_empty((len(indices), self._in_features))
        found[:_AT_ONCE] = some
        for place, part in enumerate(rest, start=1):
            found[place * _AT_ONCE : (place + 1) * _AT_ONCE] = self._some(part)
        return found

    def _some(self, indices: Tensor) -> Tensor:
        units, places = torch.unique(indices // self._unit, return_inverse=True)
        try:
            if self._stamped() != self._stamp:
                raise self._refusal("was changed while it was in use", "something has written to it")
            parts = [{name: self._tensor(name, unit) for name in self._specs} for unit in units.tolist()]
        except (OSError, EOFError) as error:
            raise self._refusal("cannot be read", str(error)) from None
        tensors = {name: torch.cat([part[name] for part in parts]) for name in self._specs}
        return self._format.rows(tensors, places * self._unit + indices % self._unit, self._in_features)

    def _tensor(self, name: str, unit: int) -> Tensor:
        spec = self._specs[name]
        return read_tensor(PlacedTensor(spec, unit * spec.nbytes), self._descriptor, self._begins[name])

    def _stamped(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    def _refusal(self, what: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path} {what}", why=why, fix=self._fix)
