"""A model of a real shape with random weights, in memory or on the disk, packed as any model is.

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

import torch
from torch import Tensor

from localllm import hub
from localllm.bench.random_folder import CONFIG, TOKENIZER, random_folder
from localllm.config import format_bytes
from localllm.errors import DoesNotFitError
from localllm.hub import ModelFiles
from localllm.hub.packed import PACKED_INDEX, packed_directory, source_id
from localllm.models.families import load_config
from localllm.models.layout import BlockLayout, Matrix, block_layouts, model_bytes
from localllm.models.load import Progress
from localllm.models.packed import PackedPlan
from localllm.models.packed_file import NewFile, PackedFile, write_block
from localllm.offload.streaming.host_buffer import host_buffer
from localllm.quant.recipe import Recipe
from localllm.quant.weight_format import WeightFormat
from localllm.text.tokenizer import Tokenizer

# A multiple of the 16 rows of a tile; 64 rows fill whole blocks of 64 weights at any width.
TILE_ROWS = 64


class RandomBlocks:
    """Random weights of a real shape in packed form: matrices of N(0, 1/K), so that activations stay near 1; norms
    around 1, biases around 0.

    A tile of rows is quantized once for each width and repeated, so that 7 billion weights take seconds; speed does not
    depend on their values. The bytes lie in pages of their own as those of a packed model do: a forward pass reads as
    much, and as fast, as of a real model.
    """

    def __init__(self, recipe: Recipe, seed: int = 0) -> None:
        self.recipe = recipe
        self._random = torch.Generator().manual_seed(seed)
        self._tiles: dict[tuple[str, int, int], dict[str, Tensor]] = {}

    def tensors(self, layout: BlockLayout) -> dict[str, Tensor]:
        file = PackedFile.of(layout, self.recipe, source="random")
        tensors = file.views(host_buffer(file.file_bytes))
        for matrix in layout.matrices:
            self._fill(matrix, tensors)
            if matrix.has_bias:
                tensors[f"{matrix.name}.linear_bias"].copy_(0.02 * self._normal(matrix.out_features))
        for norm in layout.norms:
            tensors[norm.name].copy_(1 + 0.1 * self._normal(norm.features))
        return tensors

    def finish(self) -> None:
        """No-op: there is no file to close."""

    def _fill(self, matrix: Matrix, tensors: dict[str, Tensor]) -> None:
        weight_format = matrix.format(self.recipe)
        copies, rest = divmod(matrix.out_features, TILE_ROWS)
        begins = dict.fromkeys(weight_format.specs(matrix.out_features, matrix.in_features), 0)
        for rows, count in ((TILE_ROWS, copies), (rest, 1 if rest else 0)):
            if not count:
                continue
            for name, tile in self._tile(weight_format, rows, matrix.in_features).items():
                begin, end = begins[name], begins[name] + count * tile.shape[0]
                part = tensors[f"{matrix.name}.{name}"][begin:end]
                part.view(count, *tile.shape).copy_(tile.expand(count, *tile.shape))
                begins[name] = end

    def _tile(self, weight_format: WeightFormat, rows: int, columns: int) -> dict[str, Tensor]:
        key = (weight_format.name, rows, columns)
        if key not in self._tiles:
            self._tiles[key] = weight_format.quantize(self._normal(rows, columns) * columns**-0.5)
        return self._tiles[key]

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random)


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
    config = load_config(folder)
    total, done, free = model_bytes(config, recipe), 0, shutil.disk_usage(folder).free
    if total > free:
        raise DoesNotFitError(
            "a model with random weights does not fit on the disk",
            why=f"its blocks are streamed from there: {format_bytes(total)}, {format_bytes(free)} are free",
            fix="export LOCALLLM_CACHE=/a/folder/of/yours",
        )
    (folder / TOKENIZER).write_text(json.dumps(word_vocabulary(raw_config["vocab_size"])), encoding="utf-8")
    files = dataclasses.replace(hub.locate(str(folder)), name=name)
    target, plan = packed_directory(files, recipe.name), PackedPlan(config, recipe, source_id(files))
    source, checksums = RandomBlocks(recipe), {}
    for directory in (target.parent, target):  # fails where the folder's owner has removed it: nothing is written then
        directory.mkdir()
    for layout in block_layouts(config):
        file, tensors = plan.files[layout.name], [source.tensors(layout)]
        checksums[layout.name] = write_block(file, target, tensors, lambda _count: None)
        done += layout.nbytes(recipe)
        progress(done, total)
    with NewFile(target / PACKED_INDEX) as new:
        new.write(memoryview(json.dumps(plan.index(checksums)).encode()))
        new.publish()
    return files


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
