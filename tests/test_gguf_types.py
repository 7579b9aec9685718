"""The tensor types of GGUF files, against the `gguf` package: its sizes, and its numbers bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from localllm.kernels import tile16
from localllm.models.checkpoints.gguf_types import TYPES
from localllm.quant.coded import pack_codes
from localllm.quant.layouts import CodedLayout

gguf = pytest.importorskip("gguf")

ROWS, COLUMNS = 6, 1024
CODED = [name for name, kind in TYPES.items() if kind.q is not None]
# The bytes of a block at which an fp16 begins.
HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),
    "NVFP4": (),
}
of_coded_types = pytest.mark.parametrize("name", CODED)


def sizes(name: str) -> tuple[int, int]:
    """Weights and bytes of a block."""
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]


def random_bytes(name: str, columns: int = COLUMNS, rows: int = ROWS) -> np.ndarray:
    block_weights, block_bytes = sizes(name)
    random = np.random.default_rng(block_bytes)
    blocks = random.integers(0, 256, (rows, columns // block_weights, block_bytes), dtype=np.uint8)
    for at in HALVES[name]:
        halves = random.standard_normal((*blocks.shape[:2], 1)).astype(np.float16)
        halves[0, 0], halves[-1, -1] = 6e-8, -65504  # a subnormal; the largest
        blocks[..., at : at + 2] = halves.view(np.uint8)
    return blocks.reshape(rows, -1)


def check(name: str, raw: np.ndarray) -> None:
    kind = TYPES[name]
    # At an odd address, as a file's bytes may be.
    blocks = torch.empty(raw.size + 1, dtype=torch.uint8)[1:].view(raw.shape[0], -1, sizes(name)[1])
    codes = kind.read(blocks.copy_(torch.from_numpy(raw).view_as(blocks)))
    with np.errstate(over="ignore"):
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    weights = codes.dequantize(kind.table)
    assert weights.dtype == codes.scale.dtype == torch.float32
    assert np.array_equal(weights.numpy(), expected)

    coded = isinstance(kind.kept, CodedLayout)
    in_bytes = coded and kind.kept.kind == "int8"
    assert codes.q.dtype == (torch.int8 if in_bytes else torch.uint8) and (in_bytes or int(codes.q.max()) < 16)
    groups = (raw.shape[0], expected.shape[1] // kind.kept.group)
    assert codes.scale.shape == groups
    assert (None if codes.bias is None else codes.bias.shape) == (None if coded and not kind.kept.has_bias else groups)


@of_coded_types
def test_random_blocks_mean_what_gguf_says(name):
    check(name, random_bytes(name))
    check(name, random_bytes(name, columns=sizes(name)[0], rows=1))


# The types that gguf can make.
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_quantized_weights_mean_what_gguf_says(name):
    kind = gguf.GGMLQuantizationType[name]
    weights = np.random.default_rng(int(kind)).standard_normal((ROWS, COLUMNS), dtype=np.float32)
    weights[0, :256] = 0
    check(name, gguf.quants.quantize(weights, kind))


@pytest.mark.parametrize("name", ["MXFP4", "NVFP4"])
def test_every_scale_of_one_byte_means_what_gguf_says(name):
    blocks = np.repeat(np.arange(256, dtype=np.uint8)[:, None], sizes(name)[1], axis=1)
    blocks[:, -8:] = np.arange(8, dtype=np.uint8) * 34 + 16  # every code
    check(name, blocks)


def test_a_type_has_numbers_or_codes():
    for name, kind in TYPES.items():
        assert (kind.dense is None) == (kind.form is not None) == (kind.q is not None) == (kind.kept is not None)
        weights = (kind.form.columns, kind.form.num_bytes) if kind.form else (1, getattr(torch, kind.dense).itemsize)
        assert sizes(name) == weights


@of_coded_types
def test_tiles_hold_the_codes_that_are_read_one_by_one(name):
    kind = TYPES[name]
    assert kind.kept is not None
    raw = torch.from_numpy(random_bytes(name, columns=512, rows=48)).view(48, -1, sizes(name)[1])
    blocks = torch.empty(raw.numel() + 1, dtype=torch.uint8)[1:].view_as(raw).copy_(raw)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(0))
    codes = kind.read(blocks).rows(order)
    specs = kind.kept.specs(48, codes.q.shape[1])
    tiled = {part: torch.empty(spec.shape, dtype=spec.torch_dtype) for part, spec in specs.items()}
    kind.fill_tiles(blocks, tiled, order)
    # Scales of random bytes are larger than an fp16 holds.
    plain = pack_codes(kind.kept, replace(codes, scale=torch.ones_like(codes.scale), bias=None))
    assert torch.equal(tiled["qweight"], plain["qweight"])
    assert torch.equal(tiled["scale"], tile16.pack_groups(codes.scale.half()))
    if codes.bias is not None:
        assert torch.equal(tiled["bias"], tile16.pack_groups(codes.bias.half()))
