"""The head that a checkpoint brings to draft for its model, made ready."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from localllm.cache.kv_format import choose_format
from localllm.cache.paged_kv import PagedKV
from localllm.engine.memory import is_out_of_memory
from localllm.engine.planner import DraftShape, ModelPlanner
from localllm.engine.residency import Residency, new_pages
from localllm.engine.speculative.choice import Speculate
from localllm.engine.speculative.head_drafter import HeadDrafter
from localllm.engine.speculative.head_shape import head_config, head_shape
from localllm.engine.weights import open_checkpoint
from localllm.errors import CheckpointError
from localllm.hub import ModelFiles
from localllm.models.architecture import ModelConfig
from localllm.models.block_layouts import block_layouts
from localllm.models.load import BlockTensors, DecoderParts
from localllm.quant.recipe import Recipe


@dataclass(frozen=True)
class HeadModel:
    """kv: as the setting. is_asked: by its name, so that it is said why it does not draft."""

    files: ModelFiles
    config: ModelConfig
    recipe: Recipe
    dtype: torch.dtype
    shape: DraftShape
    kv: str
    is_asked: bool

    @classmethod
    def of(
        cls, config: ModelConfig, files: ModelFiles, speculate: Speculate, planner: ModelPlanner
    ) -> HeadModel | None:
        """Return the head of a model that may draft; None where there is none, or only a part of one and nobody asked
        for it by its name. config: of the model. Raises as `head_config`."""
        head = head_config(config, files, speculate, planner.device)
        if head is None or (speculate.who == "auto" and not _is_whole(files, head, planner.recipe)):
            return None
        kv = planner.wanted.kv
        shape = head_shape(head, planner.sizes, planner.dtype, files.name, planner.device, kv)
        return cls(files, head, planner.recipe, planner.torch_dtype, shape, kv, speculate.who == "mtp")

    @property
    def label(self) -> str:
        return f"the MTP head of {self.files.name}"

    def load(self, _vocab_size: int, sequences: int, _watcher: object) -> Callable[[Residency], HeadDrafter] | None:
        """Return what makes the drafter for the model once that is placed; None where there is too little memory.

        Raises CheckpointError.
        """
        try:
            with open_checkpoint(self.files, self.config, self.recipe) as source:
                blocks = []
                for layout in block_layouts(source.config):
                    blocks.append(BlockTensors(layout, source.tensors(layout)))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return None
        parts = DecoderParts(self.config, self.recipe, self.dtype, torch.device("cpu"))
        return partial(self._drafter, parts, blocks, sequences)

    def _drafter(
        self, parts: DecoderParts, blocks: list[BlockTensors], sequences: int, residency: Residency
    ) -> HeadDrafter:
        head_of = partial(parts.draft_head, blocks)
        kv_format = choose_format(self.kv, self.config.kv_shapes, self.dtype.itemsize)
        pages = new_pages(head_of(residency.model), kv_format)
        return HeadDrafter(residency, head_of, partial(PagedKV, pages), sequences)


def _is_whole(files: ModelFiles, head: ModelConfig, recipe: Recipe) -> bool:
    """Return whether all tensors of a head are in the model's files, in their shapes."""
    try:
        with open_checkpoint(files, head, recipe) as source:
            source.check()
    except CheckpointError:
        return False
    return True
