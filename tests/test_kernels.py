"""Each kernel against its plain version in kernels/reference.py, on round and odd shapes."""

from __future__ import annotations

import pytest
import torch

from localllm.kernels import cpu_gemv, cpu_isa, cpu_jit, reference
from localllm.kernels.attention import attention
from localllm.kernels.cpu_gemv import dense_linear

SHAPES = [(1, 32), (4, 32), (7, 32), (64, 64), (67, 96), (1000, 2048), (513, 5632)]
needs_kernel = pytest.mark.skipif(not cpu_gemv.supports(1, 64, 64), reason="no llvmlite or no OpenMP runtime here")


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@needs_kernel
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_gemv_is_the_product_rounded_to_bf16(out_features, in_features):
    weight = random(out_features, in_features, seed=1)
    for rows in range(1, cpu_gemv.MAX_ROWS + 1):
        x = random(rows, in_features)
        exact = x.double() @ weight.double().T
        error = (cpu_gemv.cpu_gemv(x, weight).double() - exact).abs()
        # Half a unit in bf16's 8th bit for the rounding, and fp32 sums of K products of size one.
        assert (error <= exact.abs() * 2**-8 + in_features**0.5 * 2**-20).all()


@needs_kernel
def test_a_row_of_the_gemv_has_the_same_bits_whatever_stands_beside_it_on_any_number_of_threads(threads):
    x, weight = random(8, 2048), random(515, 2048, seed=1)
    alone = torch.cat([cpu_gemv.cpu_gemv(x[i : i + 1], weight) for i in range(8)])
    for rows, count in ((2, torch.get_num_threads()), (3, 1), (5, 2), (8, 3)):
        threads(count)
        assert torch.equal(cpu_gemv.cpu_gemv(x[:rows], weight), alone[:rows])


@pytest.mark.parametrize(("rows", "out_features", "in_features"), [(9, 64, 64), (0, 64, 64), (1, 64, 40)])
def test_shapes_that_the_gemv_cannot_do_are_left_to_torch(rows, out_features, in_features):
    assert not cpu_gemv.supports(rows, out_features, in_features)
    x, weight = random(rows, in_features), random(out_features, in_features, seed=1)
    torch.testing.assert_close(dense_linear(x, weight), reference.linear(x, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_dense_linear_adds_the_bias(rows, dtype):
    x, weight, bias = (random(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(rows, 96), (33, 96), (33,)]))
    expected, atol = reference.linear(x, weight, bias), 0.1 if dtype is torch.bfloat16 else 1e-4
    torch.testing.assert_close(dense_linear(x, weight, bias), expected, rtol=2**-7, atol=atol)


def test_where_no_kernel_compiles_the_gemv_declines(monkeypatch):
    def refuse(*_: object) -> None:
        raise cpu_jit.KernelUnavailableError("llvmlite is not installed")

    monkeypatch.setattr(cpu_gemv, "best_isa", refuse)
    cpu_gemv.supports.cache_clear()
    try:
        assert not cpu_gemv.supports(1, 64, 64)
        assert dense_linear(random(1, 64), random(64, 64)).shape == (1, 64)
    finally:
        cpu_gemv.supports.cache_clear()


@pytest.mark.parametrize("error", [ImportError, OSError])
def test_an_llvmlite_that_cannot_be_loaded_leaves_no_instruction_set(without_module, error):
    without_module("llvmlite", error("its library cannot be loaded"))
    assert cpu_isa.host_isas.__wrapped__() == ()


@needs_kernel
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3.4e38])
def test_gemv_passes_on_what_is_not_finite(value):
    x, weight = random(1, 64), random(64, 64, seed=1)
    x[0, 5], weight[:, 5] = value, 1.0
    expected = (x.float() @ weight.float().T).bfloat16()
    torch.testing.assert_close(cpu_gemv.cpu_gemv(x, weight), expected, equal_nan=True, rtol=2**-7, atol=0)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize(("new", "past"), [(1, 0), (1, 30), (9, 0), (9, 30), (5, 3)])
def test_attention_equals_the_reference(new, past, window, softcap):
    q = random(new, 6, 16, dtype=torch.float32)
    k, v = (random(2, past + new, 16, dtype=torch.float32, seed=seed) for seed in (1, 2))
    expected = reference.attention(q.double(), k.double(), v.double(), scale=0.3, window=window, softcap=softcap)
    ours = attention(q, k, v, scale=0.3, window=window, softcap=softcap)
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=2e-6)


def test_the_reference_attention_sees_no_future_and_nothing_beyond_its_window():
    mask = reference.visible(3, 5, 2, torch.device("cpu"))
    assert mask.tolist() == [
        [False, True, True, False, False],
        [False, False, True, True, False],
        [False, False, False, True, True],
    ]


@pytest.mark.parametrize("kernel", [True, False])
def test_a_row_of_a_small_bf16_batch_has_its_own_bits(kernel, monkeypatch):
    if not kernel:
        monkeypatch.setattr(cpu_gemv, "supports", lambda *_: False)
    x, weight, bias = random(6, 1000), random(300, 1000, seed=1), random(300, seed=2)
    together = dense_linear(x, weight, bias)
    assert torch.equal(together, torch.cat([dense_linear(x[i : i + 1], weight, bias) for i in range(6)]))
