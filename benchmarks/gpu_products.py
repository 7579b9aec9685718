"""One matrix of a model times a few rows, by each way there is: a process, `python -m benchmarks.gpu_products`.

The activations' codes are made before: in a model the norm or the gate writes them. Beside our kernels torch's own INT4
operator, with bf16 activations, and the library's product in bf16.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_timing import Work, copying, num_copies, replayed
from benchmarks.gpu_torch_loop import Int4
from benchmarks.measure import interleaved
from benchmarks.peers_protocol import serve
from localllm.engine.memory import choose_device
from localllm.kernels.gpu import gemm, gemv, product
from localllm.kernels.gpu.activations import Codes, to_codes
from localllm.kernels.gpu.gemm import ProgramShape
from localllm.kernels.gpu.gemv import INT8_GROUP, GpuMatrix
from localllm.kernels.gpu.launch import run_all
from localllm.kernels.gpu.product import Dispatch
from localllm.kernels.tile16 import TILE

GROUP = 64
_WEIGHT_ROWS, _PARTS, _STAGES = (64, 32), (1, 2, 4, 8), (4, 3, 2)
_SWEPT_ROWS = 16


class Products:
    @torch.inference_mode()
    def matrix(
        self, *, device: str, shape: Sequence[int], weights: str, few: Sequence[int], many: Sequence[int], rounds: int
    ) -> dict[str, Any]:
        """shape: [N, K]. weights: int4 or int8. few: numbers of rows for the packed kernels, many: for the library.
        Seconds of a product in each round, by "kernel rows"."""
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

    @torch.inference_mode()
    def sweep(self, *, device: str, shape: Sequence[int], rounds: int, seconds: float) -> dict[str, Any]:
        """Of `gemm` with 16 rows of an INT4 matrix, in every shape that there is time to compile; own: as chosen."""
        until, on = time.monotonic() + seconds, choose_device(device)
        N, K = shape
        matrix = random_matrix(N, K, "int4", on)
        own = product.dispatch_for(on).shape(matrix, _SWEPT_ROWS)
        shapes = [own, *(one for one in _shapes(matrix) if one != own)]
        measures, skipped = dict[str, Callable[[], float]](), dict[str, str]()
        copies = _copies(matrix, on)
        for each in shapes if on.type == "cuda" else shapes[:2]:
            if measures and time.monotonic() > until:
                skipped[_named(each)] = f"{seconds:.0f} s were over"
                continue
            try:
                measures[_named(each)] = replayed(on, _gemms(copies, N, _SWEPT_ROWS, each))
            except Exception as error:  # more shared memory than there is, say
                skipped[_named(each)] = f"{type(error).__name__}: {error}".splitlines()[0]
        found = interleaved(measures, rounds)
        del measures, copies
        _give_back(on)
        return {"shape": list(shape), "own": _named(own), "seconds": found, "skipped": skipped}


def random_matrix(N: int, K: int, weights: str, device: torch.device) -> GpuMatrix:
    tiles = -(-N // TILE)
    if weights == "int8":
        codes = torch.randint(
            -127, 128, (tiles, -(-K // INT8_GROUP) * INT8_GROUP // 4, TILE, 4), dtype=torch.int8, device=device
        )
        return GpuMatrix(codes, torch.rand((tiles, TILE), device=device) * K**-0.5 / 127, None)
    groups = -(-K // GROUP)
    words = torch.randint(-(1 << 31), 1 << 31, (tiles, groups * GROUP // 8, TILE), dtype=torch.int32, device=device)
    scale = (torch.rand((tiles, groups, TILE), device=device) * K**-0.5 / 8).half()
    return GpuMatrix(words, scale, (-7.5 * scale).half())


def _num_bytes(matrix: GpuMatrix) -> int:
    return sum(part.nbytes for part in (matrix.qweight, matrix.scale, matrix.bias) if part is not None)


def _copies(matrix: GpuMatrix, device: torch.device) -> list[GpuMatrix]:
    def copy() -> GpuMatrix:
        return GpuMatrix(
            matrix.qweight.clone(), matrix.scale.clone(), None if matrix.bias is None else matrix.bias.clone()
        )

    return [matrix, *(copy() for _ in range(num_copies(device, _num_bytes(matrix)) - 1))]


def _sides(
    matrix: GpuMatrix, N: int, few: Sequence[int], many: Sequence[int], device: torch.device
) -> dict[str, Callable[[], Work]]:
    """What makes each side's work: the copies are shared by all numbers of rows."""
    K, most = matrix.in_features, max(*few, *many)
    floats = torch.randn((most, K), device=device).bfloat16()
    ours, dispatch = _copies(matrix, device), product.dispatch_for(device)
    codes, y = _codes(floats[: max(few)].float(), matrix), torch.empty((max(few), N), device=device)
    rounded = torch.empty((most, N), dtype=torch.bfloat16, device=device)
    dense = _dense(N, K, device)
    sides: dict[str, Callable[[], Work]] = {}
    for rows in few:
        sides[f"gemv {rows}"] = partial(_gemvs, ours, codes.first(rows), y[:rows], N)
        sides[f"gemm {rows}"] = partial(_gemms, ours, N, rows, dispatch.shape(matrix, rows))
        sides[f"gemm16 {rows}"] = partial(_gemms, ours, N, rows, dispatch.shape(matrix, rows), 16)
    for rows in many:
        sides[f"library {rows}"] = partial(
            _each, product.multiply_dequantized, [(floats[:rows], one, rounded[:rows]) for one in ours]
        )
    for rows in (*few, *many):
        sides[f"bf16 {rows}"] = partial(
            _each, torch.nn.functional.linear, [(floats[:rows], weight) for weight in dense]
        )
    if matrix.bits == 4:
        theirs: list[Int4] = []
        for rows in few:
            sides[f"torch {rows}"] = partial(_theirs, theirs, N, floats[:rows], device)
    return sides


def _codes(x: Tensor, matrix: GpuMatrix, bits: int = 8) -> Codes:
    codes = Codes.empty(len(x), matrix.in_features, matrix.group, x.device, bits)
    to_codes(x, codes, x.shape[1]).run()
    return codes


def _dense(N: int, K: int, device: torch.device) -> list[Tensor]:
    weight = torch.randn((N, K), dtype=torch.bfloat16, device=device) * K**-0.5
    return [weight, *(weight.clone() for _ in range(num_copies(device, weight.nbytes) - 1))]


def _each(function: Callable[..., object], arguments: Sequence[tuple[object, ...]]) -> Work:
    return [partial(function, *some) for some in arguments]


def _gemvs(copies: Sequence[GpuMatrix], codes: Codes, y: Tensor, N: int) -> Work:
    return [gemv.gemv(codes, one, y, N).run for one in copies]


def _gemms(copies: Sequence[GpuMatrix], N: int, rows: int, shape: ProgramShape, bits: int = 8) -> Work:
    """Codes of their own: what a shape takes hangs on how many parts there are, not on them."""
    matrix, device = copies[0], copies[0].qweight.device
    codes, y = (
        _codes(torch.randn((rows, matrix.in_features), device=device), matrix, bits),
        torch.empty((rows, N), device=device),
    )
    partial_sums = torch.empty((shape.parts, rows, N), device=device) if shape.parts > 1 else None
    return [partial(run_all, gemm.gemm(codes, one, y, N, shape=shape, partial=partial_sums)) for one in copies]


def _theirs(copies: list[Int4], N: int, x: Tensor, device: torch.device) -> Work:
    """copies: torch's matrices, which the first side that needs them makes."""
    if not copies:
        first = Int4(N, x.shape[1], device)
        copies += [first, *(first.copy() for _ in range(num_copies(device, first.packed.nbytes) - 1))]
    return [partial(one.forward, x) for one in copies]


def _shapes(matrix: GpuMatrix) -> list[ProgramShape]:
    """With as many warps for a row of W as `Dispatch` takes."""
    own = Dispatch(1).shape(matrix, _SWEPT_ROWS)
    return [
        ProgramShape(rows, parts, max(1, own.num_warps * rows // own.weight_rows), stages)
        for parts, rows, stages in itertools.product(_PARTS, _WEIGHT_ROWS, _STAGES)
        if parts <= matrix.slices
    ]


def _named(shape: ProgramShape) -> str:
    return " ".join(f"{name} {value}" for name, value in asdict(shape).items())


def _give_back(device: torch.device) -> None:
    gc.collect()  # graphs are freed with what they write
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    gc.freeze()  # torch's hundred thousand objects, which each capture of a graph may look through
    serve(Products())
