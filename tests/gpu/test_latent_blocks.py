"""A decoder with latent attention by the GPU's kernels, beside torch's operators."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from localllm.engine.engine import Engine
from localllm.engine.kernel_check import scope_of
from localllm.engine.step_types import Chunk
from localllm.kernels.gpu import check
from localllm.kernels.gpu.check_latent import LatentHeads
from localllm.kernels.gpu.launch import recorded
from localllm.models.families import load_config
from localllm.models.gpu_capabilities import is_ours
from localllm.models.gpu_program import GpuProgram
from localllm.quant.recipe import RECIPES
from localllm.settings import EngineConfig
from tests.checkpoints import write_checkpoint
from tests.gpu.test_graphs import Replaying
from tests.gpu.test_step import EXACT, by_kernels, by_operators, error, ids, logits
from tests.thinning import every_other

SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 2,
    "num_key_value_heads": 2, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}  # fmt: skip


def loaded(folder: Path, weights: str, kv: str, family: str = "glm4_moe_lite", layers: int = 1) -> Engine:
    write_checkpoint(folder, family, layers=layers, **SIZES | ({"q_lora_rank": None} if "v2" in family else {}))
    engine = Engine.load(folder, EngineConfig(device="cpu", dtype="fp32", weights=weights, kv=kv, speculate="off"))
    attentions = [block for block in engine.model.blocks if block.name.endswith("attention")]
    assert attentions and all(is_ours(block, block.device) for block in attentions)
    return engine


CASES = [
    ("glm4_moe_lite", "int4-g32", "int8", 0.02),
    ("deepseek_v2", "fp32", "bf16", EXACT),
    ("deepseek_v2", "int4-g32", "int4", 0.03),  # of activations in INT8: with pages in bf16 it is no less
    ("glm4_moe_lite", "fp32", "bf16", EXACT),
]


@pytest.mark.parametrize(("family", "weights", "kv", "tolerance"), every_other(CASES))
def test_layers_are_computed_as_operators_do(family, weights, kv, tolerance, tmp_path):
    """Behind a coded page too, and the other way round behind pages that the kernels have written."""
    engine, token_ids = loaded(tmp_path, weights, kv, family), ids(150)
    expected = logits(engine, by_operators(engine.model), token_ids, [150])
    runners, cache, found = (by_kernels(engine.model), by_operators(engine.model)), engine.residency.new_kv(150), []
    for number, size in enumerate((66, 66, 15, 2, 1)):
        found.append(runners[number % 2].forward([Chunk(token_ids, cache, size, all_logits=True)]))
    assert error(torch.cat(found), expected) < tolerance


@pytest.mark.usefixtures("products_row_by_row")
def test_a_prompts_rows_have_a_steps_bits_in_chunks_of_any_size(tmp_path: Path) -> None:
    engine, sizes = loaded(tmp_path, "int4-g32", "int8"), [17, 9, 5, 1, 1]
    token_ids = ids(sum(sizes))
    whole = logits(engine, by_kernels(engine.model), token_ids, [sum(sizes)])
    assert torch.equal(logits(engine, by_kernels(engine.model), token_ids, sizes), whole)


def test_replayed_steps_read_the_pages_that_the_tables_name(tmp_path: Path) -> None:
    """Of two sequences in turn."""
    engine = loaded(tmp_path, "fp32", "bf16", "deepseek_v2")
    chats = [ids(20, seed=1), ids(12, seed=2)]

    def found(program: GpuProgram) -> list[Tensor]:
        runner = by_kernels(engine.model)
        runner.gpu_program = program
        caches = [engine.residency.new_kv(90) for _ in chats]
        rows = [runner.forward([Chunk(chat, kv, len(chat) - 2)]) for chat, kv in zip(chats, caches, strict=True)]
        for _ in range(2):
            rows += [runner.forward([Chunk(chat, kv, 1)]) for chat, kv in zip(chats, caches, strict=True)]
        for cache in caches:
            cache.close()
        return rows

    graphs = Replaying()
    expected, replayed = found(GpuProgram(engine.model)), found(GpuProgram(engine.model, graphs))
    assert all(torch.equal(*pair) for pair in zip(expected, replayed, strict=True)) and graphs.replays > 0


def test_a_layer_is_few_launches_a_step(tmp_path: Path) -> None:
    engine = loaded(tmp_path, "int4-g32", "int8")
    runner, cache = by_kernels(engine.model), engine.residency.new_kv(10)
    with recorded(runs=True) as launches:
        runner.forward([Chunk(ids(1), cache, 1)])
    names = [launch.name for launch in launches if launch.name != "_parts_added"]
    product = ["_to_codes", "_gemm"]
    attending = ["_latent_store", "_attend_latents", "_merge", "_gemm"]
    assert names[1:14] == [*product * 3, *attending, *product, "_to_codes"]


def test_a_model_has_its_own_latents_checked(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "glm4_moe_lite", **SIZES)
    scope = scope_of(load_config(tmp_path), RECIPES["int4-g32"], "int8", torch.bfloat16)
    sizes = check.sizes_of(json.loads(scope.arguments[1]))
    assert sizes.latents == (LatentHeads("int8", 2, 64, 32, 32),) and sizes.attention == ()
