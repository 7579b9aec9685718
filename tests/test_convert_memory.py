"""How much memory a conversion and a load take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from localllm.models.block_layouts import block_layouts, model_bytes
from localllm.models.families import load_config
from localllm.quant.recipe import recipe
from tests.packed_support import resized

pytestmark = pytest.mark.slow

MiB = 1 << 20


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """270 MiB in bf16, 26 MiB a block at most."""
    sizes = {"hidden_size": 512, "intermediate_size": 8192, "vocab_size": 4096, "head_dim": 128}
    return resized(tmp_path_factory.mktemp("large"), num_hidden_layers=10, **sizes)


PEAK = """
import sys
from pathlib import Path
import torch
from localllm.models.convert import convert
from localllm.models.families import load_config
from localllm.models.block_layouts import block_layouts
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

print(peak(load if target.exists() else lambda: convert(checkpoint, target, weights, "s")))
"""


def peak_bytes(model: Path, small: Path, target: Path, weights: str) -> int:
    """Of a conversion, or of a load where `target` is one, in a process of its own: no heap has other pages."""
    command = [sys.executable, "-c", PEAK, str(model), str(small), str(target), weights]
    return int(subprocess.check_output(command, text=True, cwd=Path(__file__).parent.parent))


@pytest.mark.parametrize("weights", ["int4-g64", "int8"])
def test_a_conversion_takes_the_memory_of_two_blocks_and_a_load_that_of_the_packed_model(
    weights, large, checkpoint, tmp_path
):
    converting, loading = (peak_bytes(large, checkpoint, tmp_path / "p", weights) for _ in range(2))
    config = load_config(large)
    layouts = block_layouts(config)
    largest = max(2 * m.out_features * m.in_features for layout in layouts for m in layout.matrices)
    block = max(sum(2 * m.out_features * m.in_features for m in layout.matrices) for layout in layouts)
    assert largest < converting < 2 * block + 32 * MiB
    packed = model_bytes(config, recipe(weights))
    assert packed < loading < packed + 16 * MiB


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """320 MiB in bf16, 96 MiB a block, of which an expert has 1.5."""
    sizes = {"hidden_size": 512, "moe_intermediate_size": 512, "num_local_experts": 64, "vocab_size": 4096}
    folder = tmp_path_factory.mktemp("mixture")
    return resized(folder, "qwen3_moe", num_hidden_layers=3, num_experts_per_tok=4, head_dim=128, **sizes)


@pytest.mark.parametrize("weights", ["int4-g64", "int8"])
def test_a_conversion_of_a_mixture_holds_an_expert_at_a_time(weights, mixture, checkpoint, tmp_path):
    converting, loading = (peak_bytes(mixture, checkpoint, tmp_path / "p", weights) for _ in range(2))
    largest = max(
        2 * matrix.num_weights for layout in block_layouts(load_config(mixture)) for matrix in layout.matrices
    )
    assert converting < 2 * largest + 32 * MiB < 96 * MiB
    packed = model_bytes(load_config(mixture), recipe(weights))
    assert packed < loading < packed + 16 * MiB
