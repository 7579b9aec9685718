"""From the header of a GGUF model to the files of its folder."""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

from localllm.errors import FETCH_ANEW, CheckpointError, UnsupportedModelError, show
from localllm.gguf.config import hf_config
from localllm.gguf.folder import DESCRIPTION
from localllm.gguf.header import GgufEntry, GgufHeader, read_floats, read_model
from localllm.gguf.metadata import Shape
from localllm.gguf.names import HEAD_NORMS, STACKED, hf_name, holds_weights, stored_form
from localllm.gguf.ollama import as_llama_cpp
from localllm.gguf.rope import rope_factors
from localllm.gguf.tokenizer import hf_tokenizer

_LISTS = (*HEAD_NORMS, ".ssm_norm.weight")  # of which some have two dimensions, as have those with the names
_AS_LISTS = (".ssm_a", ".ssm_d", ".time_mix_lerp_fused.weight")
_CONVOLUTIONS = (".ssm_conv1d.weight", ".shortconv.conv.weight", *(f".ssm_conv1d_{part}.weight" for part in "qkv"))
_ROWS_BY_HEAD = (".attn_k_b.weight", ".attn_v_b.weight")
_CONFIG, _TOKENIZER, _TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"


def model_files(path: Path) -> dict[str, bytes]:
    """Return the files of the folder of a GGUF model, by their names.

    Raises CheckpointError and TokenizerError for what cannot be read, UnsupportedModelError for what does not run here.
    """
    headers = as_llama_cpp(read_model(path))
    metadata = headers[0].metadata
    shapes = {name: tensor.shape for header in headers for name, tensor in header.tensors.items()}
    form = stored_form(str(metadata.get("general.architecture")))
    factors = rope_factors(headers) | (_head_scales(headers) if form.scales_heads else {})
    config = hf_config(metadata, shapes, factors, str(path))
    tokenizer, tokenizer_config = hf_tokenizer(metadata, str(path))
    architecture = str(metadata["general.architecture"])
    tensors = _tensors(headers, architecture)
    if form.lists_coefficients:
        tensors |= _coefficients(headers[0], config["num_hidden_layers"])
    description = {
        "files": [os.fspath(header.path.absolute()) for header in headers],
        "pairs_heads": form.pairs_heads,
        "norm_offset": form.norm_offset,
        "tiles_value_heads": form.tiles_value_heads,
        "num_extra_layers": config["num_nextn_predict_layers"],
        "tensors": tensors,
    }
    contents = {
        _CONFIG: config,
        _TOKENIZER: tokenizer,
        _TOKENIZER_CONFIG: tokenizer_config,
        DESCRIPTION: description,
    }
    return {name: json.dumps(content).encode() for name, content in contents.items()}


def _tensors(headers: Sequence[GgufHeader], architecture: str) -> dict[str, object]:
    found: dict[str, object] = {}
    stored = {name for header in headers for name in header.tensors}
    for number, header in enumerate(headers):
        for name, tensor in header.tensors.items():
            if not holds_weights(name):
                continue
            plain = hf_name(name, architecture, stored)
            if plain is None or plain in found:
                what = f"{header.path}: the tensor {show(name)} is not known"
                why = f"a model of the architecture {show(architecture)} has none like it here"
                raise UnsupportedModelError(what, why=why, fix="choose another model: localllm list --all")
            found |= {each: (number, *place) for each, place in _places(plain, tensor)}
    return found


def _places(plain: str, tensor: GgufEntry) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Yield the type, the shape, the begin and the bytes of a tensor by its name, or of each matrix that it has."""
    if tensor.name not in STACKED or len(tensor.shape) != 3:
        yield plain, (tensor.type, _hf_shape(tensor.name, tensor.shape), tensor.begin, tensor.num_bytes)
        return
    stem, size = plain.removesuffix(".weight"), tensor.num_bytes // tensor.shape[0]
    for number in range(tensor.shape[0]):
        yield f"{stem}.{number}.weight", (tensor.type, tensor.shape[1:], tensor.begin + number * size, size)


def _head_scales(headers: Sequence[GgufHeader]) -> dict[str, tuple[float, ...]]:
    """Return the weights of the norms of queries and keys by the tensors' names."""
    return {
        name: read_floats(header, name)
        for header in headers
        for name in header.tensors
        if any(part in name for part in HEAD_NORMS)
    }


def _coefficients(header: GgufHeader, num_layers: object) -> dict[str, object]:
    """Return the places of what xIELU has learnt in each layer, which stands in the header. Raises CheckpointError."""
    found: dict[str, object] = {}
    for name in ("alpha_p", "alpha_n", "beta", "eps"):
        key = f"xielu.{name}"
        values = header.metadata.get(key)
        if not isinstance(values, array) or values.typecode != "f" or len(values) != num_layers:
            why = f"it is {show(values)}; a list of {num_layers} numbers in F32 is needed, one for each layer"
            raise CheckpointError(f"{header.path}: {key} is not usable", why=why, fix=FETCH_ANEW)
        for layer in range(len(values)):
            begin = header.begins[key] + layer * values.itemsize
            found[f"model.layers.{layer}.mlp.act_fn.{name}"] = 0, "F32", (1,), begin, values.itemsize
    return found


def _hf_shape(name: str, shape: Shape) -> Shape:
    """Return the shape with its dimensions of 1, which ggml leaves out: a gate of one row is a list there, and the taps
    of a convolution stand by their channels. A norm's weights of each head or group are one list here, and so are
    numbers of each head, what RWKV-7 mixes two tokens by, and the rows of what latent attention has of each head."""
    if name.endswith(".ffn_gate_inp_shexp.weight") and len(shape) == 1:
        return 1, *shape
    if name.endswith(_CONVOLUTIONS) and len(shape) > 1:
        return math.prod(shape[:-1]), 1, shape[-1]
    if name.endswith(_ROWS_BY_HEAD) and len(shape) == 3:
        return math.prod(shape[:2]), shape[2]
    is_list = name.endswith(_AS_LISTS) or any(part in name for part in _LISTS)
    return (math.prod(shape),) if is_list else shape
