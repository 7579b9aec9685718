"""The sources of a block's tensors: a checkpoint, a packed model, or random numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from localllm.errors import FETCH_ANEW, CheckpointError
from localllm.kernels.sizes import TILE
from localllm.layers.config import AttentionConfig
from localllm.models.architecture import ModelConfig
from localllm.models.block_layouts import block_layouts
from localllm.models.checkpoints.checkpoint import Checkpoint
from localllm.models.checkpoints.safetensors_file import allocate
from localllm.models.layout import (
    CHECKSUM_BYTES,
    EXPERTS,
    SHARED_CHECKSUM,
    BlockLayout,
    HeadCut,
    Matrix,
    Record,
    Vector,
)
from localllm.models.row_order import as_computed, is_scaled, row_order, row_scales
from localllm.models.stored_matrices import (
    cut_of,
    has_slabs,
    held_bytes,
    keeps_codes,
    read_dtype,
    slab_rows,
    split,
    stored_config,
    stored_rows,
)
from localllm.quant.coded import CodedMatrix, joined, pack_codes, require_fp16
from localllm.quant.layouts import StackedLayout, torch_dtype
from localllm.quant.recipe import Recipe
from localllm.quant.weight_format import WeightFormat, require_finite


class BlockSource(Protocol):
    def tensors(self, layout: BlockLayout) -> dict[str, Tensor]:
        """Return the block's tensors by the names, shapes and dtypes of `layout.specs(recipe)`, on the CPU.

        Raises CheckpointError naming what is missing, misshapen or damaged.
        """

    def finish(self) -> None:
        """Called after the last block. Raises CheckpointError where the model holds what nobody asked for."""


class CheckpointBlocks:
    """A checkpoint read block by block and brought into a recipe's formats; unquantized weights are read in place."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, recipe: Recipe) -> None:
        """The head is read where the checkpoint has one of its own, whatever `config` says; see `self.config`."""
        self.checkpoint = checkpoint
        self.config = stored_config(checkpoint, config)
        self.recipe = recipe

    def check(self) -> None:
        """Check all of the checkpoint that its headers tell. Raises CheckpointError."""
        for layout in block_layouts(self.config):
            experts = layout.experts
            of_experts = (experts.matrices(index) for index in range(experts.num_experts)) if experts else ()
            for matrix in itertools.chain(layout.matrices, *of_experts):
                if (cut := cut_of(self.checkpoint, matrix)) is not None:
                    self.checkpoint.expect(f"{cut.stored}.weight", cut.shape(matrix))
                    continue
                for name, rows in stored_rows(self.checkpoint, matrix, "weight").items():
                    self.checkpoint.expect(name, (rows, matrix.in_features))
                for name, rows in stored_rows(self.checkpoint, matrix, "bias").items() if matrix.has_bias else ():
                    self.checkpoint.expect(name, (rows,))
            for vector in layout.vectors:
                for name, shape in self._vector_shapes(vector).items():
                    self.checkpoint.expect(name, shape)
        self.finish()

    def tensors(self, layout: BlockLayout) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        specs, filled = layout.specs(self.recipe), dict[str, int]()
        for part in self.parts(layout):
            for name, piece in part.items():
                first, spec = filled.get(name, 0), specs[name]
                filled[name] = first + len(piece)
                if piece.shape == spec.shape:
                    tensors[name] = piece
                    continue
                if name not in tensors:
                    tensors[name] = allocate(spec.shape, spec.torch_dtype, layout.name)
                tensors[name][first : filled[name]] = piece
        return tensors

    def parts(self, layout: BlockLayout) -> Iterator[dict[str, Tensor]]:
        """Yield the block's tensors one matrix at a time, an embedding's in pieces, and one expert at a time, in order:
        no more of the checkpoint is in memory at once."""
        digest = xxhash.xxh3_128()
        matrices = itertools.chain.from_iterable(map(self._matrix_parts, layout.matrices))
        for part in itertools.chain(matrices, map(self._vector, layout.vectors)):
            if layout.experts is not None:
                add_to_digest(digest, part)
            yield part
        if layout.experts is None:
            return
        yield {SHARED_CHECKSUM: checksum_tensor(digest.digest())}
        record = layout.experts.record(self.recipe)
        for index in range(layout.experts.num_experts):
            tensors: dict[str, Tensor] = {}
            for matrix in layout.experts.matrices(index):
                tensors |= self._matrix(matrix)
            yield {EXPERTS: written_record(record, tensors).unsqueeze(0)}

    def _matrix_parts(self, matrix: Matrix) -> Iterator[dict[str, Tensor]]:
        if not has_slabs(matrix, self.recipe, self.checkpoint):
            yield self._matrix(matrix)
            return
        form, columns = matrix.format(self.recipe), matrix.in_features
        (stored,) = stored_rows(self.checkpoint, matrix, "weight")
        dtype = torch_dtype(read_dtype({stored: matrix.out_features}, form, self.checkpoint, columns))
        self.checkpoint.expect(stored, (matrix.out_features, columns))
        first_name, *others = form.specs(matrix.out_features, columns)
        rest: dict[str, list[Tensor]] = {name: [] for name in others}
        step = slab_rows(columns)
        for first in range(0, matrix.out_features, step):
            rows = min(step, matrix.out_features - first)
            weight = self.checkpoint.read_slab(stored, first, (rows, columns), dtype)
            with self._blaming(stored):
                tensors = form.quantize(as_computed(weight, matrix, [stored]))
            yield {f"{matrix.name}.{first_name}": tensors[first_name]}
            for name in others:
                rest[name].append(tensors[name])
        yield {f"{matrix.name}.{name}": torch.cat(pieces) for name, pieces in rest.items()}

    def _matrix(self, matrix: Matrix) -> dict[str, Tensor]:
        """Return a matrix's tensors by their names in its block or its record."""
        tensors = {f"{matrix.name}.{name}": tensor for name, tensor in self.quantized(matrix).items()}
        if matrix.has_bias:
            rows = stored_rows(self.checkpoint, matrix, "bias")
            bias = self.checkpoint.read_rows(rows, (), torch.float32)
            for name, part in self._as_stored(matrix, "bias", bias):
                self._finite(name, part)
            tensors[f"{matrix.name}.linear_bias"] = as_computed(bias, matrix, rows)
        return tensors

    def _vector(self, vector: Vector) -> dict[str, Tensor]:
        parts = []
        for name, shape in self._vector_shapes(vector).items():
            stored = self.checkpoint.read(name, shape, torch.float32)
            part = self._finite(name, (-stored).log() if vector.is_logarithm else stored)
            parts.append(part.view(-1, vector.taps))
        values = torch.cat(parts).T.reshape(-1)
        return {vector.name: values + vector.offset}

    def _vector_shapes(self, vector: Vector) -> dict[str, tuple[int, ...]]:
        """Return the tensors of the checkpoint that make up a vector, and their shapes."""
        if vector.taps > 1:
            stored = self.checkpoint.stored_rows(vector.stored, self._conv_parts(vector))
            return {name: (rows, 1, vector.taps) for name, rows in stored.items()}
        if vector.parts and not self.checkpoint.has(vector.stored):
            return {name: self._stored_shape(name, rows) for name, rows in vector.parts}
        return {vector.stored: self._stored_shape(vector.stored, vector.features)}

    def _stored_shape(self, name: str, features: int) -> tuple[int, ...]:
        """Return the shape of so many numbers: some are stored with other dimensions than one."""
        shape = self.checkpoint.shape(name) if self.checkpoint.has(name) else ()
        return shape if self.checkpoint.has(name) and math.prod(shape) == features else (features,)

    def _conv_parts(self, vector: Vector) -> dict[str, int]:
        """Return the channels of each part of a convolution: transformers cuts them where it saves a model, into equal
        ones, whatever each was."""
        parts, channels = dict(vector.parts), vector.features // vector.taps
        if not parts or not all(map(self.checkpoint.has, parts)):
            return {vector.stored: channels}
        found = {name: self.checkpoint.shape(name)[0] for name in parts}
        return found if sum(found.values()) == channels else parts

    def held_bytes(self, layout: BlockLayout) -> int:
        """Return the most bytes that are held at once while `parts` are read."""
        return held_bytes(layout, self.recipe, self.checkpoint)

    def finish(self) -> None:
        if self.config.reads_states:  # it is in the files of another model
            return
        first = self.config.num_layers
        extra = range(first, first + self.config.stored.num_extra_layers)
        without = [f"model.layers.{layer}." for layer in extra]
        # What makes keys and values is stored for layers that read another's, too.
        mixers = enumerate(layer.mixer for layer in self.config.layers)
        readers = [i for i, each in mixers if isinstance(each, AttentionConfig) and each.kv_of_layer is not None]
        without += [f"model.layers.{layer}.self_attn.{part}" for layer in readers for part in ("k_", "v_")]
        unused = self.checkpoint.unused(tuple(without))
        if unused:
            raise CheckpointError(
                f"the checkpoint holds tensors that a {self.config.model_type} model has no use for",
                why=f"{len(unused)} of them, the first: {unused[0]}; config.json and weights do not belong together",
                fix=FETCH_ANEW,
            )

    def quantized(self, matrix: Matrix) -> dict[str, Tensor]:
        """Return the tensors of a matrix by their names in its format. Raises CheckpointError."""
        return self._quantized(matrix, matrix.format(self.recipe))

    def _quantized(self, matrix: Matrix, form: WeightFormat) -> dict[str, Tensor]:
        if isinstance(form, StackedLayout):
            parts = zip(form.parts, split(matrix, form), strict=True)
            return {
                f"{number}.{name}": tensor
                for number, ((part, _), rows) in enumerate(parts)
                for name, tensor in self._quantized(rows, part).items()
            }
        if (cut := cut_of(self.checkpoint, matrix)) is not None:
            with self._blaming(cut.stored):
                return form.quantize(self._cut_out(matrix, cut))
        rows = stored_rows(self.checkpoint, matrix, "weight")
        if keeps_codes(self.checkpoint, rows, form):
            return self._kept(matrix, rows, form)
        dtype = torch_dtype(read_dtype(rows, form, self.checkpoint, matrix.in_features))
        weight = self.checkpoint.read_rows(rows, (matrix.in_features,), dtype)  # [N, K]
        quantize = form.quantize
        if matrix.role == "router":  # one NaN in it would be every token's
            for name, part in self._as_stored(matrix, "weight", weight):
                self._finite(name, part)
        try:
            return quantize(as_computed(weight, matrix, rows))
        except CheckpointError:
            for name, part in self._as_stored(matrix, "weight", weight):
                with self._blaming(name):
                    quantize(part)
            raise

    def _cut_out(self, matrix: Matrix, cut: HeadCut) -> Tensor:
        """Return a matrix that consists of some rows of each head of another, fp32."""
        whole = self.checkpoint.read(f"{cut.stored}.weight", cut.shape(matrix), torch.float32)
        own = whole.view(cut.heads, cut.rows, -1)[:, cut.first : cut.first + cut.count(matrix)]
        return (own.mT if cut.transposes else own).reshape(matrix.out_features, matrix.in_features)

    def _kept(self, matrix: Matrix, stored: Mapping[str, int], form: WeightFormat) -> dict[str, Tensor]:
        """Return the tensors of a matrix whose codes are kept: a part after the other where parts end with a tile, else
        all of it at once."""
        columns, order = matrix.in_features, row_order(matrix, stored)
        specs = form.specs(matrix.out_features, columns)
        tensors = {name: allocate(spec.shape, spec.torch_dtype, matrix.name) for name, spec in specs.items()}
        if any(rows % TILE for rows in [*stored.values()][:-1]):
            pieces = [self._codes(matrix, name, rows) for name, rows in stored.items()]
            whole = joined([codes for piece in pieces for codes in piece])
            with self._blaming(next(iter(stored))):
                return pack_codes(form, whole if order is None else whole.rows(order))
        first = 0
        for name, rows in stored.items():
            begin, end = first // TILE, -(-(first + rows) // TILE)
            part = {kind: tensor[begin:end] for kind, tensor in tensors.items()}
            with self._blaming(name):
                self._fill(
                    matrix, name, rows, None if order is None else order[first : first + rows] - first, form, part
                )
            first += rows
        return tensors

    def _fill(
        self,
        matrix: Matrix,
        name: str,
        rows: int,
        order: Tensor | None,
        form: WeightFormat,
        out: Mapping[str, Tensor],
    ) -> None:
        """Fill the tensors of a part of a matrix with its rows in this order."""
        shape = (rows, matrix.in_features)
        if not is_scaled(matrix) and self.checkpoint.fill_tiles(name, shape, order, out):
            for kind in out.keys() - {"qweight"}:
                require_fp16(out[kind], kind)
            return
        pieces: Iterable[CodedMatrix] = self._codes(matrix, name, rows)
        if order is not None:
            pieces = [joined([*pieces]).rows(order)]
        first = 0
        for codes in pieces:
            for kind, packed in pack_codes(form, codes).items():
                out[kind][first : first + len(packed)] = packed
            first += -(-len(codes.q) // TILE)

    def _codes(self, matrix: Matrix, name: str, rows: int) -> Iterator[CodedMatrix]:
        """Yield the codes of a part of a matrix, as they are computed with."""
        names = [f"{part}.weight" for part in matrix.parts]
        first = sum([*matrix.parts.values()][: names.index(name)]) if name in names else 0
        for codes in self.checkpoint.codes(name, (rows, matrix.in_features)):
            yield codes.times(row_scales(matrix, first, len(codes.q)))
            first += len(codes.q)

    def _as_stored(self, matrix: Matrix, kind: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Return the rows of a matrix's weight or bias by the names that the checkpoint has for them."""
        rows = stored_rows(self.checkpoint, matrix, kind)
        return zip(rows, torch.split(tensor, [*rows.values()]), strict=True)

    def _finite(self, stored: str, tensor: Tensor) -> Tensor:
        with self._blaming(stored):
            require_finite(tensor if tensor.dim() == 2 else tensor.unsqueeze(0))
        return tensor

    @contextmanager
    def _blaming(self, stored: str) -> Iterator[None]:
        """An error about weights names the checkpoint and the tensor."""
        try:
            yield
        except CheckpointError as error:
            what = f"{self.checkpoint.place}: {stored}: {error.what}"
            raise type(error)(what, why=error.why, fix=error.fixes) from None


def written_record(record: Record, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return an expert's record, uint8 [bytes]. tensors: by their names in it."""
    content = torch.zeros(record.num_bytes, dtype=torch.uint8)
    for name, placed in record.tensors.items():
        content[placed.begin : placed.end] = tensors[name].contiguous().view(-1).view(torch.uint8)
    content[-CHECKSUM_BYTES:] = checksum_tensor(xxhash.xxh3_128_digest(content[:-CHECKSUM_BYTES].numpy().data))
    return content


def add_to_digest(digest: xxhash.xxh3_128, tensors: Mapping[str, Tensor]) -> None:
    """Add the bytes of these tensors, in their order."""
    for tensor in tensors.values():
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def checksum_tensor(digest: bytes) -> Tensor:
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)
