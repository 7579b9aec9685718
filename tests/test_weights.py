"""Which weights an engine takes: what was asked for, what is packed already, or what suits the size of the model."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from pathlib import Path

import pytest
import torch

from localllm import Engine
from localllm.engine import planner
from localllm.engine.loader import Watcher
from localllm.engine.weights import choose_recipe
from localllm.errors import CheckpointError, DoesNotFitError, ModelChangedError, UsageError
from localllm.hub import locate
from localllm.hub.packed import packed_directory, packed_recipes, source_id
from localllm.models.architecture import ModelConfig
from localllm.models.block_source import CheckpointBlocks
from localllm.models.checkpoints.checkpoint import Checkpoint
from localllm.models.convert import convert
from localllm.models.families import load_config
from localllm.models.load import load_decoder
from localllm.offload.planner.machine import Memory
from localllm.quant.recipe import RECIPES
from localllm.settings import EngineConfig
from tests.engine_support import generated
from tests.packed_support import FORMATS, everything_of, same, small_checkpoint, spoil
from tests.thinning import every_other

PACKED = [name for name in FORMATS if name != "bf16"]


pytestmark = pytest.mark.usefixtures("empty_cache")  # nothing is packed


@pytest.fixture
def small(checkpoint: Path) -> ModelConfig:
    return load_config(checkpoint)


@pytest.fixture
def large(small: ModelConfig) -> ModelConfig:
    """512 MiB in bf16, less one row of the vocabulary."""
    return dataclasses.replace(small, hidden_size=4096, layers=(), vocab_size=(32 << 10) - 1)


def tokens(engine: Engine) -> list[int]:
    return generated(engine, "once upon", 12)


def load(folder: Path, weights: str = "auto", watcher: Watcher | None = None, dtype: str = "auto") -> Engine:
    return Engine.load(folder, EngineConfig(device="cpu", dtype=dtype, weights=weights), watcher=watcher or Watcher())


def heard_packing() -> tuple[list[tuple[int, int]], Watcher]:
    """What a load says of its packing."""
    heard: list[tuple[int, int]] = []
    return heard, Watcher(packing=lambda *far: heard.append(far))


def expect_no_conversion(_done: int, _total: int) -> None:
    pytest.fail("it is packed already")


NO_CONVERSION = Watcher(packing=expect_no_conversion)


# Which


def test_a_small_model_that_is_not_packed_is_used_as_it_is_and_a_large_one_as_int4(large):
    assert choose_recipe("auto", large, []) == "bf16"
    larger = dataclasses.replace(large, vocab_size=large.vocab_size + 1)
    assert choose_recipe("auto", larger, []) == "int4-g64"


def test_unpacked_weights_have_the_type_of_the_activations(small):
    assert choose_recipe("auto", small, [], "fp32") == "fp32"


@pytest.mark.parametrize(
    ("packed", "expected"),
    [
        (["int8"], "int8"),
        (["int8", "int4-g64", "nf4"], "int4-g64"),
        (["nf4", "int8"], "int8"),
        (["int3-of-another-version"], "bf16"),
        (["int3-of-another-version", "nf4"], "nf4"),
        (["fp32"], "bf16"),  # packed to be streamed, which says nothing about what is wanted
        (["bf16", "int8"], "int8"),
    ],
)
def test_what_is_packed_already_is_used_int4_before_the_others(small, packed, expected):
    assert choose_recipe("auto", small, packed) == expected


@pytest.mark.parametrize(
    ("asked", "name"), [("int4", "int4-g64"), ("int4-g32", "int4-g32"), ("nf4", "nf4"), ("bf16", "bf16")]
)
def test_what_is_asked_for_is_taken_whatever_is_packed(small, asked, name):
    assert choose_recipe(asked, small, ["int4-g64", "int8"]) == name


def test_a_format_that_there_is_not_is_refused_with_those_that_there_are(small):
    with pytest.raises(UsageError) as caught:
        choose_recipe("int5", small, [])
    assert all(name in caught.value.why for name in RECIPES)


@pytest.mark.parametrize(("weights", "dtype"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_unpacked_weights_of_another_type_than_the_activations_are_refused(small, weights, dtype):
    with pytest.raises(UsageError, match="activations") as caught:
        choose_recipe(weights, small, [], dtype)
    assert caught.value.fix == f"--weights {weights} --dtype {weights}"


# From the checkpoint to the engine


@pytest.mark.parametrize(
    ("dtype", "weights"),
    every_other([*itertools.product(("bf16", "fp32"), [name for name in PACKED if name != "bf12"]), ("bf16", "bf12")]),
)
def test_the_first_use_packs_and_the_second_one_reads(checkpoint, weights, dtype):
    heard, watcher = heard_packing()
    first = load(checkpoint, weights, watcher, dtype)
    assert first.weights == weights
    assert heard[-1][0] == heard[-1][1] > 0
    assert packed_recipes(locate(str(checkpoint))) == [weights]
    second = load(checkpoint, weights, NO_CONVERSION, dtype)
    assert tokens(first) == tokens(second)
    chosen = RECIPES[weights]
    with Checkpoint.open(checkpoint) as opened:
        blocks = CheckpointBlocks(opened, load_config(checkpoint), chosen)
        of = second.model.dtype
        direct = load_decoder(blocks, blocks.config, chosen, dtype=of, device=torch.device("cpu"))
    assert same(everything_of(direct), everything_of(second.model))


def test_what_is_packed_is_found_again_without_being_asked_for(checkpoint):
    load(checkpoint, "int8")
    assert load(checkpoint).weights == "int8"
    assert load(checkpoint, "bf16").weights == "bf16"


def test_files_that_were_located_are_loaded_as_they_are(checkpoint):
    files = locate(str(checkpoint))
    assert tokens(load(files)) == tokens(load(checkpoint))


def test_a_model_that_is_written_while_it_is_loaded_is_no_mixture_of_two(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    template = folder / "chat_template.jinja"
    writing = Watcher(reading=lambda *_far: template.write_text("another"))
    with pytest.raises(ModelChangedError, match="have changed"):
        load(folder, "bf16", writing)
    assert load(folder, "bf16").template.sources["default"] == "another"


@pytest.mark.parametrize("weights", ["auto", "bf16"])
def test_unpacked_weights_write_nothing(checkpoint, weights, tmp_path):
    load(checkpoint, weights, NO_CONVERSION)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["kernels"]


def test_fp32_weights_bring_fp32_activations(checkpoint):
    engine = load(checkpoint, "fp32")
    assert (engine.weights, engine.model.dtype) == ("fp32", torch.float32)


def test_a_changed_checkpoint_never_meets_what_was_packed_of_the_old_one(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    before = tokens(load(folder, "int4"))
    small_checkpoint(folder, seed=5)
    heard, watcher = heard_packing()
    changed = load(folder, "int4", watcher)
    assert heard
    assert tokens(changed) != before


def test_what_an_older_version_packed_is_packed_anew(checkpoint, monkeypatch):
    load(checkpoint, "int4")
    for module in ("packed", "packed_file"):
        monkeypatch.setattr(f"localllm.models.{module}.LAYOUT_VERSION", 2)
    heard, watcher = heard_packing()
    load(checkpoint, "int4", watcher)
    assert heard


@pytest.mark.parametrize("damaged", ["block", "index"])
def test_damage_is_an_error_whose_command_mends_it(checkpoint, damaged):
    load(checkpoint, "int4")
    files = locate(str(checkpoint))
    folder = packed_directory(files, "int4-g64")
    path = folder / {"block": "layers.1.mlp.safetensors", "index": "index.json"}[damaged]
    spoil(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint, "int4")
    assert str(path) in caught.value.what and caught.value.fix.startswith("localllm quantize ")
    assert caught.value.fix.endswith(" --weights int4-g64")
    convert(checkpoint, folder, RECIPES["int4-g64"], source_id(files))
    load(checkpoint, "int4", NO_CONVERSION)


def test_a_model_that_will_not_fit_is_refused_before_it_is_packed(checkpoint, monkeypatch, tmp_path):
    monkeypatch.setattr(planner, "process_memory", lambda *_, **__: Memory(100_000, 0, 100_000))
    with pytest.raises(DoesNotFitError):
        load(checkpoint, "int4", NO_CONVERSION)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["kernels"]


def test_weights_that_would_fit_as_int4_are_refused_with_that_advice(checkpoint, monkeypatch):
    # Between what it takes in bf16 and in int4, packed already, with two blocks at a time and 128 tokens of context.
    load(checkpoint, "int4")
    for free_bytes, advice in ((205_000, "--weights int4"), (100_000, "choose a smaller model: localllm list --all")):
        monkeypatch.setattr(planner, "process_memory", lambda *_, free=free_bytes, **__: Memory(free, 0, free))
        with pytest.raises(DoesNotFitError) as caught:
            load(checkpoint, "bf16")
        assert caught.value.fix == advice
