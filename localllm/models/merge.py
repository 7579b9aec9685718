"""A checkpoint with adapters in it: what they add is added to its matrices in fp32, and all of it is written in bf16.

A tensor after the other is read, changed and written: no more of the model is in memory than one matrix in fp32, and
what is added to it.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from localllm.errors import AdapterError, Fix, UnsupportedModelError, UsageError, show
from localllm.models.adapters.dense import DenseDeltas
from localllm.models.adapters.places import EMBEDDING_NAME, HEAD_NAME
from localllm.models.adapters.reader import open_adapter
from localllm.models.architecture import StoredForm
from localllm.models.block_source import CheckpointBlocks
from localllm.models.checkpoints import gguf
from localllm.models.checkpoints.checkpoint import EMBEDDING, HEAD, Checkpoint
from localllm.models.checkpoints.safetensors_file import PlainTensor, allocate
from localllm.models.checkpoints.safetensors_folder import MatrixTensor, open_tensors
from localllm.models.checkpoints.stored import StoredTensor
from localllm.models.families import load_config
from localllm.models.load import Progress
from localllm.models.merged_folder import CONFIG, NewTensor, write_folder
from localllm.models.stored_matrices import stored_config
from localllm.models.strict_json import JsonLimits, read_json_object
from localllm.present import is_folder, is_there
from localllm.quant.recipe import RECIPES
from localllm.registry import REPO_ID

_NUMBERS = ("BF16", "F16", "F32", "F64")
_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
# What a quantized checkpoint has for the numbers that come into a matrix or out of it, and for the KV cache.
_SCALES = re.compile(r".+\.(?:[kvq]|input|input_global|output)_(?:scale|zero_point)")
_TIES = "tie_word_embeddings"
_QUANTIZATION = ("quantization_config", "compression_config")


def merge(
    base: Path,
    adapters: Sequence[tuple[Path, float]],
    target: Path,
    progress: Progress = lambda _done, _total: None,
    *,
    model: str = "MODEL",
) -> int:
    """Write the checkpoint of `base` with adapters in it as the new folder `target`; return its bytes.

    adapters: folders of PEFT's or GGUF files, each with a factor of what it adds.
    target: a path at which nothing is, or an empty folder. The checkpoint is there when all of it is, or not at all.
    progress(done_bytes, total_bytes) hears of every matrix, and may raise to end the work.
    model: the name of the base in commands.

    Raises AdapterError, CheckpointError and UnsupportedModelError for what cannot be read or merged, UsageError for a
    target in the way, DoesNotFitError where the disk is too small, LocalLLMError where it fails.
    """
    _require_vacant(target)
    config = load_config(base)
    opened = [(open_adapter(path, config), scale) for path, scale in adapters]
    _require_published_form(base, model, next((adapter.base for adapter, _ in opened), ""))
    tensors, files = open_tensors(base)
    with Checkpoint(base, tensors, files, config.stored) as checkpoint:
        CheckpointBlocks(checkpoint, config, RECIPES["fp32"]).check()
        own = stored_config(checkpoint, config)
        changes = _Changes([(DenseDeltas(adapter, own), scale) for adapter, scale in opened])
        is_tied = own.tie_word_embeddings and changes.are_alike(EMBEDDING_NAME, HEAD_NAME)
        merged = [*_MergedCheckpoint(base, tensors, own.stored, changes).tensors(is_tied=is_tied)]
        described = _config(base, unties=config.tie_word_embeddings and not is_tied)
        return write_folder(target, base, described, merged, progress)


def _require_vacant(target: Path) -> None:
    fix = "name another folder (-o)"
    if is_folder(target):
        if any(target.iterdir()):
            why = "a merged checkpoint is a folder of its own, and nothing is overwritten"
            raise UsageError(f"{target} is not empty", why=why, fix=fix)
    elif is_there(target) or target.is_symlink():
        raise UsageError(f"{target} is in the way", why="it is there, and no folder", fix=fix)
    elif not is_folder(target.parent):
        fix = f"mkdir -p {shlex.quote(str(target.parent))}"
        raise UsageError(f"{target} cannot be made", why=f"there is no folder {target.parent}", fix=fix)


def _require_published_form(base: Path, model: str, made_for: str) -> None:
    """Raise UnsupportedModelError where a base's tensors are not those of a checkpoint for transformers.

    made_for: the model that an adapter was made for, by its own account, or "".
    """
    if (base / gguf.DESCRIPTION).exists():
        form = "GGUF"
    elif any("quantization" in section for section in _sections(read_json_object(base / CONFIG, JsonLimits()))):
        form = "MLX"
    else:
        return
    is_named = REPO_ID.fullmatch(made_for) and made_for != model
    fix = Fix.word(model, made_for) if is_named else "name the model that it was made from: a folder of safetensors"
    why = f"its weights are in the form of {form}; a merged checkpoint is made of one in Hugging Face's"
    raise UnsupportedModelError(f"nothing can be merged into {model}", why=why, fix=fix)


def _config(base: Path, *, unties: bool) -> dict[str, object]:
    """Return the content of the new config.json."""
    config = read_json_object(base / CONFIG, JsonLimits())
    for section in _sections(config):
        section.update(dict.fromkeys(section.keys() & {"dtype", "torch_dtype"}, "bfloat16"))
        for key in _QUANTIZATION:
            section.pop(key, None)
        if unties and (section is config or section is config.get("text_config") or _TIES in section):
            section[_TIES] = False
    if not config.keys() & {"dtype", "torch_dtype"}:
        config["torch_dtype"] = "bfloat16"
    return config


def _sections(config: dict[str, object]) -> list[dict[str, object]]:
    return [config, *(section for section in config.values() if isinstance(section, dict))]


class _Changes:
    """What several adapters add together."""

    def __init__(self, deltas: Sequence[tuple[DenseDeltas, float]]) -> None:
        self._deltas = deltas

    def of(self, name: str) -> Tensor | None:
        """Return what is added to a matrix: see `DenseDeltas`."""
        total: Tensor | None = None
        for deltas, scale in self._deltas:
            delta = deltas.of(name) if scale else None
            if delta is not None:
                if scale != 1:
                    delta.mul_(scale)
                total = delta if total is None else total.add_(delta)
        return total

    def are_alike(self, name: str, other: str) -> bool:
        """Return whether the same is added to two matrices."""
        mine, theirs = self.of(name), self.of(other)
        if mine is None or theirs is None:
            return mine is theirs
        return torch.equal(mine, theirs)


@dataclass(frozen=True)
class _Source:
    """A tensor of the base, and its name in the new checkpoint.

    plain: what `Checkpoint` calls it, or the matrix of each expert in it, or some of its rows. has_experts: these are
    its first dimension. parts: what reads some of its rows, where they have names of their own.
    """

    name: str
    tensor: StoredTensor
    plain: tuple[str, ...]
    has_experts: bool
    parts: Checkpoint | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one expert's matrix, or of all."""
        return self.tensor.shape[1:] if self.has_experts else self.tensor.shape


@dataclass(frozen=True)
class _MergedCheckpoint:
    """The tensors of a base as they are written. stored: by their stored names."""

    base: Path
    stored: Mapping[str, StoredTensor]
    form: StoredForm
    changes: _Changes

    def tensors(self, *, is_tied: bool) -> Iterator[NewTensor]:
        """Yield them in the base's order; last a head, where the base has none beside its embedding and now needs
        it."""
        sources = [*self._sources()]
        if not is_tied and not any(source.plain == (HEAD,) for source in sources):
            embedding = next(source for source in sources if source.plain == (EMBEDDING,))
            is_nested = embedding.name.startswith("language_model.model.")
            sources.append(replace(embedding, name=f"language_model.{HEAD}" if is_nested else HEAD, plain=(HEAD,)))
        is_fp32 = self._is_fp32()
        for source in sources:
            tensor = source.tensor
            if isinstance(tensor, PlainTensor) and tensor.form not in _NUMBERS:
                entry = tensor.file.entry(tensor.name)
                yield NewTensor(source.name, tensor.form, tensor.shape, entry.end - entry.begin, tensor.chunks)
            else:  # what alone is in fp32 is so by intent: a router's corrections, the rates of a state
                yield self._of_numbers(source, "F32" if tensor.form == "F32" and not is_fp32 else "BF16")

    def _sources(self) -> Iterator[_Source]:
        # From these `Checkpoint` knows what stands in front of all names.
        roots = {name: tensor for name, tensor in self.stored.items() if name.endswith("embed_tokens.weight")}
        is_coded = any(isinstance(tensor, MatrixTensor) for tensor in self.stored.values())
        for name, tensor in self.stored.items():
            if is_coded and _SCALES.fullmatch(name):
                continue
            view = Checkpoint(self.base, {**roots, name: tensor}, (), self.form)
            names = view.names()
            plain = (names[[*roots].index(name)],) if name in roots else names[len(roots) :]
            has_parts = any(self.form.parts_of(name.rpartition(".")[0]))
            has_experts = not plain or view.shape(plain[0]) != tensor.shape
            yield _Source(name, tensor, plain, has_experts and not has_parts, view if has_parts else None)

    def _is_fp32(self) -> bool:
        """Return whether most of the numbers are stored in fp32."""
        sizes: Counter[str] = Counter()
        for tensor in self.stored.values():
            sizes[tensor.form] += math.prod(tensor.shape)
        return sizes["F32"] > max(sizes["BF16"], sizes["F16"])

    def _of_numbers(self, source: _Source, dtype: str) -> NewTensor:
        shape = source.tensor.shape
        if self._turns_codes(source):
            shape = (shape[0], shape[2], shape[1])
        size = math.prod(shape) * _DTYPES[dtype].itemsize
        return NewTensor(source.name, dtype, shape, size, partial(self._pieces, source, _DTYPES[dtype]))

    def _pieces(self, source: _Source, dtype: torch.dtype) -> Iterator[memoryview]:
        """Yield the bytes of a tensor, an expert's after the other's where it has those of all."""
        for number, plain in enumerate(source.plain):
            delta = self.changes.of(plain.removesuffix(".weight")) if plain.endswith(".weight") else None
            wanted = dtype if delta is None else torch.float32
            if source.parts is not None:
                values = source.parts.read(plain, source.parts.shape(plain), wanted)
            else:
                room = allocate(source.shape, wanted, source.name)
                values = source.tensor.read_into(room, number if source.has_experts else None)
            if delta is not None:
                values += delta.T if self._is_turned(source, delta.shape) else delta
                values = values.to(dtype)
                if not all(map(math.isfinite, torch.stack(values.aminmax()).tolist())):  # a NaN is both
                    what = f"with what the adapters add, {show(source.name)} has infinite numbers"
                    why = f"the largest number of {str(dtype).removeprefix('torch.')} is {torch.finfo(dtype).max:.3g}"
                    raise AdapterError(what, why=why, fix="a smaller scale (ADAPTER:0.5), or another adapter")
            if self._turns_codes(source):
                values = values.T.contiguous()
            yield values.view(-1).view(torch.uint8).numpy().data

    def _turns_codes(self, source: _Source) -> bool:
        """Return whether an expert's matrix has its rows first in codes, and its columns in numbers."""
        is_coded = isinstance(source.tensor, MatrixTensor) and source.has_experts
        return is_coded and self.form.transposes_experts == "all"

    def _is_turned(self, source: _Source, shape: tuple[int, ...]) -> bool:
        """Return whether a matrix of this shape is stored with its columns first. Where it is as wide as high only
        names tell: see `Checkpoint`."""
        if isinstance(source.tensor, MatrixTensor) or not source.has_experts or source.shape != shape[::-1]:
            return False
        return source.shape != shape or (self.form.transposes_experts == "all" and not source.name.endswith(".weight"))
