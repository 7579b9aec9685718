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
from localllm.kernels.gpu.dequantize import dequantize
from localllm.kernels.gpu.gemm import ProgramShape, gemm
from localllm.kernels.gpu.gemv import gemv
from localllm.kernels.gpu.launch import run_all
from localllm.kernels.gpu.product import Dispatch, _tables, multiply_dequantized
from localllm.kernels.tile16 import PackedMatrix
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
        assert codes.scale is not None
        grouped = codes.q.view(len(x), -1, codes.group)
        if isinstance(self.form, Int8):
            return reference.int8_product(grouped, codes.scale, **self.tensors, out_features=self.N)
        return reference.int4_product(grouped, codes.scale, **self.tensors, out_features=self.N)

    def codes(self, x: Tensor, bits: int = 8) -> Codes:
        codes = Codes.empty(len(x), self.packed.in_features, self.packed.group, x.device, bits)
        to_codes(x, codes, self.K).run()
        return codes

    def by_gemv(self, x: Tensor, **rest: Tensor) -> Tensor:
        y = torch.full((len(x), self.N), torch.nan)
        gemv(self.codes(x), self.packed, y, self.N, **rest).run()
        return y

    def by_gemm(self, x: Tensor, shape: ProgramShape, **rest: Tensor) -> Tensor:
        y, partial = torch.full((len(x), self.N), torch.nan), torch.full((shape.parts, len(x), self.N), torch.nan)
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
            ("int4-g32", ProgramShape(64, 1), 5, 40, 300),
            ("int8", ProgramShape(64, 1), 5, 70, 300),
            ("int8", ProgramShape(32, 4), 17, 20, 1100),
            ("int4-g128", ProgramShape(32, 4), 17, 20, 1100),
        ]
    ),
)
def test_tensor_cores_give_the_same_bits(weights, shape, rows, N, K):
    matrix, x = Matrix(N, K, weights), torch.randn(rows, K)
    found = matrix.by_gemm(x, shape)
    assert error(found, matrix.expected(x)) < TOLERANCE
    assert torch.equal(found, matrix.by_gemv(x))


@pytest.mark.parametrize("weights", every_other(["int4-g64", "int8"]))
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(weights):
    matrix, x = Matrix(32, 600, weights), torch.randn(6, 600)
    alone = torch.cat([matrix.by_gemv(x[i : i + 1]) for i in range(6)])
    assert torch.equal(matrix.by_gemv(x), alone)
    assert torch.equal(matrix.by_gemm(x, ProgramShape(64, 2)), alone)


@pytest.mark.usefixtures("products_row_by_row")
@pytest.mark.parametrize("weights", ["int4-g32", "int4-g64", "int8"])
def test_activations_in_16_bits_lose_nothing(weights):
    """Of what they had in bf16; and up to 16 rows have the bits that each has alone."""
    matrix, x = Matrix(40, 500, weights), torch.randn(9, 500).bfloat16()
    expected = x.double() @ matrix.form.dequantize(matrix.tensors, 40, 500).double().T
    found = {}
    for rows in (9, 1):
        y = torch.full((9, 40), torch.nan)
        for first in range(0, 9, rows):
            codes = matrix.codes(x[first : first + rows].float(), 16)
            run_all(Dispatch(64).product(codes, matrix.packed, y[first : first + rows], 40, None, adds=False))
        assert error(y, expected) < TOLERANCE
        found[rows] = y
    assert torch.equal(found[1], found[9])


def test_what_is_no_number_stays_so_in_16_bits():
    matrix, x = Matrix(20, 300, "int4-g64"), torch.randn(3, 300)
    x[1, 77], x[2, 299] = torch.nan, torch.inf
    y = torch.full((3, 20), torch.nan)
    run_all(Dispatch(64).product(matrix.codes(x, 16), matrix.packed, y, 20, None, adds=False))
    assert y[0].isfinite().all() and not y[1:].isfinite().any()


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
    for found in (matrix.by_gemv(x), matrix.by_gemm(x, ProgramShape(32, 2))):
        assert found[[1, 4]].isnan().all() and found[[0, 2, 3, 5]].isfinite().all()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_dequantized_weights_are_those_of_the_format(weights):
    matrix = Matrix(40, 300, weights)
    expected = matrix.form.dequantize(matrix.tensors, 40, 300)
    out = torch.full((48, 300), torch.nan)
    dequantize(matrix.packed, out, 0, 3, 40).run()
    assert torch.equal(out[:40], expected)
    dequantize(matrix.packed, out, 1, 1, 40).run()
    assert torch.equal(out[:16], expected[16:32])


def test_many_rows_are_multiplied_slab_by_slab(monkeypatch):
    monkeypatch.setattr("localllm.kernels.gpu.product.SLAB_WEIGHTS", 16 * 300)
    matrix, x = Matrix(40, 300, "int4-g64"), torch.randn(70, 300)
    y = torch.full((70, 40), torch.nan)
    multiply_dequantized(x, matrix.packed, y)
    assert error(y, x.double() @ matrix.form.dequantize(matrix.tensors, 40, 300).double().T) < TOLERANCE


def test_tables_of_cards_hold_what_a_dispatch_has():
    for table in _tables().values():
        dispatch = Dispatch(64, **table)
        assert dispatch.activation_bits in (8, 16)
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
        if set(sides) == {8, 16}:
            return {8: 1.0, 16: next(wide_seconds)}
        return {cut: cut.programs + abs(cut.stages - 3) for cut in sides}  # type: ignore[attr-defined]

    monkeypatch.setattr(tune_kernels, "seconds", played)
    for played_wide, bits in (((1.01, 0.9), 16), ((0.9, 1.1), 8)):
        wide_seconds = iter(played_wide)
        gemv_seconds = iter((0.5, 0.9, 1.1, 2.0))
        found = tune_kernels.tuned(torch.device("cpu"))
        assert found == {
            "activation_bits": bits, "gemv_rows": 4, "programs": 1, "stages": 3, "is_measured": True
        }  # fmt: skip
