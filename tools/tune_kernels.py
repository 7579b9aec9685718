"""Measures on the GPU at hand how matrix products are best cut there: `python -m tools.tune_kernels`.

Replaces the entry of its kind of card in localllm/kernels/gpu/dispatch.json. Matrices of an 8B model, random, in more
copies than the second cache keeps; graphs of launches, replayed in turns, medians of five.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product as combinations
from pathlib import Path

import torch
from torch import Tensor

from localllm.kernels.gpu import gemm, gemv
from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.launch import run_all
from localllm.kernels.gpu.product import Dispatch
from localllm.kernels.packed_matrix import PackedMatrix
from localllm.kernels.tile16 import TILE
from localllm.offload.measurements.roofline import device_seconds, recorded, warm_up

TABLE = Path("localllm/kernels/gpu/dispatch.json")
MATRICES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # N, K
GROUP = 64
_COPIED_BYTES = 256 << 20
_ROUNDS = 5
_ROWS = (2, 4, 8, 16)
_PROGRAMS, _STAGES = (1, 2, 4), (2, 3, 4, 6)


@dataclass(frozen=True)
class Trial:
    """A matrix in so many copies, and 16 rows of codes."""

    copies: list[PackedMatrix]
    codes: Codes
    y: Tensor

    @classmethod
    def of(cls, N: int, K: int, device: torch.device) -> Trial:
        copies = [_matrix(N, K, device) for _ in range(max(2, _COPIED_BYTES // (N * K // 2)))]
        codes = Codes.empty(16, K, GROUP, device)
        codes.q.random_(-127, 128)
        codes.scale.uniform_()
        codes.bias.uniform_()
        return cls(copies, codes, torch.empty((16, N), device=device))

    def by_gemv(self, rows: int) -> Callable[[], None]:
        launches = [gemv.gemv(self.codes.first(rows), m, self.y[:rows], self.y.shape[1]) for m in self.copies]
        return partial(run_all, launches)

    def by_gemm(self, rows: int, dispatch: Dispatch) -> Callable[[], None]:
        x, N = self.codes.first(rows), self.y.shape[1]
        shape = dispatch.shape(self.copies[0], rows)
        room = torch.empty((self.copies[0].slices, rows, N), device=self.y.device)
        launches = [
            launch for m in self.copies for launch in gemm.gemm(x, m, self.y[:rows], N, shape=shape, partial=room)
        ]
        return partial(run_all, launches)


def _matrix(N: int, K: int, device: torch.device) -> PackedMatrix:
    low, high = -(1 << 31), (1 << 31) - 1
    qweight = torch.randint(low, high, (N // TILE, K // 8, TILE), dtype=torch.int32, device=device)
    scale = torch.rand((N // TILE, K // GROUP, TILE), device=device).half() * 0.01
    return PackedMatrix(qweight, scale, (-7.5 * scale).half())


def seconds(device: torch.device, sides: dict[object, Callable[[], None]]) -> dict[object, float]:
    """The seconds of each side, taken in turn."""
    replays = {name: recorded(device, side) for name, side in sides.items()}
    for replay in replays.values():
        warm_up(device, replay)
    rounds = [{name: device_seconds(device, replay) for name, replay in replays.items()} for _ in range(_ROUNDS)]
    return {name: statistics.median(each[name] for each in rounds) for name in sides}


def tuned(device: torch.device) -> dict[str, object]:
    card = torch.cuda.get_device_properties(device)
    trials = [Trial.of(N, K, device) for N, K in MATRICES]
    cuts = [
        Dispatch(card.multi_processor_count, gemv_rows=0, programs=programs, stages=stages)
        for programs, stages in combinations(_PROGRAMS, _STAGES)
    ]
    totals = dict.fromkeys(cuts, 0.0)
    for trial in trials:
        found = seconds(device, {cut: trial.by_gemm(16, cut) for cut in cuts})
        totals = {cut: totals[cut] + found[cut] for cut in cuts}
    best = min(cuts, key=lambda cut: totals[cut])
    most = max((rows for rows, is_gemv in _faster(device, trials, best) if is_gemv), default=1)
    return {"gemv_rows": most, "programs": best.programs, "stages": best.stages, "is_measured": True}


def _faster(device: torch.device, trials: list[Trial], dispatch: Dispatch) -> Iterator[tuple[int, bool]]:
    """For numbers of rows, whether dot products of bytes are the faster way over all matrices."""
    for rows in _ROWS:
        found = [seconds(device, {0: t.by_gemv(rows), 1: t.by_gemm(rows, dispatch)}) for t in trials]
        times = [sum(each[side] for each in found) for side in (0, 1)]
        print(f"{rows} rows: gemv {1e6 * times[0]:.0f} us, gemm {1e6 * times[1]:.0f} us")
        yield rows, times[0] <= times[1]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here that torch can use, and nothing to tune for: localllm doctor says why")
    device = torch.device("cuda", torch.cuda.current_device())
    card = torch.cuda.get_device_properties(device)
    entry = tuned(device)
    tables = json.loads(TABLE.read_text(encoding="utf-8")) | {f"sm_{card.major}{card.minor}": entry}
    lines = ",\n".join(f'  "{name}": {json.dumps(table)}' for name, table in tables.items())
    TABLE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    print(f"{card.name}: {entry}")


if __name__ == "__main__":
    main()
