"""A GGUF file of a model's shape with random weights, as `llama-quantize` has it.

Q4_0: matrices in Q4_0, the head in Q6_K, norms and routers in fp32. Q4_K_M: as files are published most, with half of
the values and of the second MLP matrices in Q6_K. MXFP4: gpt-oss as it is published, the experts in MXFP4 and all
other matrices in Q8_0. The vocabulary is one word an id.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from benchmarks.peers_architectures import architecture, completed

Mix = Literal["Q4_0", "Q4_K_M", "MXFP4"]
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
# fp16 scale of a block: where it stands in the block's bytes, and what makes weights of about 1.
SCALES = {
    Type.Q4_0: (0, 0.23),
    Type.Q4_K: (0, 0.23 / 63),
    Type.Q5_0: (0, 0.11),
    Type.Q6_K: (208, 5e-4),
    Type.Q8_0: (0, 0.0136),
}
_PLAIN = {Type.F32: np.float32, Type.F16: np.float16}
# What `llama-quantize` leaves as it is, although it has rows and columns: of RWKV's small matrices some are in fp16.
_KEPT = re.compile(r"_norm\.|ffn_gate_inp\.|ssm_conv1d\.|shortconv\.conv\.|time_mix_(lerp_fused|[wavg][12])\.")
_HALF = re.compile(r"time_mix_[avg][12]\.")
_MORE_BITS = re.compile(r"attn_(v|qkv)\.|ffn_down")
# What takes the place of a type whose blocks of 256 do not divide the rows.
_SMALLER = {Type.Q4_K: Type.Q5_0, Type.Q6_K: Type.Q8_0}


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
    config, own = completed(shape), architecture(shape)
    mix = "MXFP4" if own.name == "gpt-oss" else mix  # it is published in no other
    matrix, layers = (config["vocab_size"], config["hidden_size"]), config["num_hidden_layers"]
    is_tied = config["tie_word_embeddings"]
    yield GGUFTensor(EMBEDDING, matrix, _matrix_type(matrix, mix, head if is_tied else ""))
    for layer in range(layers):
        has_more = _has_more_bits(layer, layers)
        for name, each in own.block(config, layer).items():
            yield GGUFTensor(f"blk.{layer}.{name}", each, _type(name, each, mix, has_more=has_more))
    for name, each in own.outer(config).items():
        yield GGUFTensor(name, each, Type.F32)
    if not is_tied:
        yield GGUFTensor(HEAD, matrix, _matrix_type(matrix, mix, head))


def _type(name: str, shape: tuple[int, ...], mix: Mix, *, has_more: bool) -> Type:
    """Return the type of a layer's tensor. has_more: some of this layer's matrices have more bits in Q4_K_M."""
    if _HALF.match(name):
        return Type.F16
    if len(shape) < 2 or not name.endswith(".weight") or _KEPT.search(name):
        return Type.F32
    return _matrix_type(shape, mix, "Q6_K" if mix == "Q4_K_M" and has_more and _MORE_BITS.match(name) else "")


def _matrix_type(shape: tuple[int, ...], mix: Mix, own: str = "") -> Type:
    """own: its type where it has not that of most; "": it has."""
    if mix == "MXFP4":
        return Type.MXFP4 if len(shape) > 2 else Type.Q8_0
    found = Type[own or {"Q4_0": "Q4_0", "Q4_K_M": "Q4_K"}[mix]]
    return _SMALLER[found] if shape[-1] % gguf.GGML_QUANT_SIZES[found][0] else found


def _has_more_bits(layer: int, layers: int) -> bool:
    """Return whether `llama-quantize` gives some matrices of a layer more bits in Q4_K_M."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _described(path: Path, shape: Mapping[str, Any]) -> gguf.GGUFWriter:
    """Return a writer that has been told the shape's numbers."""
    own = architecture(shape)
    writer = gguf.GGUFWriter(path, own.name)
    adds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in own.keys(completed(shape)).items():
        adds.get(type(value), writer.add_array)(f"{own.name}.{key}", value)
    _add_vocabulary(writer, shape["vocab_size"])
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
    is_tied = not any(tensor.name == HEAD for tensor in tensors)
    return sum(_read_bytes(tensor, shape) for tensor in tensors if is_tied or tensor.name != EMBEDDING)


def write_random(path: Path, shape: Mapping[str, Any], head: str, mix: Mix = "Q4_0") -> dict[str, int]:
    """Write the file tensor by tensor. Returns `file_bytes` and `weight_bytes_per_token`."""
    tensors = list(model_tensors(shape, head, mix))
    writer = _described(path, shape)
    for tensor in tensors:
        # A quantized tensor is described by its shape in bytes, a plain one by its shape in numbers.
        plain = _PLAIN.get(tensor.type)
        shape_info = tensor.shape if plain else tensor.byte_shape
        dtype = np.dtype(plain or np.uint8)
        writer.add_tensor_info(tensor.name, shape_info, dtype, tensor.nbytes, None if plain else tensor.type)
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
    return int(tensor.nbytes * shape["num_experts_per_tok"] // tensor.shape[0])


def _plain_values(tensor: GGUFTensor, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    if "attn_sinks" in tensor.name or (tensor.name.endswith(".bias") and "ssm_dt" not in tensor.name):
        return np.zeros(tensor.shape, np.float32)
    if len(tensor.shape) == 1 or tensor.shape[-1] == 1 or "_norm." in tensor.name:
        # A rate of decay is stored as -exp(A_log).
        return np.full(tensor.shape, -1 if tensor.name.endswith("ssm_a") else 1, np.float32)
    return rng.standard_normal(tensor.shape, np.float32) / np.float32(tensor.shape[-1] ** 0.5)


def random_values(tensor: GGUFTensor, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Ones for a norm, normal numbers for a router and other small matrices; for a matrix blocks of random bytes, each
    with the same scale, so that activations stay near 1."""
    if tensor.type in _PLAIN:
        return _plain_values(tensor, rng).astype(_PLAIN[tensor.type])
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
