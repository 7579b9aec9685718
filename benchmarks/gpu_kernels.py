"""Our matrix products by themselves: a side of `python -m benchmarks.gpu`, a process of its own.

One matrix of a model times a few rows by each way there is; beside our kernels torch's own INT4 operator with bf16
activations, and the library's product in bf16. The activations' codes are made before, as a norm or gate writes them in
a model.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_peers import Int4
from benchmarks.measure import interleaved
from benchmarks.peers_protocol import serve
from localllm.engine.memory import choose_device
from localllm.kernels.gpu import gemm, gemv, product
from localllm.kernels.gpu.activations import Codes, to_codes
from localllm.kernels.gpu.gemm import ProgramShape
from localllm.kernels.gpu.launch import run_all
from localllm.kernels.packed_matrix import PackedMatrix
from localllm.kernels.sizes import INT8_GROUP, TILE
from localllm.offload.measurements.roofline import device_seconds, recorded

_STRETCH_S, _MOST_LAUNCHES = 5e-3, 400  # of a graph
_CACHES = 4  # as much data as that many second caches hold, and a copy more
_COPY_BYTES = {"cuda": 1 << 29, "cpu": 1 << 20}

Work = Sequence[Callable[[], object]]


def replayed(device: torch.device, work: Work) -> Callable[[], float]:
    """A sampler of the seconds that one of these takes.

    They are a graph that is replayed between two events. Several copies of the data are worked on in turn, so many that
    no cache holds what is needed next. Raises RuntimeError where no graph can be made of them.
    """

    def once() -> None:
        for each in work:
            each()

    device_seconds(device, once)  # compiles
    passes = 1
    if device.type == "cuda":
        passes = max(1, min(_MOST_LAUNCHES // len(work), round(_STRETCH_S / device_seconds(device, once))))

    def stretch() -> None:
        for _ in range(passes):
            once()

    run = recorded(device, stretch)
    if device.type == "cuda" and run is stretch:
        raise RuntimeError("it cannot be captured in a graph")
    return lambda: _seconds(device, run) / passes / len(work)


def _seconds(device: torch.device, run: Callable[[], object]) -> float:
    if device.type != "cuda":
        return device_seconds(device, run)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    run()  # while it is computed the driver takes the next one: no launch from the host is in the time
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def copying(device: torch.device) -> Callable[[], float]:
    """A sampler of the copy bandwidth in 1e9 bytes a second, those read and those written both counted."""
    source, target = (torch.ones(_COPY_BYTES[device.type], dtype=torch.uint8, device=device) for _ in range(2))
    sample = replayed(device, [lambda: target.copy_(source)])
    return lambda: 2 * source.nbytes / sample() / 1e9


def num_copies(device: torch.device, num_bytes: int) -> int:
    """The number of copies of so many bytes at which no cache holds one until its next turn."""
    if device.type != "cuda":
        return 2
    return 2 + _CACHES * torch.cuda.get_device_properties(device).L2_cache_size // num_bytes


GROUP = 64


class Products:
    @torch.inference_mode()
    def matrix(
        self, *, device: str, shape: Sequence[int], weights: str, few: Sequence[int], many: Sequence[int], rounds: int
    ) -> dict[str, Any]:
        """Seconds of a product in each round, by "kernel rows".

        shape: [N, K].
        weights: int4 or int8.
        few, many: numbers of rows; torch's INT4 operator multiplies only the few.
        """
        on = choose_device(device)
        (N, K), skipped = shape, dict[str, str]()
        matrix = random_matrix(N, K, weights, on)
        measures: dict[str, Callable[[], float]] = {"copy": copying(on)}
        for side, made in _sides(matrix, N, few, many, on).items():
            try:
                measures[side] = replayed(on, made())
            except Exception as error:
                skipped[side] = f"{type(error).__name__}: {error}".splitlines()[0]
        found = interleaved(measures, rounds)
        del measures
        _give_back(on)
        return {
            "shape": list(shape), "weights": weights, "num_bytes": _num_bytes(matrix), "copy_gbs": found.pop("copy"),
            "seconds": found, "skipped": skipped,
        }  # fmt: skip


def random_matrix(N: int, K: int, weights: str, device: torch.device) -> PackedMatrix:
    tiles = -(-N // TILE)
    if weights == "int8":
        size = (tiles, -(-K // INT8_GROUP) * INT8_GROUP // 4, TILE, 4)
        codes = torch.randint(-127, 128, size, dtype=torch.int8, device=device)
        return PackedMatrix(codes, torch.rand((tiles, TILE), device=device) * K**-0.5 / 127, None)
    groups = -(-K // GROUP)
    words = torch.randint(-(1 << 31), 1 << 31, (tiles, groups * GROUP // 8, TILE), dtype=torch.int32, device=device)
    scale = (torch.rand((tiles, groups, TILE), device=device) * K**-0.5 / 8).half()
    return PackedMatrix(words, scale, (-7.5 * scale).half())


def _num_bytes(matrix: PackedMatrix) -> int:
    return sum(part.nbytes for part in (matrix.qweight, matrix.scale, matrix.bias) if part is not None)


def _copies(matrix: PackedMatrix, device: torch.device) -> list[PackedMatrix]:
    def clone() -> PackedMatrix:
        bias = None if matrix.bias is None else matrix.bias.clone()
        return PackedMatrix(matrix.qweight.clone(), matrix.scale.clone(), bias)

    return [matrix, *(clone() for _ in range(num_copies(device, _num_bytes(matrix)) - 1))]


def _sides(
    matrix: PackedMatrix, N: int, few: Sequence[int], many: Sequence[int], device: torch.device
) -> dict[str, Callable[[], Work]]:
    """Makers of each side's work; all numbers of rows share the copies."""
    K, most = matrix.in_features, max(*few, *many)
    floats = torch.randn((most, K), device=device).bfloat16()
    ours, dispatch = _copies(matrix, device), product.dispatch_for(device)
    codes, y = _codes(floats[: max(few)].float(), matrix), torch.empty((max(few), N), device=device)
    dense = _dense(N, K, device)
    sides: dict[str, Callable[[], Work]] = {}
    for rows in few:
        sides[f"gemv {rows}"] = partial(_gemvs, ours, codes.first(rows), y[:rows], N)
        sides[f"gemm {rows}"] = partial(_gemms, ours, N, rows, dispatch.shape(matrix, rows))
    for rows in many:
        sides[f"gemm {rows}"] = partial(_gemms, ours, N, rows, dispatch.shape(matrix, rows))
    for rows in (*few, *many):
        bf16 = [(floats[:rows], weight) for weight in dense]
        sides[f"bf16 {rows}"] = partial(_each, torch.nn.functional.linear, bf16)
    if matrix.bits == 4:
        theirs: list[Int4] = []
        for rows in few:
            sides[f"torch {rows}"] = partial(_theirs, theirs, N, floats[:rows], device)
    return sides


def _codes(x: Tensor, matrix: PackedMatrix) -> Codes:
    codes = Codes.of(len(x), matrix)
    to_codes(x, codes, x.shape[1]).run()
    return codes


def _dense(N: int, K: int, device: torch.device) -> list[Tensor]:
    weight = torch.randn((N, K), dtype=torch.bfloat16, device=device) * K**-0.5
    return [weight, *(weight.clone() for _ in range(num_copies(device, weight.nbytes) - 1))]


def _each(function: Callable[..., object], arguments: Sequence[tuple[object, ...]]) -> Work:
    return [partial(function, *some) for some in arguments]


def _gemvs(copies: Sequence[PackedMatrix], codes: Codes, y: Tensor, N: int) -> Work:
    return [gemv.gemv(codes, one, y, N).run for one in copies]


def _gemms(copies: Sequence[PackedMatrix], N: int, rows: int, shape: ProgramShape) -> Work:
    """Products with codes of their own: how long a shape takes depends on their number, not on their values."""
    matrix, device = copies[0], copies[0].qweight.device
    codes = _codes(torch.randn((rows, matrix.in_features), device=device), matrix)
    y = torch.empty((rows, N), device=device)
    partial_sums = torch.empty((matrix.slices, rows, N), device=device) if shape.parts > 1 else None
    return [partial(run_all, gemm.gemm(codes, one, y, N, shape=shape, partial=partial_sums)) for one in copies]


def _theirs(copies: list[Int4], N: int, x: Tensor, device: torch.device) -> Work:
    """copies: torch's matrices, which the first side that needs them makes."""
    if not copies:
        first = Int4(N, x.shape[1], device)
        copies += [first, *(first.copy() for _ in range(num_copies(device, first.packed.nbytes) - 1))]
    return [partial(one.forward, x) for one in copies]


def _give_back(device: torch.device) -> None:
    gc.collect()  # graphs are freed with what they write
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    gc.freeze()  # torch's hundred thousand objects, which each capture of a graph may look through
    serve(Products())
