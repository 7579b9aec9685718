"""A GGUF file of the shape of a Llama, Qwen3-MoE, Qwen3.5 or gpt-oss with random weights, as `llama-quantize` has it.

Q4_0: matrices in Q4_0, the head in Q6_K, norms and routers in fp32. Q4_K_M: as files are published most, with half of
the values and of the second MLP matrices in Q6_K. MXFP4: gpt-oss as it is published, the experts in MXFP4 and all
other matrices in Q8_0. The vocabulary is one word an id.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

Mix = Literal["Q4_0", "Q4_K_M", "MXFP4"]
EMBEDDING = "token_embd.weight"
# fp16 scale of a block: where it stands in the block's bytes, and what makes weights of about 1.
SCALES = {Type.Q4_0: (0, 0.23), Type.Q4_K: (0, 0.23 / 63), Type.Q6_K: (208, 5e-4), Type.Q8_0: (0, 0.0136)}


@dataclass(frozen=True)
class GGUFTensor:
    name: str
    shape: tuple[int, ...]  # rows first, as in torch
    type: Type

    @property
    def byte_shape(self) -> tuple[int, ...]:
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[self.type]
        return (*self.shape[:-1], self.shape[-1] // block_size * block_bytes)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.byte_shape))


def model_tensors(shape: Mapping[str, Any], head: str, mix: Mix = "Q4_0") -> Iterator[GGUFTensor]:
    """Every tensor by llama.cpp's names. shape: Hugging Face's config. head: Q6_K or Q4_0."""
    if is_gpt_oss(shape):
        yield from _gpt_oss_tensors(shape)
        return
    most = Type.Q4_0 if mix == "Q4_0" else Type.Q4_K
    layers = shape["num_hidden_layers"]
    hidden, is_tied = shape["hidden_size"], is_hybrid(shape) and shape["tie_word_embeddings"]
    yield GGUFTensor(EMBEDDING, (shape["vocab_size"], hidden), Type[head] if is_tied else most)
    for layer in range(layers):
        is_recurrent = is_hybrid(shape) and bool((layer + 1) % shape["full_attention_interval"])
        matrices = {**(_delta_net(shape) if is_recurrent else _attention(shape)), **_feed_forward(shape)}
        second_norm = "post_attention_norm" if is_hybrid(shape) else "ffn_norm"
        plain: dict[str, tuple[int, ...]] = {"attn_norm": (hidden,), second_norm: (hidden,)}
        if "num_experts" in shape:
            plain["ffn_gate_inp"] = (shape["num_experts"], hidden)
        if is_recurrent:
            plain |= _delta_gates(shape)
        elif "num_experts" in shape or is_hybrid(shape):
            plain |= {"attn_q_norm": (_head_dim(shape),), "attn_k_norm": (_head_dim(shape),)}
        for name, matrix in matrices.items():
            is_more = mix == "Q4_K_M" and name in ("attn_v", "ffn_down") and _has_more_bits(layer, layers)
            yield GGUFTensor(f"blk.{layer}.{name}.weight", matrix, Type.Q6_K if is_more else most)
        for name, numbers in plain.items():
            suffix = "" if name == "ssm_a" else ".bias" if name == "ssm_dt" else ".weight"
            yield GGUFTensor(f"blk.{layer}.{name}{suffix}", numbers, Type.F32)
    yield GGUFTensor("output_norm.weight", (hidden,), Type.F32)
    if not is_tied:
        yield GGUFTensor("output.weight", (shape["vocab_size"], hidden), Type[head])


def is_gpt_oss(shape: Mapping[str, Any]) -> bool:
    return bool(shape["model_type"] == "gpt_oss")


def _gpt_oss_tensors(shape: Mapping[str, Any]) -> Iterator[GGUFTensor]:
    hidden, vocab = shape["hidden_size"], shape["vocab_size"]
    heads, count, width = shape["num_attention_heads"], shape["num_local_experts"], shape["intermediate_size"]
    yield GGUFTensor(EMBEDDING, (vocab, hidden), Type.Q8_0)
    for layer in range(shape["num_hidden_layers"]):
        block, matrices = f"blk.{layer}", _attention(shape)
        for name, matrix in matrices.items():
            yield GGUFTensor(f"{block}.{name}.weight", matrix, Type.Q8_0)
        plain: dict[str, tuple[int, ...]] = {f"{name}.bias": (rows,) for name, (rows, _) in matrices.items()}
        for name in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"):
            rows, columns = (hidden, width) if "down" in name else (width, hidden)
            yield GGUFTensor(f"{block}.{name}.weight", (count, rows, columns), Type.MXFP4)
            plain[f"{name}.bias"] = (count, rows)
        plain |= {"attn_norm.weight": (hidden,), "post_attention_norm.weight": (hidden,), "attn_sinks.weight": (heads,)}
        plain |= {"ffn_gate_inp.weight": (count, hidden), "ffn_gate_inp.bias": (count,)}
        for name, numbers in plain.items():
            yield GGUFTensor(f"{block}.{name}", numbers, Type.F32)
    yield GGUFTensor("output_norm.weight", (hidden,), Type.F32)
    yield GGUFTensor("output.weight", (vocab, hidden), Type.Q8_0)


def is_hybrid(shape: Mapping[str, Any]) -> bool:
    return "linear_num_value_heads" in shape


def _attention(shape: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, head_dim = shape["hidden_size"], _head_dim(shape)
    mixed, kv = shape["num_attention_heads"] * head_dim, shape["num_key_value_heads"] * head_dim
    queries = 2 * mixed if is_hybrid(shape) else mixed  # each head's gate beside it
    return {
        "attn_q": (queries, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, mixed),
    }


def _delta_net(shape: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, (channels, values) = shape["hidden_size"], _delta_features(shape)
    return {"attn_qkv": (channels, hidden), "attn_gate": (values, hidden), "ssm_out": (hidden, values)}


def _delta_gates(shape: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    heads, hidden = shape["linear_num_value_heads"], shape["hidden_size"]
    return {
        "ssm_alpha": (heads, hidden),
        "ssm_beta": (heads, hidden),
        "ssm_conv1d": (_delta_features(shape)[0], shape["linear_conv_kernel_dim"]),
        "ssm_dt": (heads,),
        "ssm_a": (heads,),
        "ssm_norm": (shape["linear_value_head_dim"],),
    }


def _delta_features(shape: Mapping[str, Any]) -> tuple[int, int]:
    """Return the channels of the convolution, and the features of all values."""
    keys = shape["linear_num_key_heads"] * shape["linear_key_head_dim"]
    values = shape["linear_num_value_heads"] * shape["linear_value_head_dim"]
    return 2 * keys + values, values


def _has_more_bits(layer: int, layers: int) -> bool:
    """Return whether `llama-quantize` gives some matrices of a layer more bits in Q4_K_M."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _head_dim(shape: Mapping[str, Any]) -> int:
    return int(shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"])


def _feed_forward(shape: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden = shape["hidden_size"]
    if "num_experts" not in shape:
        mlp = shape["intermediate_size"]
        return {"ffn_gate": (mlp, hidden), "ffn_up": (mlp, hidden), "ffn_down": (hidden, mlp)}
    count, mlp = shape["num_experts"], shape["moe_intermediate_size"]
    inward = (count, mlp, hidden)
    return {"ffn_gate_exps": inward, "ffn_up_exps": inward, "ffn_down_exps": (count, hidden, mlp)}


def _described(path: Path, shape: Mapping[str, Any]) -> gguf.GGUFWriter:
    """Return a writer that has been told the shape's numbers."""
    is_mixture = "num_experts" in shape
    architecture = "qwen35" if is_hybrid(shape) else "qwen3moe" if is_mixture else "llama"
    writer = gguf.GGUFWriter(path, "gpt-oss" if is_gpt_oss(shape) else architecture)
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_rope_dimension_count(int(_head_dim(shape) * shape.get("partial_rotary_factor", 1.0)))
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_vocab_size(shape["vocab_size"])
    _add_vocabulary(writer, shape["vocab_size"])
    if is_mixture or is_hybrid(shape) or is_gpt_oss(shape):
        writer.add_key_length(_head_dim(shape))
        writer.add_value_length(_head_dim(shape))
    if is_hybrid(shape):
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_ssm_conv_kernel(shape["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(shape["linear_key_head_dim"])
        writer.add_ssm_group_count(shape["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(shape["linear_num_value_heads"])
        writer.add_ssm_inner_size(_delta_features(shape)[1])
        writer.add_full_attention_interval(shape["full_attention_interval"])
    if is_gpt_oss(shape):
        scaling = shape["rope_scaling"]
        writer.add_rope_freq_base(shape["rope_theta"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        writer.add_sliding_window(shape["sliding_window"])
    if is_mixture or is_gpt_oss(shape):
        writer.add_expert_count(shape["num_experts" if is_mixture else "num_local_experts"])
        writer.add_expert_used_count(shape["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(shape["moe_intermediate_size" if is_mixture else "intermediate_size"])
    return writer


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab", *(f"t{index}" for index in range(3, size))])
    writer.add_token_types([1] * size)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(size - 1)


def weight_bytes(shape: Mapping[str, Any], head: str, mix: Mix = "Q4_0") -> int:
    """Return the bytes that a token reads: without the embedding's, and of experts those of a token."""
    tensors = list(model_tensors(shape, head, mix))
    is_tied = not any(tensor.name == "output.weight" for tensor in tensors)
    return sum(_read_bytes(tensor, shape) for tensor in tensors if is_tied or tensor.name != EMBEDDING)


def write_random(path: Path, shape: Mapping[str, Any], head: str, mix: Mix = "Q4_0") -> dict[str, int]:
    """Write the file tensor by tensor. Returns `file_bytes` and `weight_bytes_per_token`."""
    tensors = list(model_tensors(shape, head, mix))
    writer = _described(path, shape)
    for tensor in tensors:
        # A quantized tensor is described by its shape in bytes, a plain one by its shape in numbers.
        plain = tensor.type is Type.F32
        shape_info, dtype = (tensor.shape, np.float32) if plain else (tensor.byte_shape, np.uint8)
        writer.add_tensor_info(tensor.name, shape_info, np.dtype(dtype), tensor.nbytes, None if plain else tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    for tensor in tensors:
        writer.write_tensor_data(random_values(tensor, rng))
    writer.close()
    return {
        "file_bytes": path.stat().st_size,
        "weight_bytes_per_token": weight_bytes(shape, head, mix),
    }


def _read_bytes(tensor: GGUFTensor, shape: Mapping[str, Any]) -> int:
    if "_exps." not in tensor.name:
        return tensor.nbytes
    count = shape["num_local_experts"] if is_gpt_oss(shape) else shape["num_experts"]
    return int(tensor.nbytes * shape["num_experts_per_tok"] // count)


def random_values(tensor: GGUFTensor, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Ones for a norm, normal numbers for a router; for a matrix blocks of random bytes, each with the same scale, so
    that activations stay near 1."""
    if tensor.type is Type.F32:
        if "attn_sinks" in tensor.name or (tensor.name.endswith(".bias") and "ssm_dt" not in tensor.name):
            return np.zeros(tensor.shape, np.float32)
        if len(tensor.shape) == 1:  # a rate of decay is stored as -exp(A_log)
            return np.full(tensor.shape, -1 if tensor.name.endswith("ssm_a") else 1, np.float32)
        return rng.standard_normal(tensor.shape, np.float32) / np.float32(tensor.shape[-1] ** 0.5)  # a router's
    _, block_bytes = gguf.GGML_QUANT_SIZES[tensor.type]
    blocks = rng.integers(0, 256, (tensor.nbytes // block_bytes, block_bytes), dtype=np.uint8)
    if tensor.type is Type.MXFP4:  # one byte, an exponent of two
        blocks[:, 0] = 127 - round(math.log2(2.5 * tensor.shape[-1] ** 0.5))
        return blocks.reshape(tensor.byte_shape)
    offset, scale = SCALES[tensor.type]
    if tensor.type is Type.Q4_K:
        blocks[:, 4:16] = 0xFF  # a group's scale and least: 63 times those of the block
        least = 7.5 * scale * tensor.shape[-1] ** -0.5  # half of 15 steps: the mean of the weights is zero
        blocks[:, 2:4] = np.frombuffer(np.float16(least).tobytes(), np.uint8)
    if tensor.type is Type.Q4_0:
        # 0 to 15 stand for -8 to 7: their mean would add the same to each hidden state, for which a router chooses the
        # same experts.
        codes = blocks[:, 2:]
        codes[codes & 0x0F == 0] |= 0x08
        codes[codes & 0xF0 == 0] |= 0x80
    scale *= tensor.shape[-1] ** -0.5
    blocks[:, offset : offset + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return blocks.reshape(tensor.byte_shape)
