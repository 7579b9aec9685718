"""A decoder with adapters by the GPU's kernels, beside torch's operators on the same tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.engine.adaptable_layers import AdaptableLayers
from localllm.engine.adapters import AdapterCache
from localllm.engine.engine import Engine
from localllm.engine.request import AdapterRef
from localllm.engine.runner import ModelRunner
from localllm.engine.step_types import Chunk
from localllm.kernels.gpu.launch import recorded
from localllm.layers.low_rank import HEAD, Adapter, AppliedAdapter, LowRank
from localllm.models.families import load_config
from localllm.models.gpu_capabilities import is_ours
from localllm.settings import EngineConfig
from tests.adapters import write_peft_adapter
from tests.checkpoints import write_checkpoint
from tests.gpu.test_hybrids import KIMI
from tests.gpu.test_hybrids import SIZES as HYBRID
from tests.gpu.test_step import EXACT, EXPERT_WIDTH, SMALL, by_kernels, by_operators, error, ids
from tests.thinning import every_other

ATTENTION = {"r": 3, "target_modules": ["q_proj", "v_proj", "o_proj"]}
MLP = {"r": 17, "target_modules": ["down_proj", "up_proj", "k_proj"]}


@dataclass
class Model:
    """engine: its adapters are those of no native step."""

    engine: Engine
    adapters: list[AppliedAdapter]

    def logits(
        self, runner: ModelRunner, token_ids: list[int], adapters: Sequence[int], sizes: Sequence[int]
    ) -> Tensor:
        """Of every token, fed in chunks, with these of the adapters."""
        kv = self.new_kv(len(token_ids), adapters)
        found = [runner.forward([Chunk(token_ids, kv, size, all_logits=True)]) for size in sizes]
        kv.close()
        return torch.cat(found)

    def new_kv(self, num_tokens: int, adapters: Sequence[int]) -> Any:
        kv = self.engine.residency.new_kv(num_tokens)
        kv.adapters = tuple(self.adapters[number] for number in adapters)
        return kv

    def by_kernels(self) -> ModelRunner:
        runner = by_kernels(self.engine.model)
        runner._gpu_prefill = runner.gpu_program
        return runner


def made(folder: Path, family: str, weights: str, *adapters: dict[str, Any], kv: str = "bf16", **sizes: Any) -> Model:
    """The adapters have the scales 1, 0.5, ..."""
    peer, applied = write_checkpoint(folder / "model", family, **sizes), []
    kv = kv if load_config(folder / "model").kv_shapes else "auto"
    engine = Engine.load(folder / "model", EngineConfig(device="cpu", dtype="fp32", weights=weights, kv=kv))
    cache = AdapterCache(AdaptableLayers.of(engine.model), lambda: False, 1 << 30)
    for number, options in enumerate(adapters):
        write_peft_adapter(folder / f"adapter{number}", peer, seed=number, **options)
        applied += cache.take([AdapterRef(str(folder / f"adapter{number}"), scale=1 / (1 + number))])
    return Model(engine, applied)


def needs(runner: ModelRunner, model: Model, *adapters: int) -> bool:
    kv = model.new_kv(8, adapters)
    found = runner._needs_operators(kv)
    kv.close()
    return found


@pytest.mark.parametrize(
    ("family", "weights", "sizes", "tolerance"),
    every_other(
        [
            ("llama", "fp32", SMALL, EXACT),
            ("qwen3", "int4-g32", SMALL, 0.03),
            ("gemma2", "fp32", {**SMALL, "head_dim": 16}, EXACT),
            ("qwen3_5", "fp32", HYBRID, EXACT),
            ("qwen3_5", "int8", HYBRID, 0.03),
            ("llama", "int8", SMALL, 0.03),
            ("kimi_linear", "int8", KIMI | {"mlp_layer_types": ["dense", "dense"]}, 0.03),
        ]
    ),
)
def test_prompts_and_steps_are_computed_as_operators_do(
    family: str, weights: str, sizes: dict[str, Any], tolerance: float, tmp_path: Path
) -> None:
    """Of an adapter that changes every matrix, the embedding's too; alone and with another."""
    model = made(tmp_path, family, weights, {}, ATTENTION, layers=2, **sizes)
    runner, token_ids = model.by_kernels(), ids(24)
    assert not needs(runner, model, 0, 1)
    base = model.logits(by_operators(model.engine.model), token_ids, (), [24])
    for adapters in ((0,), (1, 0)):
        expected = model.logits(by_operators(model.engine.model), token_ids, adapters, [24])
        assert error(base, expected) > 0.1, "they change something"
        assert error(model.logits(runner, token_ids, adapters, [19, 3, 1, 1]), expected) < tolerance


@pytest.mark.parametrize(("weights", "tolerance"), every_other([("int4-g32", 0.03), ("fp32", EXACT)]))
def test_every_matrix_of_rwkv7_takes_what_adapters_add(weights: str, tolerance: float, tmp_path: Path) -> None:
    """Those of its pairs of small ones, too."""
    write_checkpoint(tmp_path, "rwkv7", layers=2, hidden_size=32, head_dim=16, intermediate_size=64)
    engine = Engine.load(tmp_path, EngineConfig(device="cpu", dtype="fp32", weights=weights))
    linears = {linear.name: linear for block in engine.model.blocks for linear in block.body.linears}
    parts = {
        site: (LowRank(torch.randn(3, linear.in_features) * 0.1, torch.randn(linear.out_features, 3) * 0.1, 0),)
        for site, linear in {**linears, HEAD: engine.model.head}.items()
    }
    model = Model(engine, [AppliedAdapter(Adapter("all", b"", parts, {}), 1.0)])
    assert len(linears) == 2 * 14 - 2 and not needs(model.by_kernels(), model, 0)
    base, expected = (model.logits(by_operators(engine.model), ids(24), own, [24]) for own in ((), (0,)))
    assert error(base, expected) > 0.1, "they change something"
    assert error(model.logits(model.by_kernels(), ids(24), (0,), [19, 3, 1, 1]), expected) < tolerance


@pytest.mark.usefixtures("products_row_by_row")
@pytest.mark.parametrize(
    ("family", "weights", "sizes"), every_other([("llama", "int4-g32", SMALL), ("qwen3_5", "int4-g32", HYBRID)])
)
def test_a_row_has_the_same_bits_alone_in_a_batch_and_verified(
    family: str, weights: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    """Beside rows with other adapters, and with none; a prompt in chunks of any size."""
    model = made(tmp_path, family, weights, {}, ATTENTION, MLP, layers=2, **sizes)
    runner, own = model.by_kernels(), ((), (0,), (2, 1), (1,))
    prompts = [ids(length, seed=length) for length in (5, 20, 9, 7)]
    alone = [
        model.logits(runner, prompt, adapters, [len(prompt) - 3, 1, 1, 1])[-3:]
        for prompt, adapters in zip(prompts, own, strict=True)
    ]
    for prompt, adapters, rows in zip(prompts, own, alone, strict=True):
        assert torch.equal(model.logits(runner, prompt, adapters, [2, len(prompt) - 2])[-3:], rows)
    kvs = [model.new_kv(30, adapters) for adapters in own]
    for kv, prompt in zip(kvs, prompts, strict=True):
        runner.forward([Chunk(prompt, kv, len(prompt) - 3)])
    drafts = [Chunk(prompt, kv, 3, num_drafted=2) for kv, prompt in zip(kvs, prompts, strict=True)]
    assert not any(runner.draws([draft]) for draft in drafts[1:]) and runner.draws(drafts[:1])
    verified = runner.forward(drafts, advances=False)
    assert torch.equal(verified, torch.cat(alone))
    together = runner.forward([Chunk(prompt[:-2], kv, 1) for kv, prompt in zip(kvs, prompts, strict=True)])
    assert torch.equal(together, torch.stack([rows[0] for rows in alone]))


def test_a_batch_without_adapters_launches_what_it_did_before(tmp_path: Path) -> None:
    model = made(tmp_path, "llama", "int4-g32", ATTENTION, layers=1, **SMALL)
    runner, names = model.by_kernels(), list[list[str]]()
    for adapters in ((), (0,), ()):
        with recorded(runs=True) as launches:
            model.logits(runner, ids(3), adapters, [2, 1])
        names.append([launch.name for launch in launches])
    assert names[0] == names[2] and not {"_shrink", "_expand"} & {*names[0]}
    assert [name for name in names[1] if name in ("_shrink", "_expand")] == [
        "_shrink",
        "_expand",
    ] * 4  # of two forwards


SHARED = [f"mlp.shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")]


@pytest.mark.parametrize(
    ("options", "is_left"),
    [
        ({"target_modules": ["q_proj"], "target_parameters": SHARED}, False),
        ({}, True),  # experts and routers, among others
    ],
    ids=["shared", "all"],
)
def test_a_mixtures_shared_part_is_ours_and_experts_are_left_to_operators(
    options: dict[str, Any], is_left: bool, tmp_path: Path
) -> None:
    model = made(tmp_path, "qwen2_moe", "int4-g32", options, layers=2, **EXPERT_WIDTH)
    assert all(is_ours(block, block.device) for block in model.engine.model.blocks)
    runner, token_ids = model.by_kernels(), ids(10)
    assert needs(runner, model, 0) is is_left and not needs(runner, model)
    expected = model.logits(by_operators(model.engine.model), token_ids, (0,), [10])
    assert error(model.logits(by_operators(model.engine.model), token_ids, (), [10]), expected) > 0.1
    with recorded(runs=True) as launches:
        assert error(model.logits(runner, token_ids, (0,), [8, 2]), expected) < 0.03
    assert any(launch.name == "_expand" for launch in launches) is not is_left
