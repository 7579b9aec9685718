"""The weights of a GGUF model: tensors in blocks of codes, read from where its header says they are."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.errors import FETCH_ANEW, CheckpointError, UnsupportedModelError, show
from localllm.gguf.folder import DESCRIPTION as DESCRIPTION
from localllm.gguf.folder import GgufModel, TensorPlace, fingerprint
from localllm.models.checkpoints.safetensors_file import allocate, read_numbers
from localllm.models.checkpoints.weight_file import WeightFile
from localllm.quant.layouts import torch_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from localllm.models.checkpoints.gguf_types import TensorType
    from localllm.quant.coded import CodedMatrix
    from localllm.quant.layouts import WeightLayout

# Of a matrix, at once: what a core's L2 holds of codes and of what is made of them; of what goes into tiles as it is,
# as much as makes waking the other cores for its scales worth it.
_SLAB_BYTES, _TILED_SLAB_BYTES = 1 << 20, 8 << 20
_TILE = 16
_FACTOR, _MOST_FACTORS_BYTES = re.compile(r"(?<!\.router)\.scale$"), 1 << 16  # a router's are the weights of its norm


def open_tensors(folder: Path) -> tuple[dict[str, GgufTensor], list[WeightFile]]:
    """Return the tensors of the model of a folder by their names, and its open files. Raises CheckpointError."""
    model = GgufModel.read(folder)
    files: list[WeightFile] = []
    try:
        for path in model.files:
            files.append(WeightFile(path))
        if folder.resolve().name != fingerprint(model.files[0]):
            why = "it is not the file of which its header was read"
            raise CheckpointError(f"{model.files[0]} has changed", why=why, fix="load the model again")
        all_tensors = {name: GgufTensor(files[place.file], name, place) for name, place in model.tensors.items()}
        for tensor in all_tensors.values():
            tensor.require_room()
        tensors = _with_factors(all_tensors)
    except BaseException:
        for file in files:
            file.close()
        raise
    return tensors, files


def _with_factors(tensors: Mapping[str, GgufTensor]) -> dict[str, GgufTensor]:
    """Return the tensors without those that are factors of others, as NVFP4's matrices have them: one of a matrix, or
    one of each expert. Raises CheckpointError."""
    found = {name: tensor for name, tensor in tensors.items() if not _FACTOR.search(name)}
    for name, tensor in tensors.items():
        if name not in found:
            stem = _FACTOR.sub("", name)
            owner = f"{stem}.weight" if f"{stem}.weight" in found else stem
            if owner not in found:
                why = f"{show(name)} is there, and no matrix that it is a factor of"
                raise CheckpointError(f"{tensor.path} cannot be read", why=why, fix=FETCH_ANEW)
            found[owner] = replace(found[owner], factors=tensor.numbers())
    return found


@dataclass(frozen=True)
class GgufTensor:
    """One tensor; `place` says where and of which type. factors: of the whole, or of each expert."""

    file: WeightFile
    name: str
    place: TensorPlace
    factors: tuple[float, ...] = ()

    def numbers(self) -> tuple[float, ...]:
        """Return a short list of numbers. Raises CheckpointError for any other tensor."""
        import torch

        if self.form != "F32" or len(self.shape) > 1 or self.place.num_bytes > _MOST_FACTORS_BYTES:
            why = f"{show(self.name)} is stored as {self.form} {list(self.shape)}; a short list in F32 is needed"
            raise CheckpointError(f"{self.path} cannot be read", why=why, fix=FETCH_ANEW)
        values = torch.empty(math.prod(self.shape))
        return tuple(self.read_into(values).tolist())

    def _factor(self, part: int | None) -> float:
        if not self.factors:
            return 1.0
        number = part if part is not None and len(self.factors) > 1 else 0
        if number >= len(self.factors):
            why = f"{show(self.name)} has {len(self.factors)} factors and at least {number + 1} experts"
            raise CheckpointError(f"{self.path} cannot be read", why=why, fix=FETCH_ANEW)
        return self.factors[number]

    def require_room(self) -> None:
        end = self.place.begin + self.place.num_bytes
        if end > self.file.size_bytes:
            why = f"{show(self.name)} ends at byte {end}, it has {self.file.size_bytes}"
            raise CheckpointError(f"{self.path} is cut short", why=why, fix=FETCH_ANEW)

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def shape(self) -> tuple[int, ...]:
        return self.place.shape

    @property
    def form(self) -> str:
        return self.place.type

    @property
    def kept(self) -> WeightLayout | None:
        return self._type().kept if len(self.shape) > 1 else None

    @property
    def comes_in_pieces(self) -> bool:
        return True

    def dtype(self) -> str:
        return self._type().dense or "float32"

    def read_into(self, out: Tensor, part: int | None = None) -> Tensor:
        kind = self._type()
        begin, rows, columns = self._matrix(part)
        if kind.dense is not None:
            read_numbers(self.file, begin, torch_dtype(kind.dense), out)
            return out
        flat, first = out.view(rows, columns), 0
        for codes in self.codes(part):
            flat[first : first + len(codes.q)] = codes.dequantize(kind.table)
            first += len(codes.q)
        return out

    def codes(self, part: int | None, /) -> Iterator[CodedMatrix]:
        kind, factor = self._type(), self._factor(part)
        for slab in self._slabs(part, _SLAB_BYTES):
            yield kind.read(slab).times(factor)

    def fill_tiles(self, part: int | None, order: Tensor | None, out: Mapping[str, Tensor], /) -> bool:
        kind, (_, rows, _) = self._type(), self._matrix(part)
        if rows % _TILE or self._factor(part) != 1.0 or not kind.can_fill_tiles():
            return False
        first = 0
        for slab in self._slabs(part, _TILED_SLAB_BYTES if order is None else self.place.num_bytes):
            end = first + len(slab) // _TILE
            kind.fill_tiles(slab, {name: tensor[first:end] for name, tensor in out.items()}, order)
            first = end
        return True

    def chunks(self) -> Iterator[bytes]:
        return self.file.chunks(self.place.begin, self.place.begin + self.place.num_bytes)

    def _slabs(self, part: int | None, slab_bytes: int) -> Iterator[Tensor]:
        """Yield blocks of rows, uint8 [rows, blocks a row, block bytes]: each is what the next one overwrites."""
        import torch

        form, (begin, rows, columns) = self._type().form, self._matrix(part)
        assert form is not None, "there are no blocks"
        blocks = columns // form.columns
        row_bytes = blocks * form.num_bytes
        step = min(rows, max(1, slab_bytes // (row_bytes * _TILE)) * _TILE)
        buffer = allocate((step * row_bytes,), torch.uint8, self.name)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            slab = buffer[: count * row_bytes]
            self.file.fill(slab.numpy().data, begin + first * row_bytes)
            yield slab.view(count, blocks, form.num_bytes)
        self.file.check_unchanged()

    def _matrix(self, part: int | None) -> tuple[int, int, int]:
        """Return where the tensor begins, or its part, its rows and columns."""
        shape = self.shape if part is None else self.shape[1:]
        part_bytes = 0 if part is None else self.place.num_bytes // self.shape[0]
        columns = shape[-1] if shape else 1
        return self.place.begin + (part or 0) * part_bytes, math.prod(shape[:-1]), columns

    def _type(self) -> TensorType:
        from localllm.models.checkpoints.gguf_types import TYPES

        if self.place.type not in TYPES:
            raise UnsupportedModelError(
                f"{self.path}: the tensor {show(self.name)} is stored as {self.form}, which is not read",
                why="its codes fit no format that is computed with, and would take twice the room in another",
                fix="choose a file with Q4_K_M, IQ4_XS or Q2_K in its name",
            )
        return TYPES[self.place.type]
