"""A model of a real shape with random weights on the disk, packed as any model is.

Blocks are streamed from files. Knows their content; random_folder.py removes them.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from localllm import hub
from localllm.bench.random_blocks import RandomBlocks
from localllm.bench.random_folder import CONFIG, TOKENIZER, random_folder
from localllm.config import format_bytes
from localllm.errors import DoesNotFitError
from localllm.hub import ModelFiles
from localllm.hub.packed import PACKED_INDEX, packed_directory, source_id
from localllm.models.config import ModelConfig
from localllm.models.families import load_config
from localllm.models.layout import block_layouts, model_bytes
from localllm.models.load import Progress
from localllm.models.packed import PackedPlan
from localllm.models.packed_file import NewFile, write_block
from localllm.quant.recipe import Recipe
from localllm.text.tokenizer import Tokenizer


@contextmanager
def random_model(
    name: str, raw_config: Mapping[str, Any], recipe: Recipe, progress: Progress = lambda _done, _total: None
) -> Iterator[ModelFiles]:
    """The files of such a model in a folder of its own, which is removed at the end of the block."""
    with random_folder() as folder:
        yield write_random_model(folder, name, raw_config, recipe, progress)


def write_random_model(
    folder: Path,
    name: str,
    raw_config: Mapping[str, Any],
    recipe: Recipe,
    progress: Progress = lambda _done, _total: None,
) -> ModelFiles:
    """Write such a model into `folder`, packed in `recipe`. name: shown in errors. raw_config: content of config.json.

    Raises DoesNotFitError where the disk is too full for it.
    """
    (folder / CONFIG).write_text(json.dumps(dict(raw_config)), encoding="utf-8")
    _require_room(load_config(folder), recipe, folder)
    (folder / TOKENIZER).write_text(json.dumps(word_vocabulary(raw_config["vocab_size"])), encoding="utf-8")
    files = dataclasses.replace(hub.locate(str(folder)), name=name)
    _pack(files, packed_directory(files, recipe.name), recipe, progress)
    return files


def _require_room(config: ModelConfig, recipe: Recipe, folder: Path) -> None:
    total, free = model_bytes(config, recipe), shutil.disk_usage(folder).free
    if total > free:
        raise DoesNotFitError(
            "a model with random weights does not fit on the disk",
            why=f"its blocks are streamed from there: {format_bytes(total)}, {format_bytes(free)} are free",
            fix="export LOCALLLM_CACHE=/a/folder/of/yours",
        )


def _pack(files: ModelFiles, target: Path, recipe: Recipe, progress: Progress) -> None:
    config = load_config(files.directory)
    total, done = model_bytes(config, recipe), 0
    plan = PackedPlan(config, recipe, source_id(files))
    source, checksums = RandomBlocks(recipe), {}
    for directory in (target.parent, target):  # fails where the folder's owner has removed it: nothing is written then
        directory.mkdir()
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
    """The content of a tokenizer.json with one word an id."""
    vocab = {f"w{token_id}": token_id for token_id in range(vocab_size)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"}
    description: dict[str, Any] = {"version": "1.0", "model": model, "added_tokens": [], "normalizer": None}
    return description | {"pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None}


def word_tokenizer(vocab_size: int) -> Tokenizer:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / TOKENIZER).write_text(json.dumps(word_vocabulary(vocab_size)), encoding="utf-8")
        return Tokenizer.load(Path(directory))
