"""Mixtures of experts in Triton's interpreter: the choice, tokens by experts, and what the experts make of them."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from localllm.kernels import reference
from localllm.kernels.gpu import check_cases
from localllm.kernels.gpu.activations import Codes, to_codes
from localllm.kernels.gpu.check import BRIEF, sizes_of
from localllm.kernels.gpu.check_cases import CODED, FP4, GLUS, INT8
from localllm.kernels.gpu.expert_record import ExpertTable, RecordMatrix
from localllm.kernels.gpu.expert_rows import NOBODY, ExpertRows, group_rows
from localllm.kernels.gpu.experts import Inner, gates, is_few, mixed, mixture
from localllm.kernels.gpu.gemm import gemm
from localllm.kernels.gpu.launch import KernelLaunch, run_all
from localllm.kernels.gpu.product import Dispatch
from localllm.kernels.gpu.ready import Ways
from localllm.kernels.gpu.routing import RouterWeights, Routes, route
from localllm.kernels.packed_matrix import PackedMatrix
from localllm.kernels.sizes import CENTRED, Glu, RouterConfig, Weights, most_blocks
from tests.gpu.test_products import exact_product, matrix_of
from tests.thinning import every_other

CPU, INT4, SILU = torch.device("cpu"), Weights(4, 64), Glu("silu")
TOLERANCE = 1e-6  # of the norm: what fp32 sums of some hundred terms lose
FEW, MANY = Dispatch(1, gemv_rows=100), Dispatch(1, gemv_rows=0)  # by dot products of bytes, and on the tensor cores

ROUTERS = {
    "mixtral": RouterConfig("softmax", 8, 2, normalizes=True),
    "qwen3": RouterConfig("softmax", 128, 8, normalizes=True),
    "deepseek-v2": RouterConfig("softmax", 160, 6, groups=8, top_groups=3, scale=16.0),
    "deepseek-v3": RouterConfig("sigmoid", 256, 8, True, 8, 4, True, 1e-20, scale=2.5),
    "odd": RouterConfig("sigmoid", 60, 5, True, normalizes=True, sum_floor=0.5),
    "gpt-oss": RouterConfig("chosen", 32, 4),
    "phi": RouterConfig("sparsemixer", 16, 2, jitter=0.01),
    "one": RouterConfig("softmax", 3, 1),
}


def parts_of(router: RouterConfig, hidden: int) -> RouterWeights:
    E = router.num_experts
    correction = torch.randn(E) * 0.5 - 0.6 if router.has_correction else None
    return RouterWeights(torch.randn(E, hidden) * hidden**-0.5, torch.randn(E), correction, torch.rand(hidden), 1e-5)


def routed(x: Tensor, router: RouterConfig, parts: RouterWeights, positions: Tensor | None = None) -> Routes:
    routes = Routes.empty(len(x), router, x.device)
    routes.experts.fill_(-1)
    for part in (routes.logits, routes.weights):
        part.fill_(torch.nan)
    run_all(route(x, router, parts, routes, positions=positions))
    return routes


@pytest.mark.parametrize("rows", every_other([1, 3, 19]))
@pytest.mark.parametrize("name", ROUTERS)
def test_a_token_is_routed_as_the_reference_routes_it(name: str, rows: int) -> None:
    router, x = ROUTERS[name], torch.randn(rows, 300)
    parts = parts_of(router, 300)
    found = routed(x, router, parts)
    assert parts.bias is not None and parts.norm is not None
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * parts.norm.double()
    logits = normed @ parts.weight.double().T + parts.bias
    torch.testing.assert_close(found.logits.double(), logits, rtol=1e-5, atol=2e-6)
    experts, weights = reference.route(found.logits, parts.correction, router)
    assert torch.equal(found.experts, experts.int())
    torch.testing.assert_close(found.weights, weights, rtol=1e-5, atol=1e-7)


def test_an_input_in_bf16_that_was_normed_is_routed_too() -> None:
    router, x = ROUTERS["mixtral"], torch.randn(3, 90).bfloat16()[:, :70]
    weight = torch.randn(8, 70).bfloat16()
    found = routed(x, router, RouterWeights(weight))
    torch.testing.assert_close(found.logits.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("group", "bits"), [(64, 4), (64, 8), (128, 4)])
@pytest.mark.parametrize("has_norm", [True, False])
def test_the_codes_for_the_experts_are_made_beside_the_choice(group: int, bits: int, has_norm: bool) -> None:
    router, x = ROUTERS["mixtral"], torch.randn(3, 300)
    parts = parts_of(router, 300)
    if not has_norm:
        parts = replace(parts, norm=None)
    found, right = (Codes.empty(3, -(-300 // group) * group, group, CPU, bits) for _ in range(2))
    to_codes(x, right, 300, weight=parts.norm, eps=parts.eps).run()
    routes, alone = Routes.empty(3, router, CPU), routed(x, router, parts)
    run_all(route(x, router, parts, routes, codes=found))
    assert all(torch.equal(getattr(found, part), getattr(right, part)) for part in ("q", "scale", "bias"))
    assert torch.equal(routes.experts, alone.experts) and torch.equal(routes.weights, alone.weights)


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3"])
def test_a_token_has_the_same_route_whatever_tokens_are_beside_it(name: str) -> None:
    router, x = ROUTERS[name], torch.randn(18, 200)
    parts = parts_of(router, 200)
    batches = [routed(x[:rows], router, parts) for rows in (18, 3, 1)]
    for found in batches[1:]:
        for part in ("logits", "experts", "weights"):
            assert torch.equal(getattr(found, part), getattr(batches[0], part)[: len(found.logits)])


def test_equal_scores_choose_the_first_experts() -> None:
    router = RouterConfig("softmax", 12, 3)
    assert routed(torch.zeros(1, 20), router, RouterWeights(torch.rand(12, 20))).experts.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3", "gpt-oss", "phi"])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_logit_that_is_no_number_is_in_all_weights_and_chooses_experts_that_there_are(name, wrong):
    router, x = ROUTERS[name], torch.randn(3, 40)
    x[1, 7] = wrong
    found = routed(x, router, parts_of(router, 40))
    assert found.weights[1].isnan().all() and found.weights[[0, 2]].isfinite().all()
    assert len(set(found.experts[1].tolist())) == router.top_k
    assert 0 <= found.experts.min() and found.experts.max() < router.num_experts


@settings(max_examples=12, deadline=None, phases=[Phase.generate])
@given(
    tokens=st.integers(1, 300),
    top_k=st.integers(1, 4),
    experts=st.integers(4, 70),
    each=st.sampled_from([16, 32, 64]),
    seed=st.integers(0, 1000),
)
def test_tokens_are_sorted_by_experts_and_cut_into_blocks(tokens, top_k, experts, each, seed):
    torch.manual_seed(seed)
    scores = torch.rand(tokens, experts) + torch.rand(experts) * 2  # some have many, others none
    chosen = scores.topk(top_k, dim=-1).indices.int()
    chosen[tokens // 2 : tokens // 2 + tokens % 5] = -1  # padding
    table = torch.randint(0, 3, (experts,)) * 16
    rows = ExpertRows.empty(tokens * top_k, experts, each, chosen.device)
    for part in (rows.pairs, rows.blocks):
        part.fill_(-7)
    group_rows(chosen, table, rows).run()
    num_padded = int((chosen < 0).sum())
    assert torch.equal(rows.pairs[: chosen.numel() - num_padded], chosen.flatten().sort(stable=True)[1][num_padded:])
    blocks, place = [], 0
    for expert in range(experts):
        count = int((chosen == expert).sum())
        if table[expert] != 0:
            blocks += [[expert, place + first, min(each, count - first)] for first in range(0, count, each)]
        place += count
    found = rows.blocks.T.tolist()
    assert found[: len(blocks)] == blocks and {block[0] for block in found[len(blocks) :]} <= {NOBODY}


@pytest.mark.parametrize(("pairs", "experts", "each"), [(1, 1, 16), (7, 128, 16), (100, 3, 16), (4096, 128, 64)])
def test_no_routing_has_more_blocks_than_there_is_room_for(pairs, experts, each):
    """At worst each expert has one pair more than fills its blocks."""
    counts, left = [0] * experts, pairs
    for expert in range(experts):
        counts[expert] = min(1, left)
        left -= counts[expert]
    counts[0] += left // each * each
    assert sum(-(-count // each) for count in counts) <= most_blocks(pairs, experts, each) <= pairs


class Mixture:
    """Random experts, each in a record of its own, of which some are here."""

    def __init__(
        self,
        weights: str | Weights,
        experts: int,
        hidden: int,
        features: int,
        glu: Glu = SILU,
        *,
        has_bias: bool = False,
    ) -> None:
        self.hidden, self.features, self.glu = hidden, features, glu
        self.matrices, sizes = [], (2 * features, hidden)
        self.biases = [[torch.randn(N) if has_bias else None for N in sizes] for _ in range(experts)]
        for _ in range(experts):
            self.matrices.append([matrix_of(N, K, weights) for N, K in ((2 * features, hidden), (hidden, features))])
        self.places, self.size = self._places()
        self.records = torch.randint(0, 256, (experts, self.size), dtype=torch.uint8)
        for expert in range(experts):
            self.write(expert, self.records[expert])
        addresses = torch.tensor([record.data_ptr() for record in self.records])
        self.table = ExpertTable(addresses, *self.places, glu, features)

    def _places(self) -> tuple[list[RecordMatrix], int]:
        places, end = [], 4096
        for matrix, bias in zip(self.matrices[0], self.biases[0], strict=True):
            at: list[int | None] = []
            for tensor in (matrix.qweight, matrix.scale, matrix.bias, bias):
                at.append(end)
                end += 0 if tensor is None else -(-tensor.nbytes // 16) * 16
            meta = [None if x is None else x.to("meta") for x in (matrix.qweight, matrix.scale, matrix.bias)]
            assert meta[0] is not None and meta[1] is not None
            at[3] = None if bias is None else at[3]
            places.append(RecordMatrix(PackedMatrix(meta[0], meta[1], meta[2], matrix.table), *at))
        return places, end

    def write(self, expert: int, record: Tensor) -> None:
        for matrix, bias, place in zip(self.matrices[expert], self.biases[expert], self.places, strict=True):
            parts = ((matrix.qweight, place.qweight), (matrix.scale, place.scale), (matrix.bias, place.bias))
            for tensor, at in (*parts, (bias, place.linear_bias)):
                if tensor is not None and at is not None:
                    record[at : at + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)

    def codes(self, x: Tensor) -> Codes:
        codes = Codes.of(len(x), self.matrices[0][0])
        to_codes(x, codes, self.hidden).run()
        return codes

    def by(self, dispatch: Dispatch, x: Tensor, routes: Routes, there: Tensor | None = None) -> Tensor:
        y = torch.full((len(x), self.hidden), torch.nan) if there is None else there.clone()
        run_all(mixture(dispatch, self.codes(x), routes, self.table, y, adds=there is not None))
        return y

    def expected(self, x: Tensor, routes: Routes, there: Tensor) -> tuple[Tensor, Tensor]:
        """By the kernels of one matrix, to the bit, and by the exact products of the reference: fp64."""
        total, exact = torch.zeros(len(x), self.hidden), there.double()
        outs = [self._of_expert(expert, self.codes(x)) for expert in range(len(self.matrices))]
        for slot in range(routes.experts.shape[1]):
            for row, expert in enumerate(routes.experts[:, slot].tolist()):
                if self.table.addresses[expert] != 0:
                    total[row] += routes.weights[row, slot] * outs[expert][0][row]
                    exact[row] += routes.weights[row, slot].double() * outs[expert][1][row]
        return there + total, exact

    def _of_expert(self, expert: int, x: Codes) -> tuple[Tensor, Tensor]:
        (gate_up, down), biases = self.matrices[expert], self.biases[expert]
        wide, y = torch.empty(len(x.q), 2 * self.features), torch.empty(len(x.q), self.hidden)
        codes = Codes.of(len(x.q), down)
        run_all(gemm(x, gate_up, wide, 2 * self.features, biases[0]))
        to_codes(wide, codes, self.features, glu=self.glu).run()
        run_all(gemm(codes, down, y, self.hidden, biases[1]))
        return y, exact_product(codes, down, self.hidden) + (0 if biases[1] is None else biases[1])


def routes_of(tokens: int, top_k: int, experts: int) -> Routes:
    chosen = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int()
    return Routes(torch.empty(tokens, experts), chosen, torch.rand(tokens, top_k))


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("weights", "experts", "tokens", "top_k", "hidden", "features"),
    every_other(
        [
            ("int4-g64", 5, 3, 2, 100, 48),
            ("int4-g64", 3, 1, 3, 200, 96),
            ("int8", 4, 3, 3, 70, 80),
            ("int8", 9, 2, 1, 90, 16),
            ("int4-g32", 3, 20, 1, 40, 32),
            ("int4-g128", 6, 2, 5, 150, 112),
            (Weights(4, 32, False, FP4), 3, 2, 2, 64, 48),
            (Weights(4, 16), 3, 2, 2, 64, 48),
            (Weights(8, 16), 3, 2, 2, 64, 48),
            (Weights(4, 32, False, CENTRED), 3, 2, 2, 64, 48),
            (Weights(4, 16, False, FP4), 3, 2, 2, 64, 48),
            (Weights(8, 32, False), 3, 2, 2, 64, 48),
        ]
    ),
)
def test_experts_add_what_the_kernels_of_one_matrix_make_to_the_bit(weights, experts, tokens, top_k, hidden, features):
    """Some are not on the device, and add nothing; some have no token."""
    some, x = Mixture(weights, experts, hidden, features), torch.randn(tokens, hidden)
    routes, there = routes_of(tokens, top_k, experts), torch.randn(tokens, hidden)
    some.table.addresses[routes.experts[0, -1]] = 0
    bits, exact = some.expected(x, routes, there)
    assert error(bits, exact) < TOLERANCE
    for dispatch in (FEW, MANY):
        assert torch.equal(some.by(dispatch, x, routes, there), bits)


@pytest.mark.parametrize("glu", [Glu("gelu"), Glu("gelu_tanh")])
def test_experts_have_other_gates_too(glu: Glu) -> None:
    some, x = Mixture("int4-g64", 2, 64, 32, glu), torch.randn(2, 64)
    routes, there = routes_of(2, 2, 2), torch.randn(2, 64)
    bits, _ = some.expected(x, routes, there)
    assert torch.equal(some.by(FEW, x, routes, there), bits) and torch.equal(some.by(MANY, x, routes, there), bits)


@pytest.mark.parametrize("weights", [Weights(4, 32, False, FP4), "int8"])
def test_experts_with_biases_and_clamped_gates_add_what_one_matrix_makes_whatever_is_beside(weights) -> None:
    """Of a width that ends within a tile; one is not on the device."""
    glu, there = Glu("quick_gelu", limit=0.3, up_offset=1.0), torch.randn(19, 40)
    some, x, routes = Mixture(weights, 3, 40, 32, glu, has_bias=True), torch.randn(19, 40), routes_of(19, 2, 3)
    some.table.addresses[routes.experts[0, -1]] = 0
    bits, exact = some.expected(x, routes, there)
    assert error(bits, exact) < TOLERANCE
    assert torch.equal(some.by(MANY, x, routes, there), bits)
    for row in (0, 18):
        one = slice(row, row + 1)
        assert torch.equal(some.by(FEW, x[one], rows_of(routes, one), there[one]), bits[one])


def rows_of(routes: Routes, rows: slice) -> Routes:
    return Routes(routes.logits[rows], routes.experts[rows].contiguous(), routes.weights[rows].contiguous())


def test_a_token_has_the_same_bits_whatever_tokens_are_beside_it() -> None:
    """Of 40 tokens some experts have blocks more than one."""
    some, x, routes = Mixture("int4-g64", 3, 80, 32), torch.randn(40, 80), routes_of(40, 2, 3)
    together = some.by(MANY, x, routes)
    for dispatch, rows in ((FEW, [0, 17, 39]), (MANY, [5, 38])):
        for row in rows:
            one = slice(row, row + 1)
            assert torch.equal(some.by(dispatch, x[one], rows_of(routes, one)), together[one])


@pytest.mark.parametrize("dispatch", [FEW, MANY])
def test_what_two_devices_have_is_a_whole_together(dispatch: Dispatch) -> None:
    some, x, routes = Mixture("int4-g64", 4, 64, 32), torch.randn(2, 64), routes_of(2, 3, 4)
    whole, all_of_them = some.by(dispatch, x, routes), some.table.addresses.clone()
    halves = []
    for number in range(2):
        some.table.addresses.copy_(torch.where(torch.arange(4) % 2 == number, all_of_them, 0))
        halves.append(some.by(dispatch, x, routes))
    torch.testing.assert_close(halves[0] + halves[1], whole)


@pytest.mark.parametrize("dispatch", [FEW, MANY])
@pytest.mark.parametrize("weights", ["int4-g64", "int8"])
def test_what_is_computed_elsewhere_is_added_in_its_turn(weights: str, dispatch: Dispatch) -> None:
    """To the bit as if it were here; what nobody wrote elsewhere is not read. The last token is padding."""
    some, x, routes = Mixture(weights, 5, 72, 32), torch.randn(3, 72), routes_of(3, 3, 5)
    routes.experts[2] = -1
    whole, codes = some.by(dispatch, x, routes), some.codes(x)
    outs = [some._of_expert(expert, codes)[0] for expert in range(5)]
    elsewhere = torch.full((9, 72), torch.nan)
    for expert in (int(routes.experts[0, 1]), int(routes.experts[1, 2])):
        some.table.addresses[expert] = 0
        for pair in (routes.experts.flatten() == expert).nonzero().flatten().tolist():
            elsewhere[pair] = outs[expert][pair // 3]
    inner, y = Inner.empty(dispatch, routes, some.table), torch.full((3, 72), torch.nan)
    run_all(gates(codes, routes, some.table, inner))
    run_all(mixed(dispatch, inner, routes, some.table, y, adds=False, elsewhere=elsewhere))
    assert torch.equal(y, whole)


@pytest.mark.parametrize("dispatch", [FEW, MANY])
def test_where_no_expert_is_on_the_device_nothing_is_added(dispatch: Dispatch) -> None:
    some, x, routes = Mixture("int8", 3, 64, 32), torch.randn(2, 64), routes_of(2, 2, 3)
    there = torch.randn(2, 64)
    some.table.addresses.zero_()
    assert torch.equal(some.by(dispatch, x, routes, there), there)
    assert torch.equal(some.by(dispatch, x, routes), torch.zeros(2, 64))


@pytest.mark.parametrize("dispatch", [FEW, MANY])
def test_the_same_launches_find_an_expert_where_it_has_moved(dispatch: Dispatch) -> None:
    """As a graph that is replayed: the table is data, and so is the choice."""
    some, x, routes = Mixture("int4-g64", 4, 64, 32), torch.randn(2, 64), routes_of(2, 2, 4)
    y = torch.empty(2, 64)
    launches = mixture(dispatch, some.codes(x), routes, some.table, y, adds=False)
    run_all(launches)
    moved = some.records.flip(0).clone()
    some.table.addresses.copy_(torch.tensor([moved[3 - expert].data_ptr() for expert in range(4)]))
    some.records.fill_(0xFF)
    first = y.clone()
    run_all(launches)
    assert torch.equal(y, first)
    for part in (routes.experts, routes.weights):
        part.copy_(part.flip(0))
    run_all(launches)
    assert torch.equal(y, some.by(dispatch, x, routes)) and not torch.equal(y, first)


@pytest.mark.parametrize("dispatch", [FEW, MANY])
def test_for_a_padding_row_no_expert_is_read_and_nothing_is_added(dispatch: Dispatch) -> None:
    some, x, router = Mixture("int4-g64", 4, 64, 32), torch.randn(3, 64), RouterConfig("softmax", 4, 2)
    x[2] = torch.nan  # whatever was there before
    routes = routed(x, router, RouterWeights(torch.randn(4, 64)), torch.tensor([5, 0, -1], dtype=torch.int32))
    assert routes.experts[2].tolist() == [-1, -1] and routes.experts[:2].min() >= 0
    there = torch.randn(3, 64)
    some.table.addresses[[expert for expert in range(4) if expert not in routes.experts]] = 1  # is not read
    found = some.by(dispatch, x, routes, there)
    assert torch.equal(found[2], there[2]) and (found[:2] != there[:2]).any(-1).all()
    assert torch.equal(found[:2], some.by(FEW, x[:2], rows_of(routes, slice(2)), there[:2]))


@pytest.mark.parametrize("dispatch", [FEW, MANY])
def test_a_nan_reaches_every_output_of_its_token_and_no_other(dispatch: Dispatch) -> None:
    some, x, routes = Mixture("int4-g64", 2, 64, 32), torch.randn(4, 64), routes_of(4, 1, 2)
    x[1, 7], routes.weights[2] = torch.nan, torch.nan
    found = some.by(dispatch, x, routes)
    assert found[1:3].isnan().all() and found[[0, 3]].isfinite().all()


def test_few_tokens_and_tokens_that_share_no_expert_are_for_dot_products_of_bytes() -> None:
    dispatch = Dispatch(64, gemv_rows=4)
    assert is_few(dispatch, 4, 32, 8) and is_few(dispatch, 16, 128, 128)
    assert not is_few(dispatch, 5, 10, 8) and not is_few(dispatch, 17, 136, 128)


@pytest.mark.parametrize(("rows", "count"), [(1, 4), (4, 4), (20, 6)])
def test_a_block_of_experts_is_a_few_launches(rows: int, count: int) -> None:
    """The choice, the experts' input beside it, and the experts."""
    some, x, router = Mixture("int4-g64", 4, 64, 32), torch.randn(rows, 64), RouterConfig("softmax", 4, 2)
    routes, codes, y = Routes.empty(rows, router, CPU), some.codes(x), torch.empty(rows, 64)
    launches = route(x, router, RouterWeights(torch.randn(4, 64)), routes, codes=codes)
    launches += mixture(Dispatch(64, gemv_rows=4), codes, routes, some.table, y, adds=False)
    assert len(launches) == count


def test_a_place_that_no_load_of_128_bits_can_read_is_refused() -> None:
    matrix = Mixture("int8", 1, 64, 32).matrices[0][0]
    with pytest.raises(AssertionError, match="128 bits"):
        RecordMatrix(matrix, 0, 24)


TINY = check_cases.CheckSizes(20, 64, (1, 2), (64,), (), glus=(SILU,), routers=(RouterConfig("softmax", 9, 2),))


@pytest.mark.parametrize("weights", every_other([INT4, INT8, *CODED[2:4]]), ids=attrgetter("name"))
def test_the_check_of_a_card_has_cases_of_experts_that_are_right(weights: Weights) -> None:
    experts = check_cases._experts(CPU, weights, 2, GLUS[1], TINY, has_bias=True)
    cases = [*check_cases._routed(CPU, TINY.routers[0], TINY), *experts]
    assert all(case.is_right for case in cases), [case.line() for case in cases if not case.is_right]
    assert {case.name for case in cases} >= {
        "a router by softmax, 2 of 9: weights", f"gemv of 2 experts of {weights.name}, 2 rows",
        f"gemm of 2 experts of {weights.name}, 2 rows: bits of the first",
    }  # fmt: skip


@pytest.mark.parametrize("wrong", ["weights", "a sum in another order", "no bias"])
def test_the_check_finds_experts_that_are_a_little_wrong(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(
        dispatch: Dispatch, x: Codes, routes: Routes, table: ExpertTable, *rest: Any, **options: Any
    ) -> list[KernelLaunch]:
        weights, experts = routes.weights.clone(), routes.experts
        if wrong == "weights":
            weights *= 0.9999
        elif wrong == "no bias":
            table = replace(table, gate_up=replace(table.gate_up, linear_bias=None))
        elif len(x.q) > 1:
            weights, experts = weights.flip(1), experts.flip(1).contiguous()
        return mixture(dispatch, x, Routes(routes.logits, experts, weights), table, *rest, **options)

    monkeypatch.setattr(check_cases, "mixture", changed)
    cases = list(check_cases._experts(CPU, INT4, 5, Glu("quick_gelu", limit=7.0), TINY, has_bias=True))
    assert not all(case.is_right for case in cases)


def test_the_check_finds_a_router_that_is_a_little_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    router, route = replace(ROUTERS["qwen3"], scale=1.0001), check_cases.routing.route
    monkeypatch.setattr(check_cases.routing, "route", lambda x, _, *rest, **named: route(x, router, *rest, **named))
    cases = list(check_cases._routed(CPU, ROUTERS["qwen3"], TINY))
    assert [case.name for case in cases if not case.is_right] == ["a router by softmax, 8 of 128: weights"]


def test_a_model_without_experts_is_checked_without_them() -> None:
    """A card that is wrong there is right for it."""
    ways: Ways = {"groups": [64], "attention": [], "glus": []}
    assert sizes_of(ways).routers == BRIEF.routers == ()
    router = {"scores": "softmax", "num_experts": 8, "top_k": 2}
    assert sizes_of({**ways, "routers": [router]}).routers == (RouterConfig("softmax", 8, 2),)
