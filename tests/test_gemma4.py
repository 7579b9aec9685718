"""Gemma 4 wherever its parts rest: embeddings of each layer, a head that is the embedding, keys that layers share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from localllm import Engine, Request, SamplingParams
from localllm.engine.runner import ModelRunner
from localllm.engine.step_types import Chunk
from localllm.models import stored_matrices
from localllm.models.block_layouts import block_layouts
from localllm.models.block_source import CheckpointBlocks
from localllm.models.checkpoints.checkpoint import Checkpoint
from localllm.models.decoder import without
from localllm.models.families import load_config
from localllm.models.layout import EMBED, HEAD
from localllm.quant.recipe import RECIPES, recipe
from localllm.settings import EngineConfig
from tests.checkpoints import write_checkpoint
from tests.engine_support import answered

WIDE = {"hidden_size": 128, "head_dim": 32, "global_head_dim": 64, "intermediate_size": 192}
FAMILIES = {
    "gemma4-shared-keys": {"hidden_size_per_layer_input": 64, "max_position_embeddings": 1024},
    "gemma4-experts": {"moe_intermediate_size": 64, "max_position_embeddings": 1024},
}
PROMPTS = [list(range(5, 5 + length)) for length in (3, 64, 130, 200)]


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("gemma4")
    write_checkpoint(folder, request.param, **WIDE, **FAMILIES[request.param])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCALLLM_CACHE", str(tmp_path_factory.mktemp("cache")))
        engine = Engine.load(folder, EngineConfig(device="cpu", weights="int8", speculate="off"))
        yield engine
        engine.close()


def said(engine: Engine) -> list[list[int]]:
    sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)
    return [heard.token_ids for heard in answered(engine, *(Request(tuple(prompt), sampling) for prompt in PROMPTS))]


ON_DISK = {
    "the first block": {EMBED},
    "the head": {HEAD},
    "the first attention, and every feed-forward": {"layers.0.attention", "mlp"},
    "everything": {EMBED, HEAD, "attention", "mlp"},
}


@pytest.mark.parametrize("names", ON_DISK.values(), ids=ON_DISK)
def test_no_placement_changes_a_token(engine: Engine, names: set[str]) -> None:
    expected, before = said(engine), engine.residency.blocks
    names = names - {EMBED} if engine.config.is_tied else names
    on_disk = [names & {block.name, block.name.rpartition(".")[2]} for block in before]
    engine.residency.move(
        [replace(block, tier="disk" if is_so else "ram") for block, is_so in zip(before, on_disk, strict=True)]
    )
    assert said(engine) == expected
    engine.residency.move(before)
    assert said(engine) == expected


def test_a_cap_that_holds_no_embeddings_of_layers_leaves_them_on_the_disk(tmp_path: Path) -> None:
    """A vocabulary so large that these are most of the model."""
    write_checkpoint(
        tmp_path, "gemma4", **WIDE, hidden_size_per_layer_input=256, vocab_size_per_layer_input=60000, vocab_size=2000
    )
    whole = Engine.load(tmp_path, EngineConfig(device="cpu", weights="int8", speculate="off"))
    table = whole.residency.blocks[0]
    assert table.tier == "ram" and table.num_bytes > 4 * sum(block.num_bytes for block in whole.residency.blocks[1:])
    expected = said(whole)
    whole.residency.move([replace(table, tier="disk"), *whole.residency.blocks[1:]])
    assert said(whole) == expected
    whole.close()


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_an_embedding_that_is_packed_in_pieces_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    write_checkpoint(tmp_path, "gemma4", **WIDE, hidden_size_per_layer_input=64, vocab_size=272)
    tensors = []
    for most in (1 << 40, 1 << 13):
        monkeypatch.setattr(stored_matrices, "_SLAB_WEIGHTS", most)
        config = load_config(tmp_path)
        with Checkpoint.open(tmp_path, config.stored) as checkpoint:
            source = CheckpointBlocks(checkpoint, config, recipe(weights))
            tensors.append([source.tensors(layout) for layout in block_layouts(source.config)])
            pieces = sum(1 for _ in source.parts(block_layouts(source.config)[0]))
            assert (pieces > 2) == (most == 1 << 13)
    for whole, in_pieces in zip(*tensors, strict=True):
        assert whole.keys() == in_pieces.keys()
        assert all(torch.equal(whole[name], in_pieces[name]) for name in whole)


@pytest.mark.parametrize("family", ["gemma3n-odd", "gemma4-shared-keys"])
def test_keys_that_no_layer_reads_may_be_stored(family: str, tmp_path: Path) -> None:
    """As published checkpoints have them."""
    write_checkpoint(tmp_path, family)
    config, path = load_config(tmp_path), tmp_path / "model.safetensors"
    parts = ("k_proj", "v_proj", "k_norm")
    names = [f"model.layers.{config.num_layers - 1}.self_attn.{part}.weight" for part in parts]
    save_file(load_file(path) | {name: torch.ones(2, 2) for name in names}, path)
    with Checkpoint.open(tmp_path, config.stored) as checkpoint:
        CheckpointBlocks(checkpoint, config, RECIPES["fp32"]).check()


def test_a_draft_without_the_first_blocks_still_has_what_is_looked_up(engine: Engine) -> None:
    if engine.config.per_layer is None:
        pytest.skip("this one has no embeddings of layers")
    runner = ModelRunner(without(engine.model, frozenset({"layers.0.attention", "layers.1.mlp"})))
    kv = engine.residency.new_kv(70)
    logits = runner.forward([Chunk(PROMPTS[1], kv, 64)])
    assert logits.isfinite().all()
