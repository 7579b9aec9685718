"""Mixtures of experts from the file to the text: whatever memory experts have, and whatever is wrong with them."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from localllm.bench.random_model import RandomBlocks
from localllm.cache.kv_format import KV_FORMATS
from localllm.cache.paged_kv import PagedKV
from localllm.engine.residency import new_pages
from localllm.engine.runner import ModelRunner
from localllm.engine.step_types import Chunk
from localllm.errors import CheckpointError, DoesNotFitError
from localllm.hub.packed import PACKED_INDEX
from localllm.models.block_layouts import block_layouts
from localllm.models.families import parse_config
from localllm.models.kept_uses import USES, keep_uses, kept_uses
from localllm.models.load import DecoderParts
from localllm.models.offloaded_model import OffloadedModel
from localllm.models.packed import PackedModel, PackedPlan
from localllm.models.packed_file import NewFile, write_block
from localllm.offload.placement import NEVER, BlockPlacement, ExpertSlots, demoted
from localllm.offload.planner.hit_curve import LEAST_WANTED, USUAL, HitCurve
from localllm.offload.planner.machine import Machine, Memory, Rates
from localllm.offload.planner.search import Search
from localllm.offload.streaming.disk_read import CachedPages
from localllm.offload.streaming.expert_pool import ExpertFile, ExpertPool
from localllm.offload.streaming.expert_uses import BINS, ExpertUses
from localllm.offload.streaming.foresight import Foresight
from localllm.offload.streaming.host_buffer import host_buffer
from localllm.quant.recipe import recipe
from tests.checkpoints import write_checkpoint
from tests.packed_support import SOURCE, pack, require_kernel_reads, small_checkpoint
from tests.test_placement import engine, shape_of, tokens, with_small_models

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
            own = ExpertSlots(count, experts.record(recipe(weights)).num_bytes, min(slots or count, count))
        found.append(BlockPlacement(layout.name, size, tier, "cpu", experts=own))  # type: ignore[arg-type]
    return found


def logits(model: OffloadedModel, batch_rows: int = 512, ends: tuple[int, ...] = (90, 91, 92, 93, 120)) -> Tensor:
    """All logits of a text, computed in chunks that end where `ends` says."""
    runner = ModelRunner(model.decode_model, batch_rows=batch_rows)
    ids = torch.randint(0, 160, (ends[-1],), generator=torch.Generator().manual_seed(0)).tolist()
    kv = PagedKV(new_pages(model.decode_model, KV_FORMATS["bf16"]), 256)
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


def test_what_is_read_before_it_is_wanted_changes_no_bit(tmp_path: Path) -> None:
    """Also where a prompt and a token of another sequence share a step: then nothing is guessed."""
    require_kernel_reads(tmp_path)
    chosen = recipe("int4")
    with packed_model(tmp_path / "p", "qwen3_moe", "int4") as packed:
        parts = DecoderParts(packed.config, chosen, torch.bfloat16, HOST)
        past_cache = mock.patch.object(CachedPages, "sampled_share", return_value=0.0)
        with past_cache, OffloadedModel(packed, parts, None) as model:
            model.place(placements(packed, "int4", None), NEVER)
            ends = (*range(60, 100), 120)
            expected, side_by_side = logits(model, ends=ends), two_sequences(model)
            model.place(placements(packed, "int4", 8), NEVER)
            with mock.patch.object(Foresight, "is_worth", return_value=True) as guessed:
                assert torch.equal(logits(model, ends=ends), expected)
                assert {call.args[0][0] for call in guessed.call_args_list} == {"layers.2.mlp"}  # of two mixtures
                guessed.reset_mock()
                assert torch.equal(two_sequences(model), side_by_side)
                assert not guessed.call_count


def two_sequences(model: OffloadedModel) -> Tensor:
    """All logits of a step with one token of one sequence and a prompt of another."""
    runner, ids = ModelRunner(model.decode_model, batch_rows=16), list(range(40))
    one, other = (PagedKV(new_pages(model.decode_model, KV_FORMATS["bf16"]), 256) for _ in range(2))
    runner.forward([Chunk(ids[:20], one, 20)])
    return runner.forward([Chunk(ids[:21], one, 1, all_logits=True), Chunk(ids, other, 40, all_logits=True)])


# A whole engine


small_models = pytest.fixture(scope="module", autouse=True)(with_small_models)
LEAST = Machine(Memory(1, 0, 1), Rates(1, 1, 1))


@pytest.fixture(scope="module", params=["qwen3_moe", "glm4_moe"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    write_checkpoint(folder, request.param, hidden_size=128, moe_intermediate_size=64)
    return folder


@pytest.mark.parametrize("weights", ["int4", pytest.param("int8", marks=pytest.mark.slow), "bf16"])
def test_a_mixture_writes_the_same_text_in_whatever_memory(directory: Path, weights: str) -> None:
    """From the least that it runs in to where all of it fits: prompts, steps, and answers side by side."""
    shape = shape_of(directory, weights)
    least = Search(shape, LEAST, 128).least_ram_bytes()
    with engine(directory, weights, ctx=128) as whole:
        assert whole.plan is not None and whole.plan.is_whole
        expected = tokens(whole), tokens(whole, temperature=0.9, seed=7)
    slots = set()
    for step in range(10):
        with engine(directory, weights, least + step * shape.num_bytes // 18, ctx=128) as capped:
            assert capped.plan is not None and capped.plan.total_bytes("ram") <= capped.plan.limits["ram"]
            slots.add(sum(block.experts.slots for block in capped.plan.blocks if block.experts is not None))
            assert (tokens(capped), tokens(capped, temperature=0.9, seed=7)) == expected
    assert len(slots) > 3 and max(slots) == sum(experts.count for _, experts in shape.mixtures)


def test_less_than_what_every_token_reads_is_refused_with_numbers(directory: Path) -> None:
    least = Search(shape_of(directory, "int4"), LEAST, 128).least_ram_bytes()
    with pytest.raises(DoesNotFitError) as refusal, engine(directory, "int4", least - 1, ctx=128):
        pytest.fail("it was loaded")
    assert "what every token reads, and a few experts" in refusal.value.why


def test_memory_that_is_taken_away_takes_slots_and_no_word(directory: Path) -> None:
    with engine(directory, "int4", ctx=128) as whole:
        expected = tokens(whole)
        blocks, seen = list(whole.residency.blocks), []
        while (fewer := demoted(blocks, "ram", is_tied=False)) is not None:
            blocks = fewer
            if any(block.tier == "disk" and not block.held_bytes for block in blocks[1:]):
                break  # from there on whole blocks are streamed, as of any model
            whole.residency.move(blocks)
            seen.append(sum(block.experts.slots for block in blocks if block.experts is not None))
            assert tokens(whole) == expected
    assert len(set(seen)) > 2 and seen == sorted(seen, reverse=True)


def test_an_expert_that_is_damaged_under_a_running_engine_ends_the_answer_with_its_number(
    directory: Path, empty_cache: Path
) -> None:
    with engine(directory, "int4", ctx=128) as whole:
        expected = tokens(whole)
    (path,) = empty_cache.rglob("layers.1.mlp.safetensors")
    content = path.read_bytes()
    least = Search(shape_of(directory, "int4"), LEAST, 128).least_ram_bytes()
    for damage in (lambda: path.write_bytes(content[:-4096] + bytes(4096)), lambda: os.truncate(path, 8192)):
        with engine(directory, "int4", least, ctx=128) as capped:
            damage()
            with pytest.raises(CheckpointError, match=r"layers\.1\.mlp") as caught:
                for _ in range(3):
                    tokens(capped)
            assert "expert " in caught.value.why and caught.value.fix.startswith("localllm quantize")
        path.write_bytes(content)
        with engine(directory, "int4", least, ctx=128) as capped:
            assert tokens(capped) == expected


@pytest.fixture
def packed_mixture(directory: Path, empty_cache: Path) -> Path:
    """The packed file of a layer's mixture, in a cache of its own that a test may damage."""
    with engine(directory, "int4", ctx=128) as whole:
        tokens(whole)
    (path,) = empty_cache.rglob("layers.1.mlp.safetensors")
    return path


def test_an_expert_whose_bytes_are_not_those_of_its_checksum_is_not_computed_with(
    directory: Path, packed_mixture: Path
) -> None:
    content = bytearray(packed_mixture.read_bytes())
    experts = dict(shape_of(directory, "int4").mixtures)[shape_of(directory, "int4").blocks[3]]
    for begin in range(len(content) - experts.count * experts.num_bytes + 100, len(content), experts.num_bytes):
        content[begin] ^= 1
    packed_mixture.write_bytes(content)
    least = Search(shape_of(directory, "int4"), LEAST, 128).least_ram_bytes()
    with engine(directory, "int4", least, ctx=128) as capped:
        with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\S+ is damaged") as caught:
            tokens(capped)
        assert re.match(r"the checksum of expert \d+ is [0-9a-f]{32}, [0-9a-f]{32} is stored", caught.value.why)


def test_what_all_tokens_share_of_a_mixture_is_compared_with_its_checksum(
    directory: Path, packed_mixture: Path
) -> None:
    content = bytearray(packed_mixture.read_bytes())
    content[int.from_bytes(content[:8], "little") + 8 + 100] ^= 1  # in the router, with which the data begins
    packed_mixture.write_bytes(content)
    least = Search(shape_of(directory, "int4"), LEAST, 128).least_ram_bytes()
    damaged = pytest.raises(CheckpointError, match=r"layers\.1\.mlp\S+ is damaged")
    with damaged as caught, engine(directory, "int4", least, ctx=128):
        pytest.fail("it was loaded")
    assert "what all tokens share" in caught.value.why


# What a checkpoint may have wrong


def spoilt(folder: Path, family: str, change: Callable[[dict[str, Tensor]], object], **config: object) -> Path:
    """A checkpoint of the family whose tensors were changed, and numbers of its config."""
    small_checkpoint(folder, family)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | config))
    return folder


EXPERT = "model.layers.1.mlp.experts.2"
FUSED = "model.layers.1.block_sparse_moe.input_linear.weight"


def renamed(old: str, new: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


WRONG: dict[str, tuple[str, Callable[[dict[str, Tensor]], object], dict[str, object], str]] = {
    "fewer experts than the config says": ("qwen3_moe", lambda _: None, {"num_local_experts": 7}, "mlp.gate"),
    "more experts than the config says": ("qwen3_moe", lambda _: None, {"num_local_experts": 5}, "mlp.gate"),
    "an expert is missing": ("qwen3_moe", lambda t: t.pop(f"{EXPERT}.up_proj.weight"), {}, f"{EXPERT}.up_proj"),
    "an expert of another size": (
        "qwen3_moe",
        lambda t: t.update({f"{EXPERT}.down_proj.weight": torch.zeros(64, 39)}),
        {},
        f"{EXPERT}.down_proj",
    ),
    "an expert twice": (
        "qwen3_moe",
        lambda t: t.update({"model.layers.1.mlp.experts.down_proj": torch.zeros(6, 64, 40)}),
        {},
        "experts.0.down_proj",
    ),
    "half fused": (
        "granitemoe",
        lambda t: t.update({"model.layers.1.mlp.experts.1.gate_proj.weight": torch.zeros(96, 64)}),
        {},
        "experts.1.gate_proj",
    ),
    "fused, with a part missing": (
        "granitemoe",
        lambda t: t.pop("model.layers.1.block_sparse_moe.output_linear.weight"),
        {},
        "experts.0.down_proj",
    ),
    "an expert that the file has by another name": (
        "mixtral",
        lambda t: t.pop("model.layers.1.block_sparse_moe.experts.2.w2.weight"),
        {},
        "block_sparse_moe.experts.1.w2.weight",
    ),
    "fused experts without rows": ("granitemoe", lambda t: t.update({FUSED: torch.zeros(5, 192)}), {}, "input_linear"),
    "a NaN in a router": (
        "qwen3_moe",
        lambda t: t["model.layers.2.mlp.gate.weight"][0].fill_(torch.nan),
        {},
        "model.layers.2.mlp.gate.weight",
    ),
    "an infinity in an expert": (
        "qwen3_moe",
        lambda t: t[f"{EXPERT}.gate_proj.weight"][3, 3].fill_(torch.inf),
        {},
        f"{EXPERT}.gate_proj.weight",
    ),
    "a NaN in a correction": (
        "glm4_moe",
        lambda t: t["model.layers.1.mlp.gate.e_score_correction_bias"].fill_(torch.nan),
        {},
        "e_score_correction_bias",
    ),
    "no router": ("mixtral", lambda t: t.pop("model.layers.0.block_sparse_moe.gate.weight"), {}, "layers.0.mlp.gate"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_mixture_is_refused_by_the_name_of_its_tensor_and_nothing_is_kept(case: str, tmp_path: Path) -> None:
    family, change, config, named = WRONG[case]
    checkpoint = spoilt(tmp_path / "m", family, change, **config)
    (tmp_path / "p").mkdir()
    with pytest.raises(CheckpointError) as refusal:
        pack(checkpoint, tmp_path / "p")
    assert named in refusal.value.what + refusal.value.why
    assert not [*(tmp_path / "p").glob("*.safetensors")]


# What runs teach of the experts


def trace(rng: random.Random, blocks: int, count: int, active: int, num_tokens: int) -> Iterator[tuple[str, list[int]]]:
    """The experts of each block and token: 0.45 of those of the token before, the others by a popularity of their
    own, as steep as that of published mixtures."""
    weights = [[(1 + rank) ** -0.6 for rank in rng.sample(range(count), count)] for _ in range(blocks)]
    before: list[list[int]] = [[] for _ in range(blocks)]
    for _ in range(num_tokens):
        for block in range(blocks):
            chosen = dict.fromkeys(index for index in before[block] if rng.random() < 0.45)
            while len(chosen) < active:
                chosen |= dict.fromkeys(rng.choices(range(count), weights[block]))
            before[block] = list(chosen)
            yield f"b{block}", sorted(chosen)


@pytest.mark.parametrize("seed", range(2))
def test_the_learnt_curve_foretells_the_hits_of_any_number_of_slots(seed: int, tmp_path: Path) -> None:
    """Counted with few slots, true of all: within 3 points of what pools of other sizes have."""
    blocks, count, active, size = 3, 32, 4, 4096
    (tmp_path / "records").write_bytes(bytes(count * size))
    files = [
        ExpertFile(f"b{block}", tmp_path / "records", 0, count, lambda _index, _content: None, "", active)
        for block in range(blocks)
    ]
    asked = list(trace(random.Random(seed), blocks, count, active, LEAST_WANTED // blocks // active + 1))
    measured, curve = {}, USUAL
    for slots in (4, 8, 12, 20, 28):
        uses = ExpertUses()
        pool = ExpertPool(files, host_buffer(blocks * slots * size).view(blocks * slots, size), uses)
        for block, experts in asked:
            for _ in pool.held(block, experts):
                pass
        pool.close()
        measured[slots] = uses.hits / uses.wanted
        curve = curve if curve.learnt_from else HitCurve.of(uses.counts, USUAL)
    assert curve.learnt_from == len(asked) * active
    for slots, hits in measured.items():
        assert curve.hits(slots / count) == pytest.approx(hits, abs=0.03), slots


def test_a_short_run_teaches_nothing_and_a_prompt_counts_for_nothing() -> None:
    uses = ExpertUses()
    uses.see("b", [0, 1, 2, 3], 4, None)
    assert not any(uses.counts) and not uses.wanted
    uses.see("b", [3, 1], 4, 2)
    assert uses.counts[15] == uses.counts[5] == 1 and (uses.hits, uses.wanted) == (2, 2)
    assert HitCurve.of(uses.counts, USUAL) is USUAL


def test_what_runs_learnt_is_kept_beside_the_packed_model_and_is_no_part_of_it(directory: Path) -> None:
    """A run adds to what those before it kept; the model is as whole with it as without, and goes with it."""
    shape = shape_of(directory, "int4")
    ram_bytes = Search(shape, LEAST, 128).least_ram_bytes() + shape.num_bytes // 4
    kept = None
    for _ in range(2):
        with engine(directory, "int4", ram_bytes, ctx=128) as capped:
            tokens(capped)
            assert capped.residency.placed is not None
            uses, folder = capped.residency.placed.expert_uses, capped.residency.placed.directory
            facts = capped.facts()
            assert (facts.experts_wanted, facts.expert_hits) == (uses.wanted, uses.hits)
            assert 0 < facts.experts_in_memory < facts.num_experts and facts.hit_rate == uses.hits / uses.wanted
            before, kept = kept, sum(kept_uses(folder))  # by whoever ran before
            assert before is None or kept == before
        assert uses.wanted
        kept += uses.wanted
        assert sum(kept_uses(folder)) == kept
    keep_uses(folder, [LEAST_WANTED, *[0] * BINS])
    with engine(directory, "int4", ram_bytes, ctx=128) as taught:
        assert taught.plan is not None and capped.plan is not None
        assert taught.plan.learnt_tokens > 1000 and not capped.plan.learnt_tokens
        assert taught.plan.hit_rate > capped.plan.hit_rate
    (folder / USES).unlink()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"used_since": [1]}', '{"used_since": 1}'])
def test_a_kept_file_that_is_no_such_file_teaches_nothing(content: str, tmp_path: Path) -> None:
    (tmp_path / USES).write_text(content)
    assert not any(kept_uses(tmp_path))
    keep_uses(tmp_path, [1] * (BINS + 1))
    assert kept_uses(tmp_path) == [1] * (BINS + 1)


def test_old_runs_count_less_and_a_folder_that_takes_nothing_is_no_error(tmp_path: Path) -> None:
    keep_uses(tmp_path, [3_000_000, *[0] * BINS])
    keep_uses(tmp_path, [0, 3_000_000, *[0] * (BINS - 1)])
    assert kept_uses(tmp_path)[:2] == [1_500_000, 1_500_000]
    keep_uses(tmp_path / "absent", [1] * (BINS + 1))
