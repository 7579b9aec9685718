"""The weights of a folder of safetensors: one file or many shards, with numbers, or with codes in one of the formats of
Hugging Face's quantizers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.errors import FETCH_ANEW, CheckpointError, show
from localllm.models.checkpoints.safetensors_file import PlainTensor, SafetensorsFile
from localllm.models.checkpoints.stored import StoredTensor
from localllm.models.strict_json import JsonLimits, read_json_object

if TYPE_CHECKING:
    from torch import Tensor

    from localllm.models.checkpoints.quantized import QuantizedMatrix
    from localllm.quant.coded import CodedMatrix
    from localllm.quant.layouts import WeightLayout

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_CONFIG, _MODELOPT_CONFIG = "config.json", "hf_quant_config.json"
_QUANTIZATION = ("quantization_config", "quantization", "compression_config")  # the keys that describe one
_INDEX_LIMITS = JsonLimits(size_bytes=32 << 20, containers=1000, elements=1_000_000)
_MAX_SHARDS = 4096
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".npz")


def open_tensors(directory: Path) -> tuple[dict[str, StoredTensor], list[SafetensorsFile]]:
    """Return the tensors of a folder by their stored names, and its open files.

    Raises CheckpointError naming the file or the tensor that is wrong, UnsupportedModelError for a quantization that
    is not read.
    """
    files = _open_files(directory)
    opened = [*dict.fromkeys(files.values())]
    tensors: dict[str, StoredTensor] = {name: PlainTensor(file, name) for name, file in files.items()}
    config = _quantized_config(directory)
    if config is None:
        return tensors, opened
    from localllm.models.checkpoints.quantizers import quantized_matrices

    raw = _RawFolder(files)
    try:
        for name, matrix in quantized_matrices(config, str(directory / _CONFIG), raw).items():
            for used in matrix.used:
                tensors.pop(used, None)
            tensors[name] = MatrixTensor(raw, matrix, raw.files[matrix.used[0]].path)
    except BaseException:
        for file in opened:
            file.close()
        raise
    return tensors, opened


def is_quantized(directory: Path) -> bool:
    """Return whether a folder's config.json says that its weights are in codes. Raises CheckpointError."""
    return _quantized_config(directory) is not None


def _quantized_config(directory: Path) -> dict[str, object] | None:
    """Return the content of config.json where it, or a file beside it, describes a quantization."""
    if not (directory / _CONFIG).is_file():
        return None
    config = read_json_object(directory / _CONFIG, JsonLimits())
    text = config.get("text_config")
    sections = (config, text if isinstance(text, dict) else {})
    if any(section.get(key) is not None for section in sections for key in _QUANTIZATION):
        return config
    if (directory / _MODELOPT_CONFIG).is_file():  # modelopt's own exports
        found = read_json_object(directory / _MODELOPT_CONFIG, JsonLimits()).get("quantization")
        return {**config, "quantization_config": found} if isinstance(found, dict) else None
    return None


@dataclass(frozen=True)
class _RawFolder:
    """All stored tensors. files: by the tensors' names."""

    files: Mapping[str, SafetensorsFile]

    def names(self) -> Collection[str]:
        return self.files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.files[name].entry(name).shape

    def dtype(self, name: str) -> str:
        return self.files[name].entry(name).dtype

    def read(self, name: str, first: int = 0, end: int | None = None) -> Tensor:
        return self.files[name].read_raw(name, first, end)


@dataclass(frozen=True)
class MatrixTensor:
    """A quantized matrix, or those of all experts, of which several stored tensors are parts. path: of the first."""

    raw: _RawFolder
    matrix: QuantizedMatrix
    path: Path
    comes_in_pieces: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape

    @property
    def form(self) -> str:
        return self.kept.name if self.kept else "quantized"

    @property
    def kept(self) -> WeightLayout | None:
        return self.matrix.kept

    def dtype(self) -> str:
        return "float32"

    def read_into(self, out: Tensor, part: int | None = None) -> Tensor:
        dense = self.matrix.dense(self.raw, part)
        return out.copy_(dense.view(out.shape))

    def codes(self, part: int | None, /) -> Iterator[CodedMatrix]:
        assert self.matrix.codes is not None
        yield self.matrix.codes(self.raw, part)

    def fill_tiles(self, _part: int | None, _order: Tensor | None, _out: Mapping[str, Tensor], /) -> bool:
        return False

    def chunks(self) -> Iterator[bytes]:
        for name in self.matrix.used:
            yield from self.raw.files[name].chunks(name)


def _open_files(directory: Path) -> dict[str, SafetensorsFile]:
    """Return the open file of each tensor of a folder of safetensors. Raises CheckpointError."""
    single = directory / SINGLE
    if single.exists():
        file = SafetensorsFile(single)
        return dict.fromkeys(file.entries, file)
    if (directory / INDEX).exists():
        return _open_shards(directory, _read_index(directory / INDEX))
    raise _nothing_to_read(directory)


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
        files[shard] = SafetensorsFile(directory / shard)
    found = {name: files[shard] for name, shard in weight_map.items() if name in files[shard].entries}
    stored = {name for file in files.values() for name in file.entries}
    for name, shard in weight_map.items():  # one that is nowhere may not be needed
        if name not in found and name in stored:
            why = f"{INDEX} promises it there, and another shard has it; it holds {len(files[shard].entries)} others"
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
        why += f"; {show(others[0])} is, which is a model by its own path"
    elif others:
        why += f"; {show(others[0])} is, but pickles and other formats are never opened: they can run code"
    return CheckpointError(
        f"{directory} holds no weights that can be read",
        why=why,
        fix="choose a repository that has safetensors files: localllm list",
    )
