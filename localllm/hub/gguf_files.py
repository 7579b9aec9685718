"""GGUF files as models: of each, a folder in our cache with what its header says, made when it is first wanted."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from localllm.config import user_directories
from localllm.errors import LocalLLMError
from localllm.gguf.folder import DESCRIPTION, GgufModel, fingerprint
from localllm.gguf.header import is_later_part, split_files
from localllm.hub.quants import is_gguf_name
from localllm.present import is_file, is_folder

_MAGIC = b"GGUF"
_HEAD_BYTES = 4096  # in which the type is, as it is written behind the architecture
_ADAPTER = b"general.type\x08\0\0\0\x07\0\0\0\0\0\0\0adapter"

_UNFINISHED_S = 3600.0  # after which a folder without its name is no other process's any more


def gguf_folder(path: Path) -> Path:
    """Return the folder of a GGUF model, made where it is not there. path: its file, or any of its files.

    Raises CheckpointError, TokenizerError and UnsupportedModelError for what cannot be read or does not run here,
    LocalLLMError where the cache cannot be written.
    """
    folder = folder_of(path)
    root = folder.parent
    if is_file(folder / DESCRIPTION):
        return folder
    from localllm.gguf.conversion import model_files  # what reads vocabularies, which nobody else needs

    contents = model_files(path)
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(root)
        made = Path(tempfile.mkdtemp(prefix=".", dir=root))
        try:
            for name, content in contents.items():
                (made / name).write_bytes(content)
            if is_folder(folder) and not is_file(folder / DESCRIPTION):  # what a removal that was cut short has left
                shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # another process was faster
                made.rename(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        what = f"what {path} says cannot be kept in {root}"
        raise LocalLLMError(what, why=str(error), fix="set LOCALLLM_CACHE=/another/disk") from None
    _remove_older(root, folder, path)
    return folder


def is_gguf_model(path: Path) -> bool:
    """Return whether a plain file begins as a GGUF file does, and not as an adapter's."""
    head = _head(path)
    return head.startswith(_MAGIC) and not is_adapter_head(head)


def is_gguf_adapter(path: Path) -> bool:
    """Return whether a plain file begins as the GGUF file of an adapter (LoRA)."""
    head = _head(path)
    return head.startswith(_MAGIC) and is_adapter_head(head)


def is_adapter_head(head: bytes) -> bool:
    """Return whether the first bytes of a GGUF file say that it is an adapter."""
    return _ADAPTER in head


def _head(path: Path) -> bytes:
    if is_file(path):
        with suppress(OSError), path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    return b""


def folder_of(path: Path) -> Path:
    """Return where the folder of a GGUF model is, or will be. Raises CheckpointError where its files are not there."""
    return user_directories().cache / "gguf" / fingerprint(path)


def gguf_sources(folder: Path) -> tuple[Path, ...]:
    """Return the files of the GGUF model whose folder in our cache this is; none for any other folder."""
    return GgufModel.read(folder).files if is_file(folder / DESCRIPTION) else ()


def place_of(folder: Path) -> Path:
    """Return the place of a model that a user knows: the first file of a GGUF model, else the folder itself."""
    return (*gguf_sources(folder), folder)[0]


def gguf_parameters(folder: Path) -> int:
    """Return the number of weights of the GGUF model whose folder in our cache this is; 0 for any other folder."""
    if not is_file(folder / DESCRIPTION):
        return 0
    return sum(math.prod(place.shape) for place in GgufModel.read(folder).tensors.values())


def gguf_types(folder: Path) -> str:
    """Return the types of the weights of the GGUF model whose folder in our cache this is, with their shares of its
    bytes: "Q4_K 87%, Q6_K 13%". Types below a hundredth are left out."""
    sizes: Counter[str] = Counter()
    for place in GgufModel.read(folder).tensors.values():
        sizes[place.type] += place.num_bytes
    shares = [(stored, round(100 * size / sizes.total())) for stored, size in sizes.most_common()]
    return ", ".join(f"{stored} {share}%" for stored, share in shares if share)


def gguf_models(folder: Path) -> list[Path]:
    """Return the GGUF models in a folder: each one's file, the first where it is split."""
    files = sorted(path for path in folder.iterdir() if is_gguf_name(path.name) and is_file(path))
    return [path for path in files if not is_later_part(path)]


def _remove_unfinished(root: Path) -> None:
    """Remove what processes that were ended have left an hour ago or earlier."""
    for entry in os.scandir(root):
        with suppress(OSError):
            if entry.name.startswith(".") and time.time() - entry.stat().st_mtime > _UNFINISHED_S:
                shutil.rmtree(entry.path)


def _remove_older(root: Path, folder: Path, path: Path) -> None:
    """Remove what an earlier state of the same file has left, and files that are gone."""
    for entry in os.scandir(root):
        other = Path(entry.path)
        with suppress(OSError, LocalLLMError):
            if other == folder or entry.name.startswith("."):
                continue
            files = GgufModel.read(other).files
            if path in files or not all(map(is_file, files)):
                shutil.rmtree(other)


def gguf_bytes(path: Path) -> int:
    """Return the bytes of the files of a model; 0 where one is gone."""
    with suppress(OSError, LocalLLMError):
        return sum(file.stat().st_size for file in split_files(path))
    return 0
