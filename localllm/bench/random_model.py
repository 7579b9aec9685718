"""The weights and the tokenizer of a model of a real shape that was never trained, made in memory."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from localllm.layers.config import MLPConfig
from localllm.models.block_source import add_to_digest, checksum_tensor, written_record
from localllm.models.layout import EXPERTS, SHARED_CHECKSUM, BlockLayout, Experts, Matrix
from localllm.models.packed_file import PackedFile
from localllm.offload.streaming.host_buffer import host_buffer
from localllm.quant.recipe import Recipe
from localllm.quant.weight_format import WeightFormat
from localllm.text.tokenizer import Tokenizer

# A multiple of the 16 rows of a tile; 64 rows fill whole blocks of 64 weights at any width.
TILE_ROWS = 64
_VARIANTS = 5  # of experts of one shape: a wrong one is not computed unseen


class RandomBlocks:
    """Random weights of a real shape in packed form: matrices of N(0, 1/K), so that activations stay near 1; norms
    around 1, biases around 0.

    A tile of rows is quantized once for each width and repeated, so that 7 billion weights take seconds; speed does not
    depend on their values. The bytes lie in pages of their own as those of a packed model do: a forward pass reads as
    much, and as fast, as of a real model.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._random = torch.Generator().manual_seed(0)
        self._tiles: dict[tuple[str, int, int, int], dict[str, Tensor]] = {}
        self._records: dict[tuple[MLPConfig, int, int], Tensor] = {}

    def tensors(self, layout: BlockLayout) -> dict[str, Tensor]:
        file = PackedFile.of(layout, self.recipe, source="random")
        tensors = file.views(host_buffer(file.file_bytes))
        for matrix in layout.matrices:
            self._fill(matrix, tensors)
        for vector in layout.vectors:
            mean, spread = (1, 0.1) if vector.is_norm_weight else (0, 0.02)
            tensors[vector.name].copy_(mean + spread * self._normal(vector.features))
        if layout.experts is not None:
            digest = xxhash.xxh3_128()
            add_to_digest(digest, {name: t for name, t in tensors.items() if name not in (SHARED_CHECKSUM, EXPERTS)})
            tensors[SHARED_CHECKSUM].copy_(checksum_tensor(digest.digest()))
            for index, record in enumerate(tensors[EXPERTS]):
                record.copy_(self._record(layout.experts, index % _VARIANTS))
        return tensors

    def _record(self, experts: Experts, variant: int) -> Tensor:
        """Return the record of an expert, uint8 [bytes], made once for each shape and variant."""
        record = experts.record(self.recipe)
        key = (experts.config, experts.residual.features, variant)
        if key not in self._records:
            tensors = {name: torch.empty(p.spec.shape, dtype=p.spec.torch_dtype) for name, p in record.tensors.items()}
            for matrix in experts.matrices(0):
                self._fill(matrix, tensors, variant)
            self._records[key] = written_record(record, tensors)
        return self._records[key]

    def finish(self) -> None:
        """No-op: there is no file to close."""

    def _fill(self, matrix: Matrix, tensors: dict[str, Tensor], variant: int = 0) -> None:
        weight_format = matrix.format(self.recipe)
        if matrix.has_bias:
            tensors[f"{matrix.name}.linear_bias"].copy_(0.02 * self._normal(matrix.out_features))
        if matrix.role == "router":  # equal rows would choose equal experts
            weight = self._normal(matrix.out_features, matrix.in_features) * matrix.in_features**-0.5
            tensors[f"{matrix.name}.weight"].copy_(weight)
            return
        copies, rest = divmod(matrix.out_features, TILE_ROWS)
        begins = dict.fromkeys(weight_format.specs(matrix.out_features, matrix.in_features), 0)
        for rows, count in ((TILE_ROWS, copies), (rest, 1 if rest else 0)):
            if not count:
                continue
            for name, tile in self._tile(weight_format, rows, matrix.in_features, variant).items():
                begin, end = begins[name], begins[name] + count * tile.shape[0]
                part = tensors[f"{matrix.name}.{name}"][begin:end]
                part.view(count, *tile.shape).copy_(tile.expand(count, *tile.shape))
                begins[name] = end

    def _tile(self, weight_format: WeightFormat, rows: int, columns: int, variant: int) -> dict[str, Tensor]:
        key = (weight_format.name, rows, columns, variant)
        if key not in self._tiles:
            self._tiles[key] = weight_format.quantize(self._normal(rows, columns) * columns**-0.5)
        return self._tiles[key]

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random)


def word_vocabulary(vocab_size: int) -> dict[str, Any]:
    """The content of a tokenizer.json with one word an id."""
    vocab = {f"w{token_id}": token_id for token_id in range(vocab_size)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"}
    description: dict[str, Any] = {"version": "1.0", "model": model, "added_tokens": [], "normalizer": None}
    return description | {"pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None}


def word_tokenizer(vocab_size: int) -> Tokenizer:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "tokenizer.json").write_text(json.dumps(word_vocabulary(vocab_size)), encoding="utf-8")
        return Tokenizer.load(Path(directory))
