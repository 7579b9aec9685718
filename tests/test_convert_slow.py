"""Conversion, at length: killed at every moment, and how much memory it and a load take."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from localllm.models.families import load_config
from localllm.models.layout import block_layouts, model_bytes
from localllm.quant.recipe import recipe
from tests.packed_support import (
    WEIGHTS,
    assert_no_half_file,
    contents,
    dying_at,
    in_child,
    killed_after,
    killed_and_taken_up,
    pack,
    small_checkpoint,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def whole(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return contents(pack(checkpoint, tmp_path_factory.mktemp("packed") / WEIGHTS))


def test_death_at_every_call_to_the_disk_in_turn_leaves_what_the_next_start_takes_up(checkpoint, whole, tmp_path):
    def dies_at(call: int) -> bool:
        target = tmp_path / str(call)
        return killed_and_taken_up(dying_at(call, lambda: pack(checkpoint, target)), checkpoint, target, whole)

    call = 1
    while dies_at(call):
        call += 1
    assert call > 200


@pytest.mark.parametrize("seed", range(50))
def test_death_at_a_random_moment_leaves_what_the_next_start_takes_up(seed, checkpoint, whole, tmp_path):
    started = time.perf_counter()
    pack(checkpoint, tmp_path / "timed")
    seconds = random.Random(seed).uniform(0, time.perf_counter() - started)
    killed_and_taken_up(
        killed_after(seconds, lambda: pack(checkpoint, tmp_path / "p")), checkpoint, tmp_path / "p", whole
    )


@pytest.mark.parametrize("seed", range(10))
def test_a_conversion_that_is_killed_again_and_again_ends_with_the_same_bytes(seed, checkpoint, whole, tmp_path):
    calls = random.Random(seed)
    while os.WIFSIGNALED(in_child(dying_at(calls.randint(1, 120), lambda: pack(checkpoint, tmp_path)))):
        assert_no_half_file(checkpoint, tmp_path)
    assert contents(tmp_path) == whole


# Memory

LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY = 10, 512, 8192, 4096
MiB = 1 << 20


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """270 MiB in bf16, 26 MiB a block at most."""
    folder = small_checkpoint(tmp_path_factory.mktemp("large"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "vocab_size": VOCABULARY, "head_dim": 128}
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
    tensors = {}
    for layout in block_layouts(load_config(folder)):
        for matrix in layout.matrices:
            for name, rows in matrix.parts.items():
                tensors[f"{name}.weight"] = torch.randn(rows, matrix.in_features).bfloat16()
        for norm in layout.norms:
            tensors[f"{norm.stored}.weight"] = torch.ones(norm.features)
    save_file(tensors, folder / "model.safetensors")
    return folder


PEAK = """
import sys
from pathlib import Path
import torch
from localllm.models.convert import convert
from localllm.models.families import load_config
from localllm.models.layout import block_layouts
from localllm.models.packed import PackedModel
from localllm.quant.recipe import recipe

def status(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) * 1024

def peak(work):
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    kept = work()
    return status("VmHWM") - before

torch.set_num_threads(1)
checkpoint, small, target, weights = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), recipe(sys.argv[4])
convert(small, target.with_name("small"), weights, "warm up")

def load():
    with PackedModel.open(target, load_config(checkpoint), weights, "s") as packed:
        return [packed.tensors(layout) for layout in block_layouts(packed.config)]

print(peak(lambda: convert(checkpoint, target, weights, "s")), peak(load))
"""


@pytest.mark.parametrize("weights", ["int4-g64", "int8"])
def test_a_conversion_takes_the_memory_of_two_blocks_and_a_load_that_of_the_packed_model(
    weights, large, checkpoint, tmp_path
):
    command = [sys.executable, "-c", PEAK, str(large), str(checkpoint), str(tmp_path / "p"), weights]
    out = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parent.parent).stdout
    converting, loading = map(int, out.split())
    config = load_config(large)
    layouts = block_layouts(config)
    largest = max(2 * m.out_features * m.in_features for layout in layouts for m in layout.matrices)
    block = max(sum(2 * m.out_features * m.in_features for m in layout.matrices) for layout in layouts)
    assert largest < converting < 2 * block + 32 * MiB
    packed = model_bytes(config, recipe(weights))
    assert packed < loading < packed + 16 * MiB
