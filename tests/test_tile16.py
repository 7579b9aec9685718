"""The tiled layouts of kernels/tile16.py and kernels/int8.py, against their descriptions byte by byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.kernels import int8, packed_linear, tile16
from localllm.kernels import packed_matrix as packed_matrices
from localllm.kernels.packed_matrix import PackedMatrix, packed_matrix

tiles = st.integers(1, 4)
groups = st.integers(1, 4)
group_sizes = st.sampled_from([8, 32, 64, 128])
seeds = st.integers(0, 2**31)
unhurried = settings(deadline=None)  # the machine may have other things to do


def codes(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 16, (rows, columns), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def group_values(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn((rows, columns), generator=torch.Generator().manual_seed(seed)).half()


@unhurried
@given(tiles, st.integers(1, 40), seeds)
def test_unpacking_gives_back_what_was_packed(num_tiles, num_words, seed):
    q = codes(16 * num_tiles, 8 * num_words, seed)
    packed = tile16.pack(q)
    assert (packed.dtype, packed.shape) == (torch.int32, (num_tiles, num_words, 16))
    assert torch.equal(tile16.unpack(packed), q)


def test_byte_b_of_a_word_holds_column_b_and_four_further_on():
    q = codes(32, 24, seed=0)
    words = tile16.pack(q).view(torch.uint8).view(2, 3, 16, 4).tolist()
    expected = [
        [
            [
                [int(q[16 * t + r, 8 * k + b]) | int(q[16 * t + r, 8 * k + 4 + b]) << 4 for b in range(4)]
                for r in range(16)
            ]
            for k in range(3)
        ]
        for t in range(2)
    ]
    assert words == expected


@unhurried
@given(tiles, groups, seeds)
def test_group_values_stand_beside_their_tile(num_tiles, num_groups, seed):
    values = group_values(16 * num_tiles, num_groups, seed)
    tiled = tile16.pack_groups(values)
    assert tiled.shape == (num_tiles, num_groups, 16)
    assert tiled[num_tiles - 1, num_groups - 1, 3] == values[16 * num_tiles - 13, num_groups - 1]
    assert torch.equal(tile16.unpack_groups(tiled), values)


@st.composite
def int4_matrices(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], torch.Tensor, int, int]:
    """Tensors, the fp32 weights that they mean, and a size [N, K] that may leave part of them as padding."""
    num_tiles, num_groups, group, seed = draw(tiles), draw(groups), draw(group_sizes), draw(seeds)
    rows, columns = 16 * num_tiles, group * num_groups
    q, scale, bias = codes(rows, columns, seed), *(group_values(rows, num_groups, seed + i) for i in (1, 2))
    weights = scale.float().repeat_interleave(group, 1) * q + bias.float().repeat_interleave(group, 1)
    tensors = {"qweight": tile16.pack(q), "scale": tile16.pack_groups(scale), "bias": tile16.pack_groups(bias)}
    return tensors, weights, draw(st.integers(rows - 15, rows)), draw(st.integers(columns - group + 1, columns))


@unhurried
@given(int4_matrices(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_dequantizing_is_scale_times_code_plus_bias(matrix, dtype):
    tensors, weights, N, K = matrix
    met = packed_matrix(tensors).dequantize(N, K, dtype)
    assert torch.equal(met, weights[:N, :K].to(dtype))


@unhurried
@given(int4_matrices(), seeds)
def test_rows_are_those_of_the_dequantized_matrix(matrix, seed):
    tensors, weights, N, K = matrix
    indices = torch.randint(0, N, (seed % 9,), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(packed_matrix(tensors).rows(indices, K), weights[indices, :K])


@pytest.mark.parametrize("slab_weights", [1, 3000, 1 << 30])
def test_the_slab_does_not_show_in_what_is_dequantized(monkeypatch, slab_weights):
    q, scale, bias = codes(80, 128, 0), group_values(80, 2, 1), group_values(80, 2, 2)
    tensors = tile16.pack(q), tile16.pack_groups(scale), tile16.pack_groups(bias)
    expected = PackedMatrix(*tensors).dequantize(75, 120, torch.float32)
    monkeypatch.setattr(packed_matrices, "SLAB_WEIGHTS", slab_weights)
    assert torch.equal(PackedMatrix(*tensors).dequantize(75, 120, torch.float32), expected)


@pytest.mark.parametrize("slab_weights", [1, 3000, 1 << 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dequantized_product_is_that_of_the_whole_matrix(monkeypatch, slab_weights, dtype):
    monkeypatch.setattr(packed_linear, "SLAB_WEIGHTS", slab_weights)
    q, scale, bias = codes(80, 128, 0), group_values(80, 2, 1), group_values(80, 2, 2)
    tensors = tile16.pack(q), tile16.pack_groups(scale), tile16.pack_groups(bias)
    x = torch.randn((3, 120), generator=torch.Generator().manual_seed(3)).to(dtype)
    exact = x.double() @ PackedMatrix(*tensors).dequantize(75, 120, dtype).double().T
    # fp32 sums of 120 products; the result is rounded to dtype.
    tolerance = 1e-4 + exact.abs() * torch.finfo(dtype).eps
    assert ((packed_linear.dequantized_linear(x, PackedMatrix(*tensors), 75).double() - exact).abs() <= tolerance).all()


@unhurried
@given(tiles, st.integers(1, 40), seeds)
def test_unpacking_bytes_gives_back_what_was_packed(num_tiles, num_words, seed):
    shape = (16 * num_tiles, 4 * num_words)
    q = torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    packed = int8.pack(q)
    assert packed.shape == (num_tiles, num_words, 16, 4)
    assert packed[num_tiles - 1, num_words - 1, 5].tolist() == q[16 * num_tiles - 11, -4:].tolist()
    assert torch.equal(int8.unpack(packed), q)


@settings(max_examples=30, deadline=None)
@given(tiles, st.integers(1, 10), seeds, st.sampled_from([torch.float32, torch.bfloat16]))
def test_dequantizing_bytes_is_scale_times_code(num_tiles, num_words, seed, dtype):
    rows, columns = 16 * num_tiles, 4 * num_words
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-127, 128, (rows, columns), generator=generator, dtype=torch.int8)
    scale = torch.rand((rows, 1), generator=generator)
    tensors, N, K = (int8.pack(q), scale.view(-1, 16)), rows - seed % 16, columns - seed % 4
    expected = (scale * q)[:N, :K]
    assert torch.equal(PackedMatrix(*tensors, None).dequantize(N, K, dtype), expected.to(dtype))
    indices = torch.randint(0, N, (5,), generator=generator)
    assert torch.equal(PackedMatrix(*tensors, None).rows(indices, K), expected[indices])


@pytest.mark.parametrize("slab_weights", [1, 1 << 30])
def test_the_dequantized_product_of_bytes_is_that_of_the_whole_matrix(monkeypatch, slab_weights):
    monkeypatch.setattr(packed_linear, "SLAB_WEIGHTS", slab_weights)
    monkeypatch.setattr(packed_matrices, "SLAB_WEIGHTS", slab_weights)
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-127, 128, (80, 128), generator=generator, dtype=torch.int8)
    scale = torch.rand((5, 16), generator=generator) / 127
    x = torch.randn((3, 120), generator=generator)
    exact = x.double() @ (scale.view(-1, 1) * q)[:75, :120].double().T
    torch.testing.assert_close(
        packed_linear.dequantized_linear(x, PackedMatrix(int8.pack(q), scale, None), 75).double(),
        exact,
        atol=1e-5,
        rtol=1e-5,
    )
