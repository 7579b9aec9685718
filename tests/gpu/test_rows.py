"""What stands between matrices, in Triton's interpreter: norms, gates, codes, embedded tokens, drawn tokens."""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.engine.request import SamplingParams
from localllm.engine.sampler import PlainDraw, sample
from localllm.kernels import reference
from localllm.kernels.gpu.activations import Codes, to_codes, to_floats
from localllm.kernels.gpu.embedding import embed
from localllm.kernels.gpu.launch import run_all
from localllm.kernels.gpu.sample import NOT_FINITE, SampleRoom
from localllm.kernels.gpu.sample import sample as sample_launches
from localllm.kernels.packed_matrix import packed_matrix
from localllm.kernels.reference import ACTIVATIONS, gated
from localllm.kernels.sizes import Glu, Weights
from localllm.layers.norm import RMSNorm
from localllm.quant.int8 import Int8
from tests.choices.support import running
from tests.gpu.test_products import CODED, random_codes

EPS = 1e-5


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return RMSNorm(weight.double(), EPS)(x.double())


@pytest.mark.parametrize("features", [1, 300, 2049])
def test_a_norm_is_that_of_the_layer(features: int) -> None:
    x, weight = torch.randn(3, features + 5)[:, :features], torch.rand(features)
    y = torch.full((3, features), torch.nan)
    to_floats(x, y, features, weight=weight, eps=EPS).run()
    torch.testing.assert_close(y.double(), normed(x, weight), rtol=1e-5, atol=1e-6)


def test_a_norm_may_be_added_and_may_write_where_it_reads() -> None:
    x, weight, y = torch.randn(2, 70), torch.rand(70), torch.randn(2, 70)
    expected = y + normed(x, weight)
    to_floats(x, y, 70, weight=weight, eps=EPS, adds=True).run()
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)
    expected = normed(x, weight)
    to_floats(x, x, 70, weight=weight, eps=EPS).run()
    torch.testing.assert_close(x.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("limits", [{}, {"limit": 1.5, "up_offset": 1.0}, {"has_gate": False}], ids=str)
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_a_gate_is_that_of_the_layer_at_both_ends_too(activation: str, limits: dict[str, Any]) -> None:
    """And a number that is none stays so."""
    glu = Glu(activation, **limits)
    x = torch.cat([torch.randn(2, 200) * 3, torch.tensor([[100.0, -100.0] * 100])])
    x[0, 3] = x[1, 104] = torch.nan
    x = x if glu.has_gate else x[:, :100]
    y = torch.full((3, 100), torch.nan)
    to_floats(x, y, 100, glu=glu).run()
    torch.testing.assert_close(y.double(), gated(x.double(), glu), rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize(("group", "bits"), [(16, 4), (32, 4), (64, 4), (128, 4), (64, 8), (16, 8)])
@pytest.mark.parametrize("kind", ["plain", "norm", "gated"])
def test_codes_are_the_references(kind: str, group: int, bits: int) -> None:
    features, weight = 300, torch.rand(300)
    x = torch.randn(3, 2 * features) * torch.tensor([[1.0], [1e-3], [0.0]])
    codes = Codes.empty(3, -(-features // group) * group, group, x.device, bits)
    for part, poison in ((codes.q, 99), (codes.scale, torch.nan), (codes.bias, torch.nan)):
        part.fill_(poison)
    options = {"norm": {"weight": weight, "eps": EPS}, "gated": {"glu": Glu("silu")}, "plain": {}}[kind]
    to_codes(x, codes, features, **options).run()  # type: ignore[arg-type]
    floats = torch.full((3, features), torch.nan)
    to_floats(x, floats, features, **options).run()  # type: ignore[arg-type]
    q, scale = reference.int8_activations(floats, group)
    differ = (
        codes.in_order() - q.view(3, -1)
    ).abs()  # where a value is half a step from either, as torch divides otherwise
    assert differ.max() <= 1 and differ.sum() <= 1
    torch.testing.assert_close(codes.scale.T, scale)
    torch.testing.assert_close(codes.bias, codes.scale * codes.in_order().view(3, -1, group).sum(-1).T)


def test_codes_for_int4_stand_as_the_nibbles_of_a_word_do() -> None:
    codes, x = Codes.empty(1, 32, 32, torch.device("cpu")), torch.arange(32.0)[None]
    to_codes(x, codes, 32).run()
    low = [k for k in range(32) if k % 8 < 4]
    high = [k for k in range(32) if k % 8 >= 4]
    steps = torch.tensor([low + high]) * (127 / 31)
    assert torch.equal(codes.q, steps.round().to(torch.int8))
    assert codes.in_order().tolist() == [sorted(codes.q[0].tolist())]


def test_embedded_tokens_are_the_rows_of_the_matrix() -> None:
    tensors, ids = Int8().quantize(torch.randn(50, 200)), torch.tensor([3, 49, 0, NOT_FINITE])
    x = torch.full((4, 200), torch.nan)
    embed(tensors["qweight"], tensors["scale"], ids, x, 2.0).run()
    assert torch.equal(x, 2 * packed_matrix(tensors).rows(ids.clamp(min=0), 200))


@pytest.mark.parametrize("weights", CODED, ids=attrgetter("name"))
def test_embedded_tokens_are_those_of_any_codes(weights: Weights) -> None:
    matrix, ids, x = random_codes(50, 200, weights), torch.tensor([3, 49, 0]), torch.full((3, 200), torch.nan)
    embed(matrix.qweight, matrix.scale, ids, x, 2.0, matrix.bias, matrix.table).run()
    assert torch.equal(x, 2 * matrix.rows(ids, 200))


def drawn(logits: Tensor, draws: list[PlainDraw], positions: list[int]) -> list[int]:
    rows = [draw.at(position) for draw, position in zip(draws, positions, strict=True)]
    tokens, room = torch.full((len(rows),), -7), SampleRoom.empty(len(rows), logits.shape[1], logits.device)
    keys = torch.tensor([row.key for row in rows])
    temperatures, thresholds = (torch.tensor([getattr(row, n) for row in rows]) for n in ("temperature", "threshold"))
    run_all(sample_launches(logits, keys, temperatures, thresholds, tokens, room))
    return [int(token) for token in tokens]


@pytest.mark.parametrize("vocab_size", [7, 2048, 5000])
def test_a_token_is_the_one_that_the_host_draws(vocab_size: int) -> None:
    logits, positions = torch.randn(6, vocab_size) * 3, [1, 5, 77, 1000, 12, 3]
    params = [
        SamplingParams(temperature=temperature, min_p=min_p)
        for temperature, min_p in ((0.0, 0.0), (0.8, 0.0), (1.5, 0.0), (1.0, 0.3), (1e-4, 0.0), (2.0, 1.0))
    ]
    draws = [PlainDraw.of(each, seed) for seed, each in enumerate(params)]
    expected = [
        sample(logits[row], running(each, 0, seed=row), [0] * position)
        for row, (each, position) in enumerate(zip(params, positions, strict=True))
    ]
    assert drawn(logits, [draw for draw in draws if draw is not None], positions) == expected


def test_equal_logits_give_the_first_token() -> None:
    assert drawn(torch.zeros(1, 5000), [PlainDraw(0, 0.0, 0.0)], [1]) == [0]


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_draws_nothing(wrong: float) -> None:
    logits = torch.randn(2, 5000)
    logits[1, 4321] = wrong
    assert drawn(logits, [PlainDraw(1, temperature, 0.0) for temperature in (0.0, 0.7)], [1, 1])[1] == NOT_FINITE


def test_what_looks_at_earlier_tokens_is_no_plain_draw() -> None:
    others = [
        {"top_k": 5}, {"top_p": 0.9}, {"typical_p": 0.5}, {"repetition_penalty": 1.1}, {"frequency_penalty": 0.1},
        {"presence_penalty": -1.0}, {"dry_multiplier": 0.5}, {"logit_bias": {3: 1.0}}, {"logprobs": 0},
    ]  # fmt: skip
    assert all(PlainDraw.of(SamplingParams(**other), 1) is None for other in others)  # type: ignore[arg-type]
    plain = PlainDraw.of(SamplingParams(temperature=0.5, min_p=0.1, seed=9, max_tokens=3, stop=("x",)), 1)
    assert plain == PlainDraw(1, 0.5, 0.1) and math.isclose(plain.at(0).threshold, math.log(0.1))
