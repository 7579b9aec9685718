"""Keys and values that leave a card: it computes what the CPU does, however late it is, and a text is the same whatever
is computed beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.cache.kv_eviction import Eviction
from localllm.engine.engine import Engine
from localllm.engine.loader import LoadedModel
from localllm.engine.prefix_config import IN_POOLS
from localllm.engine.request import Request, SamplingParams
from localllm.engine.speculative.choice import Speculate
from localllm.engine.step_types import Chunk, Limits
from localllm.settings import EngineConfig
from localllm.text.tokenizer import Tokenizer
from tests.checkpoints import write_checkpoint
from tests.engine_support import answered
from tests.kv_support import check_pages
from tests.simulated_card.device import DEVICE, CardConfig
from tests.simulated_card.support import blocks, packed_in_formats
from tests.test_device_placement import CPU, Packed

LONG = tuple(3 + index * index % 90 for index in range(560))
WISH = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
LATENT = {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 64,
    "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
}  # fmt: skip


@contextmanager
def opened(packed: Packed, device: torch.device, rule: str, placement: str, **options: Any) -> Iterator[Engine]:
    with packed.opened(device) as placed:
        placed.place(blocks(packed, placement), 8)
        loaded = LoadedModel(placed.decode_model, 1024, placed=placed, eviction=Eviction.of(rule))
        engine = Engine(loaded, Tokenizer.load(packed.checkpoint), **options)
        program = engine.runner.gpu_program
        yield engine
        assert engine.runner.gpu_program is program, "nothing was given up"
        check_pages(engine.residency.kv_pages)


def logits(engine: Engine, sizes: Sequence[int]) -> tuple[Tensor, list[list[int]]]:
    """Of every token, fed in chunks of these sizes; and the pages that are left."""
    kv = engine.residency.new_kv(len(LONG))
    found = [engine.runner.forward([Chunk(LONG, kv, size, all_logits=True)]).cpu() for size in sizes]
    kv.prepare(kv.length + 1)
    assert kv.num_evicted
    left = [[number for number, page in enumerate(table) if page is not None] for table in kv.tables]
    kv.close()
    return torch.cat(found), left


@pytest.fixture(scope="module")
def models(packed_models, tmp_path_factory):
    """One more whose layers keep latents, and one of which some layers have a window."""
    folder = tmp_path_factory.mktemp("more")
    write_checkpoint(folder / "latent", "minicpm3", layers=2, **LATENT)
    write_checkpoint(folder / "windowed", "gemma3-scaled-and-capped")
    return {"llama": packed_models["int8"]} | {
        name: packed_in_formats(folder / name, folder / f"{name}-packed")["int8"] for name in ("latent", "windowed")
    }


@pytest.mark.parametrize(
    ("rule", "model", "schedule", "placement"),
    [
        ("sinks:100", "llama", "lazy", "resident"),
        ("sinks:64", "latent", "random", "resident"),
        ("sinks:100", "windowed", "lazy", "resident"),
        ("heavy:256", "llama", "copies-late", "resident"),
        ("heavy:192", "llama", "random", "mixed"),
        ("heavy:192", "windowed", "lazy", "resident"),
    ],
)
def test_a_card_computes_what_the_cpu_does(rule, model, schedule, placement, models, simulated_card):
    sizes = (200, 1, 1, 130, 5, 1, 1, 40, 16, 70, 64, 1, 1)
    with opened(models[model], CPU, rule, "resident") as engine:
        expected, left = logits(engine, sizes)
    with simulated_card(CardConfig(schedule)) as card, opened(models[model], DEVICE, rule, placement) as engine:
        found, found_left = logits(engine, sizes)
        assert card.counts["replays"]
    assert found_left == left
    assert (found - expected).norm() < 0.03 * expected.norm()  # a code falls on a step's other side


@pytest.mark.parametrize("rule", ["sinks:64", "heavy:192"])
def test_a_model_is_loaded_with_it_and_takes_what_the_plan_says(rule, tmp_path, simulated_card):
    write_checkpoint(tmp_path, "llama", layers=2, max_position_embeddings=512)
    config = EngineConfig(device="cuda", weights="int8", dtype="fp32", ctx=512, kv_evict=rule)
    with simulated_card(CardConfig()), closing(Engine.load(tmp_path, config)) as engine:
        plan, (heard,) = engine.plan, answered(engine, Request(LONG[:400], WISH))
        assert engine.runner.gpu_program is not None and heard.finished.usage.evicted_tokens
        assert engine.residency.kv_pages.nbytes <= plan.ledger["vram"]["kv"] + 512 * plan.shape.row_bytes


@pytest.mark.parametrize("rule", ["sinks:100", "heavy:256"])
def test_a_text_is_the_same_whatever_is_computed_beside_it(rule, packed_models, simulated_card):
    """Behind a prefix that is found, with drafts, and among others; in chunks, on which `heavy` depends, as well."""
    requests = [Request(text, WISH) for text in (LONG[:430], LONG[:40], (5, 6, 7, 8) * 80)]
    limits = {"limits": Limits(chunk_tokens=200)} if rule.startswith("sinks") else {}
    options: dict[str, Any] = {"reuse": IN_POOLS, "speculate": Speculate("ngram"), **limits}
    with simulated_card(CardConfig("random")):
        with opened(packed_models["int8"], DEVICE, rule, "resident") as engine:
            alone = [answered(engine, request)[0] for request in requests]
        with opened(packed_models["int8"], DEVICE, rule, "resident", **options) as engine:
            for _ in range(2):
                together = answered(engine, *requests)
                assert [heard.token_ids for heard in together] == [heard.token_ids for heard in alone]
        usages = [heard.finished.usage for heard in together]
        assert [usage.evicted_tokens > 0 for usage in usages] == [True, False, True]
