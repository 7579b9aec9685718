"""compressed-tensors (llm-compressor): integers of 4 and 8 bits, packed or as bytes, FP8, and FP4 of both kinds.

Which it is, a matrix's stored tensors say, and of the config's groups it has the first that they fit: the groups'
targets are patterns of a stranger, and are not run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.errors import show
from localllm.models.checkpoints.fp4 import fp4_matrix
from localllm.models.checkpoints.fp8 import Block, block_size, fp8_matrix
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
    scattered,
    unpack_bits,
    unsupported,
)
from localllm.models.fields import Fields
from localllm.quant.coded import CodedMatrix

_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
)
_BITS = (4, 8)
_MAX_GROUPS = 1000


@dataclass(frozen=True)
class _Scheme:
    """What a group of the config says of its weights. group: columns that share a scale; -1 where a row is one."""

    kind: str
    bits: int
    group: int
    symmetric: bool
    block: Block | None

    def group_of(self, columns: int) -> int:
        return columns if self.group == -1 else self.group

    def __str__(self) -> str:
        return f"{self.kind} of {self.bits} bits in groups of {self.group}, symmetric {self.symmetric}"


def matrices(fields: Fields, folder: Folder) -> dict[str, QuantizedMatrix]:
    """Return the matrices of a folder by their plain names."""
    schemes = _schemes(fields)
    found: dict[str, QuantizedMatrix] = {}
    for name in folder.modules("", "I32", "I8", "U8", "F8_E4M3"):
        module, _, part = name.rpartition(".")
        matrix = _matrix(module, part, folder.raw.dtype(name), schemes, folder)
        if matrix is not None:
            found[f"{module}.weight"] = matrix
    return found


def _matrix(module: str, part: str, dtype: str, schemes: list[_Scheme], folder: Folder) -> QuantizedMatrix | None:
    """Return the matrix whose codes this part of a module has, None where it has none."""
    name = f"{module}.{part}"
    match part, dtype:
        case "weight_packed", "I32":
            return _packed(module, _of_kind("int", None, name, schemes, folder), folder)
        case "weight", "I8":
            return _bytes(module, _of_kind("int", None, name, schemes, folder), folder)
        case "weight_packed", "U8":
            _of_kind("float", 4, name, schemes, folder)
            is_mxfp4 = folder.is_stored_as(f"{module}.weight_scale", "U8", "F8_E8M0")
            return fp4_matrix(folder, name, None if is_mxfp4 else f"{module}.weight_global_scale", divides=True)
        case "weight", "F8_E4M3":
            blocks = [scheme.block for scheme in _of_kind("float", 8, name, schemes, folder) if scheme.block]
            return fp8_matrix(folder, name, blocks[0] if blocks else None)
    return None


def _schemes(fields: Fields) -> list[_Scheme]:
    """Return what the config says of weights, in its order."""
    form = fields.optional_text("format") or "mixed-precision"
    sparsity, transforms = fields.section("sparsity_config"), fields.section("transform_config")
    if form not in _FORMATS:
        raise unsupported(fields.source, f"the format {show(form)} of compressed-tensors", ", ".join(_FORMATS))
    if sparsity is not None and sparsity.get("format") not in (None, "dense"):
        raise unsupported(fields.source, f"sparse weights ({show(sparsity.get('format'))})", "dense ones")
    if transforms is not None and transforms.raw.get("config_groups"):
        raise unsupported(fields.source, "weights that are transformed (transform_config)", "weights as they are")
    groups = fields.section("config_groups")
    if groups is None or len(groups.raw) > _MAX_GROUPS:
        raise fields.refuse("config_groups", f"an object of at most {_MAX_GROUPS}")
    sections = [groups.section(key) for key in groups.raw]
    weights = [section.section("weights") for section in sections if section is not None]
    return list(dict.fromkeys(_scheme(section) for section in weights if section is not None))


def _scheme(fields: Fields) -> _Scheme:
    kind, bits = fields.optional_text("type") or "int", fields.integer("num_bits", 1, 64)
    if kind not in ("int", "float") or bits not in _BITS:
        raise unsupported(
            fields.source, f"weights of the type {show(kind)} and {bits} bits", "int and float of 4 and 8 bits"
        )
    group = -1 if fields.get("group_size") is None else group_size(fields)
    return _Scheme(kind, bits, group, fields.flag("symmetric", if_null=True), block_size(fields, "block_structure"))


def _of_kind(kind: str, bits: int | None, name: str, schemes: list[_Scheme], folder: Folder) -> list[_Scheme]:
    """Return the schemes of this type. Raises CheckpointError where the config has none."""
    found = [scheme for scheme in schemes if scheme.kind == kind and bits in (None, scheme.bits)]
    if not found:
        means = "; ".join(map(str, schemes[:4])) or "nothing"
        raise folder.bad(name, f"it is stored as {folder.raw.dtype(name)}; the config means {means}")
    return found


def _packed(module: str, schemes: list[_Scheme], folder: Folder) -> QuantizedMatrix:
    """`weight_packed` int32 [N, K * bits / 32], the lowest bits first; `weight_scale` [N, groups]; `weight_zero_point`
    packed along N; `weight_shape`."""
    weight, scales, zeros, order, told = (
        f"{module}.weight_{part}" for part in ("packed", "scale", "zero_point", "g_idx", "shape")
    )
    N, words = folder.shape(weight, (2,), "I32")
    _, groups = folder.shape(scales, (2,), *FLOATS)
    scheme, K = _fitting(module, words, groups, schemes, folder)
    group, middle = scheme.group_of(K), 1 << scheme.bits - 1
    folder.expect(scales, (N, groups), *FLOATS)
    used = [weight, scales, *(name for name in (zeros, order, told) if name in folder.names)]
    if zeros in folder.names or not scheme.symmetric:
        is_packed = not folder.is_stored_as(zeros, "I8")
        folder.expect(zeros, (-(-N * scheme.bits // 32) if is_packed else N, groups), "I32" if is_packed else "I8")
    if told in folder.names:
        folder.expect(told, (2,), "I64", "I32")
    if order in folder.names:
        folder.expect(order, (K,), "I32", "I64")
    scattered_order = _order(order, group, groups, folder)

    def read(raw: RawTensors, _expert: int | None) -> CodedMatrix:
        if told in folder.names and raw.read(told).tolist() != [N, K]:
            raise folder.bad(told, f"it says {raw.read(told).tolist()}; the tensors beside it mean {[N, K]}")
        stored = _zeros(raw, zeros, N, scheme.bits) if zeros in folder.names else None
        zero = _meant(zeros, stored, middle, scheme, folder)
        q = unpack_bits(as_bytes(raw.read(weight)), scheme.bits)
        return integer_codes(q, scheme.bits, folder.floats(raw, scales), zero)

    return grouped_matrix((N, K), integer_coding(scheme.bits, scheme.symmetric), group, used, read, scattered_order)


def _zeros(raw: RawTensors, name: str, N: int, bits: int) -> Tensor:
    """Return the zero points of unsigned codes, fp32 [N, groups]: packed along N, or as signed bytes."""
    stored = raw.read(name)
    if stored.dtype == torch.int8:
        return stored.float() + (1 << bits - 1)
    return unpack_bits(as_bytes(stored.T), bits)[:, :N].T.float()


def _fitting(module: str, words: int, groups: int, schemes: list[_Scheme], folder: Folder) -> tuple[_Scheme, int]:
    """Return the scheme that so many words and groups of a row fit, and the columns that they are then."""
    weight, zeros, told = (f"{module}.weight_{part}" for part in ("packed", "zero_point", "shape"))
    columns = {scheme: words * 32 // scheme.bits for scheme in schemes}
    fitting = [s for s in schemes if groups == -(-columns[s] // s.group_of(columns[s]))]
    if len({columns[scheme] for scheme in fitting}) > 1:
        folder.expect(told, (2,), "I64", "I32")
        K = int(folder.raw.read(told)[1])
        fitting = [scheme for scheme in fitting if columns[scheme] == K]
    if not fitting:
        means = "; ".join(map(str, schemes[:4]))
        raise folder.bad(weight, f"its rows have {words} words and {groups} scales; the config means {means}")
    symmetric = zeros not in folder.names
    scheme = next((scheme for scheme in fitting if scheme.symmetric == symmetric), fitting[0])
    return scheme, columns[scheme]


def _order(order: str, group: int, groups: int, folder: Folder) -> Tensor | None:
    """Return the group of each column where they are scattered. One below 0 marks an order that was never set."""
    if order not in folder.names or int(folder.raw.read(order).min()) < 0:
        return None
    return scattered(folder, folder.raw, order, group, groups)


def _bytes(module: str, schemes: list[_Scheme], folder: Folder) -> QuantizedMatrix:
    """`weight` int8 [N, K]; `weight_scale` of the whole, of rows or of groups; `weight_zero_point` likewise."""
    weight, scales, zeros = (f"{module}.{part}" for part in ("weight", "weight_scale", "weight_zero_point"))
    N, K = shape = folder.shape(weight, (2,), "I8")
    stored = folder.shape(scales, (0, 1, 2), *FLOATS)
    symmetric = zeros not in folder.names
    scheme = next((scheme for scheme in schemes if scheme.symmetric == symmetric), schemes[0])
    is_whole = stored in ((), (1,), (1, 1), (N,), (N, 1))
    group = K if is_whole else scheme.group_of(K)
    groups = -(-K // group)
    if not is_whole and stored != (N, groups):
        raise folder.bad(scales, f"it has the shape {list(stored)}; {[N, 1]} or {[N, groups]} is needed")
    if not (symmetric and scheme.symmetric):
        folder.expect(zeros, stored, "I8")

    def read(raw: RawTensors, _expert: int | None) -> CodedMatrix:
        scale = folder.floats(raw, scales).reshape(-1, groups).expand(N, groups)
        points = None if symmetric else raw.read(zeros).float().reshape(-1, groups).expand(N, groups)
        zero = _meant(zeros, points, 0, scheme, folder)
        return CodedMatrix(raw.read(weight), scale, None if zero is None else scale * -zero)

    used = (weight, scales) if symmetric else (weight, scales, zeros)
    return grouped_matrix(shape, integer_coding(8, scheme.symmetric), group, used, read)


def _meant(name: str, zero: Tensor | None, middle: int, scheme: _Scheme, folder: Folder) -> Tensor | None:
    """Return the zero points, None of a symmetric scheme. Raises CheckpointError where some are stored that it does not
    mean."""
    if scheme.symmetric and zero is not None and not bool((zero == middle).all()):
        raise folder.bad(name, f"it has zero points; the config means {scheme}")
    return None if scheme.symmetric else zero
