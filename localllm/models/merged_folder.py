"""The folder of a new checkpoint: shards of safetensors with an index, and what a model has beside its weights. It gets
its name when all of it is on the disk. Knows no model."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from localllm.config import format_bytes
from localllm.errors import DoesNotFitError, LocalLLMError
from localllm.hub.repo_cache import free_bytes, sync_directory
from localllm.models.checkpoints.safetensors_folder import INDEX
from localllm.models.packed_file import NewFile
from localllm.offload.streaming.host_buffer import give_back_freed

CONFIG = "config.json"
SHARD_BYTES = 5 * 10**9  # as transformers cut models for years
_SLACK_BYTES = 1 << 20  # the index, and what a file system needs for itself
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What a model has beside its weights, and what of that is not true of a new one.
_BESIDE = re.compile(r".+\.(?:json|jinja|model|txt|tiktoken)|(?:LICENSE|NOTICE|USE_POLICY)[\w.-]*")
_OF_OLD = re.compile(r"config\.json|.+\.index\.json|adapter_.+\.json|hf_quant_config\.json|quant(?:ize)?_config\.json")
_TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True)
class NewTensor:
    """A tensor that is to be written. dtype: as safetensors names it. pieces: makes its bytes, in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    pieces: Callable[[], Iterable[bytes | memoryview]]


def write_folder(
    target: Path,
    base: Path,
    config: Mapping[str, object],
    tensors: Iterable[NewTensor],
    progress: Callable[[int, int], None],
) -> int:
    """Write a checkpoint with this config.json and what else `base` has beside its weights; return its bytes.

    target: nothing is there, or an empty folder; the folder that it is in is there.
    progress(done_bytes, total_bytes) hears of every piece, and may raise.

    Nothing is left behind when it raises: DoesNotFitError where the disk is too small, LocalLLMError where it fails.
    """
    shards = _cut(tensors)
    beside = [path for path in sorted(base.rglob("*")) if _is_beside(path.relative_to(base)) and path.is_file()]
    total = sum(len(_header(shard)) + _data_bytes(shard) for shard in shards)
    total += sum(path.stat().st_size for path in beside)
    if total + _SLACK_BYTES > free_bytes(target.parent):
        raise _no_space(target, total)
    try:
        with _new_folder(target) as folder:
            _write_shards(folder, shards, progress)
            _write(folder / CONFIG, _as_json(config))
            for path in beside:
                copy = folder / path.relative_to(base)
                copy.parent.mkdir(exist_ok=True)
                _write(copy, path.read_bytes())
            return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except OSError as error:
        raise _disk_error(error, target, total) from error


def _is_beside(path: Path) -> bool:
    """path: from the base on."""
    name = path.name
    in_place = path.parent == Path() or path.parent == Path(_TEMPLATES)
    return in_place and bool(_BESIDE.fullmatch(name)) and not _OF_OLD.fullmatch(name)


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """Give a folder that gets the name `target` at the end, and is gone if that is not reached. Raises OSError."""
    folder = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    folder.mkdir()
    try:
        yield folder
        sync_directory(folder)
        folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    sync_directory(target.parent)


def _write_shards(folder: Path, shards: Sequence[list[NewTensor]], progress: Callable[[int, int], None]) -> None:
    done, total = 0, sum(map(_data_bytes, shards))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map |= {tensor.name: name for tensor in shard}
        with NewFile(folder / name) as new:
            new.write(memoryview(_header(shard)))
            for tensor in shard:
                end = done + tensor.num_bytes
                for piece in tensor.pieces():
                    new.write(memoryview(piece))
                    done += len(piece)
                    give_back_freed()  # of a matrix, the C library would keep up to 100 MB beside the next one
                    progress(done, total)
                assert done == end, f"{tensor.name} is not whole"
            new.publish()
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write(folder / INDEX, _as_json(index))


def _cut(tensors: Iterable[NewTensor]) -> list[list[NewTensor]]:
    """Return the tensors of each shard, in their order."""
    shards: list[list[NewTensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and _data_bytes(shards[-1]) + tensor.num_bytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append(tensor)
    return shards


def _data_bytes(shard: Iterable[NewTensor]) -> int:
    return sum(tensor.num_bytes for tensor in shard)


def _header(shard: Iterable[NewTensor]) -> bytes:
    """Return the length of a shard's header and the header, which ends at a multiple of 8 bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in shard:
        end = begin + tensor.num_bytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _as_json(content: Mapping[str, object]) -> bytes:
    return f"{json.dumps(content, indent=2, ensure_ascii=False)}\n".encode()


def _write(path: Path, content: bytes) -> None:
    with NewFile(path) as new:
        new.write(memoryview(content))
        new.publish()


def _disk_error(error: OSError, target: Path, needed_bytes: int) -> LocalLLMError:
    if error.errno in _NO_SPACE:
        return _no_space(target, needed_bytes, f"{error.strerror}: ")
    why = f"{error.strerror or error}; nothing is kept of it"
    return LocalLLMError(f"{target} cannot be written", why=why, fix="name another folder (-o)")


def _no_space(target: Path, needed_bytes: int, reason: str = "") -> DoesNotFitError:
    sizes = f"{format_bytes(needed_bytes, 2)} are needed, {format_bytes(free_bytes(target.parent), 2)} are free"
    return DoesNotFitError(
        f"the merged model does not fit on the disk of {target.parent}",
        why=f"{reason}{sizes}",
        fix="free space there (`localllm list` shows what takes it), or name a folder on a larger disk (-o)",
    )
