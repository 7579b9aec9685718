"""Bytes a second of a step's matrix products in each format of weights: `python -m benchmarks.weight_formats`.

Matrices that no cache holds are multiplied with one row of activations, in one native call, as the steps of decoding
are. Formats take turns, beside a sum of memory that torch reads: the floor. MXFP4's codes go through a table of sixteen
values (fp4-g32), int4's do not; the first should read as many bytes a second. Results: benchmarks/results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import interleaved, machine, paired, parser, save, seconds, spread
from localllm.kernels import cpu_matmul, cpu_quantize
from localllm.kernels.cpu_jit import best_isa
from localllm.kernels.cpu_linear import Activations
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.packed_matrix import PackedMatrix, packed_matrix
from localllm.offload.measurements.roofline import MemoryFloor
from localllm.quant.layouts import CodedLayout, Int4Layout

FORMATS = {
    each.name: each for each in (Int4Layout(64), Int4Layout(32), CodedLayout("fp4", 32), CodedLayout("int8", 32))
}
BASE = "int4-g64"
N, K, COPIES = 4096, 2880, 96  # columns of gpt-oss-20b's experts; 0.6 GB of INT4
_SCALE = 0.01
Format = Int4Layout | CodedLayout


def main() -> None:
    options = parser(__doc__).parse_args()
    floor = MemoryFloor()
    measures: dict[str, Callable[[], float]] = {"dram_read": floor.dram_read_gbs}
    measures |= {name: _product(layout) for name, layout in FORMATS.items()}
    gbs = interleaved(measures, options.rounds)
    formats: dict[str, Any] = {}
    for name in measures:
        of_floor, of_base = paired(gbs[name], gbs["dram_read"]), paired(gbs[name], gbs[BASE])
        formats[name] = {"gbs": spread(gbs[name]), "of_floor": of_floor, f"of_{BASE}": of_base}
        print(f"{name:10} {spread(gbs[name])} GB/s, {of_floor} of the floor, {of_base} of {BASE}")
    result = {"machine": machine(), "matrices": [COPIES, N, K], "formats": formats}
    print(f"wrote {save('weight-formats', result)}")


def _product(layout: Format) -> Callable[[], float]:
    """Return what multiplies all matrices of this format with one row once, and gives 1e9 bytes a second."""
    matrices = [_matrix(layout, seed) for seed in range(COPIES)]
    isa, first = best_isa(), matrices[0]
    room, x, y = Activations(1, first.in_features, first.group), torch.randn(1, first.in_features), torch.empty(1, N)
    block_rows = room.resize(1, isa)
    quantize = cpu_quantize.quantize(isa, first.group, "plain")
    multiply = cpu_matmul.matmul(isa, first.weights, block_rows)
    steps = [room.quantize(quantize, x, first.group, first.in_features)]
    tape = Tape(steps + [room.multiply(multiply, matrix, y, N, None) for matrix in matrices])
    num_bytes = sum(tensor.nbytes for each in matrices for tensor in (each.qweight, each.scale, each.bias)
                    if tensor is not None)  # fmt: skip

    def rate() -> float:
        _ = matrices, x, y  # the tape has their addresses alone
        return num_bytes / seconds(tape.run) / 1e9

    return rate


def _matrix(layout: Format, seed: int) -> PackedMatrix:
    """A matrix of random codes: their values cost nothing."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for part, spec in layout.specs(N, K).items():
        if part == "qweight":
            tensors[part] = torch.randint(0, 127, spec.shape, generator=generator).to(spec.torch_dtype)
        else:
            tensors[part] = (torch.randn(spec.shape, generator=generator) * _SCALE).to(spec.torch_dtype)
    return packed_matrix(tensors, layout.weights.table)


if __name__ == "__main__":
    main()
