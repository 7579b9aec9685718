"""Random models of any size in the host's memory, loaded for a card as any packed model is.

The blocks are made here instead of read, so that no disk decides how long it takes; planning, placing and computing are
the program's own. Where the device is a CPU, it stands in for a card: it has a cap, and no memory of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.peers_protocol import UnavailableError
from localllm.bench.random_blocks import RandomBlocks
from localllm.bench.random_model import word_vocabulary
from localllm.engine import card, planner
from localllm.engine import loader as loading
from localllm.hub import ModelFiles, locate
from localllm.models.config import ModelConfig
from localllm.models.families import parse_config
from localllm.models.layout import BlockLayout, block_layouts, model_bytes
from localllm.models.packed_file import PackedFile
from localllm.models.shapes import shipped_shapes
from localllm.offload.planner.device_rates import DeviceRates
from localllm.offload.planner.machine import CardMemory
from localllm.offload.streaming.host_buffer import host_buffer
from localllm.quant.recipe import RECIPES, Recipe

SMALL = "small"  # of MLP blocks of 5 MB in bf16, for a stand-in
_SMALL = {
    "model_type": "llama", "vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip

MODEL = "llama-3.1-8b"  # that is measured with all of it on the card
_TINY = {  # instead of it, for a stand-in that interprets kernels
    **_SMALL, "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip


def model_config(*, small: bool) -> dict[str, Any]:
    """config.json of the model that is all on the card."""
    return dict(_TINY) if small else dict(shipped_shapes()[MODEL])


def sized(shape: str, weights: str, num_bytes: int) -> dict[str, Any]:
    """config.json of a model with this shape's layers, as many of them as come closest to so many bytes."""
    raw = dict(_SMALL if shape == SMALL else shipped_shapes()[shape])

    def layers(count: int) -> dict[str, Any]:
        return {**raw, "num_hidden_layers": count}

    one, two = (model_bytes(parse_config(layers(count), shape), RECIPES[weights]) for count in (1, 2))
    return layers(max(2, 1 + round((num_bytes - one) / (two - one))))


def written(folder: Path, raw_config: Mapping[str, Any]) -> ModelFiles:
    """What is loaded of a model besides its blocks."""
    (folder / "config.json").write_text(json.dumps(raw_config), encoding="utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(word_vocabulary(raw_config["vocab_size"])), encoding="utf-8")
    return locate(str(folder))


class MemoryModel:
    """Stands for a PackedModel. Each block has memory of its own, which whoever asks for the block shares; their
    weights are those of the first of its kind, as their values do not decide how fast they are copied or computed."""

    def __init__(self, config: ModelConfig, recipe: Recipe) -> None:
        self.config = config
        self._files = {layout.name: PackedFile.of(layout, recipe, "random") for layout in block_layouts(config)}
        self._random = RandomBlocks(recipe)
        self._first: dict[str, Tensor] = {}  # by the kind of block: its bytes behind the header
        self._blocks: dict[str, Tensor] = {}

    def content(self, layout: BlockLayout) -> Tensor:
        if layout.name not in self._blocks:
            self._blocks[layout.name] = self._made(layout)
        return self._blocks[layout.name]

    def _made(self, layout: BlockLayout) -> Tensor:
        file, kind = self._files[layout.name], layout.name.rpartition(".")[2]
        memory = host_buffer(file.file_bytes)
        data = memory[file.data_begin :]
        if kind in self._first:
            data.copy_(self._first[kind])
            return memory
        views = file.views(memory)
        for name, tensor in self._random.tensors(layout).items():
            views[name].copy_(tensor)
        self._first[kind] = data
        return memory

    def views(self, layout: BlockLayout, memory: Tensor) -> dict[str, Tensor]:
        return self._files[layout.name].views(memory)

    def tensors(self, layout: BlockLayout) -> dict[str, Tensor]:
        return self.views(layout, self.content(layout))

    def read_ahead_only(self, _names: Iterable[str]) -> None:
        """Nothing is read."""

    def finish(self) -> None:
        """Nothing is left over."""

    def cached_share(self) -> float:
        return 0.0

    def streamed_file(self, layout: BlockLayout) -> None:
        raise UnavailableError(f"{layout.name} would have to be on the disk: the host's memory is too small")

    small_tensors = stored_rows = streamed_file


@contextmanager
def as_card(device: torch.device, model: MemoryModel | None = None) -> Iterator[None]:
    """Inside, this model is what is loaded, and a CPU has the memory of a card: all that its cap allows."""
    with ExitStack() as patched:
        if model is not None:
            patched.enter_context(patch.object(loading, "open_packed", lambda *_: nullcontext(model)))
        if device.type == "cpu":
            patched.enter_context(patch.object(card, "card_memory", _stand_in_memory))
            for module in (loading, planner):
                patched.enter_context(patch.object(module, "has_card", lambda _device: True))
            patched.enter_context(patch.object(loading, "cap_allocator", lambda _device, _card: None))
        yield


def _stand_in_memory(_device: torch.device, vram: int | None, rates: DeviceRates, workspace: int) -> CardMemory:
    assert vram is not None
    return CardMemory(vram, rates.context_bytes, workspace, vram, vram)
