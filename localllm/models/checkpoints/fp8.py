"""FP8 (E4M3) with scales of a matrix, of its rows or of its blocks. No weight format keeps them: they are sources of
dense rows."""

from __future__ import annotations

from torch import Tensor

from localllm.errors import show
from localllm.models.checkpoints.quantized import (
    FLOATS,
    Folder,
    QuantizedMatrix,
    RawTensors,
    as_floats,
    read_part,
    unsupported,
)
from localllm.models.fields import Fields, is_integer

Block = tuple[int, int]  # rows and columns that share a scale
_DTYPE = "F8_E4M3"


def matrices(fields: Fields, folder: Folder) -> dict[str, QuantizedMatrix]:
    """Return the matrices of a folder by their plain names; experts' may end without ".weight"."""
    experts = fields.optional_text("expert_dtype") or "fp8"
    if experts != "fp8":
        raise unsupported(fields.source, f"FP8 with experts of {show(experts)}", "experts of fp8")
    block = block_size(fields, "weight_block_size")
    names = [name for name in folder.modules("", _DTYPE) if not name.endswith(("_scale", "_scale_inv"))]
    return {name: fp8_matrix(folder, name, block) for name in names}


def block_size(fields: Fields, key: str) -> Block | None:
    """Return the rows and columns of a block, None where scales are of rows or of matrices."""
    stored = fields.items(key, most=2)
    if stored is None:
        return None
    sizes = [size for size in stored if is_integer(size) and 1 <= size <= 1 << 20]
    if not len(sizes) == len(stored) == 2:
        raise fields.refuse(key, "two integers from 1")
    return sizes[0], sizes[1]


def fp8_matrix(folder: Folder, name: str, block: Block | None) -> QuantizedMatrix:
    """Return the matrix of F8_E4M3 [N, K], or [experts, N, K], and its scales: `_scale_inv`, or `_scale`; each weight
    is multiplied by its own."""
    shape = folder.shape(name, (2, 3), _DTYPE)
    scales = next((f"{name}{end}" for end in ("_scale_inv", "_scale") if f"{name}{end}" in folder.names), None)
    scales = scales or f"{name}_scale" + ("_inv" if block else "")
    stored = folder.shape(scales, (0, 1, 2, 3), *FLOATS, "F8_E8M0", "U8")
    experts = shape[:-2] if stored[: len(shape) - 2] == shape[:-2] else ()
    own = _grid(stored[len(experts) :], shape[-2:], block)
    if own is None or len(experts) != len(shape) - 2:
        blocks = f"blocks of {list(block)}" if block else "rows, or of the whole"
        raise folder.bad(
            scales, f"it has the shape {list(stored)}, its matrix {list(shape)}; scales of {blocks} are needed"
        )
    is_exponent = folder.raw.dtype(scales) == "U8"

    def dense(raw: RawTensors, expert: int | None) -> Tensor:
        scale = folder.floats(raw, scales, expert, "F8_E8M0" if is_exponent else None).reshape(own)
        weight = as_floats(read_part(raw, name, expert), _DTYPE)
        return weight.mul_(_spread(scale, weight.shape[0], weight.shape[1], block))

    return QuantizedMatrix(shape, None, (name, scales), None, dense)


def _grid(stored: tuple[int, ...], matrix: tuple[int, ...], block: Block | None) -> Block | None:
    """Return the rows and columns of a matrix's scales, None where this shape is of no such scales."""
    N, K = matrix
    if block is not None and stored == (-(-N // block[0]), -(-K // block[1])):
        return stored[0], stored[1]
    if stored in ((), (1,), (1, 1)):
        return 1, 1
    return (N, 1) if stored in ((N,), (N, 1)) else None


def _spread(scale: Tensor, N: int, K: int, block: Block | None) -> Tensor:
    """Return the scales for [N, K], of which broadcasting does the rest; the last blocks may be cut."""
    rows, columns = block or (1, 1)
    if scale.shape[0] not in (1, N):
        scale = scale.repeat_interleave(rows, 0)[:N]
    return scale if scale.shape[1] in (1, K) else scale.repeat_interleave(columns, 1)[:, :K]
