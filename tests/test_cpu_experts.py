"""The compiled kernels of a mixture of experts against plain torch, on every instruction set that this machine runs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from localllm.kernels import (
    cpu_experts,
    cpu_isa,
    cpu_jit,
    cpu_linear,
    cpu_quantize,
    cpu_router,
    int8,
    reference,
    tile16,
)
from localllm.kernels.cpu_expert_room import ExpertMatrix, ExpertRoom, Mixture, block_rows
from localllm.kernels.cpu_ir import Kernel
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_linear import float_bits
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.packed_matrix import PackedMatrix
from localllm.kernels.sizes import Glu, RouterConfig, Weights, most_blocks
from localllm.quant.layouts import TABLES

HOST_ISAS = cpu_isa.host_isas()
pytestmark = pytest.mark.skipif(not cpu_linear.is_available(), reason="no CPU kernel runs on this machine")
every_isa = pytest.mark.parametrize("isa", HOST_ISAS, ids=[isa.name for isa in HOST_ISAS])
FORMS = [
    Weights(),
    Weights(4, 32),
    Weights(4, 128),
    Weights(8, None, has_bias=False),
    Weights(8, 16, has_bias=False),
    Weights(4, 32, has_bias=False, table=TABLES["fp4"]),
]
every_form = pytest.mark.parametrize("form", FORMS, ids=[form.name for form in FORMS])
NAN = float("nan")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def as_int8(x: Tensor, group: int) -> Tensor:
    codes, scale = reference.int8_activations(x, group)
    return (codes * scale.unsqueeze(-1)).view(x.shape)


ROUTERS = {
    "qwen3": RouterConfig("softmax", 128, 8, normalizes=True),
    "olmoe": RouterConfig("softmax", 64, 8),
    "odd": RouterConfig("softmax", 5, 3, normalizes=True),
    "one": RouterConfig("softmax", 1, 1),
    "all": RouterConfig("softmax", 19, 19, normalizes=True, scale=0.5),
    "mixtral": RouterConfig("chosen", 8, 2),
    "gpt-oss": RouterConfig("chosen", 32, 4, scale=1.5),
    "chosen of many": RouterConfig("chosen", 512, 16),
    "deepseek v3": RouterConfig("sigmoid", 256, 8, True, 8, 4, True, 1e-20, scale=2.5),
    "corrected": RouterConfig("sigmoid", 60, 4, True, normalizes=True, sum_epsilon=1e-9, scale=1.8),
    "floor": RouterConfig("softmax", 48, 6, True, normalizes=True, sum_floor=1e-2),
    "groups": RouterConfig("softmax", 72, 6, groups=18, top_groups=3, scale=16.0),
    "phi": RouterConfig("sparsemixer", 16, 2, jitter=0.01),
    "wide jitter": RouterConfig("sparsemixer", 21, 5, jitter=0.4),
}


def routed(isa: Isa, router: RouterConfig, logits: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """The kernel over logits [T, at least num_experts]."""
    T = len(logits)
    experts, weights = torch.full((T, router.top_k), -7, dtype=torch.int32), torch.zeros(T, router.top_k)
    step = cpu_router.route(isa, router).step(
        logits=logits,
        correction=0 if correction is None else correction,
        scales=0,
        experts=experts,
        weights=weights,
        shape=torch.tensor([T]),
        stride=logits.shape[1],
    )
    Tape([step]).run()
    return experts, weights


def correction_of(router: RouterConfig) -> Tensor | None:
    """Some scores fall below zero by it, as of trained models: a group that is left out is not chosen for all that."""
    return random(router.num_experts, seed=3) * 0.6 - 0.6 if router.has_correction else None


@every_isa
@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_chooses_what_its_row_of_the_table_says(isa, name):
    router, correction = ROUTERS[name], correction_of(ROUTERS[name])
    for T in (1, 2, 37):
        logits = random(T, router.num_experts + 3, seed=T) * 2
        experts, weights = routed(isa, router, logits, correction)
        expected = reference.route(logits[:, : router.num_experts], correction, router)
        assert torch.equal(experts.long(), expected[0])
        torch.testing.assert_close(weights, expected[1], rtol=2e-6, atol=1e-7)


def test_equal_scores_go_to_the_experts_with_the_lower_numbers():
    logits = torch.tensor([[1.0, 2, 2, -1, 2, 1, 1, 0] * 8, [0.0, -0.0] * 32, [-0.0, 0.0] * 32])
    experts, _ = routed(HOST_ISAS[0], RouterConfig("chosen", 64, 4), logits, None)
    assert experts.tolist() == [[1, 2, 4, 9], [0, 1, 2, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("value", [NAN, -NAN, float("inf")])
def test_logits_that_are_not_finite_choose_experts_that_there_are(name, value):
    router, correction = ROUTERS[name], correction_of(ROUTERS[name])
    logits = random(4, router.num_experts)
    logits[1] = value
    logits[2, router.num_experts // 2] = value
    logits[3] = -float("inf")
    experts, weights = routed(HOST_ISAS[0], router, logits, correction)
    assert all(len(set(row)) == router.top_k for row in experts.tolist())
    assert 0 <= int(experts.min()) and int(experts.max()) < router.num_experts
    expected = reference.route(logits, correction, router)[1]
    assert torch.equal(weights.isnan().any(1), expected.isnan().any(1))
    alone = routed(HOST_ISAS[0], router, logits[:1], correction)
    assert torch.equal(experts[:1], alone[0]) and torch.equal(weights[:1], alone[1])


def router_logits(
    isa: Isa, x: Tensor, matrix: Tensor, norm: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    y = torch.zeros(len(x), len(matrix))
    step = cpu_router.logits(isa, has_norm=norm is not None, has_bias=bias is not None).step(
        x=x,
        weight=0 if norm is None else norm,
        matrix=matrix,
        bias=0 if bias is None else bias,
        y=y,
        shape=torch.tensor([len(x)]),
        features=matrix.shape[1],
        stride=x.shape[1],
        outputs=len(matrix),
        eps=float_bits(1e-5),
    )
    Tape([step]).run()
    return y


@every_isa
@pytest.mark.parametrize("experts", [1, 5, 64, 130])
@pytest.mark.parametrize(("has_norm", "has_bias"), [(True, False), (False, True)])
def test_logits_are_a_product_with_the_normed_row(isa, experts, has_norm, has_bias):
    x, matrix = random(11, 208), random(experts, 192, seed=1)
    norm, bias = (random(192, seed=2) if has_norm else None), (random(experts, seed=3) if has_bias else None)
    normed = x[:, :192].double()
    if norm is not None:
        normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + 1e-5) * norm
    expected = normed @ matrix.double().T + (0 if bias is None else bias)
    for T in (1, 3, 4, 11):
        y = router_logits(isa, x[:T], matrix, norm, bias)
        torch.testing.assert_close(y.double(), expected[:T], rtol=0, atol=1e-5 * float(expected.abs().max()))
        assert torch.equal(y[0], router_logits(isa, x[:1], matrix, norm, bias)[0])


def grouped(experts: Tensor, num_experts: int, block_rows: int) -> tuple[list[list[int]], Tensor, Tensor]:
    """The kernel over experts int32 [T, top_k]: blocks, tokens [blocks, block_rows], places [T, top_k]."""
    T, top_k = experts.shape
    most = most_blocks(T * top_k, num_experts, block_rows)
    blocks = torch.full((most + 1, 4), -1, dtype=torch.int32)
    tokens = torch.full((most + 1, block_rows), -1, dtype=torch.int32)
    places, shape = torch.full((T, top_k), -1, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    words = {"tokens": tokens, "places": places, "tokens_shape": torch.tensor([T]), "shape": shape, "top_k": top_k}
    kernel = cpu_experts.group(HOST_ISAS[0], num_experts, block_rows)
    Tape([kernel.step(experts=experts, blocks=blocks, **words)]).run()
    count = int(shape[0])
    assert count <= most and int(shape[1]) == block_rows and bool((blocks[count:] == -1).all())
    return blocks[:count].tolist(), tokens[:count], places


SIZES = st.sampled_from([(1, 1), (5, 3), (7, 1), (32, 12), (128, 4)])  # experts, rows of a block


@given(SIZES, st.integers(0, 40), st.integers(1, 4), st.integers(0, 2**32), st.booleans())
def test_every_pair_is_once_in_a_block_of_its_expert_in_the_order_of_tokens(sizes, T, top_k, seed, is_skewed):
    num_experts, rows = sizes
    top_k = min(top_k, num_experts)
    chance = torch.rand(T, num_experts, generator=torch.Generator().manual_seed(seed))
    experts = (chance * torch.arange(num_experts) ** 2 if is_skewed else chance).argsort(descending=True)[:, :top_k]
    blocks, tokens, places = grouped(experts.int().contiguous(), num_experts, rows)
    in_blocks = [
        [(expert, token) for token in tokens[b, :filled].tolist()] for b, (expert, filled, *_) in enumerate(blocks)
    ]
    pairs = [(expert, token) for token, row in enumerate(experts.tolist()) for expert in row]
    assert [pair for block in in_blocks for pair in block] == sorted(pairs)
    for b, (expert, filled, first, own) in enumerate(blocks):
        assert first <= b < first + own and 0 < filled <= rows
        assert [block[0] for block in blocks[first : first + own]] == [expert] * own
        assert filled == rows or b == first + own - 1
    for (token, slot), place in zip(itertools.product(range(T), range(top_k)), places.flatten().tolist(), strict=True):
        assert in_blocks[place // rows][place % rows] == (int(experts[token, slot]), token)


@dataclass(frozen=True)
class Experts:
    """Records of random matrices, each 64-byte aligned, the experts in no order; and what they mean."""

    mixture: Mixture
    packed: list[tuple[PackedMatrix, PackedMatrix]]  # gate and up, down
    biases: list[tuple[Tensor, Tensor]]
    dense: list[tuple[Tensor, Tensor]]
    records: Tensor


def random_matrix(form: Weights, N: int, K: int, seed: int) -> tuple[PackedMatrix, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if form.group is None:
        codes = torch.randint(-127, 128, (N, K), generator=generator, dtype=torch.int8)
        scale = torch.rand(N, generator=generator) * 0.001
        return PackedMatrix(int8.pack(codes), scale.view(-1, 16), None), codes * scale[:, None]
    codes = torch.randint(0, 16, (N, K), generator=generator, dtype=torch.uint8)
    qweight = tile16.pack(codes) if form.bits == 4 else int8.pack(codes.char() * 16 - 128)
    scale = (torch.rand(N, K // form.group, generator=generator) * 0.01 + 0.001).half() * (form.bits == 4 or 1 / 16)
    bias = (-8 * scale.float() + 0.001 * torch.randn(N, K // form.group, generator=generator)).half()
    bias_tiles = tile16.pack_groups(bias) if form.has_bias else None
    packed = PackedMatrix(qweight, tile16.pack_groups(scale), bias_tiles, form.table)
    return packed, packed.dequantize(N, K, torch.float32)


def record_of(matrices: list[tuple[PackedMatrix, Tensor]]) -> tuple[Tensor, list[list[int]]]:
    """The bytes of an expert, and where each tensor of each matrix begins: qweight, scale, bias, linear_bias."""
    parts: list[Tensor] = []
    offsets: list[list[int]] = []
    for packed, linear_bias in matrices:
        offsets.append([])
        for tensor in (packed.qweight, packed.scale, packed.bias, linear_bias):
            offsets[-1].append(sum(len(part) for part in parts))
            if tensor is not None:
                data = tensor.contiguous().view(-1).view(torch.uint8)
                parts.append(functional.pad(data, (0, -len(data) % 64)))
    return torch.cat(parts), offsets


SILU = Glu("silu")


def some_experts(
    router: RouterConfig,
    hidden: int,
    inner: int,
    form: Weights = FORMS[0],
    extra: int = 0,
    glu: Glu = SILU,
    **rest: Tensor,
) -> Experts:
    sizes = ((2 * inner, hidden), (hidden, inner))
    both = [
        [random_matrix(form, N, K, seed=2 * e + i) for i, (N, K) in enumerate(sizes)] for e in range(router.num_experts)
    ]
    biases = [[random(N, seed=500 + 2 * e + i) for i, (N, _) in enumerate(sizes)] for e in range(router.num_experts)]
    made = [
        record_of([(packed, bias) for (packed, _), bias in zip(pair, own, strict=True)])
        for pair, own in zip(both, biases, strict=True)
    ]
    size, offsets = len(made[0][0]), made[0][1]
    records = torch.zeros(router.num_experts * size + 64, dtype=torch.uint8)
    first = -records.data_ptr() % 64
    order = torch.randperm(router.num_experts, generator=torch.Generator().manual_seed(1)).tolist()
    for expert, place in enumerate(order):
        records[first + place * size : first + (place + 1) * size] = made[expert][0]
    table = torch.tensor([records.data_ptr() + first + place * size for place in order])
    matrices = [ExpertMatrix(form, N, K, *at) for (N, K), at in zip(sizes, offsets, strict=True)]
    matrix = random(router.num_experts + extra, hidden, seed=9) / hidden**0.5
    mixture = Mixture(router, matrix, table, *matrices, glu, correction=correction_of(router), **rest)
    packed = [(pair[0][0], pair[1][0]) for pair in both]
    return Experts(mixture, packed, biases, [(pair[0][1], pair[1][1]) for pair in both], records)


def run(
    isa: Isa, experts: Experts, source: Tensor, rows: int, shared: Tensor | None = None
) -> tuple[Tensor, ExpertRoom]:
    """The mixture of source [T, hidden], written over NaN."""
    room = ExpertRoom(isa, len(source), experts.mixture.router, experts.mixture.gate_up, rows)
    x = torch.full_like(source, NAN)
    Tape([*room.steps(experts.mixture, source, x, adds=False, shared=shared)]).run()
    return x, room


SMALL = RouterConfig("softmax", 5, 3, normalizes=True)


@every_isa
@every_form
def test_a_row_of_a_block_is_its_token_times_its_experts_matrix_to_the_bit(isa, form):
    experts, group = some_experts(SMALL, 256, 128, form), form.columns
    for T, rows in ((1, 1), (9, 1), (9, 3), (23, isa.max_rows)):
        x = random(T, 256, seed=T)
        _, room = run(isa, experts, x, rows)
        chosen, places = room.experts.view(T, 3), room.places.view(T, 3).long()
        for expert in chosen.unique().tolist():
            tokens, slots = (chosen == expert).nonzero(as_tuple=True)
            at = places[tokens, slots]
            (packed, _), biases, dense = experts.packed[expert], experts.biases[expert], experts.dense[expert]
            wide = (cpu_linear.packed_linear(x, packed, 256, isa) + biases[0])[tokens]
            assert torch.equal(room.wide[at], wide)
            y = as_int8(functional.silu(wide[:, :128]) * wide[:, 128:], group) @ dense[1].T + biases[1]
            torch.testing.assert_close(room.y[at], y, rtol=0, atol=5e-3 * float(y.abs().max()))


def expected_mixture(experts: Experts, source: Tensor, shared: Tensor | None = None) -> Tensor:
    """Dense torch: every expert over every token, weighted."""
    mixture = experts.mixture
    normed = (
        source if mixture.norm is None else source * torch.rsqrt(source.square().mean(-1, keepdim=True) + mixture.eps)
    )
    normed = normed if mixture.norm is None else normed * mixture.norm
    logits = normed @ mixture.matrix.T
    chosen, weights = reference.route(logits[:, : mixture.router.num_experts], mixture.correction, mixture.router)
    scale = torch.zeros(len(source), mixture.router.num_experts).scatter_(1, chosen, weights)
    total = torch.zeros_like(source)
    for expert, (dense, biases) in enumerate(zip(experts.dense, experts.biases, strict=True)):
        wide = as_int8(normed, mixture.gate_up.group) @ dense[0].T + biases[0]
        y = as_int8(reference.gated(wide, mixture.glu), mixture.down.group) @ dense[1].T + biases[1]
        total += scale[:, expert, None] * y
    if shared is not None:
        total += shared * logits[:, -1:].sigmoid()
    return total


@every_isa
@pytest.mark.parametrize("name", ["odd", "mixtral", "corrected", "phi"])
def test_a_mixture_equals_all_of_its_experts_weighted(isa, name):
    router = ROUTERS[name]
    experts = some_experts(router, 128, 64, extra=1, norm=random(128, seed=4), eps=1e-5)
    source, shared = random(13, 128), random(13, 128, seed=5)
    expected = expected_mixture(experts, source, shared)
    for T, rows in ((1, 1), (13, 1), (13, isa.max_rows)):
        x, _ = run(isa, experts, source[:T], rows, shared)
        torch.testing.assert_close(x, expected[:T], rtol=0, atol=5e-3 * float(expected.abs().max()))


@every_isa
@pytest.mark.parametrize("glu", [Glu("gelu_tanh"), Glu("quick_gelu", limit=0.5, up_offset=1.0)])
def test_experts_compute_what_their_family_does_between_their_matrices(isa, glu):
    experts, source = some_experts(SMALL, 128, 64, glu=glu), random(13, 128)
    expected = expected_mixture(experts, source)
    for T, rows in ((1, 1), (13, isa.max_rows)):
        x, _ = run(isa, experts, source[:T], rows)
        torch.testing.assert_close(x, expected[:T], rtol=0, atol=5e-3 * float(expected.abs().max()))


@every_isa
@pytest.mark.parametrize("adds", [True, False])
def test_what_all_tokens_share_is_added_whole_where_it_has_no_gate(isa, adds):
    experts, source, shared = some_experts(SMALL, 128, 64), random(6, 128), random(6, 128, seed=5)
    room, x = ExpertRoom(isa, 6, SMALL, experts.mixture.gate_up, 4), random(6, 128, seed=6)
    expected = run(isa, experts, source, 1)[0] + shared + x * adds
    Tape([*room.steps(experts.mixture, source, x, adds=adds, shared=shared)]).run()
    torch.testing.assert_close(x, expected, rtol=1e-6, atol=1e-5)


def test_a_router_may_have_a_bias():
    experts, bias = some_experts(SMALL, 128, 64), torch.tensor([9.0, -9, 9, -9, 9])
    biased = dataclasses.replace(experts, mixture=dataclasses.replace(experts.mixture, matrix_bias=bias))
    _, room = run(HOST_ISAS[0], biased, random(4, 128), 4)
    assert room.experts.view(4, 3).sort().values.tolist() == [[0, 2, 4]] * 4


@every_form
def test_a_token_has_the_same_bits_beside_any_others_and_on_any_instruction_set(form):
    experts = some_experts(SMALL, 128, 128, form, norm=random(128, seed=4), eps=1e-5)
    source = random(40, 128)
    alone = torch.cat([run(HOST_ISAS[0], experts, row[None], 1)[0] for row in source])
    assert bool(alone.isfinite().all())
    for T in range(1, 41):
        isa = HOST_ISAS[T % len(HOST_ISAS)]
        for rows in (1, 2 + T % 3, isa.max_rows):
            assert torch.equal(run(isa, experts, source[:T], rows)[0], alone[:T])


def test_a_tape_runs_any_number_of_tokens_up_to_its_rooms():
    experts = some_experts(SMALL, 128, 64)
    source, x = random(24, 128), torch.zeros(24, 128)
    room = ExpertRoom(HOST_ISAS[0], 24, SMALL, experts.mixture.gate_up, 4)
    tape = Tape([*room.steps(experts.mixture, source, x, adds=True)])
    for T in (3, 24, 1, 0, 17):
        x[:] = 2.0
        room.shape[0] = T
        tape.run()
        assert torch.equal(x[:T], run(HOST_ISAS[0], experts, source[:T], 4)[0] + 2) if T else True
        assert bool((x[T:] == 2).all())


def test_the_number_of_threads_changes_no_bit(threads):
    experts, source = some_experts(SMALL, 128, 64), random(9, 128)
    results = []
    for count in (1, 2, 3, 5):
        threads(count)
        results += [run(HOST_ISAS[0], experts, source, rows)[0] for rows in (1, 4)]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("tiles", [1, 4])
def test_all_tokens_may_choose_one_expert(monkeypatch, tiles):
    """Thirteen blocks of it, and none of the others; also where tiles are read side by side, the last ones lacking."""
    monkeypatch.setattr(Isa, "tiles_side_by_side", lambda *_: tiles)
    experts = some_experts(RouterConfig("softmax", 7, 1), 96, 96, Weights(4, 32))
    experts.mixture.matrix[:] = 0
    experts.mixture.matrix[3] = 1
    source = random(37, 96).abs()
    cpu_experts.expert_matmul.cache_clear()
    try:
        for rows in (1, 3, 8):
            x, room = run(HOST_ISAS[0], experts, source, rows)
            assert int(room.grouped_shape[0]) == -(-37 // rows)
            expected = expected_mixture(experts, source)
            torch.testing.assert_close(x, expected, rtol=0, atol=5e-3 * float(expected.abs().max()))
    finally:
        cpu_experts.expert_matmul.cache_clear()


def test_what_is_not_a_number_in_a_token_comes_out_of_it_and_of_no_other():
    experts, source = some_experts(SMALL, 128, 64, norm=random(128, seed=4), eps=1e-5), random(9, 128)
    clean, _ = run(HOST_ISAS[0], experts, source, 4)
    source[5, 17] = NAN
    x, _ = run(HOST_ISAS[0], experts, source, 4)
    assert bool(x[5].isnan().all())
    assert torch.equal(x[:5], clean[:5]) and torch.equal(x[6:], clean[6:])


def test_blocks_have_more_rows_the_more_tokens_an_expert_has():
    router, (widest, *_, narrowest) = (
        RouterConfig("softmax", 128, 8),
        sorted(cpu_isa.ISAS, key=lambda isa: -isa.max_rows),
    )
    assert [block_rows(widest, rows, router) for rows in (1, 8, 9, 32, 33, 500)] == [1, 1, 4, 4, 8, 12]
    assert [block_rows(narrowest, rows, router) for rows in (1, 8, 9, 500)] == [1, 1, 4, 4]


X86 = {"avx2": "haswell", "avx-vnni": "alderlake", "avx512-vnni": "cascadelake"}
SOURCES: dict[str, Callable[[Isa], Kernel]] = {
    "logits": lambda isa: cpu_router.logits_source(isa, has_norm=True, has_bias=True),
    **{f"route {n}": lambda _, n=n: cpu_router.route_source(ROUTERS[n]) for n in ("deepseek v3", "phi", "mixtral")},
    "group": lambda _: cpu_experts.group_source(128, 4),
    "gathered": lambda _: cpu_quantize.quantize_source(64, "norm", rows="gathered"),
    "grouped": lambda _: cpu_quantize.quantize_source(64, "gated", Glu("silu"), rows="grouped"),
    "int4": lambda isa: cpu_experts.expert_matmul_source(isa, Weights(), 4, has_bias=True),
    "int8": lambda isa: cpu_experts.expert_matmul_source(isa, Weights(8, None, has_bias=False), 1, gathers=True),
    "combine": lambda _: cpu_experts.combine_source(adds=True, shared="gated"),
}


@pytest.mark.parametrize("source", SOURCES)
def test_on_every_cpu_a_kernel_calls_nothing(source):
    from llvmlite import binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    cpus = X86 | {"neon-dot": "neoverse-n1"}
    for isa in (dataclasses.replace(isa, cpu=cpus[isa.name]) for isa in cpu_isa.ISAS):
        ir = SOURCES[source](isa).source()
        try:
            code = cpu_jit.machine_code(ir, isa)
        except RuntimeError as error:  # this llvmlite was built without the Arm target
            assert isa.machine == "aarch64" and "target" in str(error)
            continue
        assert cpu_jit.undefined_symbols(code, ir) == set()
