"""GGUF files of a checkpoint of Hugging Face's form, written by the gguf package, laid out as llama.cpp does."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.torch import load_file

gguf = pytest.importorskip("gguf")

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "phi3": "phi3",
    "gemma2": "gemma2", "gemma3_text": "gemma3", "olmo2": "olmo2", "mixtral": "llama",
}  # fmt: skip
_ENUMS = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
_PERMUTED, _OFFSET = ("llama", "mistral", "mixtral"), ("gemma2", "gemma3_text")
TypeOf = Callable[[str, tuple[int, ...]], Any]
# Every type that is read, in the order in which the matrices of a mixed model have them.
MIX = [
    "Q4_K", "Q6_K", "Q8_0", "Q5_K", "Q4_0", "F16", "Q4_1", "IQ4_NL", "Q5_0", "Q3_K", "BF16", "Q5_1", "IQ4_XS", "MXFP4",
    "Q2_K",
]  # fmt: skip


def all_of(kind: str) -> TypeOf:
    """Every matrix in one type; vectors and routers in fp32."""
    return lambda name, shape: gguf.GGMLQuantizationType["F32" if len(shape) == 1 or "ffn_gate_inp" in name else kind]


def mixed() -> TypeOf:
    """Every matrix in another type than the one before; vectors and routers in fp32."""
    kinds, plain = itertools.cycle(MIX), all_of("F32")
    is_plain = lambda name, shape: len(shape) == 1 or "gate_inp" in name  # noqa: E731
    return lambda name, shape: plain(name, shape) if is_plain(name, shape) else gguf.GGMLQuantizationType[next(kinds)]


def write_gguf(
    checkpoint: Path,
    path: Path,
    type_of: TypeOf,
    metadata: Mapping[str, Any] | None = None,
    beside: Mapping[str, NDArray[np.float32]] | None = None,
) -> dict[str, NDArray[np.float32]]:
    """Write the model of a folder with one safetensors file; tensors that the package cannot quantize are random codes.

    metadata: keys beside those of the model's shape. beside: further tensors. Returns what the file means, by the
    folder's names.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    _describe(writer, config, architecture)
    for key, value in (metadata or tokenizer_metadata(checkpoint)).items():
        _add(writer, key, value)
    meant: dict[str, NDArray[np.float32]] = {}
    names = gguf.get_tensor_name_map(_ENUMS[architecture], config["num_hidden_layers"])
    for plain, tensor in _with_stacked_experts(load_file(checkpoint / "model.safetensors")).items():
        name = names.get_name(plain, try_suffixes=(".weight", ".bias"))
        assert name is not None, plain
        values = np.ascontiguousarray(_as_stored(plain, tensor.float().numpy(), config))
        kind = type_of(name, values.shape)
        data = encoded(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        meant[plain] = _as_stored(plain, gguf.quants.dequantize(data, kind).reshape(values.shape), config, back=True)
    for name, values in (beside or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return _with_single_experts(meant)


def encoded(values: NDArray[np.float32], kind: Any) -> NDArray[Any]:
    """The bytes of a tensor in a type."""
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        return random_blocks(values.shape, kind, scale=float(np.abs(values).max()) / 100)


# Bytes of a block at which fp16 scales stand.
FP16_FIELDS = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}


def random_blocks(shape: tuple[int, ...], kind: Any, scale: float) -> NDArray[np.uint8]:
    """Random codes whose weights are of about that size."""
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(sum(shape))
    blocks = generator.integers(0, 256, (*shape[:-1], shape[-1] // weights, size), dtype=np.uint8)
    for at in FP16_FIELDS.get(kind.name, ()):
        fields = (generator.random(blocks.shape[:-1]) * scale / 64).astype(np.float16)
        blocks[..., at : at + 2] = fields[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def tokenizer_metadata(checkpoint: Path) -> dict[str, Any]:
    """What a GGUF file says of a byte-level BPE tokenizer."""
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    model, added = tokenizer["model"], {token["id"]: token for token in tokenizer["added_tokens"]}
    tokens = {index: text for text, index in model["vocab"].items()} | {i: t["content"] for i, t in added.items()}
    if not model["merges"]:  # a GGUF file has no empty lists
        tokens[len(tokens)], model["merges"] = "ab", ["a b"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    ids = {text: index for index, text in tokens.items()}
    kinds = [
        3 if index in added and added[index]["special"] else 4 if index in added else 1 for index in sorted(tokens)
    ]
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [tokens[index] for index in sorted(tokens)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": bool(config.get("add_bos_token", False)),
    }
    for role in ("bos", "eos"):
        token = config.get(f"{role}_token")
        if token is not None:
            found[f"tokenizer.ggml.{role}_token_id"] = ids[token if isinstance(token, str) else token["content"]]
    if "chat_template" in config:
        found["tokenizer.chat_template"] = config["chat_template"]
    return found


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _describe(writer: Any, config: Mapping[str, Any], architecture: str) -> None:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    numbers = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": hidden,
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads") or heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(_theta(config)),
        "rope.dimension_count": int(head_dim * config.get("partial_rotary_factor", 1.0)),
        "vocab_size": config["vocab_size"],
    }
    if config.get("sliding_window") and architecture in ("gemma2", "gemma3", "phi3"):
        numbers["attention.sliding_window"] = config["sliding_window"]
    if architecture == "gemma2":
        numbers["attn_logit_softcapping"] = float(config["attn_logit_softcapping"])
        numbers["final_logit_softcapping"] = float(config["final_logit_softcapping"])
    if "num_experts" in config or "num_local_experts" in config:
        numbers["expert_count"] = config.get("num_experts") or config["num_local_experts"]
        numbers["expert_used_count"] = config["num_experts_per_tok"]
        if "moe_intermediate_size" in config:
            numbers["expert_feed_forward_length"] = config["moe_intermediate_size"]
    for key, value in numbers.items():
        _add(writer, f"{architecture}.{key}", value)


def _theta(config: Mapping[str, Any]) -> float:
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    return float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0)


def _as_stored(
    name: str, values: NDArray[np.float32], config: Mapping[str, Any], *, back: bool = False
) -> NDArray[np.float32]:
    """A tensor of Hugging Face's as llama.cpp's converter stores it, or back."""
    kind, part = config["model_type"], name.split(".")[-2]
    if part in ("q_proj", "k_proj") and kind in _PERMUTED:
        heads = config["num_attention_heads" if part == "q_proj" else "num_key_value_heads"]
        two = (
            values.reshape(heads, -1, 2, *values.shape[1:]) if back else values.reshape(heads, 2, -1, *values.shape[1:])
        )
        return two.swapaxes(1, 2).reshape(values.shape)
    if kind in _OFFSET and name.endswith("norm.weight"):
        return values - 1 if back else values + 1
    return values


def _with_stacked_experts(tensors: Mapping[str, Any]) -> dict[str, Any]:
    import re

    import torch

    found: dict[str, Any] = {}
    experts: dict[str, dict[int, Any]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)
        if match:
            experts.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = tensor
        else:
            found[name] = tensor
    return found | {name: torch.stack([parts[i] for i in sorted(parts)]) for name, parts in experts.items()}


def _with_single_experts(tensors: Mapping[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    found: dict[str, NDArray[np.float32]] = {}
    for name, values in tensors.items():
        if values.ndim < 3:
            found[name] = values
            continue
        experts, _, rest = name.partition(".experts.")
        found |= {f"{experts}.experts.{number}.{rest}": matrix for number, matrix in enumerate(values)}
    return found
