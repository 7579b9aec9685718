"""What an adapter adds to the tensors of a checkpoint, as whole matrices: for a checkpoint that has both in one."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from localllm.models.adapters.places import MatrixPlace, MatrixPlaces
from localllm.models.adapters.sites import low_rank, placed
from localllm.models.adapters.stored import StoredAdapter, WeightDelta
from localllm.models.architecture import ModelConfig
from localllm.models.layout import EMBED
from localllm.models.row_order import row_order, row_scales


class DenseDeltas:
    """Made in fp32, one matrix at a time."""

    def __init__(self, adapter: StoredAdapter, config: ModelConfig) -> None:
        """config: of the checkpoint. Raises AdapterError for a matrix that the model does not have, or not in this
        size."""
        self._adapter = adapter
        self._config = config
        self._places = MatrixPlaces(config)
        self._deltas: dict[str, list[tuple[WeightDelta, MatrixPlace]]] = defaultdict(list)
        for delta, place in placed(adapter, config):
            self._deltas[place.site].append((delta, place))

    def of(self, name: str) -> Tensor | None:
        """Return what is added to a matrix, fp32 [N, K] with the checkpoint's rows; None where nothing is. Rows that an
        adapter has fused and the checkpoint has apart are found, and those that it is the other way round with.

        name: as `Checkpoint` has it, without ".weight". An expert's has rows first, however it is stored.
        """
        place = next(iter(self._places.find(name)), None)
        if place is None or place.site not in self._deltas:
            return None
        if place.cut is not None:
            whole = torch.zeros(place.shape)
            for delta, _ in self._deltas[place.site]:
                whole += (delta.b.float() * delta.scale) @ delta.a.float()
            return whole if bool(whole.any()) else None
        matrix = place.matrix
        computed = torch.zeros(matrix.out_features, matrix.in_features)
        for delta, own in self._deltas[place.site]:
            part = low_rank(delta, own, self._adapter, self._config)
            added = part.b @ part.a
            added = added.T if place.site == EMBED else added
            computed[part.first_row : part.first_row + len(added)] += added
        order = row_order(matrix, place.names)
        stored = computed if order is None else torch.empty_like(computed).index_copy_(0, order, computed)
        rows = stored[place.first : place.first + place.rows].div_(row_scales(matrix, place.first, place.rows))
        return rows if bool(rows.any()) else None
