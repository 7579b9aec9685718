"""A folder of weights: single or sharded, with any prefix, whole or fused; and what it says when one is missing."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from localllm.errors import CheckpointError, DoesNotFitError, TokenizerError
from localllm.models.architecture import StoredForm
from localllm.models.checkpoints import safetensors_file
from localllm.models.checkpoints.checkpoint import Checkpoint
from localllm.text.tokenizer import Tokenizer

ATTENTION = "model.layers.0.self_attn"


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "model.embed_tokens.weight": (11, 4),
        f"{ATTENTION}.q_proj.weight": (8, 4),
        f"{ATTENTION}.k_proj.weight": (2, 4),
        f"{ATTENTION}.v_proj.weight": (2, 4),
        f"{ATTENTION}.q_proj.bias": (8,),
        "model.norm.weight": (4,),
        "lm_head.weight": (11, 4),
    }
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def save_shards(folder: Path, tensors: dict[str, torch.Tensor], count: int = 3) -> dict[str, str]:
    names = list(tensors)
    weight_map = {name: f"model-{i % count + 1:05}-of-{count:05}.safetensors" for i, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def assert_reads_all(checkpoint: Checkpoint) -> None:
    for name, tensor in weights().items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert torch.equal(checkpoint.read(name, tuple(tensor.shape), torch.bfloat16), tensor)


@pytest.mark.parametrize("sharded", [False, True])
def test_every_tensor_is_read_as_it_was_saved(sharded, tmp_path):
    if sharded:
        save_shards(tmp_path, weights())
    else:
        save_file(weights(), tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert set(checkpoint.names()) == set(weights())
        assert_reads_all(checkpoint)
        assert checkpoint.unused() == ()


@pytest.mark.parametrize("prefix", ["model.", "", "language_model.model.", "model.language_model."])
def test_a_folder_with_another_prefix_answers_to_the_plain_names(prefix, tmp_path):
    head = "language_model.lm_head." if prefix.startswith("language_model") else "lm_head."
    renamed = {
        name.replace("model.", prefix, 1).replace("lm_head.", head, 1) if name[0] == "m" else f"{head}weight": tensor
        for name, tensor in weights().items()
    }
    if "language_model" in prefix:
        renamed["vision_tower.encoder.layers.0.weight"] = torch.ones(2)
        renamed["model.multi_modal_projector.weight"] = torch.ones(2)
    save_file(renamed, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert_reads_all(checkpoint)
        assert checkpoint.unused() == ()


@pytest.mark.parametrize("stored_fused", [False, True])
def test_separate_and_fused_projections_become_the_same_tensor(stored_fused, tmp_path):
    parts = {f"{ATTENTION}.{part}_proj.weight": rows for part, rows in (("q", 8), ("k", 2), ("v", 2))}
    tensors = weights()
    whole = torch.cat([tensors[name] for name in parts])
    if stored_fused:
        tensors = {name: tensor for name, tensor in tensors.items() if name not in parts}
        tensors[f"{ATTENTION}.qkv_proj.weight"] = whole
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        read = checkpoint.read_rows(checkpoint.stored_rows(f"{ATTENTION}.qkv_proj.weight", parts), (4,), torch.float32)
        assert torch.equal(read, whole.float())
        assert not any("proj.weight" in name for name in checkpoint.unused())


def test_rows_of_a_tensor_have_names_of_their_own(tmp_path):
    """And nobody misses the whole: all of its parts are asked for, or those that are not are named."""
    whole, bias = torch.arange(24.0).view(6, 4), torch.arange(6.0)
    name = "model.layers.0.mamba.in_proj"
    tensors = weights() | {f"{name}.weight": whole, f"{name}.bias": bias}
    save_file(tensors, tmp_path / "model.safetensors")
    form = StoredForm(splits=((".in_proj", ((".in_proj_z", 1), (".in_proj_x", 3), (".in_proj_dt", 2))),))
    with Checkpoint.open(tmp_path, form) as checkpoint:
        assert_reads_all(checkpoint)
        assert not checkpoint.has(f"{name}.weight") and checkpoint.shape(f"{name}_x.weight") == (3, 4)
        assert torch.equal(checkpoint.read(f"{name}_x.weight", (3, 4), torch.float32), whole[1:4])
        assert torch.equal(checkpoint.read(f"{name}_dt.bias", (2,), torch.float64), bias[4:].double())
        rows = checkpoint.read_rows({f"{name}_dt.weight": 2, f"{name}_z.weight": 1}, (4,), torch.float32)
        assert torch.equal(rows, whole[[4, 5, 0]])
        assert checkpoint.unused() == (f"{name}_z.bias", f"{name}_x.bias")
    form = StoredForm(splits=((".in_proj", ((".in_proj_z", 1), (".in_proj_x", 3))),))
    with pytest.raises(CheckpointError, match="in_proj"):
        Checkpoint.open(tmp_path, form)


def test_a_missing_tensor_is_named_with_the_nearest(tmp_path):
    save_file(weights(), tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint, pytest.raises(CheckpointError) as refusal:
        checkpoint.read(f"{ATTENTION}.o_proj.weight", (4, 8), torch.bfloat16)
    assert f"{ATTENTION}.o_proj.weight" in refusal.value.what
    assert f"{ATTENTION}.q_proj.weight" in refusal.value.why


@pytest.mark.parametrize("fused", [False, True])
def test_a_misshapen_tensor_is_named_with_both_shapes_before_memory_is_taken(fused, tmp_path, monkeypatch):
    save_shards(tmp_path, weights())
    name = f"{ATTENTION}.k_proj.weight"
    monkeypatch.setattr(torch, "empty", None)
    with Checkpoint.open(tmp_path) as checkpoint, pytest.raises(CheckpointError) as refusal:
        if fused:
            checkpoint.read_rows({f"{ATTENTION}.q_proj.weight": 8, name: 1 << 40}, (4,), torch.bfloat16)
        else:
            checkpoint.read(name, (1 << 40, 4), torch.bfloat16)
    assert name in refusal.value.what
    expected = ("[2, 4]", f"[{1 << 40}, 4]", "model-00003-of-00003.safetensors")
    assert all(each in refusal.value.why for each in expected)


def test_memory_that_is_not_there_is_an_error_with_its_size():
    with pytest.raises(DoesNotFitError) as refusal:
        safetensors_file.allocate((1 << 50, 4), torch.bfloat16, "w")
    assert str((1 << 50) * 8) in refusal.value.why


def test_a_tensor_nobody_asked_for_is_listed(tmp_path):
    strays = ("model.rotary_emb.inv_freq", "model.layers.0.extra.weight", "score.weight", "stray")
    decide = [f"{ATTENTION}.{name}" for name in ("g_b_proj.bias", "kv_a_proj_with_mqa.bias", "o_proj.bias")]
    extra = {name: torch.ones(4) for name in (*decide, f"{ATTENTION}.rotary_emb.inv_freq")}
    extra |= {name: torch.ones(2) for name in strays}
    save_file(weights() | extra, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        for name, tensor in weights().items():
            checkpoint.read(name, tuple(tensor.shape), torch.float32)
        assert sorted(checkpoint.unused()) == decide


EMBEDDING = weights()["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("head", "own"), [(None, False), (EMBEDDING, False), (weights()["lm_head.weight"], True), (EMBEDDING.float(), True)]
)
def test_a_stored_head_is_its_own_only_if_it_differs_from_the_embedding(head, own, tmp_path):
    tensors = weights()
    del tensors["lm_head.weight"]
    save_file(tensors | ({} if head is None else {"lm_head.weight": head.clone()}), tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.stores_own_head() is own
        assert "lm_head.weight" not in checkpoint.unused()


def test_a_missing_shard_is_named(tmp_path):
    shard = save_shards(tmp_path, weights())["model.norm.weight"]
    (tmp_path / shard).unlink()
    with pytest.raises(CheckpointError, match=shard):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "form", ["../outside/model.safetensors", "{outside}/model.safetensors", "sub/model.safetensors"]
)
def test_a_shard_outside_the_folder_is_refused_although_it_is_there(form, tmp_path):
    for folder in ("outside", "inside", "inside/sub"):
        (tmp_path / folder).mkdir()
        save_file(weights(), tmp_path / folder / "model.safetensors")
    (tmp_path / "inside" / "model.safetensors").unlink()
    shard = form.format(outside=tmp_path / "outside")
    index = json.dumps({"weight_map": dict.fromkeys(weights(), shard)})
    (tmp_path / "inside" / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match="not a file of the folder"):
        Checkpoint.open(tmp_path / "inside")


def test_a_truncated_shard_is_named_with_both_sizes(tmp_path):
    shard = tmp_path / save_shards(tmp_path, weights())["model.norm.weight"]
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError) as refusal:
        Checkpoint.open(tmp_path)
    assert str(shard) in refusal.value.what
    assert str(size) in refusal.value.why and str(size - 1) in refusal.value.why


def test_swapped_shards_are_noticed_by_the_tensor_that_is_not_there(tmp_path):
    save_shards(tmp_path, weights())
    first, second = sorted(tmp_path.glob("*.safetensors"))[:2]
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    with pytest.raises(CheckpointError, match=r"lacks the tensor 'model\.embed_tokens\.weight'"):
        Checkpoint.open(tmp_path)


def test_a_tensor_that_only_the_index_has_is_missed_where_it_is_needed(tmp_path):
    weight_map = save_shards(tmp_path, weights())
    path = tmp_path / "model.safetensors.index.json"
    for name in ("model.layers.0.self_attn.o_proj.weight", f"{ATTENTION}.rotary_emb.inv_freq", "lm_head.bias"):
        weight_map[name] = next(iter(weight_map.values()))
    path.write_text(json.dumps({"weight_map": weight_map}))
    with Checkpoint.open(tmp_path) as checkpoint:
        assert_reads_all(checkpoint)
        with pytest.raises(CheckpointError, match=r"has no tensor model\.layers\.0\.self_attn\.o_proj\.weight"):
            checkpoint.expect("model.layers.0.self_attn.o_proj.weight", (4, 8))


def test_the_same_tensor_under_two_names_is_refused(tmp_path):
    save_file(weights() | {"language_model.lm_head.weight": torch.ones(11, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="twice"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("pytorch_model.bin", "never opened"),
        ("consolidated.00.pth", "never opened"),
        ("model-q4.gguf", "a model by its own path"),
        ("consolidated.safetensors", "nothing says what it holds"),
        ("README.md", "neither model.safetensors nor model.safetensors.index.json"),
    ],
)
def test_a_folder_without_safetensors_says_what_it_has_instead(name, word, tmp_path):
    (tmp_path / name).write_bytes(b"\x80\x04cos\nsystem\n.")
    with pytest.raises(CheckpointError) as refusal:
        Checkpoint.open(tmp_path)
    assert str(tmp_path) in refusal.value.what
    assert word in refusal.value.why


@pytest.mark.parametrize("error", [errno.EACCES, errno.EMFILE])
def test_a_file_that_may_be_whole_is_not_to_be_deleted(error, tmp_path, monkeypatch):
    def refuse(*_: object) -> int:
        raise OSError(error, os.strerror(error))

    path = tmp_path / "model.safetensors"
    (tmp_path / "tokenizer_config.json").touch()
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        safetensors_file.SafetensorsFile(path)
    assert (caught.value.why, caught.value.fix) == (os.strerror(error), f"ls -l {path}")
    with pytest.raises(TokenizerError, match="cannot be read") as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.fix.startswith("ls -l ")


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="absent"):
        Checkpoint.open(tmp_path / "absent")
