"""The buffers of native steps that RWKV-7 has beside those of all models."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from localllm.kernels.sizes import INT8_GROUP
from localllm.kernels.state_shapes import RWKV7_MIXED, RWKV7_PROJECTED
from localllm.layers.config import Recurrent, Rwkv7ChannelMixConfig, Rwkv7TimeMixConfig


class Rwkv7Room:
    """Fixed places, fp32: RWKV7_PROJECTED of each token; what tokens are mixed to, one after the other; the values of
    the first layer; and what is between two small matrices, by its features, with zeros behind them up to a group."""

    def __init__(self, mixers: Sequence[Recurrent], rows: int) -> None:
        self._rows = rows
        times = [each for each in mixers if isinstance(each, Rwkv7TimeMixConfig)]
        channels = [each.shape.features for each in mixers if isinstance(each, Rwkv7ChannelMixConfig)]
        features = max((each.shape.features for each in times), default=0)
        self.wide = torch.zeros(rows * len(RWKV7_PROJECTED) * features)
        self.mixes = torch.zeros(rows * max([len(RWKV7_MIXED) * features, *channels]))
        self.first = torch.zeros(rows, features)
        ranks = {rank for each in times for rank in (each.decay_rank, each.rate_rank, each.value_rank, each.gate_rank)}
        self.low = {rank: torch.zeros(rows, -(-rank // INT8_GROUP) * INT8_GROUP) for rank in ranks}

    @property
    def plane(self) -> int:
        """Floats from what is made by one mix to that of the next one, where there are several."""
        return self.first.numel()
