"""A decoder with layers that keep states, and attention, by the GPU's kernels, beside torch's operators."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from localllm.engine.engine import Engine
from localllm.engine.step_types import Chunk
from localllm.kernels.gpu.launch import recorded
from localllm.models.decoder import without
from localllm.models.families import load_config
from localllm.models.gpu_capabilities import is_ours
from localllm.models.gpu_program import GpuProgram
from localllm.settings import EngineConfig
from tests.checkpoints import linear, write_checkpoint
from tests.gpu.test_graphs import Replaying
from tests.gpu.test_step import EXACT, by_kernels, by_operators, error, ids, logits, sampling, texts
from tests.thinning import every_other

SIZES = linear(1, 2, 16, 32, head_dim=32) | {
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
}


MAMBA = {"mamba_n_heads": 2, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_ssm": 32}
SMALL = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32, "intermediate_size": 64, "head_dim": 32}
KIMI = {
    "linear_head_dim": 16, "linear_num_heads": 2, "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 32, "intermediate_size": 64,
    "moe_intermediate_size": 32,
}  # fmt: skip
OTHERS = {
    "kimi_linear": KIMI,
    "falcon_h1-multipliers": SMALL | MAMBA,
    "mamba2": {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 16},
    "rwkv7": {"hidden_size": 32, "head_dim": 16, "intermediate_size": 64},
}
of_both = pytest.mark.parametrize("family", ["qwen3_5", "rwkv7"])


def loaded(folder: Path, weights: str, kv: str = "int8", family: str = "qwen3_5") -> Engine:
    write_checkpoint(folder, family, layers=2, **OTHERS.get(family, SIZES))
    kv = kv if load_config(folder).kv_shapes else "auto"
    engine = Engine.load(folder, EngineConfig(device="cpu", dtype="fp32", weights=weights, kv=kv, speculate="off"))
    assert all(is_ours(block, block.device) for block in engine.model.blocks)
    return engine


@pytest.mark.parametrize(
    ("weights", "kv", "tolerance"), every_other([("int4-g32", "int8", 0.02), ("fp32", "bf16", EXACT)])
)
def test_layers_of_both_kinds_are_computed_as_operators_do(
    weights: str, kv: str, tolerance: float, tmp_path: Path
) -> None:
    """Behind a coded page too, and the other way round behind states that the kernels have left."""
    engine, token_ids = loaded(tmp_path, weights, kv), ids(90)
    expected = logits(engine, by_operators(engine.model), token_ids, [90])
    assert error(logits(engine, by_kernels(engine.model), token_ids, [70, 17, 2, 1]), expected) < tolerance
    runners, cache, found = (by_kernels(engine.model), by_operators(engine.model)), engine.residency.new_kv(90), []
    for number, size in enumerate((66, 17, 3, 2, 2)):
        found.append(runners[number % 2].forward([Chunk(token_ids, cache, size, all_logits=True)]))
    assert error(torch.cat(found), expected) < tolerance


@pytest.mark.parametrize("family", OTHERS)
def test_mixers_beside_each_other_and_models_without_attention_are_computed_as_operators_do(
    family: str, tmp_path: Path
) -> None:
    engine, token_ids = loaded(tmp_path, "int4-g32", family=family), ids(40)
    expected = logits(engine, by_operators(engine.model), token_ids, [40])
    assert error(logits(engine, by_kernels(engine.model), token_ids, [20, 17, 2, 1]), expected) < 0.02


@pytest.mark.parametrize("is_packed", every_other([True, False]))
def test_rwkv7_is_computed_behind_states_that_operators_have_left(is_packed: bool, tmp_path: Path) -> None:
    """And the other way round; in a draft that lacks the block whose values are mixed with the others', too."""
    engine, token_ids = loaded(tmp_path, "int8" if is_packed else "fp32", family="rwkv7"), ids(90)
    assert GpuProgram(engine.model).is_whole is is_packed
    tolerance = 0.02 if is_packed else EXACT
    draft = without(engine.model, frozenset({engine.model.blocks[0].name}))
    for model in (engine.model, draft):
        expected = logits(engine, by_operators(model), token_ids, [90])
        runners, cache, found = (by_kernels(model), by_operators(model)), engine.residency.new_kv(90), []
        for number, size in enumerate((66, 17, 3, 2, 2)):
            found.append(runners[number % 2].forward([Chunk(token_ids, cache, size, all_logits=True)]))
        assert error(torch.cat(found), expected) < tolerance


@of_both
@pytest.mark.usefixtures("products_row_by_row")
def test_a_prompts_rows_have_a_steps_bits_in_chunks_of_any_size(family: str, tmp_path: Path) -> None:
    engine, sizes = loaded(tmp_path, "int4-g32", family=family), [17, 9, 5, 1, 1]
    token_ids = ids(sum(sizes))
    whole = logits(engine, by_kernels(engine.model), token_ids, [sum(sizes)])
    assert torch.equal(logits(engine, by_kernels(engine.model), token_ids, sizes), whole)


@pytest.mark.parametrize(("family", "weights"), [("qwen3_5", "int4-g32"), ("rwkv7", "int4-g32"), ("rwkv7", "fp32")])
@pytest.mark.usefixtures("products_row_by_row")
def test_a_row_has_the_same_bits_in_a_batch_and_behind_drafts_that_were_rejected(
    family: str, weights: str, tmp_path: Path
) -> None:
    engine = loaded(tmp_path, weights, family=family)
    runner, prompts = by_kernels(engine.model), [ids(length, seed=length) for length in (18, 5, 9)]
    alone = [logits(engine, runner, prompt, [len(prompt) - 2, 1, 1])[-2:] for prompt in prompts]
    caches = [engine.residency.new_kv(30) for _ in prompts]
    for cache, prompt in zip(caches, prompts, strict=True):
        runner.forward([Chunk(prompt, cache, len(prompt) - 2)])
    for row in range(2):
        drafts = [Chunk([*p[: len(p) - 2 + row], 7, 8, 9], kv, 3) for kv, p in zip(caches, prompts, strict=True)]
        runner.forward(drafts, advances=False)
        together = runner.forward([Chunk(p, kv, 1) for kv, p in zip(caches, prompts, strict=True)])
        assert torch.equal(together, torch.stack([each[row] for each in alone]))


@of_both
def test_replayed_steps_read_the_states_that_the_tables_name(family: str, tmp_path: Path) -> None:
    """Of two sequences in turn, and of requests that come and go."""
    engine = loaded(tmp_path, "fp32", "bf16", family)
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
    wishes, prompts = [sampling(0.9, 3), sampling(0, 2)], [ids(length, seed=length) for length in (7, 3)]
    engine.runner.cpu_program, engine.runner.gpu_program = None, GpuProgram(engine.model)
    answers = texts(engine, wishes, prompts)
    engine.runner.gpu_program = GpuProgram(engine.model, Replaying())
    assert texts(engine, wishes, prompts) == answers


def test_a_layer_of_either_kind_is_few_launches_a_step(tmp_path: Path) -> None:
    engine = loaded(tmp_path, "int4-g32")
    runner, cache = by_kernels(engine.model), engine.residency.new_kv(10)
    with recorded(runs=True) as launches:
        runner.forward([Chunk(ids(1), cache, 1)])
    names = [launch.name for launch in launches]
    delta = ["_logits", "_to_codes", "_gemm", "_prepare", "_take_in", "_gated_norm", "_gemm"]
    assert names[1:8] == delta and "_rope_store" in names[8:]


def test_low_rank_gates_of_kimi_delta_attention_are_three_launches_more(tmp_path: Path) -> None:
    engine = loaded(tmp_path, "int4-g32", family="kimi_linear")
    runner, cache = by_kernels(engine.model), engine.residency.new_kv(10)
    with recorded(runs=True) as launches:
        runner.forward([Chunk(ids(1), cache, 1)])
    names = [launch.name for launch in launches]
    gates = ["_logits", "_logits", "_to_codes", "_gemm", "_to_codes", "_gemm"]
    assert names[1:7] == gates and names[7:9] == ["_prepare", "_take_in"]


def test_blocks_of_rwkv7_are_few_launches_a_step_between_their_products(tmp_path: Path) -> None:
    engine = loaded(tmp_path, "int4-g32", family="rwkv7")
    runner, cache = by_kernels(engine.model), engine.residency.new_kv(10)
    with recorded(runs=True) as launches:
        runner.forward([Chunk(ids(1), cache, 1)])
    products = {"_embed", "_to_codes", "_gemm", "_parts_added"}
    names = [launch.name for launch in launches if launch.name not in products]
    time_mix = ["_layer_norm", "_shift", "_prepare_rwkv", "_take_in_rwkv", "_norm_heads"]
    channel_mix = ["_layer_norm", "_shift"]
    assert names == ["_layer_norm", *(time_mix + channel_mix) * 2, "_layer_norm"]


@of_both
def test_a_prompt_over_several_batches_leaves_the_snapshots_that_operators_leave(family: str, tmp_path: Path) -> None:
    engine, token_ids, taken = loaded(tmp_path, "fp32", "bf16", family), ids(140), []
    for runner in (by_kernels(engine.model), by_operators(engine.model)):
        runner.batch_rows, cache = 50, engine.residency.new_kv(150)
        assert cache.state is not None
        cache.state.watch((64, 128))
        runner.forward([Chunk(token_ids, cache, 140)])
        taken.append(cache.state.snapshots)
    assert list(taken[0]) == list(taken[1]) == [64, 128]
    for position, snapshot in taken[0].items():
        found, expected = (each.layer(0).view(torch.float32) for each in (snapshot, taken[1][position]))
        assert error(found, expected) < EXACT
