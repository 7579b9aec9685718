"""A model of a real shape with random weights on the disk, packed as any model is: what streams its blocks needs files.

It lies beside the packed models, on the disk that they are streamed from, and is gone when it is no longer used.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from localllm import hub
from localllm.bench.random_blocks import RandomBlocks
from localllm.errors import DoesNotFitError
from localllm.hub import ModelFiles
from localllm.hub.packed import PACKED_INDEX, packed_directory, packed_root, source_id
from localllm.models.families import load_config
from localllm.models.layout import block_layouts, model_bytes
from localllm.models.load import Progress
from localllm.models.packed import PackedPlan
from localllm.models.packed_file import NewFile, write_block
from localllm.quant.recipe import Recipe


@contextmanager
def random_model(
    raw_config: Mapping[str, Any], recipe: Recipe, progress: Progress = lambda _done, _total: None
) -> Iterator[ModelFiles]:
    """The folder of such a model, packed in `recipe` already. raw_config: as config.json has it.

    Raises DoesNotFitError where the disk has no room for it.
    """
    packed_root().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="random-", dir=packed_root().parent) as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(dict(raw_config)), encoding="utf-8")
        (folder / "tokenizer.json").write_text(json.dumps(word_vocabulary(raw_config["vocab_size"])), encoding="utf-8")
        files = hub.locate(str(folder))
        target = packed_directory(files, recipe.name)
        try:
            _pack(files, target, recipe, progress)
            yield files
        finally:
            shutil.rmtree(target.parent, ignore_errors=True)


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
