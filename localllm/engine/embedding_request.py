"""The embedding of a prompt from the hidden states of its tokens, which come chunk by chunk."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from localllm.engine.request import Pooling
from localllm.errors import NonFiniteError


class Pooler:
    """Takes the hidden states of a sequence in order."""

    def __init__(self, pooling: Pooling) -> None:
        self.pooling = pooling
        self._state: Tensor | None = None  # the sum so far, or the last one

    def take(self, states: Tensor, position: int) -> None:
        """Take states [T, hidden] behind the final norm, of the tokens from `position` on; a recomputation begins at
        0."""
        if self.pooling == "last":
            self._state = states[-1].double()
            return
        total = states.double().sum(0)  # a mean of 8,192 tokens by fp32 sums would depend on how they are chunked
        self._state = total if self._state is None or position == 0 else self._state + total

    def vector(self) -> array[float]:
        """Return the vector, of length 1: whether a mean is divided by the number of tokens makes no difference then.

        Raises NonFiniteError for what is no number.
        """
        assert self._state is not None
        if not bool(self._state.isfinite().all()):
            raise NonFiniteError("the embedding has a NaN or an infinity", why="a block gave one of these")
        return array("f", torch.nn.functional.normalize(self._state, dim=0).tolist())
