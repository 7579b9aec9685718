"""Mixtures of experts from the file to the text: whatever memory experts have, and whatever is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.bench.random_model import RandomBlocks
from localllm.cache.kv_format import KV_FORMATS
from localllm.engine.residency import new_pages
from localllm.engine.runner import ModelRunner
from localllm.engine.step_types import Chunk
from localllm.hub.packed import PACKED_INDEX
from localllm.models.families import parse_config
from localllm.models.layout import block_layouts
from localllm.models.load import DecoderParts
from localllm.models.offloaded_model import OffloadedModel
from localllm.models.packed import PackedModel, PackedPlan
from localllm.models.packed_file import NewFile, write_block
from localllm.offload.placement import NEVER, BlockPlacement, ExpertSlots
from localllm.quant.recipe import RECIPES, recipe
from tests.packed_support import SOURCE

HOST = torch.device("cpu")
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"model_type": "qwen3_moe", "norm_topk_prob": True, "mlp_only_layers": [0], "num_experts": 24},
    "qwen2_moe": {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 128, "num_experts": 12},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 5, "intermediate_size": 64, "num_experts_per_tok": 2},
}
BASE: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024, "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
}  # fmt: skip


def packed_model(folder: Path, mixture: str, weights: str) -> PackedModel:
    """Random weights of the mixture, packed in the folder."""
    config, chosen = parse_config(BASE | MIXTURES[mixture], mixture), recipe(weights)
    plan, source, checksums = PackedPlan(config, chosen, SOURCE), RandomBlocks(chosen), {}
    folder.mkdir()
    for layout in block_layouts(config):
        parts = [source.tensors(layout)]
        checksums[layout.name] = write_block(plan.files[layout.name], folder, parts, lambda _bytes: None)
    with NewFile(folder / PACKED_INDEX) as new:
        new.write(memoryview(json.dumps(plan.index(checksums)).encode()))
        new.publish()
    return PackedModel.open(folder, config, chosen, SOURCE)


def placements(packed: PackedModel, weights: str, slots: int | None) -> list[BlockPlacement]:
    """All blocks in memory, but of each mixture no more than so many experts."""
    found = []
    for layout in block_layouts(packed.config):
        size = packed.streamed_file(layout).num_bytes
        experts, tier = layout.experts, "ram" if slots is None or layout.experts is None else "disk"
        own = None
        if experts is not None:
            count = experts.num_experts
            own = ExpertSlots(
                count, experts.record(RECIPES[recipe(weights).name]).num_bytes, min(slots or count, count)
            )
        found.append(BlockPlacement(layout.name, size, tier, "cpu", experts=own))  # type: ignore[arg-type]
    return found


def logits(model: OffloadedModel, batch_rows: int = 512, ends: tuple[int, ...] = (90, 91, 92, 93, 120)) -> Tensor:
    """All logits of a text, computed in chunks that end where `ends` says."""
    runner = ModelRunner(model.decode_model, batch_rows=batch_rows)
    ids = torch.randint(0, 160, (ends[-1],), generator=torch.Generator().manual_seed(0)).tolist()
    kv = new_pages(model.decode_model, KV_FORMATS["bf16"]).new(256)
    return torch.cat([runner.forward([Chunk(ids[:end], kv, end - kv.length, all_logits=True)]) for end in ends])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["native", "operators"])
@pytest.mark.parametrize(
    ("mixture", "weights"), [("qwen3_moe", "int4"), ("qwen2_moe", "int8"), ("mixtral", "int4-g32")]
)
def test_experts_from_the_disk_give_the_bits_of_those_in_memory(mixture, weights, dtype, tmp_path):
    """However few of them have room at a time: half, as many as a token needs, one."""
    chosen = recipe(weights)
    with packed_model(tmp_path / "p", mixture, weights) as packed:
        parts = DecoderParts(packed.config, chosen, dtype, HOST)
        with OffloadedModel(packed, parts, None) as model:
            model.place(placements(packed, weights, None), NEVER)
            expected = logits(model)
            for slots in (10, 4, 1):
                model.place(placements(packed, weights, slots), NEVER)
                assert torch.equal(logits(model), expected)
                assert torch.equal(logits(model, batch_rows=7), expected)
            model.place(placements(packed, weights, None), NEVER)
            assert torch.equal(logits(model), expected)
