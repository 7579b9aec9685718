"""What the formats of quantized Hugging Face folders share: raw tensors, the matrices that they make up, and how codes
are unpacked. A file beside this one has each format. Reads no file: the caller reads raw tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from localllm.errors import FETCH_ANEW, CheckpointError, UnsupportedModelError, show
from localllm.models.fields import Fields
from localllm.quant.coded import CodedMatrix
from localllm.quant.layouts import TABLES, CodedLayout, CodeKind, Int4Layout, WeightLayout

FLOATS = ("F16", "BF16", "F32")
_MAX_GROUP = 1 << 20
READ = "GPTQ, AWQ, compressed-tensors, MLX, bitsandbytes, FP8, MXFP4 and NVFP4"


class RawTensors(Protocol):
    """A folder's stored tensors, whatever their dtype."""

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str:
        """Return the dtype as safetensors names it: "I32", "BF16", "F8_E4M3"."""
        ...

    def read(self, name: str, first: int = 0, end: int | None = None) -> Tensor:
        """Return these rows of the first dimension in the stored dtype: U32 as the bits of int32, F8_* of uint8. Of a
        tensor without dimensions, all of it."""
        ...


CodesOf = Callable[[RawTensors, int | None], CodedMatrix]
DenseOf = Callable[[RawTensors, int | None], Tensor]


@dataclass(frozen=True)
class QuantizedMatrix:
    """One plain matrix, or those of all experts.

    shape: (N, K), or (experts, N, K).
    kept: the weight format that keeps its codes; None where only dense rows can be had.
    used: the stored names that it is made of.
    codes: of the matrix, or of the expert of that number, which a matrix of all experts needs. None where `kept` is.
    dense: likewise, fp32 [N, K], as the format means it.
    """

    shape: tuple[int, ...]
    kept: WeightLayout | None
    used: tuple[str, ...]
    codes: CodesOf | None
    dense: DenseOf


def unsupported(source: str, what: str, known: str) -> UnsupportedModelError:
    fix = f"choose the original repository of the model, or one quantized as {READ}"
    return UnsupportedModelError(f"{source}: {what} cannot be read", why=f"read are: {known}", fix=fix)


@dataclass(frozen=True)
class Folder:
    """The stored tensors of a folder, checked. source: names config.json in errors."""

    source: str
    raw: RawTensors
    names: frozenset[str]

    def modules(self, ending: str, *dtypes: str) -> list[str]:
        """Return the names, without `ending`, of the tensors that have it, of these dtypes where any are named."""
        return sorted(
            name.removesuffix(ending)
            for name in self.names
            if name.endswith(ending) and (not dtypes or self.raw.dtype(name) in dtypes)
        )

    def is_stored_as(self, name: str, *dtypes: str) -> bool:
        return name in self.names and self.raw.dtype(name) in dtypes

    def shape(self, name: str, dims: tuple[int, ...], *dtypes: str) -> tuple[int, ...]:
        """Return the shape of a tensor that must be there, with so many dimensions and of one of these dtypes."""
        if name not in self.names:
            why = f"{self.source} names a format that needs it; {len(self.names)} tensors are stored"
            raise CheckpointError(f"the tensor {show(name)} is missing", why=why, fix=FETCH_ANEW)
        shape, dtype = self.raw.shape(name), self.raw.dtype(name)
        if dtype not in dtypes:
            raise self.bad(name, f"it is stored as {dtype}; {' or '.join(dtypes)} is needed")
        if len(shape) not in dims or 0 in shape:
            raise self.bad(name, f"it has the shape {list(shape)}; {' or '.join(map(str, dims))} dimensions are needed")
        return shape

    def expect(self, name: str, shape: tuple[int, ...], *dtypes: str) -> None:
        """Check a tensor that must be there with this shape, of one of these dtypes."""
        found = self.shape(name, (len(shape),), *dtypes)
        if found != shape:
            raise self.bad(name, f"it has the shape {list(found)}; the tensors beside it mean {list(shape)}")

    def bad(self, name: str, why: str) -> CheckpointError:
        """Return the error of a tensor that contradicts others, or config.json."""
        return CheckpointError(f"{self.source}: the tensor {show(name)} is not usable", why=why, fix=FETCH_ANEW)

    def finite(self, name: str, values: Tensor) -> Tensor:
        """Return the values, none of which may be a NaN or infinite."""
        wrong = values.numel() - int(values.isfinite().sum())
        if wrong:
            raise self.bad(name, f"{wrong} of its {values.numel()} values are NaN or infinite")
        return values

    def floats(self, raw: RawTensors, name: str, expert: int | None = None, dtype: str | None = None) -> Tensor:
        """Return a tensor of finite scales or biases in fp32. dtype: what its bytes mean, where not what they are
        stored as."""
        return self.finite(name, as_floats(read_part(raw, name, expert), dtype or raw.dtype(name)))


def read_part(raw: RawTensors, name: str, expert: int | None) -> Tensor:
    """Return the tensor, or the part of it that is an expert's."""
    return raw.read(name) if expert is None else raw.read(name, expert, expert + 1)[0]


def as_floats(stored: Tensor, dtype: str) -> Tensor:
    """Return the values in fp32. dtype: as safetensors names it."""
    small = {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu}.get(dtype)
    return stored.float() if small is None else stored.view(small).float()


def as_bytes(words: Tensor) -> Tensor:
    """Return int32 [..., n] as uint8 [..., 4n], the lowest byte first."""
    return words.reshape(-1).view(torch.uint8).view(*words.shape[:-1], -1)


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """Return the codes of `bits` bits each, uint8 [..., 8n/bits], in bytes [..., n]: the first in the lowest bits of
    the first byte, and some, where 8 is no multiple of `bits`, in two bytes."""
    if bits == 8:
        return packed
    common = math.gcd(bits, 8)
    units = packed.reshape(*packed.shape[:-1], -1, bits // common)
    codes = units.new_empty(*units.shape[:-1], 8 // common)
    for number in range(8 // common):
        byte, shift = divmod(number * bits, 8)
        code = units[..., byte] >> shift
        if shift + bits > 8:
            code |= units[..., byte + 1] << (8 - shift)
        torch.bitwise_and(code, (1 << bits) - 1, out=codes[..., number])
    return codes.flatten(-2)


@dataclass(frozen=True)
class Coding:
    """What codes stand for. kind: as CodedLayout has it; "affine" codes of 0..15 are their own values, and have a
    bias."""

    kind: CodeKind | Literal["affine"]
    has_bias: bool = False

    @property
    def table(self) -> Sequence[float] | None:
        return None if self.kind == "affine" else TABLES.get(self.kind)

    @property
    def groups(self) -> tuple[int, ...]:
        """The groups in which codes are kept, the largest first."""
        return (128, 64, 32) if self.kind == "affine" else (128, 64, 32, 16)

    def group(self, stored: int, columns: int) -> int:
        """Return the largest group that is kept, or at all, of which the stored groups and a row are whole ones."""
        common = math.gcd(stored, columns)
        return next((group for group in self.groups if common % group == 0), common)

    def layout(self, group: int) -> WeightLayout | None:
        if group not in self.groups:
            return None
        return Int4Layout(group) if self.kind == "affine" else CodedLayout(self.kind, group, self.has_bias)


def grouped_matrix(
    shape: tuple[int, ...], coding: Coding, stored: int, used: Sequence[str], read: CodesOf, order: Tensor | None = None
) -> QuantizedMatrix:
    """Return the matrix of which `read` makes codes with the scales and biases of its groups, [N, ceil(K / stored)].

    stored: columns of a group. order: the group of each column, where they do not follow one another: no kept format
    has those.
    """
    columns = shape[-1]
    group = 1 if order is not None else coding.group(stored, columns)

    def spread(values: Tensor) -> Tensor:
        if order is not None:
            return values[:, order.int()]
        return values.repeat_interleave(stored // group, 1)[:, : columns // group].contiguous()

    def codes(raw: RawTensors, expert: int | None) -> CodedMatrix:
        found = read(raw, expert)
        return CodedMatrix(found.q, spread(found.scale), None if found.bias is None else spread(found.bias))

    def dense(raw: RawTensors, expert: int | None) -> Tensor:
        return codes(raw, expert).dequantize(coding.table)

    kept = coding.layout(group)
    return QuantizedMatrix(shape, kept, tuple(used), None if kept is None else codes, dense)


def group_size(fields: Fields) -> int:
    """Return "group_size", -1 where a row is one group."""
    group = fields.integer("group_size", -1, _MAX_GROUP)
    if group == 0:
        raise fields.refuse("group_size", "-1 or a positive number of columns")
    return group


def integer_coding(bits: int, symmetric: bool) -> Coding:
    """Return the coding of unsigned codes of 4 or 8 bits with a zero point. symmetric: it is in the middle."""
    if bits == 8:
        return Coding("int8", has_bias=not symmetric)
    return Coding("int4") if symmetric else Coding("affine")


def integer_codes(q: Tensor, bits: int, scale: Tensor, zero: Tensor | None) -> CodedMatrix:
    """Return the codes of w = scale * (q - zero). zero: [N, groups] as `scale`; None where it is in the middle."""
    middle = 128 if bits == 8 else 0
    if bits == 8:
        q = (q ^ 128).view(torch.int8)
    return CodedMatrix(q, scale, None if zero is None else scale * (middle - zero))


def scattered(folder: Folder, raw: RawTensors, name: str, group: int, groups: int) -> Tensor | None:
    """Return the stored group of each column, None where they follow one another. Raises CheckpointError for a group
    that is not among `groups`."""
    found = raw.read(name)
    low, high = int(found.min()), int(found.max())
    if low < 0 or high >= groups:
        raise folder.bad(name, f"it names the groups {low} to {high}; there are {groups}")
    return None if found.equal(torch.arange(len(found), dtype=found.dtype) // group) else found
