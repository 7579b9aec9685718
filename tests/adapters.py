"""Random adapters (LoRA) of small random models, as PEFT and llama.cpp's converter write them."""

from __future__ import annotations

import copy
import itertools
import json
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from localllm.layers.low_rank import AdapterWeights
from localllm.models.architecture import ModelConfig
from localllm.models.block_layouts import block_layouts
from localllm.models.block_source import CheckpointBlocks
from localllm.models.checkpoints.checkpoint import Checkpoint
from localllm.models.layout import EMBED
from localllm.quant.recipe import RECIPES
from tests.gguf_metadata import ARCHITECTURES
from tests.gguf_support import as_stored, cut, gguf

_BESIDE = re.compile(r"visual|vision|multi_modal|audio|image|act_fn|moe_statics|conv1d|norm|(?:mamba|mixer)\.out_proj")
_MLP = (".gate_proj", ".up_proj", ".down_proj", ".gate")
_OUTER = ("embed_tokens", "embeddings", "lm_head")


def targets_of(model: Any) -> dict[str, Any]:
    """What a LoraConfig names to change every matrix of a text model; not the embedding and the head where they are
    one. Of mixtures PEFT takes the matrices of every MLP for those of experts, unless they are named as parameters."""
    modules, parameters = [], []
    is_mixture = any(name.endswith(".experts") for name, _ in model.named_modules())
    is_tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    for name, module in model.named_modules():
        if _BESIDE.search(name) or ("per_layer" in name.rpartition(".")[2] and "embed" in name):
            continue
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            if is_mixture and name.endswith(_MLP):
                parameters.append(f"{name}.weight")
            elif not (is_tied and name.endswith(_OUTER)):
                modules.append(name)
            continue
        if isinstance(module, torch.nn.Conv1d):
            continue
        own = module.named_parameters(recurse=False)
        parameters += [
            f"{name}.{each}" for each, values in own if values.dim() in (2, 3) and not each.endswith(("bias", "A_log"))
        ]
    return {"target_modules": modules, "target_parameters": parameters or None}


def write_peft_adapter(directory: Path, model: Any, *, seed: int = 0, size: float = 0.1, **config: Any) -> Any:
    """A random adapter in `directory`, for transformers' model; returns PEFT's own with it, which does not share the
    model's weights.

    size: of the numbers in A and B. config: of LoraConfig; by default every matrix is changed, with rank 4.
    """
    peft = pytest.importorskip("peft")
    generator = torch.Generator().manual_seed(seed)
    options = {
        "r": 4,
        "init_lora_weights": False,
        **({} if "target_modules" in config else targets_of(model)),
        **config,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**options))
        for name, values in found.named_parameters():
            if ".lora_" in name:
                values.data.copy_(torch.randn(values.shape, generator=generator) * size)
        found.save_pretrained(directory)
    return found.eval()


def write_merged(directory: Path, adapted: Any, checkpoint: Path) -> Any:
    """The checkpoint of what PEFT makes of a base and its adapter; returns transformers' model, which `adapted` has no
    longer. checkpoint: the base's, whose tokenizer it takes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged = adapted.merge_and_unload()
        merged.save_pretrained(directory)
    for path in checkpoint.glob("tokenizer*"):
        (directory / path.name).write_bytes(path.read_bytes())
    return merged


def write_gguf_lora(peft_folder: Path, path: Path, checkpoint: Path, kind: str = "F32", **keys: Any) -> None:
    """The adapter of PEFT's folder as a GGUF file. checkpoint: its base's. kind: the type of its tensors, where blocks
    of that fit. keys: of the header, beside the usual ones or in their place; None takes one away."""
    config = json.loads((checkpoint / "config.json").read_text())
    config = config.get("text_config", config)
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type("adapter")
    alpha = float(json.loads((peft_folder / "adapter_config.json").read_text())["lora_alpha"])
    for key, value in ({"adapter.type": "lora", "adapter.lora.alpha": alpha} | _dotted(keys)).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_float32(key, value)
    enums = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(enums[architecture], config["num_hidden_layers"])
    for plain, a, b in _cut_pairs(_pairs_of(load_file(peft_folder / "adapter_model.safetensors")), config):
        if "embed_tokens" in plain:
            stored = {"lora_a": a.T, "lora_b": b}
        elif plain.endswith("linear_attn.out_proj"):  # whose columns are in another order
            stored = {"lora_a": as_stored(f"{plain}.weight", a, config), "lora_b": b}
        else:
            stored = {"lora_a": a, "lora_b": as_stored(f"{plain}.weight", b, config)}
        name = names.get_name(f"{plain}.weight", try_suffixes=(".weight",))
        assert name is not None, plain
        for side, values in stored.items():
            values = np.ascontiguousarray(values)
            block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
            own = gguf.GGMLQuantizationType["F32" if values.shape[-1] % block else kind]
            writer.add_tensor(f"{name}.{side}", gguf.quants.quantize(values, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _dotted(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("__", "."): value for key, value in keys.items()}


def _pairs_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Any, Any]]:
    """A and B in fp32 by the modules; of a matrix that each expert has, those of all as [experts, ...]."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    experts: dict[tuple[str, str], dict[int, Any]] = defaultdict(dict)
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(?:base_model\.model\.)?(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?", name)
        if match is None:  # the base's embedding
            continue
        plain, side, values = match[1].replace(".language_model.", "."), match[2], tensor.float().numpy()
        if one := re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)", plain):
            experts[f"{one[1]}.{one[3]}", side][int(one[2])] = values
        else:
            found[plain][side] = values
    for (plain, side), parts in experts.items():
        found[plain][side] = np.stack([parts[number] for number in sorted(parts)])
    return {plain: (sides["A"], sides["B"]) for plain, sides in found.items()}


def _cut_pairs(pairs: Mapping[str, tuple[Any, Any]], config: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The pairs with those of Qwen 3 Next's wide projection as GGUF has them: two of the same A."""
    for plain, (a, b) in pairs.items():
        parts = cut({f"{plain}.weight": torch.from_numpy(b)}, config, is_early=not plain.endswith("in_proj_qkvz"))
        for name, rows in parts.items():
            yield name.removesuffix(".weight"), a, rows.numpy()


def fused_weights(directory: Path, config: ModelConfig) -> dict[str, Tensor]:
    """The matrices of a checkpoint in fp32, as the blocks of a model have them, by the sites of an adapter."""
    found: dict[str, Tensor] = {}
    with Checkpoint.open(directory, config.stored) as checkpoint:
        blocks = CheckpointBlocks(checkpoint, config, RECIPES["fp32"])
        for layout in block_layouts(blocks.config):
            for matrix in layout.matrices:
                is_outer = matrix.role == "embedding"
                name = layout.name if is_outer else f"{layout.name}.{matrix.name}"
                found[name] = blocks.quantized(matrix)["weight"]
            experts = layout.experts
            for index in range(experts.num_experts if experts else 0):
                for matrix in experts.matrices(index):
                    found[f"{layout.name}.experts.{index}.{matrix.name}"] = blocks.quantized(matrix)["weight"]
    return {name: weight.float() for name, weight in found.items()}


def with_adapter(weights: Mapping[str, Tensor], adapter: AdapterWeights) -> dict[str, Tensor]:
    """Return the matrices of `fused_weights` with what an adapter adds to them."""
    found = {site: weight.clone() for site, weight in weights.items()}
    for site, parts in adapter.sites.items():
        for part in parts:
            added = part.b.float() @ part.a.float()
            rows = added.T if site == EMBED else added
            found[site][part.first_row : part.first_row + len(rows)] += rows
    return found


def layers_of(sites: Sequence[str]) -> set[int]:
    """The layers that sites are in."""
    return {int(number) for number in itertools.chain(*(re.findall(r"^layers\.(\d+)\.", site) for site in sites))}
