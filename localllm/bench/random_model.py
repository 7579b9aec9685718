"""A model of a real shape with random weights on the disk, packed as any model is: what streams its blocks needs files.

It lies beside the packed models, on the disk that they are streamed from, and is gone when it is no longer used; what
a killed process left is freed by the next measurement.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from localllm import hub
from localllm.bench.random_blocks import RandomBlocks
from localllm.errors import DoesNotFitError
from localllm.hub import ModelFiles
from localllm.hub.exclusive import LOCK, exclusive
from localllm.hub.packed import PACKED_INDEX, packed_directory, packed_of_folder, packed_root, source_id
from localllm.models.families import load_config
from localllm.models.layout import block_layouts, model_bytes
from localllm.models.load import Progress
from localllm.models.packed import PackedPlan
from localllm.models.packed_file import NewFile, write_block
from localllm.quant.recipe import Recipe

_CONFIG, _TOKENIZER = "config.json", "tokenizer.json"
# Exactly such names, in which there is nothing else: the folder may be one that its owner keeps other things in.
_NAME = re.compile(r"random-[a-z0-9_]{8}")


@contextmanager
def random_model(
    name: str, raw_config: Mapping[str, Any], recipe: Recipe, progress: Progress = lambda _done, _total: None
) -> Iterator[ModelFiles]:
    """The files of such a model, packed in `recipe` already. name: in errors. raw_config: as config.json has it.

    Raises DoesNotFitError where the disk has no room for it.
    """
    folder = packed_root().parent / f"random-{secrets.token_hex(4)}"
    with exclusive(folder, lambda _process: None):  # the lock is what tells it from one whose owner was killed
        try:
            (folder / _CONFIG).write_text(json.dumps(dict(raw_config)), encoding="utf-8")
            (folder / _TOKENIZER).write_text(json.dumps(word_vocabulary(raw_config["vocab_size"])), encoding="utf-8")
            files = dataclasses.replace(hub.locate(str(folder)), name=name)
            _pack(files, packed_directory(files, recipe.name), recipe, progress)
            yield files
        finally:
            _empty(folder)


def remove_abandoned() -> None:
    """Frees what was left by processes that were killed. Nothing of a living one, and nothing else that is there."""

    def leave(_process: str) -> None:
        raise _InUseError

    for folder in packed_root().parent.glob("random-*"):
        with suppress(OSError, _InUseError):
            if _is_random_model(folder):
                with exclusive(folder, leave):
                    _empty(folder)


class _InUseError(Exception):
    """Another process has the folder."""


def _is_random_model(folder: Path) -> bool:
    if not _NAME.fullmatch(folder.name) or folder.is_symlink():
        return False
    return {path.name for path in folder.iterdir()} <= {_CONFIG, _TOKENIZER, LOCK}


def _empty(folder: Path) -> None:
    """Deletes what was packed of it and what is in it, but for the lock, with which the folder goes."""
    shutil.rmtree(packed_of_folder(folder), ignore_errors=True)
    for name in (_CONFIG, _TOKENIZER):
        (folder / name).unlink(missing_ok=True)


def _pack(files: ModelFiles, target: Path, recipe: Recipe, progress: Progress) -> None:
    config = load_config(files.directory)
    total, done = model_bytes(config, recipe), 0
    free = shutil.disk_usage(files.directory).free
    if total > free:
        raise DoesNotFitError(
            "a model with random weights does not fit on the disk",
            why=f"its blocks are streamed from there: {total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free",
            fix="export LOCALLLM_CACHE=/a/folder/of/yours",
        )
    plan = PackedPlan(config, recipe, source_id(files))
    source, checksums = RandomBlocks(recipe), {}
    target.mkdir(parents=True)
    for layout in block_layouts(config):
        checksums[layout.name] = write_block(
            plan.files[layout.name], target, [source.tensors(layout)], lambda _count: None
        )
        done += layout.nbytes(recipe)
        progress(done, total)
    with NewFile(target / PACKED_INDEX) as new:
        new.write(memoryview(json.dumps(plan.index(checksums)).encode()))
        new.publish()


def word_vocabulary(vocab_size: int) -> dict[str, Any]:
    """A tokenizer.json of one word an id: the engine must turn ids into text here as for any model."""
    vocab = {f"w{token_id}": token_id for token_id in range(vocab_size)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"}
    description: dict[str, Any] = {"version": "1.0", "model": model, "added_tokens": [], "normalizer": None}
    return description | {"pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None}
