"""A model of a real shape with random weights on the disk, packed as any model is: blocks are streamed from files."""

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
from localllm.bench.random_model import RandomBlocks, word_vocabulary
from localllm.hub import ModelFiles
from localllm.hub.packed import PACKED_INDEX, packed_directory, packed_of_folder, packed_root, source_id
from localllm.models.block_layouts import block_layouts
from localllm.models.families import load_config, parse_config
from localllm.models.packed import PackedPlan
from localllm.models.packed_file import NewFile, write_block
from localllm.quant.recipe import Recipe


@contextmanager
def random_model(name: str, raw_config: Mapping[str, Any], recipe: Recipe) -> Iterator[ModelFiles]:
    """The files of such a model, packed in `recipe`, on the disk of the packed models, until the end of the block.

    name: shown in errors. raw_config: content of config.json.
    """
    cache = packed_root().parent
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="random-", dir=cache) as directory:
        folder = Path(directory)
        (folder / "config.json").write_text(json.dumps(dict(raw_config)), encoding="utf-8")
        vocabulary = json.dumps(word_vocabulary(parse_config(raw_config, name).vocab_size))
        (folder / "tokenizer.json").write_text(vocabulary, encoding="utf-8")
        files = dataclasses.replace(hub.locate(directory), name=name)
        try:
            _pack(files, recipe)
            yield files
        finally:
            shutil.rmtree(packed_of_folder(folder), ignore_errors=True)


def _pack(files: ModelFiles, recipe: Recipe) -> None:
    config = load_config(files.directory)
    target, plan = packed_directory(files, recipe.name), PackedPlan(config, recipe, source_id(files))
    source, checksums = RandomBlocks(recipe), {}
    target.mkdir(parents=True)
    for layout in block_layouts(config):
        file, tensors = plan.files[layout.name], [source.tensors(layout)]
        checksums[layout.name] = write_block(file, target, tensors, lambda _count: None)
    with NewFile(target / PACKED_INDEX) as new:
        new.write(memoryview(json.dumps(plan.index(checksums)).encode()))
        new.publish()
