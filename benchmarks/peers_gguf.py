"""A GGUF file of a Llama's shape with random weights, as `llama-quantize ... Q4_0` would lay it out.

Matrices in Q4_0, the head in Q6_K, norms in fp32, no vocabulary: llama.cpp decodes token ids alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

EMBEDDING = "token_embd.weight"
# fp16 scale of a block: where it stands in the block's bytes, and what makes weights of about 0.02.
SCALES = {Type.Q4_0: (0, 0.0043), Type.Q6_K: (208, 1e-5)}


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


def llama_tensors(shape: Mapping[str, Any], head: str) -> Iterator[GGUFTensor]:
    """Every tensor by llama.cpp's names. shape: Hugging Face's config. head: Q6_K or Q4_0."""
    hidden, mlp = shape["hidden_size"], shape["intermediate_size"]
    kv = shape["num_key_value_heads"] * (hidden // shape["num_attention_heads"])
    yield GGUFTensor(EMBEDDING, (shape["vocab_size"], hidden), Type.Q4_0)
    for layer in range(shape["num_hidden_layers"]):
        matrices = {
            "attn_q": (hidden, hidden),
            "attn_k": (kv, hidden),
            "attn_v": (kv, hidden),
            "attn_output": (hidden, hidden),
            "ffn_gate": (mlp, hidden),
            "ffn_up": (mlp, hidden),
            "ffn_down": (hidden, mlp),
        }
        for name, matrix in matrices.items():
            yield GGUFTensor(f"blk.{layer}.{name}.weight", matrix, Type.Q4_0)
        for name in ("attn_norm", "ffn_norm"):
            yield GGUFTensor(f"blk.{layer}.{name}.weight", (hidden,), Type.F32)
    yield GGUFTensor("output_norm.weight", (hidden,), Type.F32)
    yield GGUFTensor("output.weight", (shape["vocab_size"], hidden), Type[head])


def write_random(path: Path, shape: Mapping[str, Any], head: str) -> dict[str, int]:
    """Write the file tensor by tensor. Returns `file_bytes` and `weight_bytes_per_token`, all but the embedding's."""
    tensors = list(llama_tensors(shape, head))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_rope_dimension_count(shape["hidden_size"] // shape["num_attention_heads"])
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
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
        "weight_bytes_per_token": sum(tensor.nbytes for tensor in tensors if tensor.name != EMBEDDING),
    }


def random_values(tensor: GGUFTensor, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Ones for a norm; for a matrix blocks of random bytes, each with the same sane scale: no NaN, no infinity."""
    if tensor.type is Type.F32:
        return np.ones(tensor.shape, np.float32)
    _, block_bytes = gguf.GGML_QUANT_SIZES[tensor.type]
    blocks = rng.integers(0, 256, (tensor.nbytes // block_bytes, block_bytes), dtype=np.uint8)
    offset, scale = SCALES[tensor.type]
    blocks[:, offset : offset + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return blocks.reshape(tensor.byte_shape)
