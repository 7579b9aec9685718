"""AWQ's gemm layout: `qweight` int32 [K, N/8], `qzeros` [K/G, N/8], `scales` [K/G, N]; w = scale * (q - zero).

The nibbles of a word, from the lowest, are its columns 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from torch import Tensor

from localllm.errors import show
from localllm.models.checkpoints.quantized import (
    FLOATS,
    Folder,
    QuantizedMatrix,
    RawTensors,
    as_bytes,
    group_size,
    grouped_matrix,
    integer_codes,
    integer_coding,
    unpack_bits,
    unsupported,
)
from localllm.models.fields import Fields
from localllm.quant.coded import CodedMatrix

_BITS, _IN_WORD = 4, 8
_NIBBLE_OF_COLUMN = [0, 4, 1, 5, 2, 6, 3, 7]


def matrices(fields: Fields, folder: Folder) -> dict[str, QuantizedMatrix]:
    """Return the matrices of a folder by their plain names."""
    bits = fields.integer("bits", 1, 64)
    if bits != _BITS:
        raise unsupported(fields.source, f"AWQ of {bits} bits", f"{_BITS} bits")
    form = fields.optional_text("version") or fields.optional_text("format") or "gemm"
    if form.lower() != "gemm":
        raise unsupported(fields.source, f"the AWQ version {show(form)}", "gemm")
    group = group_size(fields)
    return {f"{module}.weight": _matrix(module, group, folder) for module in folder.modules(".qweight")}


def _matrix(module: str, group: int, folder: Folder) -> QuantizedMatrix:
    weight, zeros, scales = used = [f"{module}.{part}" for part in ("qweight", "qzeros", "scales")]
    K, words = folder.shape(weight, (2,), "I32")
    group, N = K if group == -1 else group, words * _IN_WORD
    groups = -(-K // group)
    folder.expect(scales, (groups, N), *FLOATS)
    folder.expect(zeros, (groups, words), "I32")

    def read(raw: RawTensors, _expert: int | None) -> CodedMatrix:
        scale, zero = folder.floats(raw, scales).T, _columns(raw.read(zeros)).T.float()
        return integer_codes(_columns(raw.read(weight)).T.contiguous(), _BITS, scale, zero)

    return grouped_matrix((N, K), integer_coding(_BITS, symmetric=False), group, used, read)


def _columns(words: Tensor) -> Tensor:
    """Return the codes, uint8 [rows, N], of int32 [rows, N/8]."""
    nibbles = unpack_bits(as_bytes(words), _BITS).view(*words.shape, _IN_WORD)
    return nibbles[..., _NIBBLE_OF_COLUMN].flatten(1)
