"""FP4 (E2M1): MXFP4 as gpt-oss has it, and NVFP4 as modelopt and compressed-tensors have it; codes in pairs, the first
in the low nibble. The table of the kept format has twice their values, so that scales are halved."""

from __future__ import annotations

from localllm.errors import show
from localllm.models.checkpoints.fp8 import fp8_matrix
from localllm.models.checkpoints.quantized import (
    Coding,
    Folder,
    QuantizedMatrix,
    RawTensors,
    grouped_matrix,
    read_part,
    unpack_bits,
    unsupported,
)
from localllm.models.fields import Fields
from localllm.quant.coded import CodedMatrix

FP4 = Coding("fp4")
_MX_GROUP, _NV_GROUP = 32, 16
_MODELOPT = ("NVFP4", "FP8", "MIXED_PRECISION")


def mxfp4_matrices(_fields: Fields, folder: Folder) -> dict[str, QuantizedMatrix]:
    """Return the matrices of a folder of gpt-oss by their plain names, which end without ".weight"."""
    return {name: _of_blocks(name, folder) for name in folder.modules("_blocks")}


def _of_blocks(name: str, folder: Folder) -> QuantizedMatrix:
    """`_blocks` uint8 [experts, N, K/32, 16], `_scales` [experts, N, K/32], exponents of two."""
    blocks, scales = used = [f"{name}_blocks", f"{name}_scales"]
    *rows, groups, width = folder.shape(blocks, (3, 4), "U8")
    if width * 2 != _MX_GROUP:
        raise folder.bad(blocks, f"its blocks have {width} bytes; {_MX_GROUP // 2} are needed")
    folder.expect(scales, (*rows, groups), "U8", "F8_E8M0")

    def read(raw: RawTensors, expert: int | None) -> CodedMatrix:
        q = unpack_bits(read_part(raw, blocks, expert), 4).flatten(1)
        return CodedMatrix(q, folder.floats(raw, scales, expert, "F8_E8M0") / 2)

    return grouped_matrix((*rows, groups * _MX_GROUP), FP4, _MX_GROUP, used, read)


def modelopt_matrices(fields: Fields, folder: Folder) -> dict[str, QuantizedMatrix]:
    """Return the matrices of a folder of NVIDIA's modelopt by their plain names: NVFP4 and FP8."""
    algorithm = fields.optional_text("quant_algo") or "NVFP4"
    if algorithm not in _MODELOPT:
        raise unsupported(fields.source, f"modelopt's {show(algorithm)}", ", ".join(_MODELOPT))
    smoothed = folder.modules(".pre_quant_scale")
    if smoothed:
        what = f"modelopt's pre_quant_scale, which {show(smoothed[0])} has,"
        raise unsupported(fields.source, what, "weights whose activations are not scaled")
    eighths = folder.modules(".weight", "F8_E4M3")
    found = {f"{module}.weight": fp8_matrix(folder, f"{module}.weight", None) for module in eighths}
    for module in folder.modules(".weight", "U8"):
        found[f"{module}.weight"] = fp4_matrix(folder, f"{module}.weight", f"{module}.weight_scale_2")
    return found


def fp4_matrix(folder: Folder, weight: str, overall: str | None, divides: bool = False) -> QuantizedMatrix:
    """Return the matrix of uint8 `weight` [N, K/2]. Its module has `weight_scale`: NVFP4's F8_E4M3 [N, K/16], or,
    where nothing scales the whole, MXFP4's [N, K/32], exponents of two.

    overall: the tensor of one number by which NVFP4's scales are multiplied, or divided.
    """
    group, dtypes = (_MX_GROUP, ("U8", "F8_E8M0")) if overall is None else (_NV_GROUP, ("F8_E4M3",))
    scales = f"{weight.rpartition('.')[0]}.weight_scale"
    N, width = folder.shape(weight, (2,), "U8")
    if width * 2 % group:
        raise folder.bad(weight, f"its rows have {width} bytes, which are no whole groups of {group} columns")
    folder.expect(scales, (N, width * 2 // group), *dtypes)
    if overall is not None and folder.shape(overall, (0, 1), "F32") not in ((), (1,)):
        raise folder.bad(overall, "it has more than one number")

    def read(raw: RawTensors, _expert: int | None) -> CodedMatrix:
        scale = folder.floats(raw, scales, dtype=dtypes[-1])
        if overall is not None:
            number = folder.floats(raw, overall).reshape(())
            scale = folder.finite(overall, scale / number if divides else scale * number)
        return CodedMatrix(unpack_bits(raw.read(weight), 4), scale / 2)

    used = (weight, scales) if overall is None else (weight, scales, overall)
    return grouped_matrix((N, width * 2), FP4, group, used, read)
