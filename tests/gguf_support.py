"""GGUF files of a checkpoint of Hugging Face's form, written by the gguf package, laid out as llama.cpp does."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.torch import load_file

from localllm.models.families import parse_config
from tests.gguf_metadata import ARCHITECTURES, HYBRIDS, SCALES, factors_of, metadata_of, num_layers_of

gguf = pytest.importorskip("gguf")

_ENUMS = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
_ENUMS["muse-glimmer"] = _ENUMS["afmoe"]  # which the package does not know: a model with the same tensors
_PERMUTED = (
    "llama", "mistral", "mixtral", "ministral3", "smollm3", "granite", "arcee", "internlm3", "muse_glimmer_text",
    "granitemoehybrid",
)  # fmt: skip
_DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_OFFSET = ("gemma2", "gemma3_text", "nemotron", "muse_glimmer_text", *_DELTA)
TypeOf = Callable[[str, tuple[int, ...]], Any]
# Every type that is read, in the order in which the matrices of a mixed model have them.
MIX = [
    "Q4_K", "Q6_K", "Q8_0", "Q5_K", "Q4_0", "F16", "Q4_1", "IQ4_NL", "Q5_0", "Q3_K", "BF16", "Q5_1", "IQ4_XS", "MXFP4",
    "Q2_K",
]  # fmt: skip


def all_of(kind: str) -> TypeOf:
    """Every matrix in one type; vectors, convolutions and routers in fp32."""
    return lambda name, shape: gguf.GGMLQuantizationType["F32" if _is_plain(name, shape) else kind]


def mixed() -> TypeOf:
    """Every matrix in another type than the one before; vectors, convolutions and routers in fp32."""
    kinds = itertools.cycle(MIX)
    return lambda name, shape: gguf.GGMLQuantizationType["F32" if _is_plain(name, shape) else next(kinds)]


def experts_in_mxfp4() -> TypeOf:
    """The experts' matrices as gpt-oss' are published, the others in Q8_0 where blocks of that fit."""

    def type_of(name: str, shape: tuple[int, ...]) -> Any:
        is_plain = _is_plain(name, shape) or shape[-1] % 32 or name.endswith(".bias")
        return gguf.GGMLQuantizationType["F32" if is_plain else "MXFP4" if "_exps" in name else "Q8_0"]

    return type_of


def _is_plain(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 1 or any(part in name for part in ("gate_inp", "conv1d", "ssm_a", "lerp"))


def write_gguf(
    checkpoint: Path,
    path: Path,
    type_of: TypeOf,
    metadata: Mapping[str, Any] | None = None,
    beside: Mapping[str, NDArray[np.float32]] | None = None,
    *,
    is_early: bool = False,
) -> dict[str, NDArray[np.float32]]:
    """Write the text model of a folder with one safetensors file; tensors that the package cannot quantize are random
    codes.

    metadata: keys beside those of the model's shape, or in their place; None takes one away. beside: further tensors.
    is_early: as the first files of Qwen 3 Next are, with the rows of its wide projection as they were, and of DeepSeek,
    with one matrix for all that is made of latents. Returns what the file means, by the names of a folder of the text
    model alone.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    config = config.get("text_config", config)
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    of_text = _of_text(load_file(checkpoint / "model.safetensors"))
    if config["model_type"] in HYBRIDS:
        of_text = _renamed(of_text, config)
    tensors = cut(_with_stacked_experts(of_text), config, is_early)
    described = metadata_of(config, architecture) | _coefficients(tensors)
    del described["general.architecture"]  # which the writer adds
    for key, value in (described | (metadata or tokenizer_metadata(checkpoint))).items():
        if value is not None:
            _add(writer, key, value)
    meant: dict[str, NDArray[np.float32]] = {}
    names = gguf.get_tensor_name_map(_ENUMS[architecture], num_layers_of(config))
    for plain, tensor in tensors.items():
        name = _other_name(plain) or names.get_name(
            plain.replace(".dt_bias", ".dt_proj.bias").replace("correction_bias", "correction.bias"),
            try_suffixes=(".weight", ".bias"),
        )
        assert name is not None, plain
        name += "" if name.endswith((".weight", ".bias", ".scale", ".ssm_a", ".ssm_d")) else ".weight"
        name = name.replace("ffn_norm.weight", "ffn_norm") if config["model_type"] == "falcon_h1" else name
        values = np.ascontiguousarray(as_stored(plain, tensor.float().numpy(), config))
        kind = type_of(name, values.shape)
        data = encoded(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        meant[plain] = as_stored(plain, gguf.quants.dequantize(data, kind).reshape(values.shape), config, back=True)
    lists = {name: np.array(values, np.float32) for name, values in factors_of(config).items()}
    for name, values in (lists | _head_scales(config) | _unread_keys(config) | dict(beside or {})).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return _with_single_experts(_uncut(meant, config))


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


def as_stored(
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
    is_last = kind == "muse_glimmer_text" and name == "model.norm.weight"
    if kind in _OFFSET and name.endswith("norm.weight") and ".linear_attn." not in name and not is_last:
        return values - 1 if back else values + 1
    if ".mamba." in name and not back and ARCHITECTURES[kind] not in ("mamba", "jamba"):
        values = _mamba2_as_stored(part, name, values, config)
    if name.endswith("A_log"):
        values = np.log(-values) if back else -np.exp(values)
    elif name.endswith("_conv1d.weight"):  # of Kimi Linear
        channels, taps = (values.shape[1], values.shape[3]) if back else (values.shape[0], values.shape[2])
        values = values.reshape((channels, 1, taps) if back else (1, channels, 1, taps))
    elif name.endswith(("conv1d.weight", "conv.conv.weight")):
        values = values[:, None] if back else values[:, 0]
    if ".linear_attn." in name and kind != "qwen3_next":
        return _with_moved_heads(name, values, config, back=back)
    return values


def _renamed(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors by names of which the package knows all."""
    renames = parse_config(config, "config.json").stored.renames
    if config["model_type"] == "rwkv7":
        return _rwkv7(tensors)
    if config["model_type"] == "falcon_h1":  # whose norms the package knows by their own name alone
        renames = tuple(pair for pair in renames if pair[0] != ".pre_ff_layernorm.")
    if config["model_type"] == "nemotron_h":  # whose layers have one norm, always called alike
        renames += ((".post_attention_layernorm.", ".input_layernorm."),)
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        for theirs, ours in renames:
            name = name.replace(theirs, ours)
        found[name.replace("model.norm.", "model.embedding_norm.") if "conv_L_cache" in config else name] = tensor
    return found


def _mamba2_as_stored(
    part: str, name: str, values: NDArray[np.float32], config: Mapping[str, Any]
) -> NDArray[np.float32]:
    if name.endswith((".A_log", ".D")):
        return values[:, None]
    groups = config.get("mamba_n_groups", config.get("n_groups"))
    return values.reshape(groups, -1) if part == "norm" else values


def _coefficients(tensors: dict[str, Any]) -> dict[str, list[float]]:
    """What xIELU has learnt, taken out of the tensors: a list for all layers under the key of each."""
    names = [name for name in tensors if ".act_fn." in name]
    parts = {name.rpartition(".")[2]: [] for name in names}
    for name in sorted(names, key=lambda name: int(name.split(".")[2])):
        parts[name.rpartition(".")[2]].append(float(tensors.pop(name)))
    return {f"xielu.{part}": values for part, values in parts.items()}


def _head_scales(config: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
    """Muse Glimmer's scale of queries, as the weights of a norm that has none."""
    if config["model_type"] != "muse_glimmer_text":
        return {}
    scales = {"q": config["qk_scale_factor"], "k": 1.0}
    return {
        f"blk.{layer}.attn_{part}_norm.weight": np.full(config["head_dim"], scale, np.float32)
        for layer in range(config["num_hidden_layers"])
        for part, scale in scales.items()
    }


def _unread_keys(config: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
    """What makes keys and values in layers that read those of others, where published files have it."""
    count, shared = num_layers_of(config), config.get("num_kv_shared_layers") or 0
    return {
        f"blk.{layer}.{part}.weight": np.ones((2, 2), np.float32)
        for layer in range(count - shared, count)
        for part in ("attn_k", "attn_v", "attn_k_norm")
    }


def _other_name(plain: str) -> str | None:
    """The name of a tensor that the package does not know."""
    layer, _, part = plain.removeprefix("model.layers.").partition(".")
    others = SCALES | {"attention.x_x": "time_mix_lerp_fused"}
    return f"blk.{layer}.{others[part]}" if part in others else None


def _rwkv7(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors by the names that the converter gives them first, what two tokens are mixed by as one, and in the
    first layer what it does not use, copies of others."""
    import torch

    names = {"self_attn": "attention", "attn": "attention", "ffn_norm": "ln2", "ffn": "feed_forward", "g_norm": "ln_x"}
    names |= {"_lora.lora.0.weight": "1.weight", "_lora.lora.2.weight": "2.weight", "_lora.lora.2.bias": "0.weight"}
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        found[name] = tensor.flatten() if name.endswith(("r_k", "feed_forward.x_k")) else tensor
    for layer in {name.split(".")[2] for name in found if ".attention." in name}:
        stem = f"model.layers.{layer}.attention.x"
        found[f"{stem}_x"] = torch.stack([found.pop(f"{stem}_{part}") for part in "rwkvag"])
    first = {name: tensor for name, tensor in found.items() if re.match(r"model\.layers\.0\.attention\.a\d", name)}
    return found | {name.replace("attention.a", "attention.v"): tensor.clone() for name, tensor in first.items()}


def _with_moved_heads(
    name: str, values: NDArray[np.float32], config: Mapping[str, Any], *, back: bool
) -> NDArray[np.float32]:
    """Value heads that share a key head one after the other, or back: the first of each key head before the second
    ones."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_rows, value_dim = keys * config["linear_key_head_dim"], config["linear_value_head_dim"]
    part = name.removesuffix(".weight").rpartition(".")[2]
    if part == "norm":  # one for all heads
        return values
    if part == "out_proj":
        return _moved(values.T, keys, heads // keys, value_dim, back=back).T
    if part in ("in_proj_qkv", "conv1d"):
        first, own = values[: 2 * key_rows], values[2 * key_rows :]
        return np.concatenate((first, _moved(own, keys, heads // keys, value_dim, back=back)))
    return _moved(values, keys, heads // keys, value_dim if part == "in_proj_z" else 1, back=back)


def _moved(rows: NDArray[np.float32], keys: int, own: int, head_rows: int, *, back: bool) -> NDArray[np.float32]:
    two = (own, keys) if back else (keys, own)
    return rows.reshape(*two, head_rows, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


def _of_text(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's tensors, by the names that they have where there is no other."""
    of_text = (name for name in tensors if not re.search(r"\b(?:visual|vision_\w+)\.", name))
    return {name.replace(".language_model.", "."): tensors[name] for name in of_text}


def _runs(config: Mapping[str, Any]) -> tuple[int, list[int]]:
    """The key heads of Qwen 3 Next's wide projection, and how many rows of queries, keys, values and gates each has."""
    keys, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    own = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    return keys, [key_dim, key_dim, own, own]


def cut(tensors: Mapping[str, Any], config: Mapping[str, Any], is_early: bool) -> dict[str, Any]:
    """The tensors with queries, keys and values in one matrix, and their gates in another; so are those of experts, and
    what goes up beside them."""
    import torch

    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if config["model_type"] == "gpt_oss" and ".experts." in name:
            found |= _gpt_oss_experts(name, tensor)
            continue
        if config["model_type"] == "granitemoehybrid" and name.endswith(".gate_up_proj.weight"):
            halves = zip(("gate", "up"), tensor.chunk(2, dim=-2), strict=True)
            found |= {name.replace("gate_up", part): half for part, half in halves}
            continue
        if name.endswith(".mlp.experts.gate_up_proj"):  # not Gemma 4's, which stay as they are
            halves = zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True)
            found |= {name.replace("gate_up", part): half for part, half in halves}
            continue
        if name.endswith(".kv_b_proj.weight") and "topk_group" in config and not is_early:
            sizes = config["qk_nope_head_dim"], config["v_head_dim"]
            keys, values = tensor.view(config["num_attention_heads"], sum(sizes), -1).split(sizes, dim=1)
            found |= {name.replace("kv_b", "k_b"): keys.mT, name.replace("kv_b", "v_b"): values}
            continue
        if is_early or not name.endswith("in_proj_qkvz.weight"):
            found[name] = tensor
            continue
        keys, runs = _runs(config)
        q, k, v, z = (part.flatten(0, 1) for part in tensor.view(keys, sum(runs), -1).split(runs, dim=1))
        found |= {name.replace("qkvz", "qkv"): torch.cat((q, k, v)), name.replace("qkvz", "z"): z}
    return found


def _gpt_oss_experts(name: str, tensor: Any) -> dict[str, Any]:
    """A tensor of all experts with rows first, and the rows of gates apart from those of what goes up."""
    name = name.removesuffix("_bias") + (".bias" if name.endswith("_bias") else ".weight")
    tensor = tensor.transpose(1, 2) if tensor.dim() == 3 else tensor
    if "gate_up" not in name:
        return {name: tensor}
    return {name.replace("gate_up", part): tensor[:, start::2] for start, part in enumerate(("gate", "up"))}


def _uncut(tensors: Mapping[str, NDArray[np.float32]], config: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
    found = dict(tensors)
    for name, values in tensors.items():
        if name.endswith(".k_b_proj.weight"):
            parts = found.pop(name).swapaxes(1, 2), found.pop(name.replace("k_b", "v_b"))
            found[name.replace("k_b", "kv_b")] = np.concatenate(parts, axis=1).reshape(-1, values.shape[1])
    for name, values in tensors.items() if config["model_type"] == "qwen3_next" else ():
        if name.endswith("in_proj_qkv.weight"):
            keys, runs = _runs(config)
            rows = np.concatenate((found.pop(name), found.pop(name.replace("qkv", "z"))))
            parts = np.split(rows, np.cumsum([keys * run for run in runs])[:-1])
            by_head = [part.reshape(keys, -1, values.shape[1]) for part in parts]
            found[name.replace("qkv", "qkvz")] = np.concatenate(by_head, axis=1).reshape(-1, values.shape[1])
    return found


def _with_stacked_experts(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors with those of all experts of a layer as one, and of the norms of all heads, and of AltUp's states."""
    import torch

    found: dict[str, Any] = {}
    experts: dict[str, dict[int, Any]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*\.(?:experts|norms)|model\.altup_\w+)\.(\d+)((?:\.\w+)?)\.weight", name)
        if match:
            stem = match[1].removesuffix(".norms")
            experts.setdefault(f"{stem}{match[3]}.weight", {})[int(match[2])] = tensor
        else:
            found[name] = tensor
    return found | {name: torch.stack([parts[i] for i in sorted(parts)]) for name, parts in experts.items()}


def _with_single_experts(tensors: Mapping[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    found: dict[str, NDArray[np.float32]] = {}
    for name, values in tensors.items():
        if ".experts." not in name:
            found[name] = values
            continue
        experts, _, rest = name.partition(".experts.")
        found |= {f"{experts}.experts.{number}.{rest}": matrix for number, matrix in enumerate(values)}
    return found
