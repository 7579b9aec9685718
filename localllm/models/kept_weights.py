"""The recipe that keeps a checkpoint's own codes: a format for each of its matrices."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping

from localllm.models.architecture import ModelConfig
from localllm.models.block_layouts import block_layouts
from localllm.models.checkpoints.checkpoint import Checkpoint
from localllm.models.layout import BlockLayout, Matrix
from localllm.quant.layouts import (
    DEFAULT,
    KEPT,
    SIZES,
    CodedLayout,
    Int8Layout,
    Sizes,
    StackedLayout,
    WeightLayout,
)

# Of what is not in codes beside matrices that are: 8 bits with a scale for each 32, which nothing shows of.
_BESIDE, _BESIDE_EMBEDDING = CodedLayout("int8", 32), Int8Layout()


def kept_weights(checkpoint: Checkpoint, config: ModelConfig) -> Sizes | None:
    """Return the recipe; None for a checkpoint whose blocks are not in codes that can be kept.

    config: with a head of its own where the checkpoint has one. Raises CheckpointError for a tensor that is missing.
    """
    layouts = block_layouts(config)
    if not any(_is_in_codes(checkpoint, layout) for layout in layouts[1:-1]):
        return None
    own = {matrix.stored: form for layout in layouts for matrix, form in _formats(checkpoint, layout)}
    num_bytes: Counter[WeightLayout] = Counter()
    for layout in layouts[1:-1]:
        for matrix in (*layout.matrices, *(layout.experts.matrices(0) if layout.experts else ())):
            form = own.get(matrix.stored, SIZES[DEFAULT].router)
            for part, rows in form.parts if isinstance(form, StackedLayout) else ((form, matrix.out_features),):
                num_bytes[part] += sum(spec.nbytes for spec in part.specs(rows, matrix.in_features).values())
    most = next(form for form, _ in num_bytes.most_common() if form.weights is not None)
    embedding = own[layouts[0].matrices[0].stored]
    return Sizes(f"{KEPT}-{most.name}", most, embedding, SIZES[DEFAULT].router, own)


def _is_in_codes(checkpoint: Checkpoint, layout: BlockLayout) -> bool:
    matrices = (*layout.matrices, *(layout.experts.matrices(0) if layout.experts else ()))
    return any(checkpoint.kept(name) is not None for matrix in matrices for name in _stored(checkpoint, matrix))


def _formats(checkpoint: Checkpoint, layout: BlockLayout) -> Iterator[tuple[Matrix, WeightLayout]]:
    """Yield the matrices of a block with their formats; all its experts have those of one record."""
    for matrix in layout.matrices:
        if matrix.role != "router":
            yield matrix, _format(checkpoint, matrix)
    if layout.experts is None:
        return
    experts = [layout.experts.matrices(index) for index in range(layout.experts.num_experts)]
    for same in zip(*experts, strict=True):
        found = {_format(checkpoint, matrix) for matrix in same}
        form = found.pop() if len(found) == 1 else _BESIDE
        form = _BESIDE if isinstance(form, StackedLayout) else form  # an expert's gate and up are one product
        yield from ((matrix, form) for matrix in same)


def _format(checkpoint: Checkpoint, matrix: Matrix) -> WeightLayout:
    beside = _BESIDE_EMBEDDING if matrix.role == "embedding" else _BESIDE
    found = [(checkpoint.kept(name) or beside, rows) for name, rows in _stored(checkpoint, matrix).items()]
    if not found:
        return beside
    runs = [(form, sum(rows for _, rows in run)) for form, run in itertools.groupby(found, key=lambda part: part[0])]
    return runs[0][0] if len(runs) == 1 else StackedLayout(tuple(runs))


def _stored(checkpoint: Checkpoint, matrix: Matrix) -> Mapping[str, int]:
    """Return the names and rows under which a matrix is stored; none where it is cut out of another."""
    parts = {f"{name}.weight": rows for name, rows in matrix.parts.items()}
    if matrix.cut is not None and not any(map(checkpoint.has, parts)):
        return {}
    return checkpoint.stored_rows(f"{matrix.stored}.weight", parts)
