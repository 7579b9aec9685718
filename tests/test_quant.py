"""The weight formats: what they promise of every matrix, whatever its shape and its values."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localllm.errors import CheckpointError, UsageError
from localllm.kernels import cpu_calibrate, reference
from localllm.kernels.cpu_isa import host_isas
from localllm.quant import hqq, nf4
from localllm.quant import int4 as int4_format
from localllm.quant import int8 as int8_format
from localllm.quant.int4 import Int4
from localllm.quant.int8 import Int8
from localllm.quant.layouts import ALIASES
from localllm.quant.nf4 import NF4, MissingBitsandbytesError
from localllm.quant.recipe import DEFAULT, RECIPES, recipe
from localllm.quant.weight_format import WeightFormat
from tests.patience import PATIENCE_S

GROUPS = (32, 64, 128)
INT4 = [Int4(group, how) for group in GROUPS for how in ("hqq", "rtn")]
QUANTIZED: list[WeightFormat] = [Int8(), NF4(), *INT4]
FORMATS = list({recipe.blocks.name: recipe.blocks for recipe in RECIPES.values()}.values())
each_format = pytest.mark.parametrize("weights", FORMATS, ids=lambda weights: weights.name)
each_quantized = pytest.mark.parametrize("weights", QUANTIZED, ids=lambda weights: weights.name)
each_int4 = pytest.mark.parametrize("weights", INT4, ids=lambda weights: weights.name)
needs_kernel = pytest.mark.skipif(not cpu_calibrate.supports(64), reason="no native kernels here")
odd_shapes = pytest.mark.parametrize(("N", "K"), [(1, 1), (5, 7), (16, 64), (17, 65), (33, 200), (1, 384), (64, 100)])

unhurried = settings(deadline=None)  # the machine may have other things to do
sixty = settings(max_examples=60, deadline=None)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same_bytes(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    assert some.keys() == others.keys()
    return all(some[name].numpy().tobytes() == others[name].numpy().tobytes() for name in some)


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """[1..40, 1..200] of normal, heavy-tailed, stepped or one-sided weights of any size that fp16 holds."""
    N, K, seed = draw(st.integers(1, 40)), draw(st.integers(1, 200)), draw(st.integers(0, 2**31))
    size = 2.0 ** draw(st.integers(-30, 10))
    values = normal(N, K, seed=seed)
    kind = draw(st.sampled_from(["normal", "heavy", "steps", "positive", "sparse"]))
    if kind == "heavy":
        values = values / normal(N, K, seed=seed + 1).abs().clamp(min=0.02)
    elif kind == "steps":
        values = values.round()
    elif kind == "positive":
        values = values.abs() + 3
    elif kind == "sparse":
        values = values * (normal(N, K, seed=seed + 1) > 1.5)
    return (values * size).clamp(-65504, 65504)


def int4_bound(tensors: dict[str, Tensor], weight: Tensor, group: int) -> Tensor:
    """[N, K]: s/2 + |b|/2048, a hair for fp32 and for the smallest step of fp16, and what lies beyond the codes."""
    N, K = weight.shape
    scale, bias = (
        tensors[name].transpose(1, 2).reshape(-1, tensors[name].shape[1]).float().repeat_interleave(group, 1)[:N, :K]
        for name in ("scale", "bias")
    )
    clipped = (bias - weight).clamp(min=0) + (weight - (bias + 15 * scale)).clamp(min=0)
    return scale / 2 + clipped + weight.abs() * 2**-20 + bias.abs() * 2**-20 + 2**-24


@each_format
@odd_shapes
def test_tensors_are_those_of_the_specs_and_rows_those_of_the_dequantized_matrix(weights, N, K):
    tensors = weights.quantize(normal(N, K))
    told = {name: (spec.shape, spec.torch_dtype) for name, spec in weights.specs(N, K).items()}
    assert list({name: (t.shape, t.dtype) for name, t in tensors.items()}.items()) == list(told.items())
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    indices = torch.tensor([0, N - 1, N // 2, 0])
    assert torch.equal(weights.rows(tensors, indices, K), weights.dequantize(tensors, N, K)[indices])


@each_quantized
@odd_shapes
def test_a_linear_is_the_product_with_the_dequantized_matrix(weights, N, K):
    tensors = weights.quantize(normal(N, K))
    for dtype in (torch.bfloat16, torch.float32):
        x, bias = normal(3, K, seed=1).to(dtype), normal(N, seed=2).to(dtype)
        exact = x.double() @ weights.dequantize(tensors, N, K).double().T
        y = weights.linear(x, tensors, N, bias).double() - bias.double()
        # Activations in INT8: half a step of 1/127 of the group's largest, against weights of size one; bf16 of both.
        tolerance = K**0.5 * x.abs().max().double() * (0.5 / 127 + 2**-8) * 2 + 2**-6
        assert ((y - exact).abs() <= tolerance).all()
        assert weights.linear(x[:0], tensors, N, None).shape == (0, N)


@each_quantized
def test_a_weight_of_bf16_is_read_like_the_same_in_fp32(weights):
    weight = normal(33, 100).bfloat16()
    assert same_bytes(weights.quantize(weight), weights.quantize(weight.float()))


@unhurried
@given(matrices())
def test_int8_meets_every_weight_within_half_a_step(weight):
    tensors = Int8().quantize(weight)
    met = Int8().dequantize(tensors, *weight.shape)
    scale = tensors["scale"].view(-1, 1)[: len(weight)]
    assert ((met - weight).abs() <= scale * 0.5001).all()
    assert torch.equal(scale, weight.abs().amax(1, keepdim=True) / 127)


@sixty
@given(matrices(), st.sampled_from(INT4))
def test_int4_meets_every_weight_that_it_does_not_clip_within_half_a_step(weight, weights):
    tensors = weights.quantize(weight)
    error = (weights.dequantize(tensors, *weight.shape) - weight).abs()
    assert (error <= int4_bound(tensors, weight, weights.group)).all()


@sixty
@given(matrices(), st.sampled_from(GROUPS))
def test_round_to_nearest_clips_no_more_than_what_fp16_rounds_away(weight, group):
    tensors = Int4(group, "rtn").quantize(weight)
    error = (Int4(group, "rtn").dequantize(tensors, *weight.shape) - weight).abs()
    columns = torch.nn.functional.pad(weight, (0, -weight.shape[1] % group), mode="replicate")
    low, high = torch.aminmax(columns.view(len(weight), -1, group), dim=-1)
    step, largest = (high - low) / 15, torch.maximum(low.abs(), high.abs())
    # The stored scale is off by 2^-11 of itself, fifteen steps on; the bias by 2^-11 of itself.
    bound = (step * (0.5 + 16 * 2**-11) + largest * 2**-10 + 2**-20).repeat_interleave(group, 1)
    assert (error <= bound[:, : weight.shape[1]]).all()


@sixty
@given(matrices(), st.sampled_from(GROUPS))
def test_hqq_never_has_more_squared_error_in_a_group_than_round_to_nearest(weight, group):
    def errors(weights: Int4) -> Tensor:
        met = weights.dequantize(weights.quantize(weight), *weight.shape)
        error = (met.double() - weight.double()).square()
        return torch.nn.functional.pad(error, (0, -weight.shape[1] % group)).view(len(weight), -1, group).sum(-1)

    nearest = errors(Int4(group, "rtn"))
    assert (errors(Int4(group)) <= nearest * (1 + 1e-5) + 1e-30).all()


@pytest.mark.parametrize(("group", "of_nearest"), [(32, 0.79), (64, 0.83), (128, 0.84)])
@pytest.mark.parametrize("tails", ["normal", "student"])
def test_hqq_saves_a_sixth_to_a_fifth_of_the_squared_error(group, of_nearest, tails):
    weight = normal(256, 1024)
    if tails == "student":  # of four degrees of freedom
        weight = weight / (normal(4, 256, 1024, seed=1).square().mean(0)).sqrt()

    def error(weights: Int4) -> float:
        return (weights.dequantize(weights.quantize(weight), *weight.shape) - weight).square().sum().item()

    assert error(Int4(group)) < (of_nearest + (0.04 if tails == "student" else 0)) * error(Int4(group, "rtn"))


@each_int4
def test_weights_that_lie_on_sixteen_steps_are_met_exactly(weights):
    steps = torch.arange(128) * 7 % 16
    weight = (steps * 0.125 - 1).view(1, 128).repeat(3, 1)
    assert torch.equal(weights.dequantize(weights.quantize(weight), 3, 128), weight)


@each_quantized
def test_zeros_stay_zeros(weights):
    weight = torch.zeros((20, 130))
    weight[3, 70:] = 1.0
    met = weights.dequantize(weights.quantize(weight), 20, 130)
    assert torch.equal(met[weight == 0], weight[weight == 0])


@each_int4
def test_a_constant_group_is_met_as_fp16_meets_the_constant(weights):
    for value in (0.3, -1e-3, 1e-6, 65504.0):
        met = weights.dequantize(weights.quantize(torch.full((2, 256), value)), 2, 256)
        assert torch.equal(met, torch.full((2, 256), value).half().float())


@each_int4
@pytest.mark.parametrize("outlier", [50.0, -3000.0, 65504.0])
def test_an_outlier_is_kept_and_costs_its_own_group_alone(weights, outlier):
    weight = normal(16, 256) * 0.02
    expected = weights.dequantize(weights.quantize(weight), 16, 256)
    weight[5, 3] = outlier
    tensors = weights.quantize(weight)
    met = weights.dequantize(tensors, 16, 256)
    assert all(bool(tensors[name].isfinite().all()) for name in ("scale", "bias"))
    assert abs(met[5, 3].item() - outlier) < abs(outlier) / 16
    met[5, : weights.group] = expected[5, : weights.group]
    assert torch.equal(met, expected)


@each_int4
def test_both_ends_of_the_range_of_fp16_have_finite_scales(weights):
    """Weights too small for it are met within its smallest step."""

    def error(weight: Tensor) -> Tensor:
        return (weights.dequantize(weights.quantize(weight), 16, 128) - weight).abs()

    assert (error(normal(16, 128).sign() * 65504) <= 65504 * 2**-9).all()
    for size in (1e-8, 1e-20, 1e-42):
        weight = normal(16, 128) * size
        assert (error(weight) <= weight.abs().max() * 2 + 2**-25).all()


@each_quantized
@pytest.mark.parametrize(
    ("bad", "dtype"), [(math.nan, torch.float32), (math.inf, torch.bfloat16), (-math.inf, torch.float32)]
)
def test_a_weight_that_is_not_finite_is_refused_with_its_place(weights, bad, dtype):
    weight = normal(20, 70).to(dtype)
    weight[17, 5] = bad
    with pytest.raises(CheckpointError, match="not a finite number") as caught:
        weights.quantize(weight)
    assert caught.value.why == "1 of 1400 values, the first at row 17, column 5"


@each_int4
def test_a_weight_beyond_fp16_is_refused_with_its_size(weights):
    weight = normal(20, 70)
    weight[17, 5] = -70000.0
    with pytest.raises(CheckpointError, match="too large for this format: 70000") as caught:
        weights.quantize(weight)
    assert "65504" in caught.value.why
    other = recipe(caught.value.fix.removeprefix("--weights ")).blocks
    assert other.dequantize(other.quantize(weight), 20, 70)[17, 5].item() == pytest.approx(-70000.0)


@each_quantized
def test_the_number_of_threads_does_not_show_in_the_bytes(weights, threads):
    weight, found = normal(200, 321), []
    for count in (1, 2, 3):
        threads(count)
        found.append(weights.quantize(weight))
    assert same_bytes(found[1], found[0]) and same_bytes(found[2], found[0])


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_kernel), False])
@pytest.mark.parametrize("slab_weights", [1, 20_000, 1 << 30])
def test_the_slab_does_not_show_in_the_bytes(monkeypatch, native, slab_weights):
    weight = normal(200, 321)
    if not native:
        monkeypatch.setattr(cpu_calibrate, "supports", lambda group: False)
    expected = [weights.quantize(weight) for weights in (*INT4, Int8())]
    monkeypatch.setattr(int4_format, "_SLAB_WEIGHTS", dict.fromkeys(("torch", "cuda", "native"), slab_weights))
    monkeypatch.setattr(int8_format, "SLAB_WEIGHTS", slab_weights)
    assert all(same_bytes(w.quantize(weight), e) for w, e in zip((*INT4, Int8()), expected, strict=True))


def test_a_row_has_the_same_bytes_whatever_rows_stand_around_it():
    weight = normal(48, 192)
    alone = Int4().quantize(weight[16:32])
    assert same_bytes({name: tensor[1:2] for name, tensor in Int4().quantize(weight).items()}, alone)


HOSTILE: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: normal(48, 384) * 0.02,
    "heavy tails": lambda: (normal(48, 384) / normal(48, 384, seed=1)).clamp(-65504, 65504),
    "all of fp16's range": lambda: normal(48, 384).clamp(-2, 2) * 32752,
    "too small for fp16": lambda: normal(48, 384) * 1e-8,
    "denormal": lambda: normal(48, 384) * 1e-40,
    "far from zero": lambda: normal(48, 384) * 0.1 + 1000,
    "sixteen steps": lambda: (normal(48, 384) * 3).round() * 0.125,
    "two values": lambda: normal(48, 384).sign(),
    "constant": lambda: torch.full((48, 384), 0.3),
    "zero": lambda: torch.zeros((48, 384)),
    "minus zero": lambda: -torch.zeros((48, 384)),
}


@needs_kernel
@pytest.mark.parametrize("isa", host_isas(), ids=lambda isa: isa.name)
@pytest.mark.parametrize("kind", HOSTILE)
def test_the_native_calibration_gives_the_bytes_of_the_torch_operations(monkeypatch, isa, kind):
    weight = HOSTILE[kind]()
    monkeypatch.setattr(cpu_calibrate, "best_isa", lambda: isa)
    native = [weights.quantize(weight) for weights in INT4]
    monkeypatch.setattr(cpu_calibrate, "supports", lambda group: False)
    assert all(same_bytes(n, weights.quantize(weight)) for n, weights in zip(native, INT4, strict=True))


def test_a_group_is_fitted_alike_whatever_groups_stand_beside_it():
    columns = normal(64, 301)
    together = hqq.half_quadratic(columns)
    alone = [hqq.half_quadratic(columns[:, i : i + 1].contiguous()) for i in (0, 17, 300)]
    expected = [(together[0][i].item(), together[1][i].item()) for i in (0, 17, 300)]
    assert [(s.item(), b.item()) for s, b in alone] == expected


@odd_shapes
def test_nf4_means_what_bitsandbytes_says(N, K):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = normal(N, K)
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    tensors = NF4().quantize(weight)
    assert torch.equal(tensors["qweight"], packed.view(-1)) and torch.equal(tensors["absmax"], state.absmax)
    code = functional.get_4bit_type("nf4", device="cpu")
    nibbles = torch.stack([packed.view(-1) >> 4, packed.view(-1) & 15], 1).flatten()[: N * K].long()
    plain = (code[nibbles] * state.absmax.repeat_interleave(64)[: N * K]).view(N, K)
    assert torch.equal(NF4().dequantize(tensors, N, K), plain)
    if K % 2 == 0:  # for odd rows bitsandbytes compiles a kernel, where it finds a compiler
        assert torch.equal(functional.dequantize_4bit(packed, state), plain)


@pytest.mark.parametrize(("N", "K"), [(300, 50), (129, 64), (1, 7)])
def test_nf4_has_the_same_bytes_and_products_in_slabs_of_any_size(N, K, monkeypatch):
    weight, x = normal(N, K), normal(3, K, seed=1)
    whole = NF4().quantize(weight)
    expected = NF4().linear(x, whole, N, None)
    monkeypatch.setattr(nf4, "SLAB_WEIGHTS", 64 * 64)
    assert same_bytes(NF4().quantize(weight), whole)
    monkeypatch.setattr(nf4, "SLAB_WEIGHTS", 1)
    torch.testing.assert_close(NF4().linear(x, whole, N, None), expected)


def test_without_bitsandbytes_nf4_says_what_to_install(without_module):
    without_module("bitsandbytes", ModuleNotFoundError("No module named 'bitsandbytes'"))
    with pytest.raises(MissingBitsandbytesError) as caught:
        NF4().quantize(normal(4, 64))
    assert "No module named 'bitsandbytes'" in caught.value.why
    assert caught.value.fix.startswith("pip install 'bitsandbytes")


def test_bitsandbytes_is_imported_when_it_is_used_in_silence_and_fetches_nothing():
    program = (
        "import sys, torch; from localllm.quant.recipe import RECIPES; from localllm.quant.nf4 import NF4; "
        "print('bitsandbytes' in sys.modules); NF4().quantize(torch.ones(1, 64)); "
        "print('bitsandbytes' in sys.modules, 'kernels' in sys.modules)"
    )
    pytest.importorskip("bitsandbytes")
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (result.stdout, result.stderr) == ("False\nTrue False\n", "")


def test_recipes_and_formats_have_names_of_their_own_and_an_unknown_one_is_refused_with_the_nearest():
    """Two recipes of one name would share their packed bytes."""
    assert [recipe.name for recipe in RECIPES.values()] == list(RECIPES)
    blocks = [recipe.blocks for recipe in RECIPES.values()]
    assert len({weights.name for weights in blocks}) == len(set(blocks))
    assert recipe("int4") is recipe(DEFAULT) is RECIPES["int4-g64"]
    assert not RECIPES.keys() & ALIASES.keys()
    with pytest.raises(UsageError, match="'int4-g46'") as caught:
        recipe("int4-g46")
    assert caught.value.fix == "--weights int4-g64" and "nf4" in caught.value.why


@unhurried
@given(matrices(), st.sampled_from(GROUPS))
def test_activations_in_int8_are_met_within_half_a_step(x, group):
    codes, scale = reference.int8_activations(x, group)
    met = (codes * scale.unsqueeze(-1)).flatten(1)
    assert (met[:, x.shape[1] :] == 0).all()
    peak = x.abs().amax(1, keepdim=True)
    assert ((met[:, : x.shape[1]] - x).abs() <= scale.repeat_interleave(group, 1)[:, : x.shape[1]] * 0.5001).all()
    assert (scale <= peak / 126.9).all()


@pytest.mark.parametrize("group", GROUPS)
def test_the_reference_products_are_exact_for_activations_that_int8_holds(group):
    x = torch.randint(-127, 128, (3, 250), generator=torch.Generator().manual_seed(0)).float()
    x[:, ::group] = 127
    weight = normal(37, 250)
    codes = reference.int8_activations(x, group)
    for weights, product in ((Int4(group), reference.int4_product), (Int8(), reference.int8_product)):
        tensors = weights.quantize(weight)
        exact = x.double() @ weights.dequantize(tensors, 37, 250).double().T
        torch.testing.assert_close(product(*codes, **tensors, out_features=37), exact, rtol=1e-5, atol=1e-3)
