"""Every kernel beside its reference on random inputs, as cases; `check` compiles and runs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from triton.errors import TritonError

from localllm.kernels import int8, reference, tile16
from localllm.kernels.gpu import activations, embedding, gemm, gemv, low_rank, routing, sample
from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.check_attention import ATTENTION, Heads, attention_cases
from localllm.kernels.gpu.check_case import EXACT, Case, codes_for, differing, error_of, poisoned
from localllm.kernels.gpu.check_choice import choice_cases
from localllm.kernels.gpu.check_delta import delta_cases
from localllm.kernels.gpu.check_latent import LATENTS, LatentHeads, latent_cases
from localllm.kernels.gpu.check_mamba2 import mamba_cases
from localllm.kernels.gpu.check_rwkv import rwkv7_cases
from localllm.kernels.gpu.check_short_conv import short_conv_cases
from localllm.kernels.gpu.expert_record import ExpertTable, RecordMatrix
from localllm.kernels.gpu.experts import Inner, gates, mixed, mixture
from localllm.kernels.gpu.launch import first_line, run_all
from localllm.kernels.gpu.product import FEW_ROWS, Dispatch, dispatch_for
from localllm.kernels.gpu.product_end import Gate
from localllm.kernels.gpu.routing import RouterWeights, Routes
from localllm.kernels.noise import gumbel_noise, noise_key
from localllm.kernels.packed_matrix import PackedMatrix
from localllm.kernels.sizes import CENTRED, Glu, RouterConfig, Weights
from localllm.kernels.state_shapes import ConvShape, DeltaShape, Mamba2Shape, Rwkv7Shape

_EPS, _RECORD_ALIGN = 1e-5, 64
GROUPS: tuple[int, ...] = (64, 32, 128)  # of INT4 weights; the first is what models are packed with
INT8 = Weights(8, None, has_bias=False)
# Of other programs' files: one of each kind of codes, and of the shortest groups. A model is checked in its own.
FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
CODED: tuple[Weights, ...] = (
    Weights(4, 16),
    Weights(4, 32, False, CENTRED),
    Weights(4, 32, False, FP4),
    Weights(8, 32, False),
    Weights(8, 16),
)


ROUTERS = (
    RouterConfig("softmax", 128, 8, normalizes=True),
    RouterConfig("softmax", 60, 4),
    RouterConfig("sigmoid", 256, 8, True, groups=8, top_groups=4, normalizes=True, sum_epsilon=1e-20, scale=2.5),
    RouterConfig("softmax", 160, 6, groups=8, top_groups=3, scale=16.0),
    RouterConfig("chosen", 32, 4),
    RouterConfig("sparsemixer", 16, 2, jitter=0.01),
)
# The first is what most models have.
GLUS = (
    Glu("silu"),
    Glu("quick_gelu", limit=0.7, up_offset=1.0),
    Glu("gelu"),
    Glu("gelu_tanh"),
    Glu("relu2", has_gate=False),
)
CONVS = (ConvShape(2048, 3), ConvShape(192, 7))
MAMBAS = (Mamba2Shape(128, 64, 8, 128), Mamba2Shape(24, 32, 1, 256))
RWKV7S = (Rwkv7Shape(32, 64),)
DELTAS = (
    DeltaShape(16, 32, 128, 128),
    DeltaShape(4, 4, 96, 192, is_tiled=True),
    DeltaShape(32, 32, 128, 128, decays="key"),
)


@dataclass(frozen=True)
class CheckSizes:
    """The sizes that are tried: a matrix [N, K], times so many rows. groups: of INT4, None for INT8, or what codes mean
    where they are neither. expert_biases: whether the matrices of experts have any."""

    N: int = 200
    K: int = 2100
    row_counts: tuple[int, ...] = (1, 2, 4, 7, 16, 20, 33, 100)
    groups: tuple[int | Weights | None, ...] = (*GROUPS, None, *CODED)
    attention: tuple[Heads, ...] = ATTENTION
    latents: tuple[LatentHeads, ...] = LATENTS
    glus: tuple[Glu, ...] = GLUS
    routers: tuple[RouterConfig, ...] = ROUTERS
    deltas: tuple[DeltaShape, ...] = DELTAS
    convs: tuple[ConvShape, ...] = CONVS
    mambas: tuple[Mamba2Shape, ...] = MAMBAS
    rwkv7s: tuple[Rwkv7Shape, ...] = RWKV7S
    expert_biases: tuple[bool, ...] = (False, True)

    @property
    def gates(self) -> list[Glu]:
        """Return those in which the product of a first matrix can end."""
        return [glu for glu in self.glus if glu.has_gate]


# For the interpreter, where all of it takes minutes.
SMALL = CheckSizes(
    20,
    600,
    (1, 7),
    (64, None),
    (Heads("int8", "int4", 64, 4, 2),),
    latents=(),
    routers=(),
    deltas=(),
    convs=(),
    mambas=(),
    rwkv7s=(),
)

_ROUTE_PARTS = ("logits", "experts", "weights")


def cases(device: torch.device, sizes: CheckSizes = CheckSizes()) -> Iterator[Case]:
    weights = [weights_of(group) for group in sizes.groups]
    for each in weights:
        yield from _taken(f"products of {each.name}", _products(device, each, sizes))
    for router in sizes.routers:
        yield from _taken(f"a router by {router.scores}", _routed(device, router, sizes))
    of_experts = product({router.top_k: None for router in sizes.routers}, weights)
    for (top_k, each), glu, has_bias in zip(of_experts, cycle(sizes.gates), cycle(sizes.expert_biases), strict=False):
        some = _experts(device, each, top_k, glu, sizes, has_bias=has_bias)
        yield from _taken(f"{top_k} experts of {each.name}", some)
    yield from _taken("norms and gates", _between(device, sizes))
    for each in dict.fromkeys((INT8, *weights)):
        yield from _taken(f"an embedding of {each.name}", _embedded(device, each, sizes))
    yield from _taken("drawn tokens", _drawn(device))
    for dtype in dict.fromkeys((*(heads.dtype for heads in sizes.attention), torch.float32)):
        yield from _taken(f"adapters in {dtype}", _adapted(device, dtype, sizes))
    for mamba in sizes.mambas:
        yield from _taken(f"Mamba 2 of {mamba}", mamba_cases(device, mamba))
    for rwkv7 in sizes.rwkv7s:
        yield from _taken(f"RWKV-7 of {rwkv7}", rwkv7_cases(device, rwkv7, weights))
    for shape in sizes.deltas:
        yield from _taken(f"a delta rule of {shape}", delta_cases(device, shape, weights))
    for conv in sizes.convs:
        yield from _taken(f"a convolution of {conv}", short_conv_cases(device, conv, weights))
    for heads in sizes.attention:
        yield from _taken(f"attention of {heads}", attention_cases(device, heads, weights))
        if heads.chooses:
            yield from _taken(f"pages chosen by {heads}", choice_cases(device, heads))
    for latents in sizes.latents:
        yield from _taken(str(latents), latent_cases(device, latents, weights))


def weights_of(group: int | Weights | None) -> Weights:
    """Return what the codes mean: of INT4 in groups of this length, of INT8, or as it says."""
    return group if isinstance(group, Weights) else INT8 if group is None else Weights(4, group)


def _taken(what: str, some: Iterator[Case]) -> Iterator[Case]:
    try:
        yield from some
    except TritonError as error:  # more shared memory than there is, say; not what the driver says of a launch
        yield Case(f"{what}: {type(error).__name__}: {first_line(error)}", None, 0)


def _matrix(device: torch.device, weights: Weights, sizes: CheckSizes) -> PackedMatrix:
    tiles, groups = -(-sizes.N // tile16.TILE), -(-sizes.K // weights.columns)
    shape = (tiles * tile16.TILE, groups * weights.columns)
    if weights.bits == 8:
        qweight = int8.pack(torch.randint(-127, 128, shape, dtype=torch.int8))
    else:
        qweight = tile16.pack(torch.randint(0, 16, shape, dtype=torch.uint8))
    if weights.group is None:
        return PackedMatrix(qweight.to(device), torch.rand((tiles, tile16.TILE), device=device) / 127, None)
    scale = torch.rand((tiles, groups, tile16.TILE)).half()
    bias = (-7.5 * scale).half().to(device) if weights.has_bias else None
    return PackedMatrix(qweight.to(device), scale.to(device), bias, weights.table)


def _expected(x: Codes, matrix: PackedMatrix, out_features: int) -> Tensor:
    """fp64, of the codes: the weights are exact to fp32."""
    grouped, scale = x.in_order().cpu().view(len(x.q), -1, x.group), x.scale.T.cpu()
    weights = matrix.dequantize(out_features, matrix.in_features, torch.float32).cpu()
    return (grouped.double() * scale.double().unsqueeze(-1)).flatten(1) @ weights.double().T


def _has_gemm(device: torch.device) -> bool:
    return dispatch_for(device).most_rows > FEW_ROWS


def _products(device: torch.device, weights: Weights, sizes: CheckSizes) -> Iterator[Case]:
    """Both kernels; each row must have the bits that it has alone."""
    most = max(sizes.row_counts)
    matrix, x = _matrix(device, weights, sizes), torch.randn((most, sizes.K), device=device)
    codes = Codes.of(most, matrix)
    activations.to_codes(x, codes, sizes.K).run()
    right = _expected(codes, matrix, sizes.N)
    alone = poisoned(1, sizes.N, device=device)
    gemv.gemv(codes.first(1), matrix, alone, sizes.N).run()
    named = weights.name
    for rows in sizes.row_counts:
        found = {}
        if rows <= FEW_ROWS:
            found["gemv"] = poisoned(rows, sizes.N, device=device)
            gemv.gemv(codes.first(rows), matrix, found["gemv"], sizes.N).run()
        for parts in (1, 4) if _has_gemm(device) else ():
            shape = replace(dispatch_for(device).shape(matrix, rows), parts=parts)
            y, partial = poisoned(rows, sizes.N, device=device), poisoned(matrix.slices, rows, sizes.N, device=device)
            run_all(gemm.gemm(codes.first(rows), matrix, y, sizes.N, shape=shape, partial=partial))
            found[f"gemm in {parts}"] = y
        for kernel, y in found.items():
            yield Case(f"{kernel} of {named}, {rows} rows", error_of(y, right[:rows]), EXACT)
            differ = float((y[:1] != alone).sum())
            yield Case(f"{kernel} of {named}, {rows} rows: bits of the first", differ, 0)
    yield from _added(matrix, codes, right, named, sizes)
    yield from _gated(device, weights, sizes)


def _added(matrix: PackedMatrix, codes: Codes, right: Tensor, named: str, sizes: CheckSizes) -> Iterator[Case]:
    """With a bias, to what is there, of every kernel."""
    bias = torch.randn(sizes.N, device=codes.q.device)
    for rows, gemv_rows in ((3, 4), *(((7, 0), (len(codes.q), 0)) if _has_gemm(codes.q.device) else ())):
        there = torch.randn((rows, sizes.N), device=codes.q.device)
        expected, y = right[:rows] + bias.double().cpu() + there.double().cpu(), there.clone()
        dispatch = replace(dispatch_for(y.device), multiprocessors=rows, gemv_rows=gemv_rows)
        run_all(dispatch.product(codes.first(rows), matrix, y, sizes.N, bias, adds=True))
        kernel = "gemv" if gemv_rows else "gemm"
        yield Case(f"{kernel} of {named} added to {rows} rows", error_of(y, expected), EXACT)


def _gated(device: torch.device, weights: Weights, sizes: CheckSizes) -> Iterator[Case]:
    """Codes of a gate, from the end of the product that they follow: those that a launch of their own makes."""
    features = max(1, sizes.N // 2 // tile16.TILE) * tile16.TILE
    matrix = _matrix(device, weights, replace(sizes, N=2 * features))
    most = max(7, *sizes.row_counts)
    x, codes = torch.randn((most, sizes.K), device=device), Codes.of(most, matrix)
    activations.to_codes(x, codes, sizes.K).run()
    ways = ((3, 4, 1), *(((most, 0, 0), (7, 0, 100)) if _has_gemm(device) else ()))
    for (rows, gemv_rows, programs), glu in zip(ways, cycle(sizes.gates), strict=False):
        wide, few = poisoned(rows, 2 * features, device=device), codes.first(rows)
        gemv.gemv(few, matrix, wide, 2 * features).run()
        right, found = (codes_for(weights, rows, features, device) for _ in range(2))
        activations.to_codes(wide, right, features, glu=glu).run()
        dispatch = replace(dispatch_for(device), gemv_rows=gemv_rows, programs=programs)
        run_all(dispatch.product(few, matrix, Gate(found, glu, features), 2 * features, None, adds=False))
        yield Case(f"a gate of {weights.name}, {rows} rows, {programs} programs: bits", differing(found, right), 0)


def _routed(device: torch.device, router: RouterConfig, sizes: CheckSizes) -> Iterator[Case]:
    """A dense row of weights for each token, zeros for the experts that were not chosen. Three tokens have a gate."""
    E, rows = router.num_experts, min(FEW_ROWS + 1, max(sizes.row_counts))
    x, weight, norm = torch.randn(rows, sizes.K), torch.randn(E, sizes.K) * sizes.K**-0.5, torch.rand(sizes.K)
    correction = torch.randn(E) * 0.2 if router.has_correction else None
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + _EPS) * norm.double()
    bias, found, codes = torch.randn(E), dict[int, Routes](), dict[int, Codes]()
    moved = None if correction is None else correction.to(device)
    parts = RouterWeights(weight.to(device), bias.to(device), moved, norm.to(device), _EPS)
    gate = torch.randn(1, sizes.K) * sizes.K**-0.5
    for count in dict.fromkeys((rows, min(3, rows), 1)):
        own = replace(parts, gate=gate.to(device)) if count == 3 else parts
        found[count] = Routes.empty(count, router, device, has_gate=count == 3)
        codes[count] = Codes.empty(count, -(-sizes.K // 64) * 64, 64, device)
        run_all(routing.route(x[:count].to(device), router, own, found[count], codes=codes[count]))
    logits, named = found[rows].logits.cpu(), f"a router by {router.scores}, {router.top_k} of {E}"
    yield Case(f"{named}: logits", error_of(logits, normed @ weight.double().T + bias), EXACT * 10)
    if 3 in found:
        gates = found[3].gates
        yield Case(f"{named}: the gate beside it", error_of(gates, normed[:3] @ gate.double().T), EXACT * 10)
        found[3] = replace(found[3], logits=found[3].logits[:, :E])
    experts, weights = reference.route(logits, correction, router)
    right = torch.zeros(rows, E).scatter(1, experts, weights)
    dense = torch.zeros(rows, E).scatter(1, found[rows].experts.long().clamp(0, E - 1).cpu(), found[rows].weights.cpu())
    yield Case(f"{named}: weights", error_of(dense, right), EXACT * 10)
    for count in (each for each in found if each < rows):
        pairs = ((getattr(found[count], part), getattr(found[rows], part)[:count]) for part in _ROUTE_PARTS)
        yield Case(f"{named}: bits of {count}", sum(float((one != other).sum()) for one, other in pairs), 0)
        differ = differing(codes[count], codes[rows].first(count))
        yield Case(f"{named}: bits of the codes of {count}", differ, 0)
    values = codes[rows].in_order().view(rows, -1, 64).double().cpu() * codes[rows].scale.T.double().unsqueeze(-1).cpu()
    steps = (values.flatten(1)[:, : sizes.K] - normed) / codes[rows].scale.T.repeat_interleave(64, 1)[
        :, : sizes.K
    ].cpu()
    yield Case(f"{named}: codes, in steps", float(steps.abs().max()), 0.51)


def _experts(
    device: torch.device, weights: Weights, top_k: int, glu: Glu, sizes: CheckSizes, *, has_bias: bool = False
) -> Iterator[Case]:
    """Of which one is not on the device. Each token must have the bits that it has alone."""
    features, most = max(1, sizes.K // 3 // tile16.TILE) * tile16.TILE, max(sizes.row_counts)
    both = (replace(sizes, N=2 * features), replace(sizes, K=features))
    matrices = [[_matrix(device, weights, size) for size in both] for _ in range(top_k + 2)]
    biases = [[_bias(N, device) if has_bias else None for N in (2 * features, sizes.N)] for _ in matrices]
    records = [_record(*each) for each in zip(matrices, biases, strict=True)]
    addresses = torch.tensor([0] + [record.data_ptr() for record, _ in records[1:]], device=device)
    gate_up_at, down_at = records[0][1]
    table = ExpertTable(addresses, gate_up_at, down_at, glu, features)
    x, codes = torch.randn((most, sizes.K), device=device), Codes.of(most, matrices[0][0])
    activations.to_codes(x, codes, sizes.K).run()
    chosen = torch.rand((most, len(records)), device=device).argsort(dim=-1)[:, :top_k].int().contiguous()
    routes = Routes(chosen, chosen, torch.rand((most, top_k), device=device))
    right = torch.zeros((most, sizes.N), dtype=torch.float64)
    for expert, (gate_up, down) in list(enumerate(matrices))[1:]:
        wide, inner = poisoned(most, 2 * features, device=device), codes_for(weights, most, features, device)
        gemv.gemv(codes, gate_up, wide, 2 * features, biases[expert][0]).run()
        activations.to_codes(wide, inner, features, glu=glu).run()
        bias = biases[expert][1]
        part = _expected(inner, down, sizes.N) + (0 if bias is None else bias.double().cpu())
        share = torch.where(routes.experts == expert, routes.weights, 0).sum(1, keepdim=True)
        right += share.double().cpu() * part
    named, alone = f"{top_k} experts of {weights.name}", None
    for rows in sizes.row_counts:
        few = Routes(*(part[:rows] for part in (routes.logits, routes.experts, routes.weights)))
        for kernel in ("gemv",) * (rows <= FEW_ROWS) + ("gemm",) * _has_gemm(device):
            dispatch = replace(dispatch_for(device), gemv_rows=FEW_ROWS if kernel == "gemv" else 0)
            y = torch.zeros((rows, sizes.N), device=device)
            run_all(mixture(dispatch, codes.first(rows), few, table, y, adds=rows == 1))
            alone = y[:1].clone() if alone is None else alone
            yield Case(f"{kernel} of {named}, {rows} rows", error_of(y, right[:rows]), EXACT)
            yield Case(f"{kernel} of {named}, {rows} rows: bits of the first", float((y[:1] != alone).sum()), 0)
            yield _elsewhere(f"{kernel} of {named}, {rows} rows", dispatch, codes.first(rows), few, table, right[:rows])


def _bias(features: int, device: torch.device) -> Tensor:
    """Return one that changes much: of sums as large as these here, a gate with a limit shows little else."""
    return 100 * torch.randn(features, device=device)


def _elsewhere(named: str, dispatch: Dispatch, codes: Codes, routes: Routes, table: ExpertTable, right: Tensor) -> Case:
    """With the first expert's, which is not on the device, as somebody else has computed it."""
    pairs, device = routes.experts.numel(), codes.q.device
    parts, is_absent = torch.randn((pairs, right.shape[1]), device=device), routes.experts.flatten() == 0
    added = torch.where(is_absent, routes.weights.flatten(), 0).unsqueeze(1).double() * parts.double()
    parts[~is_absent] = torch.nan
    inner, y = Inner.empty(dispatch, routes, table), poisoned(*right.shape, device=device)
    run_all(gates(codes, routes, table, inner))
    run_all(mixed(dispatch, inner, routes, table, y, adds=False, elsewhere=parts))
    return Case(
        f"{named} and one elsewhere", error_of(y, right + added.view(*routes.experts.shape, -1).sum(1).cpu()), EXACT
    )


def _record(matrices: Sequence[PackedMatrix], biases: Sequence[Tensor | None]) -> tuple[Tensor, list[RecordMatrix]]:
    """Return an expert's bytes, and where its matrices and their biases are in them."""
    parts, places, end = list[Tensor](), list[RecordMatrix](), 0
    for matrix, linear_bias in zip(matrices, biases, strict=True):
        at = []
        for tensor in (matrix.qweight, matrix.scale, matrix.bias, linear_bias):
            at.append(end)
            if tensor is not None:
                content = tensor.contiguous().view(-1).view(torch.uint8)
                parts.append(functional.pad(content, (0, -len(content) % _RECORD_ALIGN)))
                end += len(parts[-1])
        places.append(RecordMatrix(matrix, at[0], at[1], at[2], None if linear_bias is None else at[3]))
    return torch.cat(parts), places


def _between(device: torch.device, sizes: CheckSizes) -> Iterator[Case]:
    x, weight = torch.randn((3, 2 * sizes.K), device=device), torch.rand(sizes.K, device=device)
    wide = x.double()
    first = wide[:, : sizes.K]
    normed = first * torch.rsqrt(first.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    right: dict[str, tuple[Tensor, dict[str, Any]]] = {
        "a norm": (normed, {"weight": weight, "eps": 1e-5}),
        "rows": (first, {}),
        **{str(glu): (reference.gated(wide if glu.has_gate else first, glu), {"glu": glu}) for glu in sizes.glus},
    }
    for name, (expected, options) in right.items():
        y, codes = poisoned(3, sizes.K, device=device), Codes.empty(3, -(-sizes.K // 64) * 64, 64, device)
        activations.to_floats(x, y, sizes.K, **options).run()
        yield Case(f"{name} as floats", error_of(y, expected), EXACT * 10)
        activations.to_codes(x, codes, sizes.K, **options).run()
        values = codes.in_order().view(3, -1, 64).double() * codes.scale.T.double().unsqueeze(-1)
        steps = codes.scale.T.repeat_interleave(64, 1)
        half_steps = ((values.flatten(1)[:, : sizes.K] - expected) / steps[:, : sizes.K]).abs()
        yield Case(f"{name} as codes, in steps", float(half_steps.max()), 0.51)
        yield Case(f"{name}: sums of codes", error_of(codes.bias.T, values.sum(-1)), EXACT * 10)


def _embedded(device: torch.device, weights: Weights, sizes: CheckSizes) -> Iterator[Case]:
    matrix, ids = _matrix(device, weights, sizes), torch.tensor([3, 0, sizes.N - 1], device=device)
    x = poisoned(3, sizes.K, device=device)
    embedding.embed(matrix.qweight, matrix.scale, ids, x, 2.0, matrix.bias, matrix.table).run()
    yield Case(f"an embedding of {weights.name}", error_of(x, 2 * matrix.rows(ids, sizes.K)), EXACT)


def _drawn(device: torch.device) -> Iterator[Case]:
    """A greedy row, one of NaN, one with noise, and one of noise among the likeliest."""
    logits, ids = torch.randn((4, 5000), device=device), torch.arange(5000)
    logits[1, 4000] = torch.nan
    tokens, room = torch.full((4,), -7, device=device), sample.SampleRoom.empty(4, 5000, device)
    keys = [noise_key(seed, 17) for seed in range(4)]
    temperatures = torch.tensor([0.0, 1.0, 0.9, 2.0], device=device)
    thresholds = torch.tensor([-torch.inf, -torch.inf, -torch.inf, -0.5], device=device)
    run_all(sample.sample(logits, torch.tensor(keys, device=device), temperatures, thresholds, tokens, room))
    scores = (logits - logits.amax(1, keepdim=True)).cpu() / temperatures.cpu().unsqueeze(1)
    noisy = [scores[row].double() + gumbel_noise(keys[row], ids) for row in (2, 3)]
    likely = noisy[1].masked_fill(scores[3] < -0.5, -torch.inf)
    right = [int(logits[0].argmax()), sample.NOT_FINITE, int(noisy[0].argmax()), int(likely.argmax())]
    yield Case("drawn tokens", float(tokens.tolist() != right), 0)


def _adapted(device: torch.device, dtype: torch.dtype, sizes: CheckSizes) -> Iterator[Case]:
    """Of two adapters in the second site of their tables, the one with two parts; each row must have the bits that it
    has alone."""
    scales, rows = (0.5, -2.0), sizes.N // 2
    parts = [[(16, 0, sizes.N)], [(3, 0, rows), (40, rows, sizes.N - rows)]]  # ranks, and the rows of each
    pairs, tables, right = list[Tensor](), list[Tensor](), list[Tensor]()
    x, y = torch.randn((3, sizes.K), device=device), torch.randn((4, sizes.N), device=device)
    for own, scale in zip(parts, scales, strict=True):
        records = torch.zeros((2, len(own), len(low_rank.RECORD_WORDS)), dtype=torch.int64)
        added = torch.zeros((3, sizes.N), dtype=torch.float64)
        for number, (rank, first, count) in enumerate(own):
            a = (torch.randn((rank, sizes.K)) * sizes.K**-0.5).to(device, dtype)
            b = torch.randn((count, rank)).to(device, dtype)
            records[1, number] = torch.tensor((a.data_ptr(), b.data_ptr(), rank, first, count))
            added[:, first : first + count] = scale * (x.cpu().double() @ a.cpu().double().T @ b.cpu().double().T)
            pairs += (a, b)
        tables.append(records.to(device))
        right.append(added)
    bits = torch.tensor(scales).view(torch.int32).tolist()
    one, two = ((table.data_ptr(), table.shape[1], word) for table, word in zip(tables, bits, strict=True))
    none = (0, 0, 0)
    uses = torch.tensor([[one, two], [none, none], [two, none]], device=device)
    before, t = y.clone(), low_rank.new_ranks(uses, 2, 40)
    run_all([low_rank.shrink(uses, 1, x, t, dtype), low_rank.expand(uses, 1, t, y[:3], dtype)])
    expected = before.cpu().double()
    expected[0] += right[0][0] + right[1][0]
    expected[2] += right[1][2]
    yield Case(f"adapters in {dtype}", error_of(y, expected), EXACT * 10)
    yield Case(f"adapters in {dtype}: rows without any", float((y[1::2] != before[1::2]).sum()), 0)
    alone, t = before[2:3].clone(), low_rank.new_ranks(uses[2:, :1], 2, 40)
    run_all([low_rank.shrink(uses[2:, :1], 1, x[2:], t, dtype), low_rank.expand(uses[2:, :1], 1, t, alone, dtype)])
    yield Case(f"adapters in {dtype}: bits of one", float((alone != y[2:3]).sum()), 0)
