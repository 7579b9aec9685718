"""The kernels' work by torch's operators: what each function of `localllm.kernels.gpu` that makes launches does.

They read what the kernels read, tables and addresses among it, when it is their turn, and take a hundredth of the time
that Triton's interpreter does. Sums are of integers or in fp64, so that a row's bits are the same beside any others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels import delta_rule, int8, kv_page, mamba2_rule, noise, reference, rwkv7, tile16
from localllm.kernels.delta_rule import DeltaWeights
from localllm.kernels.gpu import (
    activations,
    attention,
    delta,
    embedding,
    experts,
    latent_attention,
    latent_store,
    layer_norm,
    low_rank,
    mamba2,
    page_choice,
    page_masses,
    product,
    rope,
    routing,
    rwkv,
    sample,
    shift,
    short_conv,
)
from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.attention import AttentionHistory, ChosenTables
from localllm.kernels.gpu.expert_record import ExpertTable, RecordMatrix
from localllm.kernels.gpu.experts import Inner
from localllm.kernels.gpu.page_choice import Choices
from localllm.kernels.gpu.page_masses import Watched
from localllm.kernels.gpu.product import Dispatch
from localllm.kernels.gpu.product_end import Gate
from localllm.kernels.gpu.recurrence import SegmentTables
from localllm.kernels.gpu.rope import Rope, TokenTables
from localllm.kernels.gpu.routing import RouterWeights, Routes
from localllm.kernels.kv_page import PAGE_TOKENS, PageLayout
from localllm.kernels.layer_state import LayerState, StateRows
from localllm.kernels.mamba2_rule import Mamba2Weights
from localllm.kernels.packed_matrix import PackedMatrix
from localllm.kernels.page_choice import rotated_groups, scores_of, sketch_of
from localllm.kernels.rwkv7 import TimeMixWeights
from localllm.kernels.short_conv import ConvWeights
from localllm.kernels.short_conv import convolve as convolve_by_reference
from localllm.kernels.sizes import Glu, RouterConfig
from localllm.kernels.state_shapes import (
    RWKV7_KEPT,
    ConvShape,
    DeltaShape,
    Mamba2Shape,
    Rwkv7Shape,
    StatePlace,
    StateShape,
)
from tests.simulated_card.device import SimulatedCard


def _prepared(
    x: Tensor, features: int, weight: Tensor | None = None, eps: float = 0.0, glu: Glu | None = None
) -> Tensor:
    values = x[:, :features].float()
    if weight is not None:
        return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * weight
    return values if glu is None else reference.gated(x[:, : (1 + glu.has_gate) * features].float(), glu)


def _to_codes(_: SimulatedCard, x: Tensor, codes: Codes, features: int, **options: Any) -> None:
    _write_codes(_prepared(x, features, **options), codes)


def _write_codes(values: Tensor, codes: Codes) -> None:
    values = functional.pad(values, (0, codes.q.shape[1] - values.shape[1]))
    q, scale = reference.int8_activations(values, codes.group)
    scale += (values * 0).view(q.shape).sum(-1)  # what is no number is none in its group's scale
    codes.scale.copy_(scale.T)
    codes.bias.copy_((scale * q.sum(-1)).T)
    if codes.bits == 4:
        q = q.view(len(q), -1, codes.group // 8, 2, 4).transpose(2, 3)
    codes.q.copy_(q.reshape(codes.q.shape))


def _to_floats(_: SimulatedCard, x: Tensor, y: Tensor, features: int, *, adds: bool = False, **options: Any) -> None:
    values = _prepared(x, features, **options)
    into = y[:, :features]
    into.copy_(values + into.float() if adds else values)


def _multiply(
    _: SimulatedCard,
    x: Codes,
    matrix: PackedMatrix,
    y: Tensor | Gate,
    out_features: int,
    bias: Tensor | None,
    *,
    adds: bool,
) -> None:
    M, groups = len(x.q), matrix.groups
    weights = (int8.unpack if matrix.bits == 8 else tile16.unpack)(matrix.qweight)
    if matrix.table is not None:
        weights = torch.tensor(matrix.table, dtype=torch.int8)[weights.int()]
    q = x.in_order().double().view(M, groups, 1, -1)
    dots = (q @ weights.double().view(len(weights), groups, -1).permute(1, 2, 0)).squeeze(2)  # [M, groups, N]
    scales = x.scale.T.unsqueeze(-1)
    by = matrix.scale.view(-1) if matrix.scale.dim() == 2 else tile16.unpack_groups(matrix.scale).double().T
    products = dots * scales * by
    if matrix.bias is not None:
        products += x.bias.T.double().unsqueeze(-1) * tile16.unpack_groups(matrix.bias).double().T
    product = products.sum(1)
    product = product[:, :out_features]
    if bias is not None:
        product = product + bias
    if isinstance(y, Gate):
        _write_codes(_prepared(product.float(), y.features, glu=y.glu), y.codes)
        return
    into = y[:, :out_features]
    into.copy_(product + into if adds else product)


def _by_head(card: SimulatedCard, x: Codes, matrix: PackedMatrix, y: Tensor, heads: int) -> None:
    tiles, groups, N = matrix.tiles // heads, matrix.groups, y.shape[1] // heads
    for head in range(heads):
        columns, own = slice(head * matrix.in_features, (head + 1) * matrix.in_features), slice(head * groups, None)
        codes = Codes(x.q[:, columns].contiguous(), x.scale[own][:groups], x.bias[own][:groups], x.bits)
        part = matrix.part(slice(head * tiles, (head + 1) * tiles))
        _multiply(card, codes, part, y[:, head * N : (head + 1) * N], N, None, adds=False)


def _route(
    card: SimulatedCard,
    x: Tensor,
    router: RouterConfig,
    parts: RouterWeights,
    routes: Routes,
    *,
    positions: Tensor | None = None,
    codes: Codes | None = None,
) -> None:
    _logits_of(card, x, parts, routes.logits)
    experts, weights = reference.route(routes.logits[:, : router.num_experts], parts.correction, router)
    routes.experts.copy_(experts if positions is None else experts.masked_fill(positions.unsqueeze(1) < 0, -1))
    routes.weights.copy_(weights)
    if codes is not None:
        _to_codes(card, x, codes, x.shape[1], weight=parts.norm, eps=parts.eps)


def _logits_of(_: SimulatedCard, x: Tensor, parts: RouterWeights, logits: Tensor) -> None:
    normed = x.double()
    if parts.norm is not None:
        normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + parts.eps) * parts.norm.double()
    matrix = parts.weight if parts.gate is None else torch.cat((parts.weight, parts.gate))
    logits.copy_(normed @ matrix.double().T)
    if parts.bias is not None:
        logits[:, : len(parts.bias)] += parts.bias


def _delta_mix(
    card: SimulatedCard,
    wide: Tensor,
    gates: Tensor,
    z: Tensor,
    out: Tensor | Codes,
    tables: SegmentTables,
    weights: DeltaWeights,
    shape: DeltaShape,
    place: StatePlace,
) -> None:
    mixed = torch.zeros(len(wide), shape.value_features)
    b, a = gates[:, : shape.value_heads], gates[:, -shape.decay_features :]
    raw = torch.cat((wide[:, : shape.channels].float(), b, a), dim=1)
    for begin, end, rows in _state_rows(card, raw, tables, shape, place):
        o = delta_rule.mix(rows, weights)
        mixed[begin:end] = delta_rule.gated_norm(o, z[begin:end].reshape(o.shape), weights).flatten(1)
    _write(mixed, out)


def _convolve(
    card: SimulatedCard,
    wide: Tensor,
    out: Tensor | Codes,
    tables: SegmentTables,
    weights: ConvWeights,
    shape: ConvShape,
    place: StatePlace,
) -> None:
    front, behind, value = wide.float().chunk(3, dim=1)
    mixed = torch.zeros(len(wide), shape.channels)
    for begin, end, rows in _state_rows(card, front * value, tables, shape, place):
        mixed[begin:end] = behind[begin:end] * convolve_by_reference(rows, weights)
    _write(mixed, out)


S = TypeVar("S", bound=StateShape)


def _state_rows(
    card: SimulatedCard, raw: Tensor, tables: SegmentTables, shape: S, place: StatePlace
) -> Iterator[tuple[int, int, StateRows[S]]]:
    """Yield the rows of each segment, and which they are of the batch."""
    for begin, end, past, committed, states, _, pairs, count in tables.segments.tolist():
        if end <= begin:
            continue
        state = LayerState(shape, card.bytes_at(states + place.state, shape.state_bytes))
        due = card.bytes_at(pairs, 16 * count).view(torch.int64).view(-1, 2).tolist() if count else []
        snapshots = {at: card.bytes_at(p + place.snapshot, shape.snapshot_bytes) for at, p in due}
        yield begin, end, StateRows(state, raw[begin:end], past, committed, snapshots)


def _write(values: Tensor, out: Tensor | Codes) -> None:
    if isinstance(out, Codes):
        _write_codes(values, out)
    else:
        out.copy_(values)


def _mamba_mix(
    card: SimulatedCard,
    wide: Tensor,
    steps: Tensor,
    out: Tensor,
    tables: SegmentTables,
    weights: Mamba2Weights,
    shape: Mamba2Shape,
    place: StatePlace,
) -> None:
    out.zero_()
    for begin, end, past, committed, states, _, pairs, count in tables.segments.tolist():
        if end <= begin:
            continue
        state = LayerState(shape, card.bytes_at(states + place.state, shape.state_bytes))
        due = card.bytes_at(pairs, 16 * count).view(torch.int64).view(-1, 2).tolist() if count else []
        snapshots = {at: card.bytes_at(p + place.snapshot, shape.snapshot_bytes) for at, p in due}
        raw = torch.cat((wide[begin:end, shape.features :].float(), steps[begin:end]), dim=1)
        y = mamba2_rule.mix(StateRows(state, raw, past, committed, snapshots), weights).flatten(1)
        out[begin:end] = mamba2_rule.gated_norm(y, wide[begin:end, : shape.features], weights, shape.num_groups)


def _layer_norm(_: SimulatedCard, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> None:
    normed = functional.layer_norm(x.double(), x.shape[1:], weight.double(), eps=eps)
    y.copy_(normed if bias is None else normed + bias)


def _shift(
    card: SimulatedCard,
    x: Tensor,
    mixes: Tensor,
    y: Tensor,
    tables: SegmentTables,
    shape: StateShape,
    place: StatePlace,
    *,
    keeps: bool,
) -> None:
    for begin, end, rows in _state_rows(card, x, tables, shape, place):
        own = rows.raw
        y[:, begin:end] = rwkv7.shifted(own, rwkv7.before(rows.state, own, rows.past), mixes)
        if keeps:
            rows.keep()


def _mix_time(
    card: SimulatedCard,
    projected: rwkv.Projected,
    first_values: Tensor,
    out: Tensor | Codes,
    tables: SegmentTables,
    weights: TimeMixWeights,
    shape: Rwkv7Shape,
    place: StatePlace,
) -> None:
    own, values = projected._asdict(), projected.v
    if projected.value_gate is None:
        first_values.copy_(values)
    else:
        own["v"] = rwkv7.gated_values(values, projected.value_gate, first_values)
    raw, mixed = torch.cat([own[name] for name in RWKV7_KEPT], dim=1), torch.zeros_like(values)
    for begin, end, rows in _state_rows(card, raw, tables, shape, place):
        mixed[begin:end] = rwkv7.mix_time(rows, projected.r[begin:end], projected.g[begin:end], weights)
    _write(mixed, out)


def _mixture(
    card: SimulatedCard, dispatch: Dispatch, x: Codes, routes: Routes, table: ExpertTable, y: Tensor, *, adds: bool
) -> None:
    down, pairs = table.down.shape, routes.experts.numel()
    inner = Inner(Codes.empty(pairs, down.in_features, down.group, y.device, down.bits))
    _gates(card, x, routes, table, inner)
    _mixed(card, dispatch, inner, routes, table, y, adds=adds)


def _gates(card: SimulatedCard, x: Codes, routes: Routes, table: ExpertTable, inner: Inner) -> None:
    for pairs, address in _pairs(routes, table):
        codes, rows = _rows(inner.codes, pairs), pairs // routes.experts.shape[1]
        gate, width = Gate(codes, table.glu, table.features), 2 * table.features
        matrix, bias = _matrix(card, table.gate_up, address, width)
        _multiply(card, _rows(x, rows), matrix, gate, width, bias, adds=False)
        inner.codes.q[pairs] = codes.q
        inner.codes.scale[:, pairs], inner.codes.bias[:, pairs] = codes.scale, codes.bias


def _mixed(
    card: SimulatedCard,
    _: Dispatch,
    inner: Inner,
    routes: Routes,
    table: ExpertTable,
    y: Tensor,
    *,
    adds: bool,
    elsewhere: Tensor | None = None,
) -> None:
    known = (routes.experts >= 0).flatten().nonzero().squeeze(1)
    parts = torch.zeros((routes.experts.numel(), y.shape[1]))
    if elsewhere is not None:
        parts[known] = elsewhere[known]
    for pairs, address in _pairs(routes, table):
        part = torch.empty((len(pairs), y.shape[1]))
        matrix, bias = _matrix(card, table.down, address, y.shape[1])
        _multiply(card, _rows(inner.codes, pairs), matrix, part, y.shape[1], bias, adds=False)
        parts[pairs] = part
    by_slots = parts.view(*routes.experts.shape, -1).unbind(1)
    total = sum(part * routes.weights[:, slot, None] for slot, part in enumerate(by_slots))
    y.copy_(total + y if adds else total)


def _pairs(routes: Routes, table: ExpertTable) -> Iterator[tuple[Tensor, int]]:
    """The pairs of each expert that is here, and where it is."""
    chosen, addresses = routes.experts.flatten(), table.addresses.tolist()
    for expert in chosen.unique().tolist():
        if expert >= 0 and addresses[expert]:
            yield (chosen == expert).nonzero().squeeze(1), addresses[expert]


def _rows(codes: Codes, rows: Tensor) -> Codes:
    return Codes(codes.q[rows], codes.scale[:, rows], codes.bias[:, rows], codes.bits)


def _matrix(
    card: SimulatedCard, place: RecordMatrix, address: int, out_features: int
) -> tuple[PackedMatrix, Tensor | None]:
    """The matrix of the record at an address, and its bias."""
    shape = place.shape
    pairs = ((shape.qweight, place.qweight), (shape.scale, place.scale), (shape.bias, place.bias))
    qweight, scale, bias = (
        None if like is None else card.bytes_at(address + at, like.nbytes).view(like.dtype).view(like.shape)
        for like, at in pairs
    )
    assert qweight is not None and scale is not None
    linear_bias = None
    if place.linear_bias is not None:
        linear_bias = card.bytes_at(address + place.linear_bias, 4 * out_features).view(torch.float32)
    return PackedMatrix(qweight, scale, bias, shape.table), linear_bias


def _embed(
    _: SimulatedCard,
    qweight: Tensor,
    scale: Tensor,
    token_ids: Tensor,
    x: Tensor,
    factor: float,
    bias: Tensor | None = None,
    table: tuple[int, ...] | None = None,
) -> None:
    x.copy_(PackedMatrix(qweight, scale, bias, table).rows(token_ids.clamp(min=0), x.shape[1]) * factor)


def _shrink(card: SimulatedCard, uses: Tensor, site: int, x: Tensor, t: Tensor, dtype: torch.dtype) -> None:
    for row, slot, scale, (a, _, rank, _, _) in _parts_of_rows(card, uses, site, t):
        matrix = card.bytes_at(a, rank * x.shape[1] * dtype.itemsize).view(dtype).view(rank, -1)
        t[row, slot, :rank] = (matrix.double() @ x[row].double()) * scale


def _expand(card: SimulatedCard, uses: Tensor, site: int, t: Tensor, y: Tensor, dtype: torch.dtype) -> None:
    for row, slot, _, (_, b, rank, first, rows) in _parts_of_rows(card, uses, site, t):
        matrix = card.bytes_at(b, rank * rows * dtype.itemsize).view(dtype).view(rows, rank)
        y[row, first : first + rows] += matrix.double() @ t[row, slot, :rank].double()


def _parts_of_rows(
    card: SimulatedCard, uses: Tensor, site: int, t: Tensor
) -> Iterator[tuple[int, int, float, list[int]]]:
    """Yield row, slot of t, scale and record of each part that a row has."""
    most_parts, words = t.shape[1] // uses.shape[1], len(low_rank.RECORD_WORDS)
    for row, own in enumerate(uses.tolist()):
        for use, (table, parts, bits) in enumerate(own):
            records = card.bytes_at(table + 8 * words * site * parts, 8 * words * parts) if table else None
            for part, record in enumerate(
                [] if records is None else records.view(torch.int64).view(parts, -1).tolist()
            ):
                scale = torch.tensor(bits, dtype=torch.int32).view(torch.float32).item()
                if record[2]:
                    yield row, use * most_parts + part, scale, record


def _rope_store(
    card: SimulatedCard,
    qkv: Tensor,
    q: Tensor,
    tokens: TokenTables,
    rope: Rope,
    dense: PageLayout,
    coded: PageLayout | None,
    layer: int,
) -> None:
    H, KH = q.shape[1], dense.num_kv_heads
    is_there = tokens.positions >= 0
    queries, keys, values = qkv.float().split([H, KH, KH], 1)
    queries, keys = (
        _rotated(heads, norm, tokens.positions, rope) for heads, norm in ((queries, rope.q_norm), (keys, rope.k_norm))
    )
    if rope.growth is not None:
        steps = (tokens.positions // rope.growth_length).clamp(min=0).view(-1, 1, 1)
        queries = queries * (1 + rope.growth * torch.log1p(steps.float()))
    if coded is not None:
        queries, keys, values = map(kv_page.rotated, (queries, keys, values))
    q[is_there] = queries[is_there]
    _store_rows(card, tokens, keys, values, dense, coded, layer)


def _store_rows(
    card: SimulatedCard,
    tokens: TokenTables,
    keys: Tensor,
    values: Tensor,
    dense: PageLayout,
    coded: PageLayout | None,
    layer: int,
) -> None:
    for first, last in _runs(tokens):
        slot = int(tokens.positions[first]) % PAGE_TOKENS
        own = int(tokens.own[first]) + layer * int(tokens.own_stride[first])
        rows = slice(first, last)
        kv_page.store(dense, card.bytes_at(own, dense.layer_bytes), slot, keys[rows], values[rows])
        if coded is not None and (address := int(tokens.coded[first])):
            page = card.bytes_at(address + layer * coded.layer_bytes, coded.layer_bytes)
            kv_page.store(coded, page, slot, keys[rows], values[rows])


def _runs(tokens: TokenTables) -> Iterator[tuple[int, int]]:
    """Rows [first, last) of one page, one behind the other."""
    rows = list(zip(tokens.positions.tolist(), tokens.own.tolist(), strict=False))
    first = 0
    for row in range(1, len(rows) + 1):
        position, own = rows[first]
        if row < len(rows) and rows[row] == (position + row - first, own):
            continue
        if position >= 0:
            yield first, row
        first = row


def _rotated(x: Tensor, norm: Tensor | None, positions: Tensor, rope: Rope) -> Tensor:
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + rope.eps) * norm
    half = rope.inv_freq.shape[1]
    angle = (positions.float().unsqueeze(1) * rope.inv_freq).unsqueeze(1)  # [M, 1, half]
    cosine, sine = angle.cos() * rope.scale, angle.sin() * rope.scale
    low, high, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat((low * cosine - high * sine, high * cosine + low * sine, rest), -1)


def _gated_heads(mixed: Tensor, gate: Tensor, heads: int) -> Tensor:
    """mixed [T, H * D], gate [T, H * D] or [T, H]"""
    return (mixed.view(len(mixed), heads, -1) * gate.float().sigmoid().view(len(mixed), heads, -1)).flatten(1)


def _attend(
    card: SimulatedCard,
    q: Tensor,
    out: Tensor | Codes,
    tokens: TokenTables,
    history: AttentionHistory,
    _parts: object,
    dense: PageLayout,
    coded: PageLayout | None,
    layer: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    rows: int = 0,
    sinks: Tensor | None = None,
    gate: Tensor | None = None,
    chosen: ChosenTables | None = None,
) -> None:
    all_mixed = out if isinstance(out, Tensor) else torch.zeros(out.q.shape)
    for first, count, segment, _ in history.tasks.tolist():
        positions = tokens.positions[first : first + count].tolist()
        if not positions or positions[-1] < 0:
            continue
        if chosen is not None and int(chosen.rows[first, 0]):
            options = {"scale": scale, "softcap": softcap, "sinks": sinks}
            mixed = _over_chosen(card, q[first], tokens, chosen, first, dense, coded, layer, **options)
            mixed = mixed if gate is None else _gated_heads(mixed, gate[first : first + 1], len(q[0]))
            all_mixed[first : first + 1] = mixed
            continue
        lowest = 0 if window is None else max(0, positions[0] - window + 1)
        own = int(tokens.own[first]) + layer * int(tokens.own_stride[first])
        pages = history.tables[segment].tolist()
        keys, values = _seen(card, pages, own, lowest, positions[-1], dense, coded, layer)
        mixed = reference.attention(
            q[first : first + count].double(),
            keys.double(),
            values.double(),
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        mixed = mixed.float() if coded is None else kv_page.rotated(mixed)
        mixed = mixed.flatten(1)
        mixed = mixed if gate is None else _gated_heads(mixed, gate[first : first + count], len(q[0]))
        all_mixed[first : first + count] = mixed
    if isinstance(out, Codes):
        _write_codes(all_mixed, out)


def _over_chosen(
    card: SimulatedCard,
    q: Tensor,
    tokens: TokenTables,
    chosen: ChosenTables,
    row: int,
    dense: PageLayout,
    coded: PageLayout | None,
    layer: int,
    *,
    sinks: Tensor | None,
    **options: Any,
) -> Tensor:
    """q [H, D] of one row: each key head has pages of its own. Returns [1, H * D]."""
    KH, own = dense.num_kv_heads, int(tokens.own[row]) + layer * int(tokens.own_stride[row])
    found = []
    for head, (pages, queries) in enumerate(
        zip(chosen.tables[int(chosen.rows[row, 3])].tolist(), q.double().chunk(KH), strict=True)
    ):
        seen = _seen(card, pages, own, 0, int(tokens.positions[row]), dense, coded, layer)
        keys, values = (part[head : head + 1].double() for part in seen)
        own_sinks = None if sinks is None else sinks.chunk(KH)[head]
        found.append(reference.attention(queries.unsqueeze(0), keys, values, **options, sinks=own_sinks))
    mixed = torch.cat(found, 1)
    return (mixed.float() if coded is None else kv_page.rotated(mixed)).flatten(1)


def _seen(
    card: SimulatedCard,
    pages: list[int],
    own: int,
    lowest: int,
    last: int,
    dense: PageLayout,
    coded: PageLayout | None,
    layer: int,
) -> tuple[Tensor, Tensor]:
    """Keys and values [KH, last + 1, D]; those before the page of the lowest that is seen are zeros, and not read."""
    parts = []
    for number in range(last // PAGE_TOKENS + 1):
        layout = dense if coded is None or number in (0, last // PAGE_TOKENS) else coded
        if number < lowest // PAGE_TOKENS:
            nothing = torch.zeros(dense.num_kv_heads, PAGE_TOKENS, dense.head_dim)
            parts.append((nothing, nothing[..., : dense.value_dim]))
            continue
        address = own if number == last // PAGE_TOKENS else pages[number] + layer * layout.layer_bytes
        keys, values = kv_page.load(layout, card.bytes_at(address, layout.layer_bytes).unsqueeze(0))
        parts.append((keys.float(), values.float()))
    keys, values = (torch.cat(some, 1)[:, : last + 1] for some in zip(*parts, strict=True))
    return keys, values


def _choose(
    card: SimulatedCard,
    q: Tensor,
    chosen: Tensor,
    tokens: TokenTables,
    history: AttentionHistory,
    choices: Choices,
    dense: PageLayout,
    coded: PageLayout | None,
    layer: int,
    *,
    scale: float,
) -> None:
    KH, D, layout = dense.num_kv_heads, q.shape[2], coded or dense
    for row, (room, _, table, index) in enumerate(choices.rows.tolist()):
        if not room:
            continue
        newest, pages = int(tokens.positions[row]) // PAGE_TOKENS - 1, history.tables[table]
        parts = [card.bytes_at(at + layer * layout.layer_bytes, layout.layer_bytes) for at in pages[1:newest].tolist()]
        keys, query = kv_page.load(layout, torch.stack(parts))[0].float(), q[row] * scale
        if coded is None:
            keys, query = map(rotated_groups, (keys, query))
        scores = scores_of(query.view(KH, -1, D), sketch_of(keys))
        ranked = torch.where(scores.isnan(), torch.inf, scores).sort(dim=1, descending=True, stable=True).indices
        numbers = ranked[:, : choices.pages].sort(dim=1).values + 1
        ends = numbers.new_zeros(KH, 1), numbers.new_full((KH, 1), newest)
        chosen[index, :, : choices.pages + 2] = pages[torch.cat((ends[0], numbers, ends[1]), 1)]


def _watch(
    card: SimulatedCard,
    q: Tensor,
    tokens: TokenTables,
    history: AttentionHistory,
    watched: Watched,
    _parts: object,
    _pages: int,
    dense: PageLayout,
    coded: PageLayout | None,
    layer: int,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    KH = dense.num_kv_heads
    for (row, count, table, _), (address, width) in zip(watched.tasks.tolist(), watched.sums.tolist(), strict=True):
        if not count:
            continue
        position, own = int(tokens.positions[row]), int(tokens.own[row]) + layer * int(tokens.own_stride[row])
        keys, _ = _seen(card, history.tables[table].tolist(), own, 0, position, dense, coded, layer)
        scores = q[row].double().view(KH, -1, q.shape[2]) @ keys.double().mT * scale
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        weights = reference.softmax(scores.unsqueeze(2), sinks).sum((1, 2))  # [KH, slots]
        masses = functional.pad(weights, (0, -weights.shape[1] % PAGE_TOKENS)).view(KH, -1, PAGE_TOKENS).sum(-1)
        sums = card.bytes_at(address, 4 * KH * width).view(torch.float32).view(KH, width)
        sums[:, : masses.shape[1]] += masses.float()


def _latent_store(
    card: SimulatedCard,
    absorbed: Tensor,
    turning: Tensor,
    kept: Tensor,
    q: Tensor,
    tokens: TokenTables,
    rope: Rope,
    dense: PageLayout,
    coded: PageLayout | None,
    layer: int,
) -> None:
    M, H, _ = q.shape
    is_there, latent = tokens.positions >= 0, dense.value_dim
    turned = _rotated(turning.float().view(M, H, -1), None, tokens.positions, rope)
    key = _rotated(kept[:, None, latent:].float(), None, tokens.positions, rope)
    keys = torch.cat((_prepared(kept, latent, rope.k_norm, rope.eps).unsqueeze(1), key), -1)
    queries = torch.cat((absorbed.view(M, H, latent), turned), -1)
    if coded is not None:
        queries, keys = kv_page.rotated(queries), kv_page.rotated(keys)
    q[is_there] = queries[is_there].to(q.dtype)
    _store_rows(card, tokens, keys, keys, dense, coded, layer)


def _attend_latents(
    card: SimulatedCard,
    q: Tensor,
    out: Tensor | Codes,
    tokens: TokenTables,
    history: AttentionHistory,
    parts: object,
    dense: PageLayout,
    coded: PageLayout | None,
    layer: int,
    *,
    scale: float,
    rows: int = 0,
) -> None:
    _attend(card, q, out, tokens, history, parts, dense, coded, layer, scale=scale, rows=rows)


def _sample(
    _: SimulatedCard,
    logits: Tensor,
    keys: Tensor,
    temperatures: Tensor,
    thresholds: Tensor,
    tokens: Tensor,
    _room: object,
) -> None:
    token_ids = torch.arange(logits.shape[1])
    for row, values in enumerate(logits):
        temperature = float(temperatures[row])
        noisy = values.double()
        if temperature > 0:
            scores = (values - values.max()) / temperature
            noisy = scores.double() + noise.gumbel_noise(int(keys[row]), token_ids)
            noisy[scores < thresholds[row]] = -torch.inf
        is_finite = bool(values.isfinite().all())
        tokens[row] = int((noisy == noisy.max()).nonzero()[0]) if is_finite else sample.NOT_FINITE


# By the function whose place each takes. Those behind it run what they launch by themselves.
REFERENCES: dict[Callable[..., Any], Callable[..., None]] = {
    activations.to_codes: _to_codes,
    activations.to_floats: _to_floats,
    embedding.embed: _embed,
    low_rank.shrink: _shrink,
    low_rank.expand: _expand,
    rope.rope_store: _rope_store,
    latent_store.latent_store: _latent_store,
    latent_attention.attend_latents: _attend_latents,
    attention.attend: _attend,
    page_choice.choose: _choose,
    page_masses.watch: _watch,
    sample.sample: _sample,
    product.multiply: _multiply,
    product.by_head: _by_head,
    routing.route: _route,
    routing.logits_of: _logits_of,
    delta.mix: _delta_mix,
    short_conv.convolve: _convolve,
    mamba2.mix: _mamba_mix,
    layer_norm.layer_norm: _layer_norm,
    shift.shift: _shift,
    rwkv.mix_time: _mix_time,
    experts.mixture: _mixture,
    experts.gates: _gates,
    experts.mixed: _mixed,
}
RUN_BY_THEMSELVES = (product.multiply, product.by_head)
