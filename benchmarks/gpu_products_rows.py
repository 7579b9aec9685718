"""The products of four models' matrices: what is measured in which order, and the rows that come of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu_model import MODEL
from benchmarks.gpu_rows import Row
from benchmarks.measure import Spread, paired, spread
from benchmarks.peers_protocol import UnavailableError, Worker
from localllm.models.families import parse_config
from localllm.models.layout import HEAD, block_layouts
from localllm.models.shapes import shipped_shapes

PART = "products"
MODELS = (MODEL, "mistral-7b", "qwen3-14b", "llama-3.3-70b")
FEW, MANY = (1, 2, 4, 8, 16, 32, 64), (128, 512)
_FEW_OF_OTHERS = (1, 4, 16, 64)  # of the models beside the one that has wanted figures
_SMALL_FEW, _SMALL_MANY, _SMALL_SHAPE = (1, 16), (128,), (16, 64)
_SWEPT = ("gate_up_proj", "down_proj")
_SWEEP_SHARE = 0.2  # of the time, for each
_WANTED_COPY, _WANTED_TORCH, _WANTED_MANY = 0.60, 1.3, 1.25
_WIDE = 16  # rows, that shall take hardly longer than one

Key = tuple[int, int, str]
Found = dict[str, Any]


def measure(
    worker: Worker, device: str, seconds: float, rounds: int, found: Found, add: Callable[[list[Row]], None]
) -> None:
    """Each matrix once, whichever models have it, the wanted model's first; found: what there is so far."""
    until, is_small = time.monotonic() + seconds, device == "cpu"
    models = {MODEL: _small()} if is_small else {name: _matrices(name) for name in MODELS}
    measured: dict[Key, Found] = {}
    took = 0.0  # by the last one: the first compiles for all
    found |= {"matrices": [], "sweeps": [], "models": {name: list(own) for name, own in models.items()}}
    for name, own in models.items():
        few = _SMALL_FEW if is_small else FEW if name == MODEL else _FEW_OF_OTHERS
        many = _SMALL_MANY if is_small else MANY
        for N, K, weights in own.values():
            if (N, K, weights) not in measured:
                started = time.monotonic()
                if started + took > until:
                    add([Row(PART, f"{name} and what is behind it", note="not measured: no time was left")])
                    return
                options = {"few": few, "many": many if weights == "int4" else (), "rounds": rounds}
                told = worker.call("matrix", device=device, shape=[N, K], weights=weights, **options)
                measured[N, K, weights] = told
                found["matrices"].append(told)
                took = time.monotonic() - started if len(measured) > 1 else 0.0
        add(rows_of(name, {matrix: measured[key] for matrix, key in own.items()}))
        if name == MODEL:
            for N, K, _ in (own[matrix] for matrix in _SWEPT if matrix in own):
                share = _SWEEP_SHARE * (until - time.monotonic())
                try:
                    told = worker.call("sweep", device=device, shape=[N, K], rounds=rounds, seconds=share)
                except UnavailableError as error:
                    add([Row(PART, f"gemm of {N} x {K} in other shapes", note=f"not measured: {error}")])
                    continue
                found["sweeps"].append(told)
                add([_swept(told)])


def _matrices(name: str) -> dict[str, Key]:
    """By their names, of one layer and of the head."""
    layouts = {layout.name: layout for layout in block_layouts(parse_config(shipped_shapes()[name], name))}
    return {
        matrix.name: (matrix.out_features, matrix.in_features, "int8" if block == HEAD else "int4")
        for block in ("layers.0.attention", "layers.0.mlp", HEAD)
        for matrix in layouts[block].matrices
    }


def _small() -> dict[str, Key]:
    return {"gate_up_proj": (*_SMALL_SHAPE, "int4"), "lm_head": (*_SMALL_SHAPE, "int8")}


def rows_of(model: str, found: Mapping[str, Found]) -> list[Row]:
    """The sum over a layer's matrices, which weighs each by its bytes; the head by itself."""
    layer = [one for one in found.values() if one["weights"] == "int4"]
    heads = [one for one in found.values() if one["weights"] == "int8"]
    is_wanted = model == MODEL
    rows = [
        _copied(f"{model}, a layer's INT4 matrices", layer, is_wanted),
        *(_copied(f"{model}, the head in INT8", [head], False) for head in heads),
        _against(
            f"{model}, one row, us a layer, of torch's INT4 operator",
            layer,
            "torch 1",
            "gemv 1",
            _WANTED_TORCH,
            is_wanted,
        ),
        _widened(f"{model}, {_WIDE} rows, us a layer, beside one", layer, is_wanted),
        *(
            _against(
                f"{model}, {count} rows, us a layer, of 16-bit activations", layer, f"gemm16 {count}", own, None, False
            )
            for count, own in ((1, "gemv 1"), (_WIDE, f"gemm {_WIDE}"))
        ),
        *(
            _against(f"{model}, {count} rows, us a layer, of bf16", layer, f"bf16 {count}", side, None, False)
            for count, side in ((1, "gemv 1"), (128, "library 128"), (512, "library 512"))
            if _has(layer, side)
        ),
        _faster(model, layer),
    ]
    skipped = sorted({f"no {side}: {why}" for one in found.values() for side, why in one["skipped"].items()})
    rows[0] = rows[0].noted("; ".join(skipped))
    return rows


def _has(layer: Sequence[Found], *sides: str) -> bool:
    return bool(layer) and all(side in one["seconds"] for one in layer for side in sides)


def _seconds(layer: Sequence[Found], side: str) -> list[float]:
    """Of all of them, in each round."""
    return [sum(turn) for turn in zip(*(one["seconds"][side] for one in layer), strict=True)]


def _us(values: Sequence[float]) -> Spread:
    return spread([1e6 * value for value in values])


def _copied(what: str, layer: Sequence[Found], is_wanted: bool) -> Row:
    what += ", one row, GB/s, beside the device copy"
    if not _has(layer, "gemv 1"):
        return Row(PART, what, note="not measured")
    num_bytes = sum(one["num_bytes"] for one in layer)
    ours = [num_bytes / seconds / 1e9 for seconds in _seconds(layer, "gemv 1")]
    floors = [
        num_bytes / sum(one["num_bytes"] / gbs for one, gbs in zip(layer, turn, strict=True))
        for turn in zip(*(one["copy_gbs"] for one in layer), strict=True)
    ]
    share = paired(ours, floors)
    return _judged(Row(PART, what, spread(ours), spread(floors), share), _WANTED_COPY if is_wanted else None)


def _against(what: str, layer: Sequence[Found], other: str, own: str, wanted: float | None, is_wanted: bool) -> Row:
    """How many times as long the other takes."""
    what += f" beside ours ({own.split()[0]})"
    if not _has(layer, other, own):
        return Row(PART, what, note="not measured")
    theirs, ours = _seconds(layer, other), _seconds(layer, own)
    return _judged(Row(PART, what, _us(theirs), _us(ours), paired(theirs, ours)), wanted if is_wanted else None)


def _widened(what: str, layer: Sequence[Found], is_wanted: bool) -> Row:
    if not _has(layer, f"gemm {_WIDE}", "gemv 1"):
        return Row(PART, what, note="not measured")
    many, one = _seconds(layer, f"gemm {_WIDE}"), _seconds(layer, "gemv 1")
    ratio = paired(many, one)
    row = Row(PART, what, _us(many), _us(one), ratio)
    if not is_wanted:
        return row
    return Row(PART, what, row.figure, row.beside, ratio, f"<= {_WANTED_MANY}", ratio.median <= _WANTED_MANY)


def _judged(row: Row, wanted: float | None) -> Row:
    if wanted is None or row.ratio is None:
        return row
    return Row(
        row.part, row.what, row.figure, row.beside, row.ratio, f">= {wanted}", row.ratio.median >= wanted, row.note
    )


def _faster(model: str, layer: Sequence[Found]) -> Row:
    """Which of our kernels this card would have, by the number of rows."""
    what = f"{model}, which kernel is faster"
    found = {
        count: {side: spread(_seconds(layer, f"{side} {count}")).median for side in ("gemv", "gemm")}
        for count in _counts(layer)
    }
    told = [
        f"{count}: {min(times, key=lambda side: times[side])} "
        f"({1e6 * times['gemv']:.3g} us by gemv, {1e6 * times['gemm']:.3g} by gemm)"
        for count, times in found.items()
    ]
    most = 0
    for count, times in found.items():
        if times["gemv"] > times["gemm"]:
            break
        most = count
    return Row(PART, what, note=f"gemv_rows = {most}; rows {', '.join(told)}" if told else "not measured")


def _counts(layer: Sequence[Found]) -> Iterator[int]:
    return (count for count in FEW if _has(layer, f"gemv {count}", f"gemm {count}"))


def _swept(told: Found) -> Row:
    medians = {shape: spread(values).median for shape, values in told["seconds"].items()}
    best = min(medians, key=lambda shape: medians[shape])
    own, other = told["seconds"].get(told["own"]), told["seconds"][best]
    what = f"gemm of {told['shape'][0]} x {told['shape'][1]}, 16 rows, us, beside the best of {len(medians)} shapes"
    note = f"chosen: {told['own']}; best: {best}"
    if told["skipped"]:
        note += f"; {len(told['skipped'])} shapes not tried"
    if own is None:
        return Row(PART, what, note=f"{note}; the chosen one failed: {told['skipped'].get(told['own'])}")
    return Row(PART, what, _us(own), _us(other), paired(own, other), note=note)
