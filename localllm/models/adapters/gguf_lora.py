"""A GGUF file of an adapter, as llama.cpp's convert_lora_to_gguf.py writes it.

A matrix "blk.0.attn_q.weight" has "blk.0.attn_q.weight.lora_a" [rank, K] and ".lora_b" [N, rank], one of all experts
with the experts before that; the embedding's lora_a is [V, rank]. All are scaled by alpha / rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from localllm.errors import AdapterError, show
from localllm.gguf.architectures import holds_type
from localllm.gguf.folder import TensorPlace
from localllm.gguf.header import GgufEntry, GgufHeader, read_header
from localllm.gguf.names import hf_name, stored_form
from localllm.layers.config import MoEConfig
from localllm.models.adapters.stored import (
    CHOOSE_ANOTHER,
    LoraPair,
    LoraTensor,
    StoredAdapter,
    WeightDelta,
    by_name,
    unsupported,
)
from localllm.models.architecture import ModelConfig
from localllm.models.checkpoints.gguf import GgufTensor
from localllm.models.checkpoints.safetensors_file import allocate
from localllm.models.checkpoints.weight_file import WeightFile
from localllm.models.families import in_gguf_form, in_published_form

_SIDES = {".lora_a": "A", ".lora_b": "B"}
_EMBEDDING = "token_embd.weight"
_INVOCATION = "adapter.alora.invocation_tokens"


def open_file(path: Path, config: ModelConfig) -> StoredAdapter:
    """Return the adapter of a file, for a model of this config. Raises AdapterError and CheckpointError."""
    header = read_header(path)
    architecture, alpha = _described(header, config)
    file = WeightFile(path)
    try:
        pairs = _pairs(header, file)
        names = _hf_names(pairs, architecture, config, path)
        form, stored = stored_form(architecture), [f"{name}.weight" for name in names.values()]
        made_for = in_gguf_form(in_published_form(config), form.pairs_heads, form.tiles_value_heads, stored)
        found = (_deltas(names[stem], pair, alpha) for stem, pair in pairs.items())
        deltas = by_name(itertools.chain.from_iterable(found), path)
    finally:
        file.close()
    base = header.metadata.get("general.base_model.0.name")
    return StoredAdapter(path, base if isinstance(base, str) else "", made_for, deltas)


def _described(header: GgufHeader, config: ModelConfig) -> tuple[str, float]:
    """Return the architecture and alpha. Raises AdapterError for any other file than a LoRA for this kind of model."""
    keys, path = header.metadata, header.path
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if keys.get(key) != wanted:
            found = f"is {show(keys[key])}" if key in keys else "is absent"
            why = f"{key} {found}; {show(wanted)} is needed"
            raise AdapterError(f"{path} is no LoRA", why=why, fix="name a GGUF file that is one")
    if keys.get(_INVOCATION):
        raise unsupported(path, f"Activated LoRA ({_INVOCATION})")
    architecture = str(keys.get("general.architecture"))
    if not holds_type(architecture, config.model_type):
        why = f"general.architecture is {show(architecture)}, the model is of the type {show(config.model_type)}"
        raise AdapterError(f"{path} was made for another kind of model", why=why, fix=CHOOSE_ANOTHER)
    alpha = keys.get("adapter.lora.alpha", 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        why = f"adapter.lora.alpha is {show(alpha)}; a finite number is needed"
        raise AdapterError(f"{path} cannot be read", why=why, fix="fetch the adapter's files anew")
    return architecture, float(alpha)


def _pairs(header: GgufHeader, file: WeightFile) -> dict[str, LoraPair]:
    """Return the pairs by the names of the matrices that they change, in GGUF's words. Raises AdapterError."""
    halves: dict[str, dict[str, LoraTensor]] = {}
    for name, entry in header.tensors.items():
        stem, suffix = name[:-7], name[-7:]
        if suffix not in _SIDES:
            raise unsupported(header.path, f"a whole tensor beside the thin ones ({show(name)})")
        halves.setdefault(stem, {})[_SIDES[suffix]] = _tensor(entry, file)
    if not halves:
        raise AdapterError(f"{header.path} changes nothing", why="it has no tensors", fix="choose another adapter")
    for stem, half in halves.items():
        if len(half) < 2:
            (present,) = half.values()
            why = f"{show(present.name)} is there, and not the other one of lora_a and lora_b"
            raise AdapterError(f"{header.path}: half of {show(stem)} is missing", why=why, fix="fetch its file anew")
    return {stem: _pair(header.path, stem, half) for stem, half in halves.items()}


def _pair(path: Path, stem: str, half: Mapping[str, LoraTensor]) -> LoraPair:
    if stem == _EMBEDDING:  # of which a [V, rank] and b.T [rank, K] are what the two are of other matrices
        return LoraPair(path, stem, _transposed(half["B"]), half["A"])
    return LoraPair(path, stem, half["A"], half["B"])


def _tensor(entry: GgufEntry, file: WeightFile) -> LoraTensor:
    tensor = GgufTensor(file, entry.name, TensorPlace(0, entry.type, entry.shape, entry.begin, entry.num_bytes))
    return LoraTensor(entry.name, entry.shape, tensor.dtype(), tensor.read_into)


def _transposed(tensor: LoraTensor) -> LoraTensor:
    def read_into(out: Tensor) -> Tensor:
        return out.copy_(tensor.read_into(allocate(tensor.shape, out.dtype, tensor.name)).T)

    return replace(tensor, shape=tensor.shape[::-1], read_into=read_into)


def _hf_names(stems: Iterable[str], architecture: str, config: ModelConfig, path: Path) -> dict[str, str]:
    """Return Hugging Face's names of matrices by GGUF's. Raises AdapterError."""
    layers = enumerate(config.layers)
    routers = [f"blk.{n}.ffn_gate_inp.weight" for n, layer in layers if isinstance(layer.feed_forward, MoEConfig)]
    names: dict[str, str] = {}
    for stem in stems:
        name = hf_name(stem, architecture, routers)
        if name is None:
            why = f"a model of the architecture {show(architecture)} has no such matrix here"
            raise AdapterError(f"{path} changes {show(stem)}, which is not known", why=why, fix=CHOOSE_ANOTHER)
        names[stem] = name.removesuffix(".weight")
    return names


def _deltas(name: str, pair: LoraPair, alpha: float) -> Iterator[WeightDelta]:
    """Yield what a pair adds to a matrix, or to one of each expert. Raises AdapterError."""
    scale = alpha / pair.rank if alpha else 1.0
    experts, _, matrix = name.rpartition(".")
    a, b = pair.read()
    if a.dim() == 2:
        yield WeightDelta(name, pair.b.name, a, b, scale)
        return
    if a.dim() > 3 or not experts.endswith(".experts"):
        why = f"{show(pair.a.name)} is {list(a.shape)}; only of experts there are several"
        raise AdapterError(f"{pair.place}: {show(pair.module)} is no matrix", why=why, fix=CHOOSE_ANOTHER)
    for index, (own_a, own_b) in enumerate(zip(a, b, strict=True)):
        yield WeightDelta(f"{experts}.{index}.{matrix}", pair.b.name, own_a, own_b, scale)
