"""Packed weights times rows, by both kernels, in Triton's interpreter: exact to fp32, whatever the number of rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from localllm.kernels import reference
from localllm.kernels.gpu.activations import Codes, to_codes
from localllm.kernels.gpu.gemm import ProgramShape, gemm
from localllm.kernels.gpu.gemv import gemv
from localllm.kernels.gpu.launch import run_all
from localllm.kernels.gpu.product import Dispatch, _tables
from localllm.kernels.gpu.product_end import Gate
from localllm.kernels.packed_matrix import PackedMatrix
from localllm.quant.int4 import Int4
from localllm.quant.int8 import Int8
from tests.thinning import every_other
from tools import tune_kernels

TOLERANCE = 1e-6  # of the norm: what fp32 sums of some hundred terms lose


class Matrix:
    """A random one, and what the reference makes of rows times it."""

    def __init__(self, N: int, K: int, weights: str) -> None:
        weight = torch.randn(N, K) * K**-0.5
        self.N, self.K = N, K
        self.form = Int8() if weights == "int8" else Int4(int(weights.removeprefix("int4-g")), "rtn")
        self.tensors = self.form.quantize(weight)
        self.packed = PackedMatrix(self.tensors["qweight"], self.tensors["scale"], self.tensors.get("bias"))

    def expected(self, x: Tensor) -> Tensor:
        """Of the codes that the kernel made: fp64."""
        codes = self.codes(x)
        grouped, scale = codes.in_order().view(len(x), -1, codes.group), codes.scale.T
        if isinstance(self.form, Int8):
            return reference.int8_product(grouped, scale, **self.tensors, out_features=self.N)
        return reference.int4_product(grouped, scale, **self.tensors, out_features=self.N)

    def codes(self, x: Tensor) -> Codes:
        codes = Codes.of(len(x), self.packed)
        to_codes(x, codes, self.K).run()
        return codes

    def by_gemv(self, x: Tensor, **rest: Tensor) -> Tensor:
        y = torch.full((len(x), self.N), torch.nan)
        gemv(self.codes(x), self.packed, y, self.N, **rest).run()
        return y

    def by_gemm(self, x: Tensor, shape: ProgramShape, **rest: Tensor) -> Tensor:
        y, partial = (
            torch.full((len(x), self.N), torch.nan),
            torch.full((self.packed.slices, len(x), self.N), torch.nan),
        )
        run_all(gemm(self.codes(x), self.packed, y, self.N, shape=shape, partial=partial, **rest))
        return y


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


WEIGHTS = ("int4-g32", "int4-g64", "int4-g128", "int8")


@settings(max_examples=8, deadline=None, phases=[Phase.generate])
@given(
    weights=st.sampled_from(WEIGHTS),
    rows=st.integers(1, 6),
    N=st.integers(1, 40),
    K=st.integers(1, 500),
    seed=st.integers(0, 1000),
)
def test_dot_products_of_bytes_are_the_reference_for_any_shape(weights, rows, N, K, seed):
    torch.manual_seed(seed)
    matrix, x = Matrix(N, K, weights), torch.randn(rows, K)
    assert error(matrix.by_gemv(x), matrix.expected(x)) < TOLERANCE


@pytest.mark.parametrize(
    ("weights", "shape", "rows", "N", "K"),
    every_other(
        [
            ("int4-g32", ProgramShape(64, 16), 5, 40, 300),
            ("int8", ProgramShape(64, 16), 5, 70, 300),
            ("int8", ProgramShape(32, 32, 4), 17, 20, 1100),
            ("int4-g128", ProgramShape(32, 32, 4), 17, 20, 1100),
            ("int4-g64", ProgramShape(128, 64), 150, 140, 700),
            ("int8", ProgramShape(128, 64, 8), 70, 20, 700),
        ]
    ),
)
def test_tensor_cores_give_the_same_bits(weights, shape, rows, N, K):
    matrix, x = Matrix(N, K, weights), torch.randn(rows, K)
    found = matrix.by_gemm(x, shape)
    assert error(found, matrix.expected(x)) < TOLERANCE
    # Each row of dot products takes half a second in the interpreter: at a program's ends, and between them.
    some = sorted({0, 3, rows - 1, *(row for row in (63, 64) if row < rows)})
    assert torch.equal(found[some], matrix.by_gemv(x[some]))


@pytest.mark.parametrize("weights", every_other(["int4-g64", "int8"]))
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(weights):
    matrix, x = Matrix(32, 600, weights), torch.randn(6, 600)
    alone = torch.cat([matrix.by_gemv(x[i : i + 1]) for i in range(6)])
    assert torch.equal(matrix.by_gemv(x), alone)
    assert torch.equal(matrix.by_gemm(x, ProgramShape(64, 16, 2)), alone)


@pytest.mark.parametrize("weights", ["int4-g64", "int8"])
@pytest.mark.parametrize("rows", every_other([2, 6]))
def test_a_bias_and_what_is_there_are_added(weights, rows):
    matrix, x, bias = Matrix(40, 200, weights), torch.randn(rows, 200), torch.randn(40)
    for dispatch in (Dispatch(1, gemv_rows=16), Dispatch(1, gemv_rows=0), Dispatch(64, gemv_rows=0)):
        y = torch.randn(rows, 40)
        expected = matrix.expected(x) + bias + y
        run_all(dispatch.product(matrix.codes(x), matrix.packed, y, 40, bias, adds=True))
        assert error(y, expected) < TOLERANCE


def test_a_nan_reaches_every_output_of_its_row_and_no_other():
    matrix, x = Matrix(20, 300, "int4-g64"), torch.randn(6, 300)
    x[1, 77], x[4, 299] = torch.nan, torch.inf
    for found in (matrix.by_gemv(x), matrix.by_gemm(x, ProgramShape(32, 16, 2))):
        assert found[[1, 4]].isnan().all() and found[[0, 2, 3, 5]].isfinite().all()


@pytest.mark.parametrize(
    ("weights", "codes_for", "rows"),
    every_other(
        [("int4-g64", "int4-g64", 3), ("int8", "int8", 7), ("int4-g32", "int4-g128", 1), ("int4-g64", "int8", 70)]
    ),
)
@pytest.mark.parametrize("features", [48, 112])
def test_a_product_ends_in_the_codes_of_its_gate(weights, codes_for, rows, features):
    """As a launch of its own makes them, whichever kernel ends it."""
    matrix, x, bias = Matrix(2 * features, 300, weights), torch.randn(rows, 300), torch.randn(2 * features)
    following = Matrix(8, features, codes_for).packed
    right = Codes.of(rows, following)
    to_codes(matrix.by_gemv(x, bias=bias), right, features, activation="silu").run()
    for dispatch in (Dispatch(1, gemv_rows=100), Dispatch(1, gemv_rows=0), Dispatch(64, gemv_rows=0)):
        found = Codes.of(rows, following)
        found.q.fill_(99)
        gate = Gate(found, "silu", features)
        run_all(dispatch.product(matrix.codes(x), matrix.packed, gate, 2 * features, bias, adds=False))
        assert all(torch.equal(getattr(found, part), getattr(right, part)) for part in ("q", "scale", "bias"))


def test_tables_of_cards_hold_what_a_dispatch_has():
    for table in _tables().values():
        dispatch = Dispatch(64, **table)
        assert 1 <= dispatch.gemv_rows <= 64 and dispatch.programs >= 1 and dispatch.stages >= 1
    assert {"sm_80", "sm_86", "sm_89", "sm_90", "sm_120"} <= set(_tables())


def test_a_card_is_tuned_by_what_was_faster(monkeypatch):
    """Times are played: the way to a table is what is tried."""
    monkeypatch.setattr(tune_kernels, "MATRICES", ((32, 128),))
    monkeypatch.setattr(tune_kernels, "_COPIED_BYTES", 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(multi_processor_count=8))

    def played(_device: torch.device, sides: dict[object, object]) -> dict[object, float]:
        if set(sides) == {0, 1}:
            return {0: next(gemv_seconds), 1: 1.0}
        return {cut: cut.programs + abs(cut.stages - 3) for cut in sides}  # type: ignore[attr-defined]

    monkeypatch.setattr(tune_kernels, "seconds", played)
    gemv_seconds = iter((0.5, 0.9, 1.1, 2.0))
    found = tune_kernels.tuned(torch.device("cpu"))
    assert found == {"gemv_rows": 4, "programs": 1, "stages": 3, "is_measured": True}
