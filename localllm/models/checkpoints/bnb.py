"""bitsandbytes: nf4 and fp4 in blocks along the flattened matrix, and int8 with a scale for each row.

4 bits: `weight` uint8 [ceil(N * K / 2), 1], the first code in the high nibble, with `absmax` of each block, which may
be 8-bit codes itself, `quant_map`, the values of the codes, and a JSON object as bytes, which has the shape.
8 bits: `weight` int8 [N, K] and `SCB` [N]; w = q * SCB / 127.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.errors import show
from localllm.models.checkpoints.quantized import (
    Coding,
    Folder,
    QuantizedMatrix,
    RawTensors,
    grouped_matrix,
    unsupported,
)
from localllm.models.fields import Fields, is_integer
from localllm.models.strict_json import JsonLimits, parse_json_object
from localllm.quant.coded import CodedMatrix

_STATE_LIMITS = JsonLimits(size_bytes=4096, objects=1, containers=2, elements=100)
# By bitsandbytes' name: the coding, and what its table is multiplied by to be whole numbers.
_KINDS = {"nf4": (Coding("nf4"), 127), "fp4": (Coding("bnb4"), 120)}
_MAP_TOLERANCE = 0.005  # the table of nf4 is rounded by up to 0.004
_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_MAX_SIDE = 1 << 24


@dataclass(frozen=True)
class _State:
    """What `quant_state` says of a matrix. nested: whether absmax are codes."""

    kind: str
    name: str
    shape: tuple[int, int]
    block: int
    nested: bool
    nested_block: int
    offset: float


def matrices(fields: Fields, folder: Folder) -> dict[str, QuantizedMatrix]:
    """Return the matrices of a folder by their plain names."""
    storage = fields.optional_text("bnb_4bit_quant_storage") or "uint8"
    if storage != "uint8":
        raise unsupported(fields.source, f"bitsandbytes' codes stored as {show(storage)}", "uint8")
    nibbles, eighths = folder.modules(".weight", "U8"), folder.modules(".weight", "I8")
    for names, flag in ((nibbles, "load_in_4bit"), (eighths, "load_in_8bit")):
        if names and not fields.flag(flag):
            raise folder.bad(f"{names[0]}.weight", f"the config does not say {flag}")
    found = {f"{module}.weight": _four_bits(f"{module}.weight", fields, folder) for module in nibbles}
    return found | {f"{module}.weight": _eight_bits(module, folder) for module in eighths}


def _eight_bits(module: str, folder: Folder) -> QuantizedMatrix:
    weight, scales, form = f"{module}.weight", f"{module}.SCB", f"{module}.weight_format"
    shape = folder.shape(weight, (2,), "I8")
    folder.expect(scales, shape[:1], "F32")
    used = (weight, scales, *([form] if form in folder.names else []))

    def read(raw: RawTensors, _expert: int | None) -> CodedMatrix:
        if form in folder.names and bool(raw.read(form).any()):
            raise unsupported(folder.source, f"the layout in which {show(weight)} is stored", "int8 in rows")
        return CodedMatrix(raw.read(weight), folder.floats(raw, scales).unsqueeze(1) / 127)

    return grouped_matrix(shape, Coding("int8"), shape[1], used, read)


def _four_bits(weight: str, fields: Fields, folder: Folder) -> QuantizedMatrix:
    state = _state(weight, fields, folder)
    N, K = state.shape
    blocks = -(-N * K // state.block)
    packed = folder.shape(weight, (2,), "U8")
    if math.prod(packed) != -(-N * K // 2):
        raise folder.bad(weight, f"it has {math.prod(packed)} bytes; {state.name} says {N} x {K} codes of 4 bits")
    absmax, values = f"{weight}.absmax", f"{weight}.quant_map"
    folder.expect(absmax, (blocks,), "U8" if state.nested else "F32")
    folder.expect(values, (16,), "F32")
    used = [weight, absmax, values, state.name]
    if state.nested:
        folder.expect(f"{weight}.nested_absmax", (-(-blocks // state.nested_block),), "F32")
        folder.expect(f"{weight}.nested_quant_map", (256,), "F32")
        used += [f"{weight}.nested_absmax", f"{weight}.nested_quant_map"]
    coding, multiple = _KINDS[state.kind]
    group = coding.group(state.block, K)

    def blocks_of(raw: RawTensors) -> CodedMatrix:
        stored = raw.read(weight).flatten()
        q = torch.stack((stored >> 4, stored & 15), 1).flatten()[: N * K]
        scale = _absmax(raw, weight, state, folder).repeat_interleave(state.block // group)[: N * K // group]
        return CodedMatrix(q.view(N, K), scale.view(N, K // group))

    def read(raw: RawTensors, _expert: int | None) -> CodedMatrix:
        _table(raw, values, state, folder)
        found = blocks_of(raw)
        return CodedMatrix(found.q, found.scale / multiple)

    def dense(raw: RawTensors, _expert: int | None) -> Tensor:
        return blocks_of(raw).dequantize(_table(raw, values, state, folder).tolist())

    kept = coding.layout(group)
    return QuantizedMatrix((N, K), kept, tuple(used), None if kept is None else read, dense)


def _state(weight: str, fields: Fields, folder: Folder) -> _State:
    """Return what the bytes of `quant_state` say, which are read."""
    stored = [kind for kind in _KINDS if f"{weight}.quant_state.bitsandbytes__{kind}" in folder.names]
    kind = stored[0] if stored else "nf4"
    name = f"{weight}.quant_state.bitsandbytes__{kind}"
    (count,) = folder.shape(name, (1,), "U8")
    if count > _STATE_LIMITS.size_bytes:
        raise folder.bad(name, f"it has {count} bytes; at most {_STATE_LIMITS.size_bytes} are read")
    state = Fields(parse_json_object(bytes(folder.raw.read(name).tolist()), name, _STATE_LIMITS), name)
    for told in (state.optional_text("quant_type"), fields.optional_text("bnb_4bit_quant_type")):
        if told not in (None, kind):
            raise folder.bad(name, f"its name says {kind}, and it or the config {show(told)}")
    sides = [side for side in state.items("shape", most=2) or [] if is_integer(side) and 1 <= side <= _MAX_SIDE]
    if len(sides) != 2:
        raise state.refuse("shape", "two positive integers")
    block = state.integer("blocksize", _BLOCK_SIZES[0], _BLOCK_SIZES[-1])
    if block not in _BLOCK_SIZES:
        raise state.refuse("blocksize", f"one of {', '.join(map(str, _BLOCK_SIZES))}")
    nested = "nested_offset" in state.raw
    inner = state.integer("nested_blocksize", 1, 1 << 20) if nested else 1
    offset = state.number("nested_offset", -1e30, 1e30) if nested else 0.0
    return _State(kind, name, (sides[0], sides[1]), block, nested, inner, offset)


def _absmax(raw: RawTensors, weight: str, state: _State, folder: Folder) -> Tensor:
    """Return the largest absolute weight of each block, fp32 [blocks]."""
    if not state.nested:
        return folder.floats(raw, f"{weight}.absmax")
    codes = raw.read(f"{weight}.absmax")
    values, inner = (folder.floats(raw, f"{weight}.nested_{part}") for part in ("quant_map", "absmax"))
    return values[codes.int()] * inner.repeat_interleave(state.nested_block)[: len(codes)] + state.offset


def _table(raw: RawTensors, name: str, state: _State, folder: Folder) -> Tensor:
    """Return the values of the codes as they are stored, which are those of the format."""
    coding, multiple = _KINDS[state.kind]
    values = folder.floats(raw, name)
    known = torch.tensor(coding.table, dtype=torch.float32) / multiple
    if float((values - known).abs().max()) > _MAP_TOLERANCE:
        raise folder.bad(name, f"its values are not those of {state.kind}")
    return values
