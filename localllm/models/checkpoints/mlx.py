"""MLX: `weight` U32 [N, K * bits / 32], a stream of bits, with `scales` and `biases` [N, K/G]: w = scale * q + bias;
and its modes of 4-bit floats, which have scales of 8 bits and no biases.

The matrices of all experts are one tensor, with a dimension more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from localllm.errors import show
from localllm.models.checkpoints.fp4 import FP4
from localllm.models.checkpoints.quantized import (
    FLOATS,
    Coding,
    Folder,
    QuantizedMatrix,
    RawTensors,
    as_bytes,
    group_size,
    grouped_matrix,
    read_part,
    unpack_bits,
    unsupported,
)
from localllm.models.fields import Fields
from localllm.quant.coded import CodedMatrix

_BITS = (2, 3, 4, 5, 6, 8)
_SCALES = {"mxfp4": "F8_E8M0", "nvfp4": "F8_E4M3"}  # what their bytes mean


@dataclass(frozen=True)
class _Scheme:
    group: int
    bits: int
    mode: str


def matrices(fields: Fields, folder: Folder) -> dict[str, QuantizedMatrix]:
    """Return the matrices of a folder by their plain names."""
    usual = _scheme(fields)
    found = {}
    for module in folder.modules(".weight", "U32"):
        own = fields.section(module) if isinstance(fields.get(module), dict) else None
        scheme = usual if own is None else _scheme(Fields(own.raw, own.source, own.path, fields.raw))
        found[f"{module}.weight"] = _matrix(module, scheme, folder)
    return found


def _scheme(fields: Fields) -> _Scheme:
    bits, mode = fields.integer("bits", 1, 64), fields.optional_text("mode") or "affine"
    if mode != "affine" and mode not in _SCALES:
        raise unsupported(fields.source, f"MLX's mode {show(mode)}", ", ".join(["affine", *_SCALES]))
    known = _BITS if mode == "affine" else (4,)
    if bits not in known:
        raise unsupported(fields.source, f"MLX's mode {mode} of {bits} bits", f"{', '.join(map(str, known))} bits")
    group = group_size(fields)
    if group == -1:
        raise fields.refuse("group_size", "a positive number of columns")
    return _Scheme(group, bits, mode)


def _matrix(module: str, scheme: _Scheme, folder: Folder) -> QuantizedMatrix:
    weight, scales, biases = (f"{module}.{part}" for part in ("weight", "scales", "biases"))
    *rows, words = folder.shape(weight, (2, 3), "U32")
    K = words * 32 // scheme.bits
    if K * scheme.bits != words * 32 or K % scheme.group:
        why = f"it is {words} words wide; the config means {scheme.bits} bits in groups of {scheme.group} columns"
        raise folder.bad(weight, why)
    groups, shape = (*rows, K // scheme.group), (*rows, K)
    if scheme.mode == "affine":
        folder.expect(scales, groups, *FLOATS)
        folder.expect(biases, groups, *FLOATS)
        coding = Coding("affine", has_bias=True) if scheme.bits <= 4 else Coding("int8", has_bias=True)
        used = [weight, scales, biases]
    else:
        folder.expect(scales, groups, "U8")
        coding, used = FP4, [weight, scales]

    def read(raw: RawTensors, expert: int | None) -> CodedMatrix:
        q = unpack_bits(as_bytes(read_part(raw, weight, expert)), scheme.bits)
        if scheme.mode != "affine":
            return CodedMatrix(q, folder.floats(raw, scales, expert, _SCALES[scheme.mode]) / 2)
        scale, bias = (folder.floats(raw, name, expert) for name in (scales, biases))
        if scheme.bits == 8:
            return CodedMatrix((q ^ 128).view(torch.int8), scale, bias + 128 * scale)
        return CodedMatrix(q if scheme.bits <= 4 else q.view(torch.int8), scale, bias)

    return grouped_matrix(shape, coding, scheme.group, used, read)
