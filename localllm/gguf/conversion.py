"""From the header of a GGUF model to the files of its folder."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from localllm.errors import UnsupportedModelError, show
from localllm.gguf.config import hf_config
from localllm.gguf.folder import DESCRIPTION
from localllm.gguf.header import GgufHeader, read_model
from localllm.gguf.metadata import Shape
from localllm.gguf.names import hf_name, holds_weights, stored_form
from localllm.gguf.rope import rope_factors
from localllm.gguf.tokenizer import hf_tokenizer

_CONFIG, _TOKENIZER, _TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"


def model_files(path: Path) -> dict[str, bytes]:
    """Return the files of the folder of a GGUF model, by their names.

    Raises CheckpointError and TokenizerError for what cannot be read, UnsupportedModelError for what does not run here.
    """
    headers = read_model(path)
    metadata = headers[0].metadata
    shapes = {name: tensor.shape for header in headers for name, tensor in header.tensors.items()}
    config = hf_config(metadata, shapes, rope_factors(headers), str(path))
    tokenizer, tokenizer_config = hf_tokenizer(metadata, str(path))
    architecture = str(metadata["general.architecture"])
    form = stored_form(architecture)
    description = {
        "files": [os.fspath(header.path.absolute()) for header in headers],
        "pairs_heads": form.pairs_heads,
        "norm_offset": form.norm_offset,
        "tiles_value_heads": form.tiles_value_heads,
        "num_extra_layers": config["num_nextn_predict_layers"],
        "tensors": _tensors(headers, architecture),
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
    for number, header in enumerate(headers):
        for name, tensor in header.tensors.items():
            if not holds_weights(name):
                continue
            plain = hf_name(name, architecture)
            if plain is None or plain in found:
                what = f"{header.path}: the tensor {show(name)} is not known"
                why = f"a model of the architecture {show(architecture)} has none like it here"
                raise UnsupportedModelError(what, why=why, fix="choose another model: localllm list")
            found[plain] = (number, tensor.type, _hf_shape(name, tensor.shape), tensor.begin, tensor.num_bytes)
    return found


def _hf_shape(name: str, shape: Shape) -> Shape:
    """Return the shape with its dimensions of 1, which ggml leaves out: a gate of one row is a list there, and the taps
    of a convolution stand by their channels."""
    if name.endswith(".ffn_gate_inp_shexp.weight") and len(shape) == 1:
        return 1, *shape
    if name.endswith(".ssm_conv1d.weight") and len(shape) == 2:
        return shape[0], 1, shape[1]
    return shape
