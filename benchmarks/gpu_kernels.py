"""Our kernels by themselves: sides of `python -m benchmarks.gpu`, processes (`python -m benchmarks.gpu_kernels SIDE`).

kernels: every kernel beside its reference, on random inputs.
products: one matrix of a model times a few rows by each way there is; beside our kernels torch's own INT4 operator with
bf16 activations, and the library's product in bf16. The activations' codes are made before, as a norm or gate writes
them in a model.
profile: the time of one decode step by kernel. Every launch of a step is recorded, and those of one kind, one of each
layer, are replayed in a graph by themselves: the weights are others each time. What the step takes beyond their sum is
torch's own copies and the gaps.
"""

from __future__ import annotations

import gc
import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu_engines import WithoutGraphs, decoded, ignore, resident, sequence
from benchmarks.gpu_peers import Int4
from benchmarks.measure import interleaved
from benchmarks.peers_protocol import serve
from localllm.cache.kv_format import KV_FORMATS, kv_bytes_per_token
from localllm.cache.paged_kv import PagedKV
from localllm.engine.memory import choose_device
from localllm.kernels.gpu import check, gemm, gemv, product
from localllm.kernels.gpu.activations import Codes, to_codes
from localllm.kernels.gpu.check import Case, Heads
from localllm.kernels.gpu.gemm import ProgramShape
from localllm.kernels.gpu.launch import KernelLaunch, run_all
from localllm.kernels.gpu.product import Dispatch
from localllm.kernels.packed_matrix import INT8_GROUP, PackedMatrix
from localllm.kernels.tile16 import TILE
from localllm.offload.planner.roofline import device_seconds, recorded

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


_FAMILIES = ("gemv", "gemm", "dequantized", "attention", "an embedding", "drawn tokens")
_OTHERS = "norms and gates"
_SMALLER = replace(check.SMALL, attention=(Heads("int8", "int8", 64, 1, 1),))  # for the interpreter


class Kernels:
    def check(self, *, device: str, seconds: float) -> dict[str, Any]:
        """Each family's number of cases, those that are wrong, and the error that is closest to its tolerance.

        ended: why not all of them were tried.
        """
        torch.manual_seed(time.time_ns() % (1 << 31))
        until, found, ended = time.monotonic() + seconds, list[Case](), ""
        sizes = _SMALLER if device == "cpu" else check.CheckSizes()
        try:
            for case in check.cases(choose_device(device), sizes):
                found.append(case)
                if time.monotonic() > until:
                    ended = f"{seconds:.0f} s were over"
                    break
        except Exception as error:
            ended = f"{type(error).__name__}: {error}".splitlines()[0]
        last = f"{ended} (behind {found[-1].name if found else 'none'})" if ended else ""
        families = {family: [case for case in found if _family(case) == family] for family in (*_FAMILIES, _OTHERS)}
        return {"ended": last, "families": {family: _family_summary(some) for family, some in families.items() if some}}


def _family(case: Case) -> str:
    return next((family for family in _FAMILIES if case.name.startswith(family)), _OTHERS)


def _family_summary(cases: list[Case]) -> dict[str, Any]:
    closest = max(cases, key=_nearness)
    return {
        "cases": len(cases),
        "wrong": [case.line() for case in cases if not case.is_right or case.error is None],
        "closest": closest.name,
        "error": closest.error if closest.error == closest.error else None,  # JSON has no NaN
        "tolerance": closest.tolerance,
    }


def _nearness(case: Case) -> float:
    """The error by its tolerance: above 1 where it is wrong, and of those the NaN first."""
    if case.error is None or not case.tolerance:
        return 0.0 if case.is_right else float("inf")
    return case.error / case.tolerance if case.error == case.error else float("inf")


GROUP = 64
_WEIGHT_ROWS, _PARTS, _STAGES = (64, 32), (1, 2, 4, 8), (4, 3, 2)
_SWEPT_ROWS = 16


class Products:
    @torch.inference_mode()
    def matrix(
        self, *, device: str, shape: Sequence[int], weights: str, few: Sequence[int], many: Sequence[int], rounds: int
    ) -> dict[str, Any]:
        """Seconds of a product in each round, by "kernel rows".

        shape: [N, K].
        weights: int4 or int8.
        few, many: numbers of rows for the packed kernels and for the library.
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

    @torch.inference_mode()
    def sweep(self, *, device: str, shape: Sequence[int], rounds: int, seconds: float) -> dict[str, Any]:
        """`gemm` with 16 rows of an INT4 matrix, in every shape that there is time to compile. own: as chosen."""
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
    rounded = torch.empty((most, N), dtype=torch.bfloat16, device=device)
    dense = _dense(N, K, device)
    sides: dict[str, Callable[[], Work]] = {}
    for rows in few:
        sides[f"gemv {rows}"] = partial(_gemvs, ours, codes.first(rows), y[:rows], N)
        sides[f"gemm {rows}"] = partial(_gemms, ours, N, rows, dispatch.shape(matrix, rows))
        sides[f"gemm16 {rows}"] = partial(_gemms, ours, N, rows, dispatch.shape(matrix, rows), 16)
    for rows in many:
        library = [(floats[:rows], one, rounded[:rows]) for one in ours]
        sides[f"library {rows}"] = partial(_each, product.multiply_dequantized, library)
    for rows in (*few, *many):
        bf16 = [(floats[:rows], weight) for weight in dense]
        sides[f"bf16 {rows}"] = partial(_each, torch.nn.functional.linear, bf16)
    if matrix.bits == 4:
        theirs: list[Int4] = []
        for rows in few:
            sides[f"torch {rows}"] = partial(_theirs, theirs, N, floats[:rows], device)
    return sides


def _codes(x: Tensor, matrix: PackedMatrix, bits: int = 8) -> Codes:
    codes = Codes.empty(len(x), matrix.in_features, matrix.group, x.device, bits)
    to_codes(x, codes, x.shape[1]).run()
    return codes


def _dense(N: int, K: int, device: torch.device) -> list[Tensor]:
    weight = torch.randn((N, K), dtype=torch.bfloat16, device=device) * K**-0.5
    return [weight, *(weight.clone() for _ in range(num_copies(device, weight.nbytes) - 1))]


def _each(function: Callable[..., object], arguments: Sequence[tuple[object, ...]]) -> Work:
    return [partial(function, *some) for some in arguments]


def _gemvs(copies: Sequence[PackedMatrix], codes: Codes, y: Tensor, N: int) -> Work:
    return [gemv.gemv(codes, one, y, N).run for one in copies]


def _gemms(copies: Sequence[PackedMatrix], N: int, rows: int, shape: ProgramShape, bits: int = 8) -> Work:
    """Products with codes of their own: how long a shape takes depends on their number, not on their values."""
    matrix, device = copies[0], copies[0].qweight.device
    codes = _codes(torch.randn((rows, matrix.in_features), device=device), matrix, bits)
    y = torch.empty((rows, N), device=device)
    partial_sums = torch.empty((shape.parts, rows, N), device=device) if shape.parts > 1 else None
    return [partial(run_all, gemm.gemm(codes, one, y, N, shape=shape, partial=partial_sums)) for one in copies]


def _theirs(copies: list[Int4], N: int, x: Tensor, device: torch.device) -> Work:
    """copies: torch's matrices, which the first side that needs them makes."""
    if not copies:
        first = Int4(N, x.shape[1], device)
        copies += [first, *(first.copy() for _ in range(num_copies(device, first.packed.nbytes) - 1))]
    return [partial(one.forward, x) for one in copies]


def _shapes(matrix: PackedMatrix) -> list[ProgramShape]:
    """Shapes with as many warps for a row of W as `Dispatch` takes."""
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


_ROOM = 64
_STEPS = 16  # that the step's time is taken of


class Profile:
    @torch.inference_mode()
    def step(self, *, device: str, depth: int, kv: str, rounds: int, small: bool) -> dict[str, Any]:
        """Seconds of a step, and of all launches of a kind in it, in each round."""
        on = choose_device(device)
        engine = resident(on, depth + _ROOM, kv, ignore, small=small)
        if on.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, on)
        cache = sequence(engine.residency.new_pages(KV_FORMATS[kv]), depth, _ROOM)
        step = engine.runner.gpu_program
        assert step is not None
        kinds = _kinds(self._launches(engine.model, cache, depth))
        measures: dict[str, Callable[[], float]] = {"copy": copying(on)}
        steps = 1 if small else _STEPS
        measures["step"] = lambda: device_seconds(on, lambda: decoded(step, cache, depth, steps)) / steps
        measures |= {kind: replayed(on, [launch.run for launch in some]) for kind, some in kinds.items()}
        found = interleaved(measures, rounds)
        dense, coded = cache.layouts
        kv_bytes = depth * kv_bytes_per_token((dense, coded), 1)
        return {
            "depth": depth,
            "kv": kv,
            "copy_gbs": found.pop("copy"),
            "step_s": found.pop("step"),
            "kinds": {
                kind: {
                    "launches": len(some),
                    "num_bytes": sum(_launch_bytes(launch, kv_bytes) for launch in some),
                    "seconds": [each * len(some) for each in found[kind]],
                }
                for kind, some in kinds.items()
            },
        }

    def _launches(self, model: Any, cache: PagedKV, depth: int) -> list[KernelLaunch]:
        """The launches of one step, after another has made what is made once."""
        step, found, run = WithoutGraphs(model), list[KernelLaunch](), KernelLaunch.run
        decoded(step, cache, depth, 1)

        def record(launch: KernelLaunch) -> None:
            found.append(launch)
            run(launch)

        with patch.object(KernelLaunch, "run", record):
            decoded(step, cache, depth, 1)
        return found


def _kinds(launches: list[KernelLaunch]) -> dict[str, list[KernelLaunch]]:
    """Launches of one kernel for matrices of one shape, in the order of the step."""
    kinds: dict[str, list[KernelLaunch]] = {}
    for launch in launches:
        kinds.setdefault(_kind(launch), []).append(launch)
    return kinds


def _kind(launch: KernelLaunch) -> str:
    name, weights = launch.name.lstrip("_"), launch.arguments.get("qweight")
    if name in ("gemv", "gemm") and isinstance(weights, Tensor):
        K = weights[0].nbytes * 8 // launch.constants["BITS"] // 16
        return f"{name} {launch.arguments['out_features']}x{K}"
    return " ".join([name, str(launch.constants.get("KIND", ""))]).strip()


def _launch_bytes(launch: KernelLaunch, kv_bytes: int) -> int:
    """Bytes read and written. kv_bytes: of a layer's pages, of which the kernel is given addresses."""
    if launch.name == "_embed":
        return _sum({"x": launch.arguments["x"]}) * 5 // 4  # of the matrix a row of bytes is read
    if launch.name == "_attend":
        return kv_bytes + _sum({"q": launch.arguments["q"], "part": launch.arguments["part"]})
    return _sum(launch.arguments)


def _sum(arguments: Mapping[str, object]) -> int:
    tensors = (value for value in arguments.values() if isinstance(value, Tensor))
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


if __name__ == "__main__":
    gc.freeze()  # torch's hundred thousand objects, which each capture of a graph may look through
    serve({"kernels": Kernels, "products": Products, "profile": Profile}[sys.argv[1]]())
