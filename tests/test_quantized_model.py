"""Models of Hugging Face's quantizers, whole: read from a folder, kept in their codes, and computed with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from localllm import hub
from localllm.engine.engine import Engine
from localllm.engine.step_types import Chunk
from localllm.errors import CheckpointError, LocalLLMError
from localllm.settings import EngineConfig
from tests import test_quantized_formats as formats
from tests.checkpoints import write_checkpoint
from tests.test_quantized_formats import Case

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32, "num_hidden_layers": 2}
# What makes a matrix of a shape, and the name of the recipe that keeps it; "": numbers, which are quantized.
FOLDERS: dict[str, tuple[Callable[[int, int], Case], str]] = {
    "gptq": (lambda N, K: formats.gptq(N, K, 32), "kept-int4-g32-sym"),
    "gptq asym": (lambda N, K: formats.gptq(N, K, 64, sym=False), "kept-int4-g64"),
    "awq": (lambda N, K: formats.awq(N, K, 32), "kept-int4-g32"),
    "w4a16": (lambda N, K: formats.packed(N, K, 32), "kept-int4-g32-sym"),
    "w8a8": (lambda N, K: formats.int8(N, K, (N, 1)), "kept-int8-g128"),
    "fp8": (lambda N, K: formats.fp8(N, K, (-(-N // 128), -(-K // 128)), formats.BLOCKS, "weight_scale_inv"), ""),
    "mlx": (lambda N, K: formats.mlx(N, K, 64, 4), "kept-int4-g64"),
    "mlx 6": (lambda N, K: formats.mlx(N, K, 32, 6), "kept-int8-g32-bias"),
    "nf4": (lambda N, K: formats.bnb4(N, K, "nf4"), "kept-nf4-g64"),
    "nvfp4": (lambda N, K: formats.nvfp4(N, K, "modelopt"), "kept-fp4-g16"),
}


pytestmark = pytest.mark.usefixtures("empty_cache")


def write_quantized(
    folder: Path, make: Callable[[int, int], Case], family: str = "llama", sizes: dict[str, Any] = SHAPE
) -> Any:
    """A small model whose layers are quantized, in a folder; returns transformers' model of its weights."""
    write_checkpoint(folder, family, **sizes)
    tensors, dense = load_file(folder / "model.safetensors"), {}
    stored: dict[str, Tensor] = {}
    for name, weight in tensors.items():
        dense[name] = weight
        if not name.endswith("_proj.weight"):
            stored[name] = weight
            continue
        case = make(*weight.shape)
        # About as large as the weights that they replace, by the same factor for all.
        dense[name] = case.dense
        stored |= {
            own.replace(formats.Q, name.removesuffix(".weight")): part.contiguous()
            for own, part in case.tensors.items()
        }
    config = json.loads((folder / "config.json").read_text())
    plain = folder.with_name("plain")
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(config))
    save_file(dense, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | case.config))
    return AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")


def logits(engine: Engine, ids: list[int]) -> Tensor:
    kv = engine.residency.new_kv(len(ids))
    return engine.runner.forward([Chunk(ids, kv, len(ids), all_logits=True)])


@pytest.mark.parametrize("name", FOLDERS)
@torch.inference_mode()
def test_a_quantized_folder_computes_what_transformers_computes_with_its_weights(name, tmp_path):
    make, recipe = FOLDERS[name]
    peer = write_quantized(tmp_path / "folder", make)
    ids = torch.randint(0, 256, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = peer(torch.tensor([ids]), use_cache=False).logits[0]
    files = hub.locate(str(tmp_path / "folder"))
    engine = Engine.load(files, EngineConfig(device="cpu", dtype="fp32", weights="fp32"))
    torch.testing.assert_close(logits(engine, ids), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    kept = Engine.load(files, EngineConfig(device="cpu"))
    assert kept.weights == (recipe or "bf16")
    likeness = torch.nn.functional.cosine_similarity(logits(kept, ids), expected, dim=1)
    assert float(likeness.median()) > 0.99


@pytest.mark.parametrize("name", ["gptq asym", "mlx", "fp8"])
@torch.inference_mode()
def test_parts_of_a_quantized_matrix_have_names_and_multipliers_of_their_own(name, tmp_path):
    """The steps of Mamba 2 are read in fp32, and each part of its projection is multiplied by its own number."""
    make, recipe = FOLDERS[name]
    mamba = {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 32}
    unbiased = {"projectors_bias": False, "mlp_bias": False}
    peer = write_quantized(tmp_path / "folder", make, "falcon_h1-multipliers", SHAPE | mamba | unbiased)
    ids = torch.randint(0, 256, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = peer(torch.tensor([ids]), use_cache=False).logits[0]
    files = hub.locate(str(tmp_path / "folder"))
    engine = Engine.load(files, EngineConfig(device="cpu", dtype="fp32", weights="fp32"))
    torch.testing.assert_close(logits(engine, ids), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    kept = Engine.load(files, EngineConfig(device="cpu"))
    assert kept.weights == (recipe or "bf16")
    likeness = torch.nn.functional.cosine_similarity(logits(kept, ids), expected, dim=1)
    assert float(likeness.median()) > 0.99


def test_codes_that_cannot_be_kept_are_refused_by_name(tmp_path):
    write_quantized(tmp_path / "folder", FOLDERS["fp8"][0])
    with pytest.raises(LocalLLMError, match="no codes to keep"):
        Engine.load(hub.locate(str(tmp_path / "folder")), EngineConfig(device="cpu", weights="kept"))


def test_a_scale_that_is_not_a_number_leaves_nothing_behind(tmp_path):
    write_quantized(tmp_path / "folder", FOLDERS["w4a16"][0])
    tensors = load_file(tmp_path / "folder" / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight_scale"
    tensors[name][3, 1] = float("nan")
    save_file(tensors, tmp_path / "folder" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as refusal:
        Engine.load(hub.locate(str(tmp_path / "folder")), EngineConfig(device="cpu"))
    assert "down_proj" in refusal.value.what
    assert not [*(tmp_path / "cache").rglob("*.safetensors")]
