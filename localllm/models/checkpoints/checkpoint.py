"""A model's weights by their Hugging Face names, whatever files and formats they are in, with any prefix.

The names asked for are those of a plain decoder (`model.layers.0.self_attn.q_proj.weight`, `lm_head.weight`); a folder
that says `layers.0...` or `language_model.model.layers.0...` answers to them too, and a tensor of all experts of a
layer to the names of single ones. Reads no pickle. Knows no architecture: the caller says which tensors it wants and
of which shape.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from localllm.errors import FETCH_ANEW, CheckpointError, show
from localllm.layers.config import MAX_EXPERTS
from localllm.models.architecture import StoredForm
from localllm.models.checkpoints import gguf, safetensors_folder
from localllm.models.checkpoints.safetensors_file import PlainTensor, allocate
from localllm.models.checkpoints.stored import StoredTensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from localllm.quant.coded import CodedMatrix
    from localllm.quant.layouts import WeightLayout

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_USUAL_FORM = StoredForm()
_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
# What changes an answer where a model has it: a config.json that knows nothing of it belongs to other weights.
_DECIDES = re.compile(
    r"model\.layers\.\d+\.(?:self_attn\.(?:\w+_proj(?:_with_mqa)?|\w+_conv1d|[qk]_norm(?:\.\d+)?)"
    r"|mlp\.(?:(?:experts\.\d+|shared_expert)\.)?(?:gate|up|down|gate_up)_proj|mlp\.(?:gate|shared_expert_gate)|\w*layernorm)"
    r"\.(?:weight|bias|e_score_correction_bias)"
    r"|model\.layers\.\d+\.(?:self_attn\.sinks|mlp\.act_fn\.\w+|layer_scalar|per_layer_\w+\.weight|router\.\w+)"
    r"|model\.layers\.\d+\.(?:linear_attn|mamba|conv)\.[\w.]+|lm_head\.bias|model\.norm\.bias"
    r"|model\.(?:layers\.\d+\.(?:attn|ffn|attn_norm|ffn_norm)|embedding_norm)\.[\w.]+"
)
# All experts' matrices as one tensor [experts, rows, columns], or [experts, columns, rows]; or their biases.
_FUSED = re.compile(
    r"((?:model|mtp)\.layers\.\d+\.mlp\.experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)(?:\.weight|([._]bias))?"
)


@dataclass(frozen=True)
class _Place:
    """Where a tensor is stored. expert: its number where it is one of a tensor of all. rows: the first one and their
    number, where it is some of a tensor's."""

    name: str
    expert: int | None = None
    rows: tuple[int, int] | None = None


class Closing(Protocol):
    def close(self) -> None: ...


class Checkpoint:
    """The tensors of one folder, and which of them have been asked for."""

    def __init__(
        self,
        place: Path,
        tensors: Mapping[str, StoredTensor],
        opened: Iterable[Closing],
        form: StoredForm = _USUAL_FORM,
    ) -> None:
        """place: the folder, or the file of a GGUF model. tensors: by their stored names. opened: the files that they
        are in."""
        self.place = place
        self._tensors = tensors
        self._opened = tuple(opened)
        self._prefix = next((prefix for prefix in _PREFIXES if f"{prefix}embed_tokens.weight" in tensors), "model.")
        self._form = form
        names = _plain_names(tensors, self._prefix, place, form)
        self._stored = _with_parts(_with_experts(names, tensors, place), tensors, place, form)
        self._asked: set[str] = set()

    @classmethod
    def open(cls, directory: Path, form: StoredForm = _USUAL_FORM) -> Checkpoint:
        """Check every header. form: see `ModelConfig.stored`. Raises CheckpointError naming the file, the shard or the
        tensor that is wrong."""
        if (directory / gguf.DESCRIPTION).exists():
            found, files = gguf.open_tensors(directory)
            return cls(files[0].path, found, files, form)
        tensors, opened = safetensors_folder.open_tensors(directory)
        return cls(directory, tensors, opened, form)

    def close(self) -> None:
        for file in self._opened:
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def has(self, name: str) -> bool:
        return name in self._stored

    def names(self) -> tuple[str, ...]:
        """Return the plain names of all tensors, those outside the text model included."""
        return tuple(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._tensor(name).shape
        return shape if self._stored[name].expert is None else shape[1:]

    def dtype(self, name: str) -> str:
        """Return torch's name of the dtype as it is stored. Raises CheckpointError if it is missing, or not read."""
        return self._tensor(name).dtype()

    def kept(self, name: str) -> WeightLayout | None:
        """Return the weight format that keeps the codes of a matrix, if it is stored in codes. Raises CheckpointError
        if it is missing."""
        return self._tensor(name).kept

    def comes_in_pieces(self, name: str) -> bool:
        """Return whether little of a tensor is held while it is read: see `StoredTensor`."""
        return self._tensor(name).comes_in_pieces

    def codes(self, name: str, shape: tuple[int, ...]) -> Iterator[CodedMatrix]:
        """Yield the codes of a matrix that has a `kept` format, in pieces of its rows: see `StoredTensor`. Raises as
        `read` does."""
        self.expect(name, shape)
        return self._tensor(name).codes(self._stored[name].expert)

    def fill_tiles(self, name: str, shape: tuple[int, ...], order: Tensor | None, out: Mapping[str, Tensor]) -> bool:
        """Fill the tensors of the `kept` format: see `StoredTensor`. Raises as `read` does."""
        self.expect(name, shape)
        return self._tensor(name).fill_tiles(self._stored[name].expert, order, out)

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """Check a tensor without reading it. Raises as `read` does."""
        stored = self.shape(name)
        if stored != shape and not self._is_transposed(name, shape):
            why = f"{self._tensor(name).path.name} stores {list(stored)}; config.json means {list(shape)}"
            raise CheckpointError(f"{self.place}: {name} has the wrong shape", why=why, fix=FETCH_ANEW)
        self.dtype(name)
        self._asked.add(name)

    def stored_rows(self, fused: str, parts: Mapping[str, int]) -> Mapping[str, int]:
        """Return the names and rows under which a matrix is stored: all of it as `fused`, or its parts."""
        return {fused: sum(parts.values())} if self.has(fused) else parts

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Read the tensor as `dtype`, or into `out`: contiguous, of `shape`, on any device, perhaps rows of a larger
        one.

        Raises CheckpointError if it is missing, of another shape, or of a dtype that is not read.
        """
        self.expect(name, shape)
        target = allocate(shape, dtype, name) if out is None else out
        stored, part = self._tensor(name), self._stored[name].expert
        if not self._is_transposed(name, shape):
            return stored.read_into(target, part)
        return target.copy_(stored.read_into(allocate(shape[::-1], dtype, name), part).T)

    def has_slabs(self, name: str) -> bool:
        """Return whether rows of a matrix can be read by themselves."""
        return self.has(name) and isinstance(self._tensor(name), PlainTensor)

    def read_slab(self, name: str, first: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Read some rows of a matrix that `has_slabs`, from number `first` on. shape: of those. Raises as `read`."""
        tensor = self._tensor(name)
        assert isinstance(tensor, PlainTensor), "`has_slabs` said so"
        self.dtype(name)
        self._asked.add(name)
        return tensor.file.read_slab(tensor.name, first, allocate(shape, dtype, name))

    def _is_transposed(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether an expert's matrix of this shape is stored with its columns first. Where it is as wide as high
        only names tell: transformers has no ".weight" in its own, for which the family says how. Codes have rows
        first."""
        stored, how = self.shape(name), self._form.transposes_experts
        is_matrix = self._stored[name].expert is not None and len(shape) == 2
        has_codes = isinstance(self._tensor(name), safetensors_folder.MatrixTensor)
        if not is_matrix or has_codes or how == "no" or stored != shape[::-1]:
            return False
        return stored != shape or (how == "all" and not self._stored[name].name.endswith(".weight"))

    def read_rows(self, parts: Mapping[str, int], features: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Read tensors one above the other, [sum of rows, *features], each straight into its rows.

        parts: name -> rows, in order. Raises as `read` does.
        """
        import torch

        for name, rows in parts.items():
            self.expect(name, (rows, *features))
        target = allocate((sum(parts.values()), *features), dtype, next(iter(parts)))
        for (name, rows), into in zip(parts.items(), torch.split(target, [*parts.values()]), strict=True):
            self.read(name, (rows, *features), dtype, into)
        return target

    def stores_own_head(self) -> bool:
        """Return whether lm_head is stored and differs from the embedding: then it is not tied, whatever config.json
        says."""
        if not self.has(HEAD):
            return False
        head, embedding = self._tensor(HEAD), self._tensor(EMBEDDING)
        if (head.form, head.shape) != (embedding.form, embedding.shape):
            return True
        return any(mine != other for mine, other in zip_longest(head.chunks(), embedding.chunks()))

    def unused(self, without: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Return the names of tensors that a decoder computes with and nobody asked for: without the head, which may be
        tied, what is not text in a multimodal model, and names that begin with one of `without`."""
        multimodal = "language_model." in self._prefix
        return tuple(
            plain
            for plain, place in self._stored.items()
            if plain not in self._asked
            and _DECIDES.fullmatch(plain)
            and not plain.startswith(without)
            and (not multimodal or place.name.startswith(self._prefix))
        )

    def _tensor(self, name: str) -> StoredTensor:
        if name not in self._stored:
            # difflib over all of a large checkpoint would take seconds; those of its layer are enough.
            layer = name.rpartition(".layers.")[2].partition(".")[0]
            alike = [other for other in self._stored if f".{layer}." in other or ".layers." not in other][:1000]
            stored = dict.fromkeys(self._stored[other].name for other in difflib.get_close_matches(name, alike))
            near = ", ".join(map(show, stored)) or "none"
            raise CheckpointError(
                f"{self.place} has no tensor {name}",
                why=f"{len(self._stored)} tensors are stored; the nearest names: {near}",
                fix=FETCH_ANEW,
            )
        found = self._stored[name]
        tensor = self._tensors[found.name]
        return tensor if found.rows is None else _RowsOf(tensor, *found.rows)


@dataclass(frozen=True)
class _RowsOf:
    """Some rows of a stored matrix, or of its bias, as a tensor of their own: from number `first` on. Of plain numbers
    no others are read; of codes all are decoded."""

    tensor: StoredTensor
    first: int
    rows: int

    @property
    def path(self) -> Path:
        return self.tensor.path

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, *self.tensor.shape[1:])

    @property
    def form(self) -> str:
        return self.tensor.form

    @property
    def kept(self) -> WeightLayout | None:
        return self.tensor.kept

    @property
    def comes_in_pieces(self) -> bool:
        return isinstance(self.tensor, PlainTensor)

    def dtype(self) -> str:
        return self.tensor.dtype()

    def read_into(self, out: Tensor, _part: int | None = None) -> Tensor:
        if isinstance(self.tensor, PlainTensor):
            return self.tensor.file.read_slab(self.tensor.name, self.first, out)
        whole = self.tensor.read_into(allocate(self.tensor.shape, out.dtype, self.path.name))
        return out.copy_(whole[self.first : self.first + self.rows].view(out.shape))

    def codes(self, _part: int | None, /) -> Iterator[CodedMatrix]:
        import torch

        from localllm.quant.coded import joined

        yield joined([*self.tensor.codes(None)]).rows(torch.arange(self.first, self.first + self.rows))

    def fill_tiles(self, _part: int | None, _order: Tensor | None, _out: Mapping[str, Tensor], /) -> bool:
        return False

    def chunks(self) -> Iterator[bytes]:
        return self.tensor.chunks()


def is_quantized(directory: Path) -> bool:
    """Return whether a folder's weights are in codes, or may be. Raises CheckpointError."""
    return (directory / gguf.DESCRIPTION).exists() or safetensors_folder.is_quantized(directory)


def _plain_names(stored: Iterable[str], prefix: str, directory: Path, form: StoredForm) -> dict[str, str]:
    """Return the stored names by the plain ones."""
    names: dict[str, str] = {}
    for name in stored:
        plain = name
        if name in _HEADS:
            plain = HEAD
        elif name.startswith(prefix):
            plain = f"model.{name.removeprefix(prefix)}"
        for theirs, ours in form.renames:
            plain = plain.replace(theirs, ours)
        if plain in names:
            raise _stored_twice(directory, plain, names[plain], name)
        names[plain] = name
    return names


def _with_experts(names: Mapping[str, str], tensors: Mapping[str, StoredTensor], directory: Path) -> dict[str, _Place]:
    """Return where each tensor is, single experts among them where a tensor holds them all."""
    places = {plain: _Place(name) for plain, name in names.items() if not _FUSED.fullmatch(plain)}
    for plain, name in names.items():
        fused = _FUSED.fullmatch(plain)
        if fused is None:
            continue
        shape = tensors[name].shape
        experts, matrix, bias = fused.groups()
        kind, wanted = ("bias", "[experts, rows]") if bias else ("weight", "[experts, rows, columns]")
        if len(shape) != (2 if bias else 3) or shape[0] > MAX_EXPERTS:
            why = f"it has the shape {list(shape)}; {wanted} is needed, at most {MAX_EXPERTS} experts"
            raise CheckpointError(f"{directory}: {show(name)} is not a tensor of experts", why=why, fix=FETCH_ANEW)
        parts = ("gate_proj", "up_proj", matrix) if matrix == "gate_up_proj" else (matrix,)
        for expert in range(shape[0]):
            for other in (f"{experts}.{expert}.{part}.{kind}" for part in parts):
                if other in places:
                    raise _stored_twice(directory, other, name, places[other].name)
            places[f"{experts}.{expert}.{matrix}.{kind}"] = _Place(name, expert)
    return places


def _with_parts(
    places: Mapping[str, _Place], tensors: Mapping[str, StoredTensor], directory: Path, form: StoredForm
) -> dict[str, _Place]:
    """Return where each tensor is, parts of those whose rows have names of their own in their place."""
    found: dict[str, _Place] = {}
    for plain, place in places.items():
        stem, _, kind = plain.rpartition(".")
        parts = form.parts_of(stem) if kind in ("weight", "bias") else []
        shape, total = tensors[place.name].shape, sum(rows for _, _, rows in parts)
        if parts and shape[:1] != (total,):
            why = f"it stores {list(shape)}; config.json means {total} rows"
            raise CheckpointError(f"{directory}: {show(place.name)} has the wrong shape", why=why, fix=FETCH_ANEW)
        of_parts = {f"{name}.{kind}": _Place(place.name, rows=(first, rows)) for name, first, rows in parts}
        found |= of_parts or {plain: place}
    return found


def _stored_twice(directory: Path, plain: str, first: str, second: str) -> CheckpointError:
    why = f"{show(first)} and {show(second)} are both stored"
    return CheckpointError(f"{directory} stores {show(plain)} twice", why=why, fix=FETCH_ANEW)
