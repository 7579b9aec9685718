"""Damaged headers of GGUF and safetensors files: each is read or refused, quickly and within bounds."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from safetensors.torch import save

from localllm.errors import LocalLLMError
from localllm.gguf.conversion import model_files
from localllm.gguf.header import read_header
from localllm.models.checkpoints.checkpoint import Checkpoint
from tests.checkpoints import write_checkpoint
from tests.gguf_support import all_of, write_gguf
from tests.patience import PATIENCE_S

# Numbers that lie: all bits, signs, sizes of 2^40 and 2^60.
LIES = [b"\xff" * 8, b"\0" * 8, b"\0\0\0\0\0\0\0\x10", b"\0\0\0\0\0\1\0\0", b"\xff\xff\xff\x7f", b"\x01\0\0\0", b"\x80"]
MOST_BYTES = 1 << 30


def mutated(content: bytes, header_bytes: int, seed: int) -> bytes:
    """The content with a few bytes of its header changed, taken out, put in or repeated, or cut short."""
    random = np.random.default_rng(seed)
    data = bytearray(content)
    for _ in range(int(random.integers(1, 4))):
        at = int(random.integers(0, min(header_bytes if random.random() < 0.7 else 64, len(data))))
        match int(random.integers(0, 6)):
            case 0:
                data[at] ^= 1 << int(random.integers(0, 8))
            case 1:
                lie = LIES[int(random.integers(0, len(LIES)))]
                data[at : at + len(lie)] = lie
            case 2:
                del data[at : at + int(random.integers(1, 32))]
            case 3:
                data[at:at] = random.bytes(int(random.integers(1, 32)))
            case 4:
                data[at:at] = data[at : at + int(random.integers(1, 64))]
            case 5:
                del data[at:]
        if not data:
            break
    return bytes(data)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def survive(content: bytes, header_bytes: int, read: Callable[[bytes], object], count: int) -> None:
    read(content)
    before, refused = peak_bytes(), 0
    for seed in range(count):
        started = time.monotonic()
        try:
            read(mutated(content, header_bytes, seed))
        except LocalLLMError:
            refused += 1
        assert time.monotonic() - started < PATIENCE_S, seed
    assert refused > count / 4
    assert peak_bytes() - before < MOST_BYTES


COUNTS = [pytest.param(300, id="few"), pytest.param(20_000, id="many", marks=pytest.mark.slow)]


@pytest.mark.parametrize("count", COUNTS)
def test_any_gguf_header_is_read_or_refused(count, tmp_path):
    path = tmp_path / "model.gguf"
    write_checkpoint(tmp_path / "checkpoint", "llama", layers=1)
    write_gguf(tmp_path / "checkpoint", path, all_of("Q8_0"))
    content, tensors = path.read_bytes(), read_header(path).tensors

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return model_files(path)

    survive(content, min(tensor.begin for tensor in tensors.values()), read, count)


@pytest.mark.parametrize("count", COUNTS)
def test_any_safetensors_header_is_read_or_refused(count, tmp_path):
    tensors = {f"model.layers.{number}.mlp.up_proj.weight": torch.zeros(8, 8) for number in range(20)}
    content = save(tensors, {"format": "pt"})
    path = tmp_path / "model.safetensors"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        with Checkpoint.open(tmp_path) as checkpoint:
            for name in checkpoint.names():
                checkpoint.read(name, checkpoint.shape(name), torch.float32)

    survive(content, 8 + int.from_bytes(content[:8], "little"), read, count)
