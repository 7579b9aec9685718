"""Which weights an engine takes: what was asked for, what is packed already, or what suits the size of the model."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from pathlib import Path

import pytest
import torch

from localllm import Engine, SamplingParams, TokenEvent
from localllm.engine import planner
from localllm.engine.loader import Watcher
from localllm.engine.weights import choose_recipe
from localllm.errors import CheckpointError, DoesNotFitError, ModelChangedError, UsageError
from localllm.hub import locate
from localllm.hub.packed import packed_directory, packed_recipes, source_id
from localllm.models.block_source import CheckpointBlocks
from localllm.models.checkpoint import Checkpoint
from localllm.models.config import ModelConfig
from localllm.models.convert import convert
from localllm.models.families import load_config
from localllm.models.load import load_decoder
from localllm.offload.planner.machine import Memory
from localllm.quant.recipe import RECIPES
from localllm.settings import EngineConfig
from tests.packed_support import FORMATS, everything_of, small_checkpoint

PACKED = [name for name in FORMATS if name != "bf16"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def no_packed_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def small(directory: Path) -> ModelConfig:
    return load_config(directory)


@pytest.fixture
def large(small: ModelConfig) -> ModelConfig:
    """512 MiB in bf16, less one row of the vocabulary."""
    return dataclasses.replace(small, hidden_size=4096, intermediate_size=1, num_layers=0, vocab_size=(32 << 10) - 1)


def tokens(engine: Engine) -> list[int]:
    events = engine.generate("once upon", SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    return [event.token_id for event in events if isinstance(event, TokenEvent)]


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
    [*itertools.product(("bf16", "fp32"), [name for name in PACKED if name != "bf12"]), ("bf16", "bf12")],
)
def test_the_first_use_packs_and_the_second_one_reads(directory, weights, dtype):
    heard: list[tuple[int, int]] = []
    first = Engine.load(
        directory,
        EngineConfig(device="cpu", dtype=dtype, weights=weights),
        watcher=Watcher(packing=lambda *far: heard.append(far)),
    )
    assert first.weights == weights
    assert heard[-1][0] == heard[-1][1] > 0
    assert packed_recipes(locate(str(directory))) == [weights]
    second = Engine.load(directory, EngineConfig(device="cpu", dtype=dtype, weights=weights), watcher=NO_CONVERSION)
    assert tokens(first) == tokens(second)
    chosen = RECIPES[weights]
    with Checkpoint.open(directory) as checkpoint:
        blocks = CheckpointBlocks(checkpoint, load_config(directory), chosen)
        of = second.model.dtype
        direct = load_decoder(blocks, blocks.config, chosen, dtype=of, device=torch.device("cpu"))
    expected, found = everything_of(direct), everything_of(second.model)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_what_is_packed_is_found_again_without_being_asked_for(directory):
    Engine.load(directory, EngineConfig(device="cpu", weights="int8"))
    assert Engine.load(directory, EngineConfig(device="cpu")).weights == "int8"
    assert Engine.load(directory, EngineConfig(device="cpu", weights="bf16")).weights == "bf16"


def test_files_that_were_located_are_loaded_as_they_are(directory):
    files = locate(str(directory))
    assert tokens(Engine.load(files, EngineConfig(device="cpu"))) == tokens(
        Engine.load(directory, EngineConfig(device="cpu"))
    )


def test_a_model_that_is_written_while_it_is_loaded_is_no_mixture_of_two(directory, tmp_path):
    folder = shutil.copytree(directory, tmp_path / "model")
    template = folder / "chat_template.jinja"
    writing = Watcher(reading=lambda *_far: template.write_text("another"))
    with pytest.raises(ModelChangedError, match="have changed"):
        Engine.load(folder, EngineConfig(device="cpu", weights="bf16"), watcher=writing)
    assert Engine.load(folder, EngineConfig(device="cpu", weights="bf16")).template.sources["default"] == "another"


@pytest.mark.parametrize("weights", ["auto", "bf16"])
def test_unpacked_weights_write_nothing(directory, weights, tmp_path):
    Engine.load(directory, EngineConfig(device="cpu", weights=weights), watcher=NO_CONVERSION)
    assert not (tmp_path / "cache").exists()


def test_fp32_weights_bring_fp32_activations(directory):
    engine = Engine.load(directory, EngineConfig(device="cpu", weights="fp32"))
    assert (engine.weights, engine.model.dtype) == ("fp32", torch.float32)


def test_a_changed_checkpoint_never_meets_what_was_packed_of_the_old_one(directory, tmp_path):
    folder = shutil.copytree(directory, tmp_path / "model")
    before = tokens(Engine.load(folder, EngineConfig(device="cpu", weights="int4")))
    small_checkpoint(folder, seed=5)
    heard: list[object] = []
    changed = Engine.load(
        folder, EngineConfig(device="cpu", weights="int4"), watcher=Watcher(packing=lambda *far: heard.append(far))
    )
    assert heard
    assert tokens(changed) != before


def test_what_an_older_version_packed_is_packed_anew(directory, monkeypatch):
    Engine.load(directory, EngineConfig(device="cpu", weights="int4"))
    for module in ("packed", "packed_file"):
        monkeypatch.setattr(f"localllm.models.{module}.LAYOUT_VERSION", 2)
    heard: list[object] = []
    Engine.load(
        directory, EngineConfig(device="cpu", weights="int4"), watcher=Watcher(packing=lambda *far: heard.append(far))
    )
    assert heard


@pytest.mark.parametrize("spoil", ["block", "index"])
def test_damage_is_an_error_whose_command_mends_it(directory, spoil):
    Engine.load(directory, EngineConfig(device="cpu", weights="int4"))
    files = locate(str(directory))
    folder = packed_directory(files, "int4-g64")
    path = folder / {"block": "layers.1.mlp.safetensors", "index": "index.json"}[spoil]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        Engine.load(directory, EngineConfig(device="cpu", weights="int4"))
    assert str(path) in caught.value.what
    assert caught.value.fix.startswith("localllm quantize ")
    assert caught.value.fix.endswith(" --weights int4-g64")
    convert(directory, folder, RECIPES["int4-g64"], source_id(files))
    Engine.load(directory, EngineConfig(device="cpu", weights="int4"), watcher=NO_CONVERSION)


def test_a_model_that_will_not_fit_is_refused_before_it_is_packed(directory, monkeypatch, tmp_path):
    monkeypatch.setattr(planner, "process_memory", lambda *_, **__: Memory(100_000, 0, 100_000))
    with pytest.raises(DoesNotFitError):
        Engine.load(directory, EngineConfig(device="cpu", weights="int4"), watcher=NO_CONVERSION)
    assert not (tmp_path / "cache").exists()


def test_weights_that_would_fit_as_int4_are_refused_with_that_advice(directory, monkeypatch):
    # Between what it takes in bf16 and in int4, packed already, with two blocks at a time and 128 tokens of context.
    Engine.load(directory, EngineConfig(device="cpu", weights="int4"))
    for free_bytes, advice in ((205_000, "--weights int4"), (100_000, "choose a smaller model: localllm list --all")):
        monkeypatch.setattr(planner, "process_memory", lambda *_, free=free_bytes, **__: Memory(free, 0, free))
        with pytest.raises(DoesNotFitError) as caught:
            Engine.load(directory, EngineConfig(device="cpu", weights="bf16"))
        assert caught.value.fix == advice
