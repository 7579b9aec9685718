"""How a checkpoint stores the matrices of a block, and what is held of them while they are packed.

Without torch: plans count with it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from functools import partial

from localllm.errors import FETCH_ANEW, CheckpointError
from localllm.kernels.sizes import TILE
from localllm.models.architecture import ModelConfig
from localllm.models.checkpoints.checkpoint import Checkpoint
from localllm.models.layout import BlockLayout, HeadCut, Matrix
from localllm.quant.layouts import ITEM_BYTES, Sizes, StackedLayout, WeightLayout

# Of codes that are kept: a byte a weight, as many once more while they are packed, and scales in fp32.
_CODE_BYTES, _PIECE_WEIGHTS = 3, 16 << 20
_SLAB_WEIGHTS = 32 << 20  # of an embedding, which may be half of a model, at once


def stored_config(checkpoint: Checkpoint, config: ModelConfig) -> ModelConfig:
    """Return the config, with a head of its own where the checkpoint has one, whatever it says."""
    own_head = config.tie_word_embeddings and not config.reads_states and checkpoint.stores_own_head()
    if own_head and config.per_layer is not None:
        what = f"{checkpoint.place} has a head of its own beside embeddings for each layer"
        raise CheckpointError(what, why="config.json says that it is the embedding", fix=FETCH_ANEW)
    return dataclasses.replace(config, tie_word_embeddings=False) if own_head else config


def blocks_at_once(recipe: Sizes) -> int:
    """Return how many blocks are packed at once. Codes that are kept are brought into tiles faster than a disk takes
    them, so that one block is read while another is written; where weights are calibrated, all cores work on one."""
    return 2 if recipe.own else 1


def held_bytes(layout: BlockLayout, recipe: Sizes, checkpoint: Checkpoint | None) -> int:
    """Return the most bytes that are held at once while a block is packed: a matrix as it is read, what is made of it,
    and what was made of the one before. Norms and biases are not worth counting.

    checkpoint: None where nobody has read it: it is taken to be in 16 bits, as almost all are.
    """
    most = before = 0
    for matrix in (*layout.matrices, *(() if layout.experts is None else layout.experts.matrices(0))):
        form = matrix.format(recipe)
        if checkpoint is None or has_slabs(matrix, recipe, checkpoint):
            matrix = _slab_of(matrix)
        made = sum(spec.nbytes for spec in form.specs(matrix.out_features, matrix.in_features).values())
        parts = [part for part, _ in form.parts] if isinstance(form, StackedLayout) else [form]
        read = max(map(partial(_read_bytes, checkpoint=checkpoint), split(matrix, form), parts))
        beside = made if any(part.specs(1, 1).keys() != {"weight"} for part in parts) else 0  # else it is read in place
        most = max(most, before + read + beside)
        before = made
    if layout.experts is not None:
        most += layout.experts.record(recipe).num_bytes
    return most


def has_slabs(matrix: Matrix, recipe: Sizes, checkpoint: Checkpoint) -> bool:
    """Return whether a matrix is read and packed in pieces of its rows: an embedding, unless its codes are kept, or it
    is read in place."""
    is_small = matrix.out_features <= slab_rows(matrix.in_features)
    if matrix.role != "embedding" or is_small or "weight" in matrix.format(recipe).specs(1, 1):
        return False
    stored = stored_rows(checkpoint, matrix, "weight")
    return len(stored) == 1 and all(map(checkpoint.has_slabs, stored))


def slab_rows(columns: int) -> int:
    """Return the rows of an embedding that are packed at once: whole tiles."""
    return max(_SLAB_WEIGHTS // columns // TILE, 1) * TILE


def _slab_of(matrix: Matrix) -> Matrix:
    """Return an embedding with no more rows than are packed at once; any other matrix as it is."""
    if matrix.role != "embedding":
        return matrix
    rows = min(matrix.out_features, slab_rows(matrix.in_features))
    return dataclasses.replace(matrix, parts={next(iter(matrix.parts)): rows})


def _read_bytes(matrix: Matrix, form: WeightLayout, checkpoint: Checkpoint | None) -> int:
    """Return the bytes that are held of a matrix while it is brought into a format, beside what is made of it."""
    N, K = matrix.out_features, matrix.in_features
    if checkpoint is not None and (cut := cut_of(checkpoint, matrix)) is not None:
        return ITEM_BYTES["float32"] * (math.prod(cut.shape(matrix)) + N * K) + form.working_bytes(K)
    rows = {} if checkpoint is None else stored_rows(checkpoint, matrix, "weight")
    in_pieces = checkpoint is None or all(map(checkpoint.comes_in_pieces, rows))
    if checkpoint is not None and keeps_codes(checkpoint, rows, form):
        # Codes as bytes with their scales.
        is_ordered = matrix.interleaved is not None or matrix.grouped is not None
        is_whole = not in_pieces or is_ordered or any(count % TILE for count in rows.values())
        return _CODE_BYTES * (N * K if is_whole else min(N * K, _PIECE_WEIGHTS))
    is_in_place = "weight" in form.specs(1, 1)
    read = N * K * ITEM_BYTES[read_dtype(rows, form, checkpoint, K)]
    decoded = 0 if in_pieces else N * K * ITEM_BYTES["float32"]  # before it is copied into its place
    return read + decoded + (0 if is_in_place else form.working_bytes(K))


def split(matrix: Matrix, form: WeightLayout) -> list[Matrix]:
    """Return the matrices that a format stores one below the other."""
    if not isinstance(form, StackedLayout):
        return [matrix]
    counts = [rows for _, rows in form.parts]
    begins = itertools.accumulate(counts, initial=0)
    return [matrix.rows_of(first, rows) for first, rows in zip(begins, counts, strict=False)]


def keeps_codes(checkpoint: Checkpoint, stored: Mapping[str, int], form: WeightLayout) -> bool:
    """Return whether these parts of a matrix are stored in the codes of a format."""
    kept = [checkpoint.kept(name) for name in stored if checkpoint.has(name)]
    return bool(kept) and all(each is not None and each.name == form.name for each in kept)


def read_dtype(stored: Mapping[str, int], form: WeightLayout, checkpoint: Checkpoint | None, in_features: int) -> str:
    """Return the type to read in: the format's own where it has one `weight`, else as stored, fp32 at most."""
    own = form.specs(1, in_features).get("weight")
    if own is not None or checkpoint is None:
        return own.dtype if own is not None else "bfloat16"
    found = {checkpoint.dtype(name) for name in stored}
    # Two types of 16 bits have only fp32 in common.
    return found.pop() if len(found) == 1 and found != {"float64"} else "float32"


def cut_of(checkpoint: Checkpoint, matrix: Matrix) -> HeadCut | None:
    """Return where a matrix is that is not stored by itself."""
    return None if matrix.cut is None or checkpoint.has(f"{matrix.stored}.weight") else matrix.cut


def stored_rows(checkpoint: Checkpoint, matrix: Matrix, kind: str) -> Mapping[str, int]:
    parts = {f"{name}.{kind}": rows for name, rows in matrix.parts.items()}
    return checkpoint.stored_rows(f"{matrix.stored}.{kind}", parts)
