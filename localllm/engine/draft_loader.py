"""A second model that guesses for the first: whether it speaks the same tokens, what it takes, and how it is loaded."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from localllm import hub
from localllm.cache.kv_format import choose_format
from localllm.cache.prefix import PrefixCache
from localllm.engine.memory import is_out_of_memory
from localllm.engine.placement import model_shape
from localllm.engine.planner import DraftShape, ModelPlanner
from localllm.engine.residency import Residency
from localllm.engine.runner import BATCH_ROWS
from localllm.engine.speculative.draft_model import ModelDrafter
from localllm.engine.weights import choose_recipe, is_unpacked, open_checkpoint, open_packed
from localllm.errors import FETCH_ANEW, Fix, ModelNotFoundError, TokenizerError, UsageError
from localllm.hub import ModelFiles
from localllm.hub.packed import packed_recipes
from localllm.models.block_source import BlockSource
from localllm.models.config import ModelConfig
from localllm.models.decoder import Decoder
from localllm.models.families import load_config
from localllm.models.load import Progress, load_decoder
from localllm.quant.recipe import RECIPES, Recipe
from localllm.settings import DRAFT_MODEL
from localllm.text.tokenizer import Tokenizer


class Hearing(Protocol):
    """Who is told of what takes long, as `engine.loader.Watcher` is."""

    @property
    def reading(self) -> Progress: ...
    @property
    def packing(self) -> Progress: ...
    @property
    def waiting(self) -> Callable[[str], None]: ...
    @property
    def measuring(self) -> Callable[[str], None]: ...


@dataclass(frozen=True)
class DraftModel:
    """kv: as the setting."""

    files: ModelFiles
    config: ModelConfig
    recipe: Recipe
    dtype: torch.dtype
    device: torch.device
    kv: str

    @classmethod
    def of(cls, word: str, tokenizer: Tokenizer, planner: ModelPlanner) -> DraftModel | None:
        """Return the model of this name, in the format in which it would run by itself; None where none is named.

        tokenizer, planner: of the model that it drafts for.

        Raises ModelNotFoundError, and UsageError where the two do not have the same tokens.
        """
        if not word:
            return None
        try:
            files = hub.locate(word)
        except ModelNotFoundError as error:
            error.what = f"--speculate {DRAFT_MODEL}{word}: {error.what}"
            raise
        require_same_tokenizer(tokenizer, planner.name, files)
        config = load_config(files.directory)
        recipe = RECIPES[choose_recipe("auto", config, packed_recipes(files), planner.dtype)]
        return cls(files, config, recipe, planner.dtype, planner.device, planner.wanted.kv)

    @property
    def shape(self) -> DraftShape:
        shape = model_shape(self.config, self.recipe, self.dtype, self.files.name, self.device, self.kv)
        return DraftShape(shape, self.config.longest_context)

    def load(self, vocab_size: int, sequences: int, watcher: Hearing) -> ModelDrafter | None:
        """vocab_size: of the logits that its own are compared with. sequences: that it has room for at once. None where
        there turns out to be too little memory. Raises CheckpointError."""
        try:
            if is_unpacked(self.recipe):
                with open_checkpoint(self.files, self.config, self.recipe) as source:
                    decoder = self._decoder(source, source.config, watcher.reading)
            else:
                with open_packed(self.files, self.config, self.recipe, watcher.packing, watcher.waiting) as packed:
                    decoder = self._decoder(packed, packed.config, watcher.reading)
            kv_format = choose_format(self.kv, self.config.head_dim, self.dtype)
            residency = Residency(decoder, kv_format, BATCH_ROWS)
            residency.warm_up(watcher.measuring)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return None
        is_dynamic = any(rope.kind in ("dynamic", "longrope") for rope in self.config.ropes)  # keys that change later
        return ModelDrafter(
            f"model:{self.files.name}",
            lambda: residency.runner,
            residency.new_kv,
            prefix=None if is_dynamic else PrefixCache(secrets.token_bytes(32), residency.kv_pages),
            ctx=self.config.longest_context,
            sequences=sequences,
            vocab_size=vocab_size,
        )

    def _decoder(self, source: BlockSource, config: ModelConfig, reading: Progress) -> Decoder:
        return load_decoder(source, config, self.recipe, dtype=self.dtype, device=self.device, progress=reading)


def require_same_tokenizer(tokenizer: Tokenizer, name: str, files: ModelFiles) -> None:
    """tokenizer, name: of the model for which the one of these files shall guess. Raises UsageError where the two do
    not speak the same tokens, TokenizerError."""
    try:
        difference = tokenizer.difference(Tokenizer.load(files.directory))
    except TokenizerError as error:
        error.fix = FETCH_ANEW.with_model(files.name) if files.repo else f"copy its files into {files.directory} anew"
        raise
    if difference:
        raise UsageError(
            f"--speculate {DRAFT_MODEL}{files.name}: it cannot guess for {name}, as it has another tokenizer",
            why=f"{difference}; a smaller model of the same family has the same one",
            fix=Fix.flag("--speculate", "auto"),
        )
