"""Packed weights times rows, by both kernels, in Triton's interpreter: exact to fp32, whatever the number of rows."""

from __future__ import annotations

from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from localllm.kernels import int8, reference, tile16
from localllm.kernels.gpu.activations import Codes, to_codes
from localllm.kernels.gpu.gemm import ProgramShape, gemm
from localllm.kernels.gpu.gemv import gemv
from localllm.kernels.gpu.launch import run_all
from localllm.kernels.gpu.product import Dispatch, _tables
from localllm.kernels.gpu.product_end import Gate
from localllm.kernels.packed_matrix import PackedMatrix, packed_matrix
from localllm.kernels.sizes import Glu, Weights
from localllm.quant.int4 import Int4
from localllm.quant.int8 import Int8
from localllm.quant.layouts import TABLES
from tests.thinning import every_other
from tools import tune_kernels

TOLERANCE = 1e-6  # of the norm: what fp32 sums of some hundred terms lose


def random_codes(N: int, K: int, weights: Weights) -> PackedMatrix:
    """Any codes, in groups."""
    tiles, groups = -(-N // 16), -(-K // weights.columns)
    shape = (16 * tiles, groups * weights.columns)
    if weights.bits == 8:
        qweight = int8.pack(torch.randint(-128, 128, shape, dtype=torch.int8))
    else:
        qweight = tile16.pack(torch.randint(0, 16, shape, dtype=torch.uint8))
    scale, bias = torch.randn(2, tiles, groups, 16).half() * 0.1
    return PackedMatrix(qweight, scale, bias if weights.has_bias else None, weights.table)


def matrix_of(N: int, K: int, weights: str | Weights) -> PackedMatrix:
    if isinstance(weights, Weights):
        return random_codes(N, K, weights)
    form = Int8() if weights == "int8" else Int4(int(weights.removeprefix("int4-g")), "rtn")
    return packed_matrix(form.quantize(torch.randn(N, K) * K**-0.5))


def exact_product(codes: Codes, matrix: PackedMatrix, out_features: int) -> Tensor:
    """fp64 [M, out_features]"""
    weights = matrix.dequantize(out_features, matrix.in_features, torch.float32)
    grouped = codes.in_order().view(len(codes.q), -1, codes.group).double() * codes.scale.T.double().unsqueeze(-1)
    return grouped.flatten(1) @ weights.double().T


class Matrix:
    """A random one, and what the reference makes of rows times it."""

    def __init__(self, N: int, K: int, weights: str | Weights) -> None:
        self.N, self.K = N, K
        self.packed = matrix_of(N, K, weights)

    def expected(self, x: Tensor) -> Tensor:
        """Of the codes that the kernel made: fp64."""
        return exact_product(self.codes(x), self.packed, self.N)

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
CODED = (
    Weights(4, 16),
    *(Weights(4, group, False, TABLES[kind]) for kind, group in (("int4", 16), ("int4", 32), ("int4", 128))),
    *(Weights(4, group, False, TABLES[kind]) for kind, group in (("fp4", 16), ("iq4", 32), ("nf4", 64), ("bnb4", 128))),
    *(Weights(8, group, has_bias) for group, has_bias in ((16, True), (32, False), (64, True), (128, False))),
)


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


@pytest.mark.parametrize("weights", every_other(CODED), ids=attrgetter("name"))
def test_codes_of_other_files_are_the_reference_and_have_the_same_bits_from_both_kernels(weights: Weights) -> None:
    matrix, x = Matrix(20, 300, weights), torch.randn(3, 300)
    found, codes = matrix.by_gemv(x), matrix.codes(x)
    q, scale = reference.int8_activations(functional.pad(x, (0, codes.q.shape[1] - 300)), codes.group)
    assert torch.equal(codes.in_order(), q.flatten(1)) and torch.allclose(codes.scale.T, scale)
    assert error(found, matrix.expected(x)) < TOLERANCE
    for parts in (1, 2):
        assert torch.equal(matrix.by_gemm(x, ProgramShape(32, 16, parts)), found)


def test_every_code_stands_for_its_value() -> None:
    """Exactly, the lowest byte too: of each column alone, by both kernels."""
    for weights in (*(Weights(4, 16, False, TABLES[kind]) for kind in TABLES if kind != "int8"), Weights(8, 16, False)):
        matrix, x = Matrix(32, 16, weights), torch.eye(16) * 127
        matrix.packed.scale.fill_(1)
        expected = matrix.packed.dequantize(32, 16, torch.float32).T * 127
        assert torch.equal(matrix.by_gemv(x), expected)
        assert torch.equal(matrix.by_gemm(x, ProgramShape(32, 16)), expected)


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
        [
            ("int4-g64", "int4-g64", 3),
            ("int8", "int8", 7),
            ("int4-g32", "int4-g128", 1),
            ("int4-g64", "int8", 70),
            (CODED[4], CODED[9], 2),
            (CODED[8], CODED[4], 2),
        ]
    ),
)
@pytest.mark.parametrize("features", [48, 112])
def test_a_product_ends_in_the_codes_of_its_gate(weights, codes_for, rows, features):
    """As a launch of its own makes them, whichever kernel ends it."""
    glu = Glu("silu") if features == 48 else Glu("quick_gelu", limit=0.5, up_offset=1.0)
    matrix, x, bias = Matrix(2 * features, 300, weights), torch.randn(rows, 300), torch.randn(2 * features)
    following = Matrix(8, features, codes_for).packed
    right = Codes.of(rows, following)
    to_codes(matrix.by_gemv(x, bias=bias), right, features, glu=glu).run()
    for dispatch in (Dispatch(1, gemv_rows=100), Dispatch(1, gemv_rows=0), Dispatch(64, gemv_rows=0)):
        found = Codes.of(rows, following)
        found.q.fill_(99)
        gate = Gate(found, glu, features)
        run_all(dispatch.product(matrix.codes(x), matrix.packed, gate, 2 * features, bias, adds=False))
        assert all(torch.equal(getattr(found, part), getattr(right, part)) for part in ("q", "scale", "bias"))


def test_columns_of_gpt_oss_are_90_groups_which_no_number_of_slices_divides():
    matrix, x = Matrix(20, 2880, Weights(4, 32, False, TABLES["fp4"])), torch.randn(2, 2880)
    found = matrix.by_gemv(x)
    assert error(found, matrix.expected(x)) < TOLERANCE
    for parts in (1, 4):
        assert torch.equal(matrix.by_gemm(x, ProgramShape(32, 16, parts)), found)


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


BY_HEAD = [
    (2, 64, 64, 32, "int4-g32"),
    (3, 48, 128, 7, "int8"),
    (2, 32, 64, 3, Weights(8, 16)),
    (5, 16, 32, 20, "int4-g32"),
]


@pytest.mark.parametrize(("heads", "N", "K", "rows", "weights"), every_other(BY_HEAD))
@pytest.mark.parametrize("programs", [0, 100])
def test_each_head_is_multiplied_with_its_own_rows_as_alone(heads, N, K, rows, weights, programs):
    """By both kernels; `programs` has the second one's columns shared out."""
    packed, x = matrix_of(heads * N, K, weights), torch.randn(rows, heads * K)
    codes = Codes.empty(rows, heads * K, packed.group, x.device, packed.bits)
    to_codes(x, codes, heads * K).run()
    expected, tiles = torch.full((rows, heads * N), torch.nan), N // 16
    for head in range(heads):
        part, own = packed.part(slice(head * tiles, (head + 1) * tiles)), Codes.of(rows, packed)
        to_codes(x[:, head * K : (head + 1) * K], own, K).run()
        gemv(own, part, expected[:, head * N : (head + 1) * N], N).run()
    for gemv_rows in (0, rows):
        y = torch.full_like(expected, torch.nan)
        dispatch = Dispatch(multiprocessors=1, gemv_rows=gemv_rows, programs=programs)
        run_all(dispatch.product(codes, packed, y, heads * N, None, adds=False, heads=heads))
        assert torch.equal(y, expected)
