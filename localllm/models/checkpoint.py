"""A model folder's weights by their Hugging Face names: one file or many shards, with any prefix.

The names asked for are those of a plain decoder (`model.layers.0.self_attn.q_proj.weight`, `lm_head.weight`); a folder
that says `layers.0...` or `language_model.model.layers.0...` answers to them too, and a tensor of all experts of a
layer to the names of single ones. Reads safetensors only, no pickle. Knows no architecture: the caller says which
tensors it wants and of which shape.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.errors import FETCH_ANEW, CheckpointError
from localllm.layers.config import MAX_EXPERTS
from localllm.models.architecture import StoredForm
from localllm.models.fields import show
from localllm.models.safetensors_file import SafetensorsFile, allocate
from localllm.models.safetensors_header import StoredTensor
from localllm.models.strict_json import JsonLimits, read_json_object

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_INDEX_LIMITS = JsonLimits(size_bytes=32 << 20, containers=1000, elements=1_000_000)
_MAX_SHARDS = 4096
_USUAL_FORM = StoredForm()
_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
# What changes an answer where a model has it: a config.json that knows nothing of it belongs to other weights.
_DECIDES = re.compile(
    r"model\.layers\.\d+\.(?:self_attn\.(?:(?:[qkvo]|qkv)_proj|[qk]_norm)"
    r"|mlp\.(?:(?:experts\.\d+|shared_expert)\.)?(?:gate|up|down|gate_up)_proj|mlp\.(?:gate|shared_expert_gate)|\w*layernorm)"
    r"\.(?:weight|bias|e_score_correction_bias)|lm_head\.bias|model\.norm\.bias"
)
# All experts' matrices as one tensor [experts, rows, columns], or [experts, columns, rows].
_FUSED = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)(?:\.weight)?")
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".npz")


@dataclass(frozen=True)
class _Place:
    """Where a tensor is stored. expert: its number where it is one of a tensor of all."""

    name: str
    expert: int | None = None


class Checkpoint:
    """The tensors of one folder, and which of them have been asked for."""

    def __init__(
        self, directory: Path, locations: Mapping[str, SafetensorsFile], form: StoredForm = _USUAL_FORM
    ) -> None:
        """locations: stored name -> the open file that holds it."""
        self.directory = directory
        self._locations = locations
        self._prefix = next((prefix for prefix in _PREFIXES if f"{prefix}embed_tokens.weight" in locations), "model.")
        self._form = form
        self._stored = _with_experts(_plain_names(locations, self._prefix, directory, form), locations, directory)
        self._asked: set[str] = set()

    @classmethod
    def open(cls, directory: Path, form: StoredForm = _USUAL_FORM) -> Checkpoint:
        """Check every header. form: see `ModelConfig.stored`. Raises CheckpointError naming the file, the shard or the
        tensor that is wrong."""
        single = directory / SINGLE
        if single.exists():
            file = SafetensorsFile.open(single)
            return cls(directory, dict.fromkeys(file.specs, file), form)
        if (directory / INDEX).exists():
            return cls(directory, _open_shards(directory, _read_index(directory / INDEX)), form)
        raise _nothing_to_read(directory)

    def close(self) -> None:
        for file in set(self._locations.values()):
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
        shape = self._spec(name).shape
        return shape if self._stored[name].expert is None else shape[1:]

    def dtype(self, name: str) -> str:
        """Return torch's name of the dtype as it is stored. Raises CheckpointError if it is missing, or not read."""
        self._spec(name)
        return self._file(name).dtype(self._stored[name].name)

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """Check a tensor without reading it. Raises as `read` does."""
        stored = self.shape(name)
        if stored != shape and not self._is_transposed(name, shape):
            why = f"{self._file(name).path.name} stores {list(stored)}; config.json means {list(shape)}"
            raise CheckpointError(f"{self.directory}: {name} has the wrong shape", why=why, fix=FETCH_ANEW)
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
        place, file = self._stored[name], self._file(name)
        if not self._is_transposed(name, shape):
            return file.read_into(place.name, target, part=place.expert)
        columns = file.read_into(place.name, allocate(shape[::-1], dtype, name), part=place.expert)
        return target.copy_(columns.T)

    def _is_transposed(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether an expert's matrix of this shape is stored with its columns first. Where it is as wide as high
        nothing tells; it is taken to be stored as usual then, as transformers does."""
        stored, is_expert = self.shape(name), self._stored[name].expert is not None
        return is_expert and self._form.transposes_experts and stored != shape and stored == shape[::-1]

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
        head, embedding = self._spec(HEAD), self._spec(EMBEDDING)
        if (head.dtype, head.shape) != (embedding.dtype, embedding.shape):
            return True
        chunks = (self._file(name).chunks(self._stored[name].name) for name in (HEAD, EMBEDDING))
        pairs = zip(*chunks, strict=True)
        return any(mine != other for mine, other in pairs)

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

    def _file(self, name: str) -> SafetensorsFile:
        return self._locations[self._stored[name].name]

    def _spec(self, name: str) -> StoredTensor:
        if name not in self._stored:
            # difflib over all of a large checkpoint would take seconds; those of its layer are enough.
            layer = name.rpartition(".layers.")[2].partition(".")[0]
            alike = [other for other in self._stored if f".{layer}." in other or ".layers." not in other][:1000]
            stored = dict.fromkeys(self._stored[other].name for other in difflib.get_close_matches(name, alike))
            near = ", ".join(map(show, stored)) or "none"
            raise CheckpointError(
                f"{self.directory} has no tensor {name}",
                why=f"{len(self._stored)} tensors are stored; the nearest names: {near}",
                fix=FETCH_ANEW,
            )
        return self._file(name).spec(self._stored[name].name)


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


def _with_experts(
    names: Mapping[str, str], locations: Mapping[str, SafetensorsFile], directory: Path
) -> dict[str, _Place]:
    """Return where each tensor is, single experts among them where a tensor holds them all."""
    places = {plain: _Place(name) for plain, name in names.items() if not _FUSED.fullmatch(plain)}
    for plain, name in names.items():
        fused = _FUSED.fullmatch(plain)
        if fused is None:
            continue
        shape = locations[name].spec(name).shape
        if len(shape) != 3 or shape[0] > MAX_EXPERTS:
            why = f"it has the shape {list(shape)}; [experts, rows, columns] is needed, at most {MAX_EXPERTS} experts"
            raise CheckpointError(f"{directory}: {show(name)} is not a tensor of experts", why=why, fix=FETCH_ANEW)
        experts, matrix = fused.groups()
        parts = ("gate_proj", "up_proj", "gate_up_proj") if matrix == "gate_up_proj" else ("down_proj",)
        for expert in range(shape[0]):
            for other in (f"{experts}.{expert}.{part}.weight" for part in parts):
                if other in places:
                    raise _stored_twice(directory, other, name, places[other].name)
            places[f"{experts}.{expert}.{matrix}.weight"] = _Place(name, expert)
    return places


def _stored_twice(directory: Path, plain: str, first: str, second: str) -> CheckpointError:
    why = f"{show(first)} and {show(second)} are both stored"
    return CheckpointError(f"{directory} stores {show(plain)} twice", why=why, fix=FETCH_ANEW)


def _read_index(path: Path) -> dict[str, str]:
    """Return the shards' file names by the tensors' names, each a plain name inside the folder."""
    weight_map = read_json_object(path, _INDEX_LIMITS).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map", why="it says which shard holds a tensor", fix=FETCH_ANEW)
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain_file_name(shard):
            why = f"weight_map puts {show(name)} into {show(shard)}; plain .safetensors file names are accepted"
            raise CheckpointError(f"{path} names a shard that is not a file of the folder", why=why, fix=FETCH_ANEW)
    return weight_map


def _is_plain_file_name(name: str) -> bool:
    return (
        name.endswith(".safetensors")
        and not name.startswith((".", "~"))
        and name.isprintable()
        and not set(name) & set("/\\:%")
        and len(name.encode()) <= 255
    )


def _open_shards(directory: Path, weight_map: Mapping[str, str]) -> dict[str, SafetensorsFile]:
    shards = sorted(set(weight_map.values()))
    if len(shards) > _MAX_SHARDS:
        why = f"{len(shards)} shards; at most {_MAX_SHARDS} are opened"
        raise CheckpointError(f"{directory / INDEX} names too many shards", why=why, fix=FETCH_ANEW)
    files: dict[str, SafetensorsFile] = {}
    for number, shard in enumerate(shards, 1):
        if not (directory / shard).exists():
            why = f"{INDEX} needs it: shard {number} of {len(shards)}"
            raise CheckpointError(f"{directory / shard} is missing", why=why, fix=FETCH_ANEW)
        files[shard] = SafetensorsFile.open(directory / shard)
    found = {name: files[shard] for name, shard in weight_map.items() if name in files[shard].specs}
    stored = {name for file in files.values() for name in file.specs}
    for name, shard in weight_map.items():  # one that is nowhere may not be needed
        if name not in found and name in stored:
            why = f"{INDEX} promises it there, and another shard has it; it holds {len(files[shard].specs)} others"
            raise CheckpointError(f"{directory / shard} lacks the tensor {show(name)}", why=why, fix=FETCH_ANEW)
    return found


def _nothing_to_read(directory: Path) -> CheckpointError:
    try:
        found = sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        return CheckpointError(f"{directory} cannot be read", why=error.strerror or "unknown", fix=FETCH_ANEW)
    others = [name for name in found if name.endswith(_OTHER_WEIGHTS)]
    unlisted = [name for name in found if name.endswith(".safetensors")]
    why = f"neither {SINGLE} nor {INDEX} is there"
    if unlisted:
        why += f"; {show(unlisted[0])} is, and nothing says what it holds"
    elif others and all(name.endswith(".gguf") for name in others):
        why += f"; {show(others[0])} is, but GGUF is not read: use the repository with the safetensors files"
    elif others:
        why += f"; {show(others[0])} is, but pickles and other formats are never opened: they can run code"
    return CheckpointError(
        f"{directory} holds no weights that can be read",
        why=why,
        fix="choose a repository that has safetensors files: localllm list",
    )
