"""An adapter becomes what the blocks of a model add: its rows where the model has them, in the model's order."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
import xxhash
from torch import Tensor

from localllm.errors import AdapterError, show
from localllm.kernels.state_shapes import DeltaShape
from localllm.layers.config import DeltaNetConfig
from localllm.layers.low_rank import AdapterWeights, LowRank
from localllm.models.adapters.places import MatrixPlace, MatrixPlaces
from localllm.models.adapters.stored import CHOOSE_ANOTHER, StoredAdapter, WeightDelta, made_for, unknown_matrix
from localllm.models.architecture import ModelConfig
from localllm.models.block_source import add_to_digest
from localllm.models.layout import EMBED
from localllm.models.row_order import row_order, row_scales

_LAYER = re.compile(r"layers\.(\d+)\.")


def weights_for(adapter: StoredAdapter, config: ModelConfig, name: str) -> AdapterWeights:
    """Return what an adapter adds to the matrices of a model. Raises AdapterError for a matrix that the model does not
    have, or not in this size."""
    sites: dict[str, list[LowRank]] = defaultdict(list)
    for delta, place in placed(adapter, config):
        sites[place.site] += low_ranks(delta, place, adapter, config)
    ordered = {site: tuple(sorted(parts, key=lambda part: part.first_row)) for site, parts in sorted(sites.items())}
    return AdapterWeights(name, _digest(ordered), ordered)


def placed(adapter: StoredAdapter, config: ModelConfig) -> Iterator[tuple[WeightDelta, MatrixPlace]]:
    """Yield what an adapter has, each with where its rows are by the adapter's own account. Raises AdapterError for a
    matrix that the model does not have, or not in this size."""
    places = MatrixPlaces(adapter.made_for)
    for delta in adapter.deltas.values():
        found = places.find(delta.name)
        if not found and not places.is_unread(delta.name):
            raise unknown_matrix(adapter.place, delta.name, delta.stored, adapter.base, config)
        for place in found:
            if delta.shape != (wanted := place.shape):
                raise _misfit(delta, wanted, adapter)
            yield delta, place


def low_ranks(delta: WeightDelta, place: MatrixPlace, adapter: StoredAdapter, config: ModelConfig) -> Iterator[LowRank]:
    """Yield what is added to a site's matrix, fp32, in the model's order of its rows: all at once, or of each head."""
    if place.cut is None:
        yield low_rank(delta, place, adapter, config)
        return
    own, cut, matrix = place.cut.count(place.matrix), place.cut, place.matrix
    a, b = delta.a.float(), (delta.b.float() * delta.scale).view(cut.heads, cut.rows, -1)
    _require_finite(b, delta, adapter, delta.scale)
    rows = matrix.out_features // cut.heads
    for head, part in enumerate(b[:, cut.first : cut.first + own]):
        both = (part.T, a.T) if cut.transposes else (a, part)
        yield LowRank(both[0].contiguous(), both[1].contiguous(), head * rows)


def low_rank(delta: WeightDelta, place: MatrixPlace, adapter: StoredAdapter, config: ModelConfig) -> LowRank:
    """Return what is added to a site's matrix, fp32, in the model's order of its rows. Raises AdapterError where scaled
    numbers are too large for that."""
    scale = delta.scale * row_scales(place.matrix, place.first, place.rows)
    a, b = delta.a.float(), delta.b.float() * scale  # as PEFT computes: a scale that is rounded to bf16 is 0.4 % off
    _require_finite(b, delta, adapter, scale)
    if place.site == EMBED:  # a token chooses a column of a
        return LowRank(b.T.contiguous(), a.T.contiguous())
    order = row_order(place.matrix, place.names)
    heads = _value_heads(place, config)
    if heads is not None and place.delta is not None:
        if place.matrix.name == "out_proj":
            return LowRank(a[:, _features(heads, place.delta.value_dim)].contiguous(), b, place.first)
        order = _with_value_heads(order, heads, place.matrix.name, place.delta)
    return _ordered(a, b, place, order)


def _require_finite(b: Tensor, delta: WeightDelta, adapter: StoredAdapter, scale: float | Tensor) -> None:
    if not bool(torch.isfinite(b).all()):
        what = f"{adapter.place}: the numbers of {show(delta.stored)} are too large"
        why = f"multiplied by {float(torch.as_tensor(scale).max()):g} they are infinite in {b.dtype}"
        raise AdapterError(what, why=why, fix=CHOOSE_ANOTHER)


def _ordered(a: Tensor, b: Tensor, place: MatrixPlace, order: Tensor | None) -> LowRank:
    """Return rows of a matrix where its rows are computed with in an order. Those between them, if any, are zeros."""
    if order is None:
        return LowRank(a, b, place.first)
    stored = order - place.first
    rows = ((stored >= 0) & (stored < place.rows)).nonzero().flatten()
    first, end = int(rows[0]), int(rows[-1]) + 1
    moved = b.new_zeros(end - first, b.shape[1])
    moved[rows - first] = b[stored[rows]]
    return LowRank(a, moved, first)


def _value_heads(place: MatrixPlace, config: ModelConfig) -> Tensor | None:
    """Return the value heads of Gated DeltaNet in the model's order, by their numbers in the adapter's; None where the
    two are one."""
    layer = _LAYER.match(place.site)
    mixer = config.layers[int(layer[1])].mixer if layer else None
    if place.delta is None or not isinstance(mixer, DeltaNetConfig) or mixer.shape.is_tiled == place.delta.is_tiled:
        return None
    keys, own = mixer.shape.key_heads, mixer.shape.value_heads // mixer.shape.key_heads
    stored = (keys, own) if mixer.shape.is_tiled else (own, keys)
    return torch.arange(keys * own).view(stored).T.flatten()


def _with_value_heads(order: Tensor | None, heads: Tensor, name: str, shape: DeltaShape) -> Tensor:
    """Return the order of a matrix's rows with the value heads in theirs. name: of the matrix in its block."""
    values, gates = _features(heads, shape.value_dim), heads
    if name == "in_proj":
        keys = 2 * shape.key_heads * shape.key_dim
        moved = torch.cat((torch.arange(keys), keys + values, keys + len(values) + values))
    else:
        moved = torch.cat((gates, len(gates) + gates))
    return moved if order is None else order[moved]


def _features(heads: Tensor, head_dim: int) -> Tensor:
    return (heads[:, None] * head_dim + torch.arange(head_dim)).flatten()


def _digest(sites: Mapping[str, tuple[LowRank, ...]]) -> bytes:
    digest = xxhash.xxh3_128()
    for site, part in _parts(sites):
        shapes = f"{list(part.a.shape)} {list(part.b.shape)} {part.a.dtype}"
        digest.update(f"{site} {part.first_row} {shapes}\n".encode())
        add_to_digest(digest, {"a": part.a, "b": part.b})
    return digest.digest()


def _parts(sites: Mapping[str, tuple[LowRank, ...]]) -> Iterator[tuple[str, LowRank]]:
    return ((site, part) for site, parts in sites.items() for part in parts)


def _misfit(delta: WeightDelta, wanted: tuple[int, int], adapter: StoredAdapter) -> AdapterError:
    (rows, columns), (own_rows, own_columns) = delta.shape, wanted
    why = f"{show(delta.stored)} is for {columns} features in and {rows} out, the model's has {own_columns} in and"
    why += f" {own_rows} out{made_for(adapter.base)}"
    return AdapterError(f"{adapter.place} was made for another model", why=why, fix=CHOOSE_ANOTHER)
