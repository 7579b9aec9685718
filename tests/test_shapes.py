"""The shapes of the models of the registry: the published architecture, the stated size, a plan without a download."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.engine.placement import model_shape
from localllm.errors import ModelNotFoundError
from localllm.layers.config import RopeConfig
from localllm.models.architecture import LayerConfig
from localllm.models.block_layouts import block_layouts
from localllm.models.families import parse_config
from localllm.models.shapes import SHAPES, Shape, find_shape
from localllm.offload.planner.machine import Machine, Memory, Rates
from localllm.offload.planner.plan import GIB
from localllm.offload.planner.search import Search
from localllm.quant.recipe import RECIPES
from localllm.registry import BUILT_IN, FAMILIES, ModelEntry, load_registry
from tests.cli_support import write_checkpoint

ENTRIES = [entry for entry in load_registry().entries if entry.name != BUILT_IN]
STATED = json.loads(SHAPES.read_text(encoding="utf-8"))
RATES = Rates(matrix_gbs=40.0, compute_gops=1200.0, disk_gbs=1.5)

# The published file of each shape, where the data has one. The context stands for the instructed model.
PUBLISHED = {
    "llama-3.1-8b": "llama3_1_8b",
    "llama-3.2-1b": "llama3_2_1b",
    "llama-3.3-70b": "llama-3.3-70b-instruct",
    "tinyllama-1.1b": "tinyllama_1b_chat_v1.0",
    "smollm2-135m": "smollm2_135m",
    "mistral-7b": "mistral_7b_v03",
    "qwen2.5-0.5b": "qwen2_0_5b",
    "qwen2.5-7b": "qwen2.5-7b",
    "qwen3-0.6b": "qwen3_0.6b",
    "qwen3-1.7b": "qwen3_1.7b",
    "qwen3-8b": "qwen3-8b",
    "phi-3.5-mini": "phi-3_5",
    "phi-4-mini": "phi-4",
    "gemma-2-9b": "gemma2_9b",
    "gemma-3-1b": "gemma3_1b_it",
    "olmo-2-7b": "olmo2_7b",
    "qwen3-30b-a3b": "qwen3-30b-a3b",
    "mixtral-8x7b": "Mixtral-8x7B-v0.1",
    "gpt-oss-20b": "gpt-oss-20b",
}
NO_ARCHITECTURE = {"max_position_embeddings", "bos_token_id", "eos_token_ids", "dtype", "layers"}


def shape_of(name: str) -> Shape:
    if (model_type := STATED[name]["model_type"]) not in FAMILIES:
        pytest.skip(f"the architecture {model_type} does not run here")
    return find_shape(name)


def test_every_model_of_the_registry_has_a_shape_and_every_shape_a_model() -> None:
    assert {entry.name for entry in ENTRIES} == set(STATED)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_shape_has_the_stated_size_and_context(entry: ModelEntry) -> None:
    config = shape_of(entry.name).config
    count = sum(layout.num_weights for layout in block_layouts(config))
    assert count / 1e9 == pytest.approx(entry.parameters, rel=0.01)
    assert config.max_position_embeddings == entry.context


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_model_is_planned_without_its_files(entry: ModelEntry) -> None:
    it = shape_of(entry.name)
    shape = model_shape(it.config, RECIPES["int4-g64"], "bf16", it.name)
    plan = Search(shape, Machine(Memory(16 * GIB, 300 << 20, 1 << 40), RATES)).best()
    assert plan.ctx > 0 and plan.decode_tok_s > 0


@pytest.mark.parametrize(("name", "file"), PUBLISHED.items(), ids=list(PUBLISHED))
def test_a_shape_is_the_published_architecture(name: str, file: str, shared_data: Callable[[str], Path]) -> None:
    ours = shape_of(name).config
    published = parse_config(json.loads(shared_data(f"configs/{file}.json").read_text()), file)
    for field in dataclasses.fields(ours):
        if field.name not in NO_ARCHITECTURE:
            assert getattr(ours, field.name) == getattr(published, field.name), field.name
    for layer, theirs in zip(ours.layers, published.layers, strict=True):
        assert without_rope(layer) == without_rope(theirs)
        assert (layer.mixer.rope.kind, layer.mixer.rope.theta) == (theirs.mixer.rope.kind, theirs.mixer.rope.theta)
        assert layer.mixer.rope.long_factor == pytest.approx(theirs.mixer.rope.long_factor, rel=1e-5)


def without_rope(layer: LayerConfig) -> LayerConfig:
    return dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, rope=RopeConfig()))


def test_a_shape_is_found_by_name_alias_letter_case_or_folder(tmp_path: Path) -> None:
    assert find_shape("mistral").name == find_shape("Mistral-7B").name == "mistral-7b"
    assert find_shape("mistral:latest").name == "mistral-7b"
    assert find_shape("tiny").config.num_layers == 12
    assert find_shape(str(write_checkpoint(tmp_path / "mine", hidden=32, layers=3))).config.num_layers == 3


def test_an_unknown_shape_names_the_nearest() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        find_shape("tinylama-1.1b")
    assert "tinyllama-1.1b" in caught.value.why
