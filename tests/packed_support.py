"""Small packed models for the tests, and what may be said of any folder of one."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from localllm.hub.packed import PACKED_INDEX
from localllm.models.block_layouts import block_layouts
from localllm.models.convert import convert
from localllm.models.decoder import Decoder
from localllm.models.families import load_config
from localllm.models.packed import PackedModel, PackedPlan
from localllm.offload.streaming.kernel_reads import KernelReads
from localllm.quant.recipe import recipe
from tests.checkpoints import write_checkpoint
from tests.forks import in_child

WEIGHTS = "int4-g64"
SOURCE = "maker/model@0123abcd"
# int4 with groups that the fixtures' widths do not fill, int8, a format with odd sizes, and one that is not quantized.
FORMATS = ["int4-g64", "int4-g32-rtn", "int8", "nf4", "bf16", "bf12"]


def require_kernel_reads(folder: Path) -> None:
    """Skip the test where the kernel reads no file of this folder beside the program."""
    try:
        KernelReads(1).close()
        os.close(os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"this system or its file system has no such reads: {error}")


def small_checkpoint(folder: Path, family: str = "llama", seed: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(folder, family, seed=seed)
    return folder


def resized(folder: Path, family: str = "llama", seed: int = 0, **sizes: int) -> Path:
    """A small checkpoint whose config has these sizes, in bf16, as most are."""
    config = json.loads((small_checkpoint(folder, family) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | sizes))
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layout in block_layouts(load_config(folder)):
        experts = layout.experts
        of_experts = [experts.matrices(index) for index in range(experts.num_experts)] if experts else []
        for matrix in itertools.chain(layout.matrices, *of_experts):
            for name, rows in matrix.parts.items():
                weight = 0.02 * torch.randn(rows, matrix.in_features, generator=generator)
                tensors[f"{name}.weight"] = weight.bfloat16()
        tensors |= {vector.stored: torch.ones(vector.features) for vector in layout.vectors}
    save_file(tensors, folder / "model.safetensors")
    return folder


def pack(checkpoint: Path, target: Path, weights: str = WEIGHTS, source: str = SOURCE, **options: object) -> Path:
    convert(checkpoint, target, recipe(weights), source, **options)  # type: ignore[arg-type]
    return target


def plan(checkpoint: Path, weights: str = WEIGHTS, source: str = SOURCE) -> PackedPlan:
    return PackedPlan(load_config(checkpoint), recipe(weights), source)


def spoil(path: Path, place: int, mask: int = 4) -> None:
    """Flip bits of a byte of it."""
    data = bytearray(path.read_bytes())
    data[place] ^= mask
    path.write_bytes(data)


def open_packed(checkpoint: Path, target: Path, weights: str = WEIGHTS, source: str = SOURCE) -> PackedModel:
    return PackedModel.open(target, load_config(checkpoint), recipe(weights), source, model="my model")


def read_all(packed: PackedModel) -> dict[str, Tensor]:
    """Every tensor, by block and name."""
    with packed:
        layouts = block_layouts(packed.config)
        return {f"{x.name}/{name}": tensor for x in layouts for name, tensor in packed.tensors(x).items()}


def same(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}


def assert_no_half_file(checkpoint: Path, target: Path, weights: str = WEIGHTS) -> int:
    """Whatever has a final name is whole, and the index is there only if all is; returns the number of blocks."""
    files = plan(checkpoint, weights).files
    there = [file for file in files.values() if (target / file.file_name).exists()]
    for file in there:
        assert file.checksum_of(target / file.file_name) is not None, file.name
    if (target / PACKED_INDEX).exists():
        assert len(there) == len(files)
        read_all(open_packed(checkpoint, target, weights))
    return len(there)


DISK_CALLS = ("open", "write", "fsync", "replace", "unlink", "mkdir", "lseek", "close")


def dying_at(call: int, work: Callable[[], object]) -> Callable[[], object]:
    """`work`, killed at its `call`-th call that has to do with the disk. To be run in a child."""

    def run() -> object:
        count = 0

        def counted(function: Callable[..., object]) -> Callable[..., object]:
            def maybe_die(*arguments: object, **named: object) -> object:
                nonlocal count
                count += 1
                if count == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **named)

            return maybe_die

        for name in DISK_CALLS:
            setattr(os, name, counted(getattr(os, name)))
        return work()

    return run


def inodes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.iterdir()} if folder.is_dir() else {}


def killed_after(seconds: float, work: Callable[[], object]) -> Callable[[], object]:
    """`work`, dead after so long. To be run in a child."""

    def run() -> object:
        # Nobody handles SIGALRM: it ends the process as SIGKILL does, without another line of Python.
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
        return work()

    return run


def killed_and_taken_up(
    killed: Callable[[Callable[[], object]], Callable[[], object]],
    checkpoint: Path,
    target: Path,
    whole: dict[str, bytes],
) -> bool:
    """Run a conversion that is `killed`, in a child; finish what it left. Whether it died before its end."""
    status = in_child(killed(lambda: pack(checkpoint, target)))
    assert status <= 0
    assert_no_half_file(checkpoint, target)
    kept = inodes(target)
    pack(checkpoint, target)
    assert contents(target) == whole
    again = {name for name, inode in inodes(target).items() if kept.get(name, inode) != inode}
    assert again <= {PACKED_INDEX}
    return status < 0


def everything_of(decoder: Decoder) -> dict[str, Tensor]:
    """Every tensor that a decoder computes with."""
    found: dict[str, Tensor] = {}

    def visit(path: str, value: object) -> None:
        if isinstance(value, Tensor):
            found[path] = value
        elif isinstance(value, dict | list | tuple):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                visit(f"{path}.{key}", item)
        elif type(value).__module__.startswith("localllm."):
            for key, item in vars(value).items():
                visit(f"{path}.{key}", item)

    visit("", decoder)
    return found
