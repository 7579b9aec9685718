"""Models of GGUF files: every family and tensor type against transformers with the weights that the file means."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from localllm import hub
from localllm.engine.engine import Engine
from localllm.engine.step_types import Chunk
from localllm.engine.validation import require_unchanged
from localllm.errors import CheckpointError, ModelChangedError, TemplateError
from localllm.gguf.folder import GgufModel
from localllm.models.block_layouts import block_layouts
from localllm.models.block_source import CheckpointBlocks
from localllm.models.checkpoints.checkpoint import Checkpoint
from localllm.models.families import load_config
from localllm.models.kept_weights import kept_weights
from localllm.quant.recipe import RECIPES, recipe_of
from localllm.quant.stacked import Stacked
from localllm.settings import EngineConfig
from localllm.text.chat_template import ChatTemplate
from tests.checkpoints import TRAINED, linear, rope, write_checkpoint
from tests.gguf_metadata import assert_same_model
from tests.gguf_support import TypeOf, all_of, experts_in_mxfp4, mixed, tokenizer_metadata, write_gguf

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
OTHERS = {
    "gemma2": {"query_pre_attn_scalar": 64},
    "gemma3": {"query_pre_attn_scalar": 64},
    "llama-mha-wide-heads": {"num_key_value_heads": 4},
    "gemma4-shared-keys": {"global_head_dim": 128, "hidden_size_per_layer_input": 256},
    "qwen3_moe": {"moe_intermediate_size": 256},
    "qwen3_next": linear(2, 8, 32, 32, moe_intermediate_size=256, shared_expert_intermediate_size=256),
    "qwen3_5": linear(2, 6, 32, 128),
    "deepseek_v3": {
        "q_lora_rank": 256,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 256,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "moe_intermediate_size": 256,
    },
    "qwen3_5_moe": linear(2, 8, 32, 32, moe_intermediate_size=256, shared_expert_intermediate_size=256),
}
NAMES = [
    "llama", "llama-biases-tied", "llama-mha-wide-heads", "qwen2", "qwen3", "phi3", "gemma2",
    "gemma3", "olmo2", "mixtral", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "gemma4-shared-keys",
    "deepseek_v3",
]  # fmt: skip


# Families whose files are compared with their checkpoints, and what the format cannot say of them otherwise.
AS_STORED = {
    "ministral3": {},
    "smollm3": {"no_rope_layer_interval": 4},
    "olmo3": {},
    "olmo3-yarn": {"attention_bias": False},
    "granite": {},
    "glm": {"head_dim": 16},
    "glm4": {},
    "seed_oss": {},
    "hunyuan_v1_dense": {},
    "ernie4_5": {},
    "exaone4": {},
    "exaone4-full": {},
    "apertus": {},
    "arcee": {},
    "cohere2": {},
    "qwen3_vl": {},
    "qwen3_vl_moe": {},
    "qwen2_5_vl": {},
    "muse_glimmer": {},
    "internlm3": {"bias": False, "qkv_bias": False},
    "stablelm": {},
    "stablelm-parallel": {},
    "starcoder2": {"sliding_window": 4096},
    "nemotron": {},
    "gemma3n-odd": {"vocab_size_per_layer_input": 272, "altup_correct_scale": True},
    "gemma4-shared-keys": {},
    "gemma4-experts": {},
    "gpt_oss": {},
    "deepseek_v2": {},
    "deepseek_v2-scaled": {"attention_bias": False},
    "deepseek_v3": {},
    "deepseek_v3-odd": {"rope_interleave": True} | rope("yarn", 4.0, mscale=0.5, mscale_all_dim=0.5, **TRAINED),
    "glm4_moe_lite": {},
    "minicpm3": {"dim_model_base": 256},
    "mamba": {"max_position_embeddings": 1 << 20, "mixer_rms_eps": 1e-6},
    "mamba-odd": {"max_position_embeddings": 1 << 20},
    "falcon_mamba": {"max_position_embeddings": 1 << 20, "mixer_rms_eps": 1e-6},
    "jamba": {},
    "jamba-dense": {},
    "mamba2": {"max_position_embeddings": 1 << 20},
    "mamba2-odd": {"max_position_embeddings": 1 << 20},
    "granitemoehybrid": {},
    "granitemoehybrid-dense": {"position_embedding_type": None},
    "falcon_h1": {},
    "nemotron_h": {"moe_intermediate_size": 96},
    "nemotron_h-groups": {"moe_intermediate_size": 96},
    "kimi_linear": {},
    "kimi_linear-odd": {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "norm_topk_prob": True},
    "rwkv7": {"max_position_embeddings": 1 << 20},
    "rwkv7-odd": {"max_position_embeddings": 1 << 20},
    "lfm2": {},
    "lfm2-odd": {"conv_bias": False},
    "lfm2_moe": {},
    "lfm2_moe-odd": {"conv_bias": False, "use_expert_bias": True, "routed_scaling_factor": 1.0, "norm_topk_prob": True},
}


pytestmark = pytest.mark.usefixtures("empty_cache")


def write_model(
    tmp_path: Path, family: str, type_of: TypeOf, *, is_early: bool = False
) -> dict[str, NDArray[np.float32]]:
    """Write a checkpoint and the file that is made of it, and return what the file means."""
    write_checkpoint(tmp_path / "checkpoint", family, **(WIDE | OTHERS.get(family, {})))
    return write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", type_of, is_early=is_early)


def written(tmp_path: Path, family: str, type_of: TypeOf, *, is_early: bool = False) -> tuple[Any, hub.ModelFiles]:
    """The peer with the weights that the file means, and the file. is_early: see `write_gguf`."""
    folder = tmp_path / "checkpoint"
    meant = write_model(tmp_path, family, type_of, is_early=is_early)
    tensors = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in meant.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return peer, hub.locate(str(tmp_path / "model.gguf"))


def logits(engine: Engine, ids: list[int]) -> Tensor:
    kv = engine.residency.new_kv(len(ids))
    return engine.runner.forward([Chunk(ids, kv, len(ids), all_logits=True)])


def add_to_config(folder: Path, **keys: int) -> None:
    """Keys of the text model in its config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.get("text_config", config).update(keys)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("family", NAMES)
@torch.inference_mode()
def test_a_gguf_model_computes_what_transformers_computes_with_its_weights(family, tmp_path):
    peer, files = written(tmp_path, family, mixed())
    ids = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = peer(torch.tensor([ids]), use_cache=False).logits[0]
    engine = Engine.load(files, EngineConfig(device="cpu", dtype="fp32", weights="fp32"))
    torch.testing.assert_close(logits(engine, ids), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    kept = Engine.load(files, EngineConfig(device="cpu"))
    assert kept.weights.startswith("kept-")
    likeness = torch.nn.functional.cosine_similarity(logits(kept, ids), expected, dim=1)
    # Activations are in INT8, and a router may choose another expert: six seeds of deepseek_v3 have 0.989 to 0.996.
    assert float(likeness.median()) > (0.985 if family == "deepseek_v3" else 0.99)


@pytest.mark.parametrize("family", AS_STORED)
@torch.inference_mode()
def test_a_gguf_model_is_the_checkpoint_that_it_was_made_of(family, tmp_path):
    folder, path = tmp_path / "checkpoint", tmp_path / "model.gguf"
    write_checkpoint(folder, family, **AS_STORED[family])
    write_gguf(folder, path, all_of("F32"))
    files = hub.locate(str(path))
    made, raw = (json.loads((each / "config.json").read_text()) for each in (files.directory, folder))
    text = raw.get("text_config", raw)
    assert_same_model(made, text | raw | {"model_type": text["model_type"]})
    loaded = [Engine.load(each, EngineConfig(device="cpu", dtype="fp32")) for each in (files, hub.locate(str(folder)))]
    ids = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    ours, theirs = (logits(engine, ids) for engine in loaded)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


@torch.inference_mode()
def test_an_early_file_of_deepseek_has_what_is_made_of_latents_as_one_matrix(tmp_path):
    folder, path = tmp_path / "checkpoint", tmp_path / "model.gguf"
    write_checkpoint(folder, "deepseek_v2")
    config = json.loads((folder / "config.json").read_text())
    sizes = {"key": config["qk_nope_head_dim"] + config["qk_rope_head_dim"], "value": config["v_head_dim"]}
    early = {f"deepseek2.attention.{part}_length": size for part, size in sizes.items()}
    early |= {f"deepseek2.attention.{part}_length_mla": None for part in sizes} | {"deepseek2.expert_gating_func": None}
    write_gguf(folder, path, all_of("F32"), tokenizer_metadata(folder) | early, is_early=True)
    loaded = [Engine.load(hub.locate(str(each)), EngineConfig(device="cpu", dtype="fp32")) for each in (path, folder)]
    ids = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    ours, theirs = (logits(engine, ids) for engine in loaded)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("family", ["llama", "mixtral", "muse_glimmer", "deepseek_v3"])
def test_kept_codes_mean_the_files_weights_within_the_rounding_of_scales(family, tmp_path):
    write_model(tmp_path, family, mixed())
    files = hub.locate(str(tmp_path / "model.gguf"))
    config = load_config(files.directory)
    with Checkpoint.open(files.directory, config.stored) as checkpoint:
        exact, sizes = CheckpointBlocks(checkpoint, config, RECIPES["fp32"]), kept_weights(checkpoint, config)
        assert sizes is not None
        kept = CheckpointBlocks(checkpoint, config, recipe_of(sizes))
        for layout in block_layouts(config):
            of_experts = () if layout.experts is None else layout.experts.matrices(1)
            for matrix in (*layout.matrices, *of_experts):
                form = matrix.format(kept.recipe)
                found = form.dequantize(kept.quantized(matrix), matrix.out_features, matrix.in_features)
                weights = exact.quantized(matrix)["weight"]
                stored = [checkpoint.kept(f"{name}.weight") for name in matrix.parts]
                names = {part.name for part, _ in form.parts} if isinstance(form, Stacked) else {form.name}
                is_kept = {each and each.name for each in stored} == names
                error = float((found - weights).abs().max() / weights.abs().max())
                assert error <= (2**-10 if is_kept else 1 / 250), (matrix.stored, form.name)


# Sizes that blocks of 32 weights fit.
BLOCKS: dict[str, dict[str, int]] = {
    "gemma3n": {"hidden_size_per_layer_input": 32, "laurel_rank": 32, "vocab_size_per_layer_input": 272},
    "gemma4-experts": {"moe_intermediate_size": 64},
    "gpt_oss": {},
}


@pytest.mark.parametrize("family", BLOCKS)
@torch.inference_mode()
def test_codes_of_all_that_these_families_have_are_kept(family, tmp_path):
    write_checkpoint(tmp_path / "checkpoint", family, **BLOCKS[family])
    write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", experts_in_mxfp4())
    files = hub.locate(str(tmp_path / "model.gguf"))
    config = load_config(files.directory)
    with Checkpoint.open(files.directory, config.stored) as checkpoint:
        exact, sizes = CheckpointBlocks(checkpoint, config, RECIPES["fp32"]), kept_weights(checkpoint, config)
        assert sizes is not None
        kept = CheckpointBlocks(checkpoint, config, recipe_of(sizes))
        experts = [layout.experts for layout in block_layouts(config) if layout.experts is not None]
        assert bool(experts) == (family in ("gemma4-experts", "gpt_oss"))
        for matrix in (matrix for each in experts for matrix in each.matrices(each.num_experts - 1)):
            form = matrix.format(kept.recipe)
            assert form.name == "fp4-g32"
            weights = form.dequantize(kept.quantized(matrix), matrix.out_features, matrix.in_features)
            assert torch.equal(weights, exact.quantized(matrix)["weight"])
    settings = [EngineConfig(device="cpu", dtype="fp32", weights="fp32"), EngineConfig(device="cpu")]
    dense, coded = (logits(Engine.load(files, each), [*range(40)]) for each in settings)
    assert float(torch.nn.functional.cosine_similarity(coded, dense, dim=1).median()) > 0.99


@torch.inference_mode()
def test_an_early_file_of_qwen3_next_has_its_rows_by_key_heads(tmp_path):
    peer, files = written(tmp_path, "qwen3_next", mixed(), is_early=True)
    names = GgufModel.read(files.directory).tensors
    assert "model.layers.0.linear_attn.in_proj_qkvz.weight" in names
    ids = list(range(40))
    expected = peer(torch.tensor([ids]), use_cache=False).logits[0]
    engine = Engine.load(files, EngineConfig(device="cpu", dtype="fp32", weights="fp32"))
    torch.testing.assert_close(logits(engine, ids), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
def test_a_layer_that_predicts_further_tokens_is_left_out(family, tmp_path):
    folder, path = tmp_path / "checkpoint", tmp_path / "model.gguf"
    write_checkpoint(folder, family)
    add_to_config(folder, mtp_num_hidden_layers=1)
    own = ("attn_norm.weight", "attn_q.weight", "nextn.eh_proj.weight", "nextn.enorm.weight")
    beside = {f"blk.4.{name}": np.ones((2, 2), np.float32) for name in own}
    write_gguf(folder, path, all_of("F16"), beside=beside)
    files = hub.locate(str(path))
    config = load_config(files.directory)
    assert (len(config.layers), config.stored.num_extra_layers) == (4, 1)
    with Checkpoint.open(files.directory, config.stored) as checkpoint:
        CheckpointBlocks(checkpoint, config, RECIPES["fp32"]).check()


@pytest.mark.parametrize("values", [[0.5, 0.5, 0.5], None])
def test_coefficients_that_are_no_list_for_all_layers_are_refused_by_their_key(values, tmp_path):
    folder, path = tmp_path / "checkpoint", tmp_path / "model.gguf"
    write_checkpoint(folder, "apertus")
    write_gguf(folder, path, all_of("F16"), {**tokenizer_metadata(folder), "xielu.beta": values})
    with pytest.raises(CheckpointError, match=r"xielu\.beta"):
        hub.locate(str(path))


def test_decays_that_are_none_are_refused_by_their_name(tmp_path):
    folder, path = tmp_path / "checkpoint", tmp_path / "model.gguf"
    write_checkpoint(folder, "qwen3_5")
    write_gguf(folder, path, all_of("F16"))
    place = GgufModel.read(hub.locate(str(path)).directory).tensors["model.layers.1.linear_attn.A_log"]
    content = bytearray(path.read_bytes())
    content[place.begin : place.begin + 4] = struct.pack("<f", 0.5)  # -exp of nothing
    path.write_bytes(content)
    files = hub.locate(str(path))
    with pytest.raises(CheckpointError, match=r"layers\.1\.linear_attn\.A_log"):
        Engine.load(files, EngineConfig(device="cpu", dtype="fp32", weights="fp32"))


def test_a_factor_beside_a_matrix_is_multiplied_in(tmp_path):
    """As NVFP4's have: one of a matrix, in a tensor of its own."""
    write_checkpoint(tmp_path / "checkpoint", "llama", layers=1, **WIDE)
    plain = write_gguf(tmp_path / "checkpoint", tmp_path / "plain.gguf", all_of("Q8_0"))
    name, factor = "blk.0.ffn_down.scale", np.array([0.25], np.float32)
    write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", all_of("Q8_0"), beside={name: factor})
    files = hub.locate(str(tmp_path / "model.gguf"))
    config, stored = load_config(files.directory), "model.layers.0.mlp.down_proj.weight"
    with Checkpoint.open(files.directory, config.stored) as checkpoint:
        shape = checkpoint.shape(stored)
        dense = checkpoint.read(stored, shape, torch.float32)
        assert torch.equal(dense, torch.from_numpy(plain[stored]) / 4)
        sizes = kept_weights(checkpoint, config)
        assert sizes is not None
        kept = CheckpointBlocks(checkpoint, config, recipe_of(sizes))
        down = block_layouts(config)[2].matrices[1]
        form = down.format(kept.recipe)
        torch.testing.assert_close(form.dequantize(kept.quantized(down), *shape), dense, rtol=2**-10, atol=1e-6)


def test_a_file_that_was_replaced_is_not_read_by_its_old_header(tmp_path):
    write_checkpoint(tmp_path / "checkpoint", "llama", layers=1)
    path = tmp_path / "model.gguf"
    write_gguf(tmp_path / "checkpoint", path, all_of("Q8_0"))
    files = hub.locate(str(path))
    write_gguf(tmp_path / "checkpoint", path, all_of("F16"))
    with pytest.raises(CheckpointError, match="has changed"):
        Checkpoint.open(files.directory)
    assert hub.locate(str(path)).directory != files.directory


def test_a_folder_with_a_config_and_a_gguf_file_is_the_gguf_model(tmp_path):
    folder = tmp_path / "cloned"
    write_checkpoint(folder, "llama", layers=1)
    write_gguf(folder, folder / "model-Q8_0.gguf", all_of("Q8_0"))
    (folder / "model.safetensors").unlink()
    assert hub.locate(str(folder)).gguf == folder / "model-Q8_0.gguf"


def test_errors_name_the_file_and_not_the_folder_that_is_made_of_it(tmp_path):
    write_checkpoint(tmp_path / "checkpoint", "llama", layers=1, **WIDE)
    path, said = tmp_path / "model.gguf", tokenizer_metadata(tmp_path / "checkpoint")
    said.pop("tokenizer.chat_template")
    write_gguf(tmp_path / "checkpoint", path, all_of("Q8_0"), said)
    directory = hub.locate(str(path)).directory
    with pytest.raises(TemplateError) as without_template:
        ChatTemplate.load(directory)
    before = hub.contents(directory)
    path.touch()
    with pytest.raises(ModelChangedError) as changed:
        require_unchanged(directory, before)
    for error in (without_template.value, changed.value):
        assert str(path) in error.what and str(directory) not in f"{error.what} {error.why}"
