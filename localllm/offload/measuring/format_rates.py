"""How fast one weight format is computed with, on the CPU or on a device, by the way that a model of it goes."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.offload.measuring.roofline import device_seconds, recorded, warm_up
from localllm.offload.planner.profile import FormatRates
from localllm.quant.weight_format import WeightFormat

_REPEATS = 5
# So long products are repeated: 5 of INT4 are over in 17 ms, in which a CPU that was idle gave 10 % less than later.
_LEAST_S = 0.3
_QUANTIZED_ROWS = 1024  # repeated to the whole matrix: to quantize all of it would take longer than all the products


@dataclass(frozen=True)
class _Trial:
    """A matrix [N, K] that stands for all of a model's, copies of it beyond any cache, and how many rows are many."""

    N: int
    K: int
    working_set_bytes: int
    many_rows: int


_CPU = _Trial(8192, 4096, 128 << 20, 128)
# 8192 rows of INT4 take a GPU of 1 TB/s 19 us, not much more than a launch, which a plan counts for itself. And 128 MiB
# would be no more than some cards' cache.
_DEVICE = _Trial(32768, 4096, 384 << 20, 512)


@torch.inference_mode()
def format_rates(weight_format: WeightFormat, dtype: torch.dtype, device: torch.device) -> FormatRates:
    """Matrices of this format times one row and times many."""
    trial = _CPU if device.type == "cpu" else _DEVICE
    one = _matrix(weight_format, trial, device)
    num_bytes = sum(tensor.nbytes for tensor in one.values())
    copies = [one] + [
        {name: tensor.clone() for name, tensor in one.items()} for _ in range(trial.working_set_bytes // num_bytes)
    ]

    def sampled(x: Tensor) -> tuple[float, float]:
        """Products with all copies in a second, and the spread."""

        def multiply() -> None:
            for tensors in copies:
                weight_format.linear(x, tensors, trial.N, None)

        run = recorded(device, multiply)
        warm_up(device, run)
        samples: list[float] = []
        while len(samples) < _REPEATS or sum(samples) < _LEAST_S:
            samples.append(device_seconds(device, run))
        lower, middle, upper = statistics.quantiles(samples, n=4)
        return 1 / middle, (upper - lower) / middle

    row, rows = (torch.randn(count, trial.K).to(device, dtype) for count in (1, trial.many_rows))
    total_bytes, total_flops = num_bytes * len(copies), 2 * trial.N * trial.K * len(copies)
    (of_row, spread), (of_rows, spread_of_rows) = sampled(row), sampled(rows)
    return FormatRates(
        matrix_gbs=of_row * total_bytes / 1e9,
        compute_gops=of_rows * trial.many_rows * total_flops / 1e9,
        workspace_bytes=_workspace_bytes(weight_format, rows, one, trial.N),
        spread=max(spread, spread_of_rows),
    )


def _matrix(weight_format: WeightFormat, trial: _Trial, device: torch.device) -> dict[str, Tensor]:
    """Every format has its output rows in dimension 0, so that a part repeated is a matrix."""
    part = weight_format.quantize(torch.randn(_QUANTIZED_ROWS, trial.K) * trial.K**-0.5)
    times = trial.N // _QUANTIZED_ROWS
    return {name: torch.cat([tensor.to(device)] * times) for name, tensor in part.items()}


def _workspace_bytes(weight_format: WeightFormat, x: Tensor, tensors: dict[str, Tensor], out_features: int) -> int:
    """0 on a CPU, whose allocations torch does not count."""
    if x.device.type == "cpu":
        return 0
    torch._C._cuda_clearCublasWorkspaces()  # kept since the first product, and then no part of a peak
    before_bytes = torch.cuda.memory_allocated(x.device)
    torch.cuda.reset_peak_memory_stats(x.device)
    y = weight_format.linear(x, tensors, out_features, None)
    return max(0, torch.cuda.max_memory_allocated(x.device) - before_bytes - y.nbytes)
