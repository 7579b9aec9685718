"""The values of the first time mix of RWKV-7, with which those of all others are mixed: who makes them, and how blocks
that a GPU's kernels compute share them with those of operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from localllm.layers.batch import Batch
from localllm.layers.config import Rwkv7TimeMixConfig
from localllm.layers.rwkv7 import FIRST_VALUES, Rwkv7TimeMix
from localllm.models.architecture import ModelConfig
from localllm.models.decoder import Block


def makes_first_values(blocks: Sequence[Block], body: Rwkv7TimeMix) -> bool:
    """Return whether a body is the first time mix of those blocks: a draft may leave the model's out."""
    return body is next(block.body for block in blocks if isinstance(block.body, Rwkv7TimeMix))


def first_value_features(config: ModelConfig) -> int:
    """Return how many values of the first time mix a token has; 0 without any."""
    times = (each.shape.features for each in config.mixers if isinstance(each, Rwkv7TimeMixConfig))
    return max(times, default=0)


@contextmanager
def first_values_shared(block: Block, blocks: Sequence[Block], batch: Batch, values: Tensor) -> Iterator[None]:
    """Inside, operators compute a block, which finds in `values`, or leaves there, what its batch carries else."""
    body = block.body
    if not isinstance(body, Rwkv7TimeMix):
        yield
        return
    makes = makes_first_values(blocks, body)
    if not makes:
        batch.carried[FIRST_VALUES] = values
    yield
    if makes:
        values.copy_(batch.carried[FIRST_VALUES])
