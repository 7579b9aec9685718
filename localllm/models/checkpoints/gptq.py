"""GPTQ: `qweight` int32 [K * bits / 32, N], `qzeros` [groups, N * bits / 32], `scales` [groups, N], `g_idx` [K].

w[n, k] = scales[g, n] * (q[n, k] - zero[g, n]), g = g_idx[k]. Version 1 stores its zeros less one.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    scattered,
    unpack_bits,
    unsupported,
)
from localllm.models.fields import Fields
from localllm.quant.coded import CodedMatrix

_FORMATS = ("gptq", "gptq_v2")
_MAX_OVERRIDES = 10_000


@dataclass(frozen=True)
class _Scheme:
    """group: -1 where a row is one group. less: of stored zeros. ordered: whether the columns of a group may be
    scattered; None where only g_idx tells."""

    bits: int
    group: int
    symmetric: bool
    less: int
    ordered: bool | None

    def columns(self, rows: int) -> int:
        return rows * 32 // self.bits

    def group_of(self, columns: int) -> int:
        return columns if self.group == -1 else self.group


@dataclass(frozen=True)
class _Names:
    weight: str
    zeros: str
    scales: str
    order: str


def matrices(fields: Fields, folder: Folder) -> dict[str, QuantizedMatrix]:
    """Return the matrices of a folder by their plain names."""
    schemes = _schemes(fields)
    return {f"{module}.weight": _matrix(module, schemes, folder) for module in folder.modules(".qweight")}


def _schemes(fields: Fields) -> list[_Scheme]:
    """Return the scheme of the config, and those that it has for single modules: a matrix has the first that its
    tensors fit, so that no pattern of a stranger is ever run."""
    dynamic = fields.section("dynamic") or Fields({}, fields.source)
    if len(dynamic.raw) > _MAX_OVERRIDES:
        raise fields.refuse("dynamic", f"an object of at most {_MAX_OVERRIDES}")
    changes = [dynamic.section(pattern) for pattern in dynamic.raw if not pattern.startswith("-:")]
    merged = [{**fields.raw, **change.raw} for change in changes if change]
    return [_scheme(Fields(raw, fields.source, fields.path)) for raw in (fields.raw, *merged)]


def _scheme(fields: Fields) -> _Scheme:
    bits = fields.integer("bits", 1, 64)
    if bits not in (4, 8):
        raise unsupported(fields.source, f"GPTQ of {bits} bits", "4 and 8 bits")
    form = fields.optional_text("checkpoint_format") or fields.optional_text("format") or "gptq"
    if form not in _FORMATS:
        raise unsupported(fields.source, f"the GPTQ format {show(form)}", ", ".join(_FORMATS))
    ordered = fields.flag("desc_act") if fields.get("desc_act") is not None else None
    return _Scheme(bits, group_size(fields), fields.flag("sym"), int(form == "gptq"), ordered)


def _matrix(module: str, schemes: list[_Scheme], folder: Folder) -> QuantizedMatrix:
    names = _Names(*(f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")))
    rows, N = folder.shape(names.weight, (2,), "I32")
    groups, _ = folder.shape(names.scales, (2,), *FLOATS)
    scheme, K = _fitting(names, rows, groups, schemes, folder)
    folder.expect(names.scales, (groups, N), *FLOATS)
    if N * scheme.bits % 32:
        raise folder.bad(names.weight, f"it has {N} rows; zeros of {scheme.bits} bits fill words of 32 bits")
    folder.expect(names.zeros, (groups, N * scheme.bits // 32), "I32")
    has_order = names.order in folder.names
    if scheme.ordered or has_order:
        folder.expect(names.order, (K,), "I32", "I64")
    group, coding = scheme.group_of(K), integer_coding(scheme.bits, scheme.symmetric)
    told = has_order and scheme.ordered is not False
    order = scattered(folder, folder.raw, names.order, group, groups) if told else None
    used = (names.weight, names.zeros, names.scales, *([names.order] if has_order else []))

    def read(raw: RawTensors, _expert: int | None) -> CodedMatrix:
        if has_order and not told and scattered(folder, raw, names.order, group, groups) is not None:
            raise folder.bad(names.order, "its groups do not follow one another, and the config says desc_act false")
        return _codes(raw, names, scheme, folder)

    return grouped_matrix((N, K), coding, group, used, read, order)


def _fitting(names: _Names, rows: int, groups: int, schemes: list[_Scheme], folder: Folder) -> tuple[_Scheme, int]:
    """Return the first scheme that these rows of codes and groups fit, and the columns that they are then."""
    has_order = names.order in folder.names
    stored = folder.shape(names.order, (1,), "I32", "I64")[0] if has_order else None
    for scheme in schemes:
        K = scheme.columns(rows)
        if stored in (None, K) and groups == -(-K // scheme.group_of(K)):
            return scheme, K
    found = f"{rows} rows of codes, {groups} groups" + (f", {stored} columns in g_idx" if has_order else "")
    means = " or ".join(f"{scheme.bits} bits in groups of {scheme.group}" for scheme in schemes[:4])
    raise folder.bad(names.weight, f"it has {found}; the config means {means}")


def _codes(raw: RawTensors, names: _Names, scheme: _Scheme, folder: Folder) -> CodedMatrix:
    scale = folder.floats(raw, names.scales).T
    zeros = (unpack_bits(as_bytes(raw.read(names.zeros)), scheme.bits) + scheme.less) & (1 << scheme.bits) - 1
    middle = 1 << scheme.bits - 1
    if scheme.symmetric and not bool((zeros == middle).all()):
        why = f"the config says sym, which means {middle}; its zeros are {int(zeros.min())} to {int(zeros.max())}"
        raise folder.bad(names.zeros, why)
    q = unpack_bits(as_bytes(raw.read(names.weight).T), scheme.bits)
    return integer_codes(q, scheme.bits, scale, None if scheme.symmetric else zeros.T.float())
