"""Attention over KV pages: the CPU's kernels beside torch's operators, and those beside plain attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from localllm.cache.kv_format import KV_FORMATS
from localllm.cache.kv_pages import KVPages
from localllm.cache.paged_kv import PagedKV
from localllm.cache.pages import HOST
from localllm.kernels import cpu_linear, cpu_rope, kv_page, reference
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import host_isas
from localllm.kernels.cpu_linear import float_bits
from localllm.kernels.cpu_page_mass import MassRoom
from localllm.kernels.cpu_paged import AttentionPlace, AttentionRoom
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.paged_attention import paged_attention, write
from localllm.kernels.sizes import KVShape
from localllm.layers.native_attention import attention_tables, watched_tokens
from localllm.layers.segment import Segment
from tests.kv_support import filled, random
from tests.thinning import one_in

native = pytest.mark.skipif(not cpu_linear.is_available(), reason="no CPU kernel runs on this machine")
every_isa = pytest.mark.parametrize("isa", host_isas(), ids=lambda isa: isa.name)


@dataclasses.dataclass(frozen=True)
class Heads:
    H: int
    KH: int
    D: int
    rotary_dim: int
    norms: cpu_rope.Norms = "none"
    softcap: float | None = None
    window: int | None = None
    has_sinks: bool = False

    @property
    def sinks(self) -> Tensor | None:
        return random(self.H, seed=6) * 3 if self.has_sinks else None


SHAPES = [
    Heads(8, 1, 64, 64),
    Heads(8, 2, 128, 128, "first", window=37),
    Heads(4, 4, 96, 64, softcap=30.0, window=200),
    Heads(14, 2, 64, 32, "last"),
    Heads(2, 2, 512, 512, "first"),
    Heads(8, 1, 64, 64, window=128, has_sinks=True),
]
ODD = Heads(4, 2, 80, 32, window=150)  # of dense pages alone
SEGMENTS = [[(0, 5)], [(300, 1)], [(510, 5)], [(0, 270)], [(10, 1), (1100, 1)], [(60, 70), (64, 64)]]


def new_pages(kv_format: kv_page.Coding | object, shape: Heads, dtype: torch.dtype = torch.float32) -> KVPages:
    """Two layers. What no token has been written to is NaN: nothing may read it."""
    windows, devices = [shape.window] * 2, [HOST] * 2
    return KVPages(kv_format, windows=windows, devices=devices, shapes=[KVShape(shape.KH, shape.D)] * 2, dtype=dtype)


def segments_of(stores: Sequence[PagedKV], news: Sequence[int]) -> list[Segment]:
    ends = [sum(news[: i + 1]) for i in range(len(news))]
    places = zip(stores, news, ends, strict=True)
    return [Segment(end - new, end, kv, kv.length, rope_length=0) for kv, new, end in places]


def run_native(
    isa: Isa, shape: Heads, qkv: Tensor, segments: list[Segment], *, threads: int = 1, layer: int = 1
) -> Tensor:
    """qkv [T, H + 2 KH, D], rotated and scaled in place; the tokens are written. Returns [T, H, D]."""
    T, D = len(qkv), shape.D
    tables = attention_tables(segments, shape.H, shape.KH, 1, threads)
    room = AttentionRoom(len(tables.tasks), len(tables.merges), tables.num_parts, shape.KH, D)
    room.place(tables)
    layouts, tokens = segments[0].kv.layouts, torch.tensor(tables.tokens[0])
    out = torch.full((T, shape.H * D), float("nan"))
    rope = cpu_rope.rope(isa, *layouts, shape.rotary_dim, shape.norms)
    cos, sin = (random(T, shape.rotary_dim, seed=seed) for seed in (1, 2))
    norms = {"q_norm": random(D, seed=3), "k_norm": random(D, seed=4), "eps": float_bits(1e-6)}
    words = {"heads": shape.H, "kv_heads": shape.KH, "layer": layer, "scales": torch.full((T,), D**-0.5)}
    words["stride"] = (shape.H + 2 * shape.KH) * D
    store = rope.step(qkv=qkv, cos=cos, sin=sin, tokens=tokens, shape=torch.tensor([T]), **norms, **words)
    place = AttentionPlace(qkv, qkv[0].numel(), out, tokens, layer, shape.H, shape.window, shape.softcap, shape.sinks)
    steps = [store, *room.steps(isa, layouts, place, rows=tables.rows, is_split=tables.is_split)]
    if segments[0].kv.masses is not None:
        steps.append(MassRoom(0, 0, 0).placed(watched_tokens(segments), threads).step(isa, layouts, place))
    Tape(steps).run()
    return out.view(T, shape.H, D)


def rope_of(qkv: Tensor, shape: Heads) -> Tensor:
    """Queries and keys as the kernel should rotate them, [T, H + KH, D]."""
    T, half = len(qkv), shape.rotary_dim // 2
    cos, sin = (random(T, shape.rotary_dim, seed=seed)[:, None] for seed in (1, 2))
    x = qkv[:, : shape.H + shape.KH]
    weights = torch.cat([random(shape.D, seed=seed).expand(heads, -1) for seed, heads in ((3, shape.H), (4, shape.KH))])
    if shape.norms != "none":  # behind the rotation their lengths are taken to be those before
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    x = x * weights if shape.norms == "first" else x
    turning = x[..., : shape.rotary_dim]
    swapped = torch.cat((turning[..., half:], turning[..., :half]), dim=-1)
    x = torch.cat((turning * cos + swapped * sin, x[..., shape.rotary_dim :]), dim=-1)
    return x * weights if shape.norms == "last" else x


FORMATS = list(KV_FORMATS.values())
# Every shape with every run of segments, the formats in turn; a third of them each time, which have all of each.
CASES = [
    *(
        pytest.param(
            host_isas()[:1], FORMATS[(i + j) % 4], shape, some, marks=[pytest.mark.slow] * ((2 * i + j) % 3 > 0)
        )
        for i, shape in enumerate(SHAPES)
        for j, some in enumerate(SEGMENTS)
    ),
    *one_in(3, product([host_isas()[:1]], FORMATS[:1], [ODD], SEGMENTS[1::2])),
    *one_in(4, product([host_isas()[1:]], [KV_FORMATS["k8v4"]], SHAPES[:3], SEGMENTS[2:5])),
]


@native
@pytest.mark.parametrize(("isas", "kv_format", "shape", "segments"), CASES)
def test_the_kernels_write_and_attend_as_torch_does(isas, kv_format, shape, segments) -> None:  # type: ignore[no-untyped-def]
    """segments: (tokens held, new tokens) of each sequence."""
    for isa in isas:
        pages = new_pages(kv_format, shape)
        stores = [filled(pages, past, new, seed=i) for i, (past, new) in enumerate(segments)]
        parts = segments_of(stores, [new for _, new in segments])
        qkv = random(parts[-1].end, shape.H + 2 * shape.KH, shape.D)
        out = run_native(isa, shape, qkv.clone(), parts)
        for segment in parts:
            _check_segment(segment, shape, qkv, rope_of(qkv, shape), out)


def _check_segment(segment: Segment, shape: Heads, qkv: Tensor, rotated: Tensor, out: Tensor) -> None:
    rows, held = slice(segment.begin, segment.end), segment.kv.layer(1, segment.past, segment.end - segment.begin)
    options = {"scale": shape.D**-0.5, "window": shape.window, "softcap": shape.softcap, "sinks": shape.sinks}
    expected = paged_attention(rotated[rows, : shape.H], held, segment.past, **options)
    torch.testing.assert_close(out[rows], expected, rtol=0, atol=2e-5)
    written = [page.clone() for page in (*held.pages, *held.own)]
    write(held, segment.past, rotated[rows, shape.H :], qkv[rows, shape.H + shape.KH :])
    for ours, theirs, layout in _with_layouts(held, written):
        _assert_close_codes(layout, ours, theirs)


NOT_FINITE = [float("nan"), float("inf"), -float("inf")]


@native
@pytest.mark.parametrize(
    ("kv_format", "bad"),
    [
        pytest.param(kv_format, bad, id=f"{bad}-{name}", marks=[pytest.mark.slow] * (i % 3 != j))
        for i, (name, kv_format) in enumerate(KV_FORMATS.items())
        for j, bad in enumerate(NOT_FINITE)
    ],
)
def test_what_is_not_finite_is_not_finite_in_its_page(kv_format, bad: float) -> None:  # type: ignore[no-untyped-def]
    """Keys of the third token, values of the fifth: in the kernel's pages as in torch's, and in no other group."""
    shape, new = Heads(2, 1, 64, 0), 130
    kv = filled(new_pages(kv_format, shape), 0, new, seed=5)
    qkv = random(new, shape.H + 2 * shape.KH, shape.D)
    qkv[66, shape.H, 40], qkv[68, shape.H + shape.KH, 3] = bad, bad
    run_native(host_isas()[0], shape, qkv.clone(), segments_of([kv], [new]))
    held = kv.layer(1, 0, new)
    for page in (held.pages[1].clone(), None):
        if page is None:
            write(held, 0, qkv[:, shape.H : -shape.KH], qkv[:, -shape.KH :])
            page = held.pages[1]
        keys, values = kv_page.load(held.coded or held.dense, page[None])
        found = [sorted(set((~x[0].isfinite()).nonzero()[:, 0].tolist())) for x in (keys, values)]
        assert found == [[2], [4]]
        assert keys[0, 2, :32].isfinite().all() and values[0, 4, 32:].isfinite().all()


def _with_layouts(held, written):  # type: ignore[no-untyped-def]
    pages = (*held.pages, *held.own)
    for number, (page, ours) in enumerate(zip(pages, written, strict=True), held.first):
        is_own = number - held.first >= len(held.pages)
        yield ours, page, held.dense if is_own or number == 0 or held.coded is None else held.coded


def _assert_close_codes(layout: kv_page.PageLayout, ours: Tensor, theirs: Tensor) -> None:
    """A value at the edge between two codes may fall on either side."""
    for own, other in zip(kv_page.load(layout, ours[None]), kv_page.load(layout, theirs[None]), strict=True):
        largest = other.nan_to_num().abs().amax().item()  # what was never written is a NaN, by its scale
        step = 0.0 if layout.is_dense else largest / (100 if layout.keys == layout.values == "int8" else 6)
        torch.testing.assert_close(own, other, rtol=1e-5, atol=step + 1e-5, equal_nan=True)
        assert layout.is_dense or (own - other).abs().gt(1e-4).sum() <= own.numel() // 1000


SHARED_OUT = [Heads(8, 2, 64, 64, has_sinks=True), Heads(8, 2, 64, 64, window=150), Heads(3, 3, 32, 32)]


@native
@pytest.mark.parametrize(
    ("kv_format", "shape"),
    [
        pytest.param(kv_format, shape, id=f"{shape}-{name}", marks=[pytest.mark.slow] * (i % 3 != j))
        for i, (name, kv_format) in enumerate(KV_FORMATS.items())
        for j, shape in enumerate(SHARED_OUT)
    ],
)
def test_a_token_attends_with_the_same_bits_however_the_work_is_shared_out(kv_format, shape) -> None:  # type: ignore[no-untyped-def]
    """All new tokens at once, in threes, and one by one; with tasks of sections for many threads, or of all keys."""
    isa, past, new = host_isas()[0], 2100, 70
    qkv, results = random(new, shape.H + 2 * shape.KH, shape.D), []
    cos_free = dataclasses.replace(shape, rotary_dim=0)
    for size, threads in [(new, 1), (3, 1), (1, 64), (1, 1), (new, 1 << 20)]:
        kv = filled(new_pages(kv_format, shape, torch.bfloat16), past, new, seed=5)
        outs = []
        for begin in range(0, new, size):
            count = min(size, new - begin)
            kv.prepare(past + begin + count)
            part = qkv[begin : begin + count].clone()
            outs.append(run_native(isa, cos_free, part, segments_of([kv], [count]), threads=threads))
            kv.advance(count)
        results.append(torch.cat(outs))
    assert all(torch.equal(result, results[0]) for result in results)


@native
@every_isa
@pytest.mark.parametrize("value", [float("nan"), 3e38])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_a_query_whose_scores_are_not_finite_gives_no_number_and_the_other_heads_theirs(isa, value, softcap) -> None:  # type: ignore[no-untyped-def]
    shape = Heads(2, 1, 64, 64, softcap=softcap)
    qkv = random(1, 4, 64)
    stores = [filled(new_pages(KV_FORMATS["bf16"], shape), 20, 1, seed=1) for _ in range(2)]
    usual, spoilt = (
        run_native(isa, shape, x, segments_of([kv], [1]))
        for x, kv in zip((qkv.clone(), _with(qkv, value)), stores, strict=True)
    )
    assert bool(spoilt[0, 0].isnan().all()) and torch.equal(spoilt[0, 1], usual[0, 1])


def _with(qkv: Tensor, value: float) -> Tensor:
    changed = qkv.clone()
    changed[0, 0] = value
    return changed


LIMITS, LENGTHS = [(None, None), (90, None), (None, 20.0), (70, 20.0)], [(0, 10), (0, 200), (250, 90), (300, 1)]


@pytest.mark.parametrize(
    ("kv_format", "window", "softcap", "past", "new"),
    [  # half of them each time, which have all formats, limits and lengths
        pytest.param(FORMATS[(i + j) % 4], *limits, *lengths, marks=[pytest.mark.slow] * ((i + j // 2) % 2))
        for i, limits in enumerate(LIMITS)
        for j, lengths in enumerate(LENGTHS)
    ],
)
def test_attention_over_pages_is_that_over_their_keys(kv_format, window, softcap, past, new) -> None:  # type: ignore[no-untyped-def]
    """A query sees the first page and its own as they were written, all others as they are coded."""
    shape = Heads(6, 2, 64, 64, window=window, softcap=softcap)
    pages = new_pages(kv_format, shape)
    keys, values, q = random(past + new, 2, 64), random(past + new, 2, 64, seed=1), random(past + new, 6, 64, seed=2)
    kv, outs = PagedKV(pages, past + new), []
    for begin, end in [(0, past), (past, past + new)]:
        if begin == end:
            continue
        kv.prepare(end)
        held = kv.layer(0, begin, end - begin)
        write(held, begin, keys[begin:end], values[begin:end])
        options = {"scale": 0.2, "window": window, "softcap": softcap}
        outs.append(paged_attention(q[begin:end], held, begin, **options))
        kv.advance(end - begin)
    _, coded = kv_format.layouts(KVShape(2, 64), torch.float32)
    out = torch.cat(outs)
    for own in range(0, past + new, 64):
        read = [_as_read(coded, x, own, n) for n, x in enumerate((keys, values))]
        for position in range(own, min(own + 64, past + new)):
            seen = [x[: position + 1].transpose(0, 1) for x in read]
            expected = reference.attention(q[position : position + 1], *seen, scale=0.2, window=window, softcap=softcap)
            torch.testing.assert_close(out[position], expected[0], rtol=1e-5, atol=1e-5)


def _as_read(coded: kv_page.PageLayout | None, x: Tensor, own: int, part: int) -> Tensor:
    """x [S, KH, D] as a query in the page that begins at `own` reads it. part: 0 of keys, 1 of values."""
    read = x.clone()
    for begin in range(64, own, 64):
        if coded is None:
            continue
        page = torch.zeros(coded.layer_bytes, dtype=torch.uint8)
        turned = kv_page.rotated(x[begin : begin + 64])
        kv_page.store(coded, page, 0, turned, turned)
        read[begin : begin + 64] = kv_page.rotated(kv_page.load(coded, page[None])[part]).transpose(0, 1)
    return read


@pytest.mark.parametrize("coding", ["int8", "int4"])
def test_a_code_is_within_half_a_step_of_its_value(coding: kv_page.Coding) -> None:
    x = random(500, 96) * torch.logspace(-7, 3, 500)[:, None]
    codes, scales = kv_page.quantize(x, coding)
    error = (kv_page.dequantize(codes, scales, coding) - x).abs().view(500, 3, 32)
    peak = x.abs().view(500, 3, 32).amax(-1, keepdim=True)
    # A scale is at most an eighth above the smallest that would do.
    assert bool((error <= peak * 1.125 / (127 if coding == "int8" else 8) / 2 * 1.001 + kv_page.SCALE_LOW).all())


def test_int4_pages_take_less_than_a_third_of_dense_ones() -> None:
    ratios = {}
    for name, kv_format in KV_FORMATS.items():
        dense, coded = kv_format.layouts(KVShape(8, 128), torch.bfloat16)
        ratios[name] = (coded or dense).layer_bytes / dense.layer_bytes
    assert ratios == {"bf16": 1, "int8": 0.515625, "k8v4": 0.390625, "int4": 0.265625}
