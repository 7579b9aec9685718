"""A checkpoint that cannot be packed is refused by the name of what is wrong, and nothing is kept of it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from localllm.errors import CheckpointError, LocalLLMError
from tests.packed_support import contents, pack, small_checkpoint
from tests.thinning import one_in

NAMES = [
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.1.self_attn.k_proj.bias",
    "model.layers.1.mlp.up_proj.weight",
    "model.layers.1.input_layernorm.weight",
    "model.embed_tokens.weight",
]
VALUES = [float("nan"), float("inf"), -float("inf")]
CASES = [("llama-biases-tied", name, weights) for name in NAMES for weights in ("int4-g64", "int8", "nf4")]
# One that is stored fused is named as it is stored.
CASES.append(("phi3", "model.layers.1.self_attn.qkv_proj.weight", "int4-g64"))


@pytest.mark.parametrize(
    ("family", "name", "weights", "value"), one_in(5, [(*case, value) for case in CASES for value in VALUES])
)
def test_a_number_that_is_none_is_refused_by_the_tensors_name_and_its_place(family, name, weights, value, tmp_path):
    checkpoint = small_checkpoint(tmp_path / "m", family)
    tensors = load_file(checkpoint / "model.safetensors")
    tensors[name][-1:].view(-1)[5 if tensors[name].ndim > 1 else 0] = value
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        pack(checkpoint, tmp_path / "p", weights)
    assert caught.value.what.startswith(f"{checkpoint}: {name}: ")
    if family == "phi3":
        assert f"row {len(tensors[name]) - 1}, column 5" in caught.value.why


def test_nothing_is_kept_of_a_checkpoint_that_proves_to_be_damaged(tmp_path):
    """What was made of it before may be wrong as well, and where the files are mended its source is the same."""
    checkpoint = small_checkpoint(tmp_path / "m")
    intact = load_file(checkpoint / "model.safetensors")
    damaged = {name: tensor.clone() for name, tensor in intact.items()}
    damaged["model.layers.0.mlp.up_proj.weight"][0] = 1.0  # which nobody can see
    damaged["model.layers.3.mlp.up_proj.weight"][0] = float("nan")
    save_file(damaged, checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a finite number"):
        pack(checkpoint, tmp_path / "p")
    assert not (tmp_path / "p").exists()
    save_file(intact, checkpoint / "model.safetensors")
    assert contents(pack(checkpoint, tmp_path / "p")) == contents(pack(checkpoint, tmp_path / "fresh"))


@pytest.mark.parametrize("change", ["missing", "misshapen", "unused", "unreadable"])
def test_a_checkpoint_that_is_not_whole_is_refused_before_anything_is_written(change, tmp_path):
    checkpoint = small_checkpoint(tmp_path / "m")
    tensors = load_file(checkpoint / "model.safetensors")
    name = "model.layers.3.mlp.down_proj.weight"
    match change:
        case "missing":
            del tensors[name]
        case "misshapen":
            tensors[name] = tensors[name][:, :-1].contiguous()
        case "unused":
            name = "model.layers.4.mlp.down_proj.weight"
            tensors[name] = torch.zeros(2)
        case "unreadable":
            tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        pack(checkpoint, tmp_path / "p")
    assert name in caught.value.what + caught.value.why
    assert not (tmp_path / "p").exists()


def test_a_folder_in_a_blocks_place_is_named_with_the_command_that_takes_it_away(tmp_path):
    checkpoint = small_checkpoint(tmp_path / "m")
    packed = pack(checkpoint, tmp_path / "p")
    block = sorted(packed.glob("*.safetensors"))[0]
    block.unlink()
    block.mkdir()
    with pytest.raises(LocalLLMError) as caught:
        pack(checkpoint, tmp_path / "p")
    assert caught.value.what == f"{block} cannot be written"
    assert caught.value.fix == "localllm rm --packed MODEL"
