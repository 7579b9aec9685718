"""The way from an adapter's files to what it adds to a model."""

from __future__ import annotations

import shlex
from pathlib import Path

from localllm.errors import AdapterError
from localllm.gguf.header import SUFFIX
from localllm.layers.low_rank import AdapterWeights
from localllm.models.adapters.gguf_lora import open_file
from localllm.models.adapters.peft_folder import open_folder
from localllm.models.adapters.sites import weights_for
from localllm.models.adapters.stored import StoredAdapter, blaming_adapter
from localllm.models.architecture import ModelConfig


def read_adapter(path: Path, config: ModelConfig, name: str = "") -> AdapterWeights:
    """Return an adapter for a model of this config, in whatever form the model is stored itself.

    path: a folder of PEFT's, or a GGUF file.
    name: for people; the path's own where it is "".

    Raises AdapterError that names the file, the tensor and the numbers; DoesNotFitError where memory is short.
    """
    return weights_for(open_adapter(path, config), config, name or path.name)


def open_adapter(path: Path, config: ModelConfig) -> StoredAdapter:
    """Return an adapter as its files have it, all of it in memory. config: of the base, whose names and orders of rows
    it uses. Raises as `read_adapter` does; that a matrix is not the base's only `weights_for` says."""
    with blaming_adapter():
        if path.is_dir():
            return open_folder(path, config)
        if path.suffix.casefold() == SUFFIX:
            return open_file(path, config)
    why = "it is no folder, and no .gguf file" if path.exists() else "it is not there"
    raise AdapterError(
        f"{path} is not an adapter that can be read", why=why, fix=f"ls -l {shlex.quote(str(path.parent))}"
    )
