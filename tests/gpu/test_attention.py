"""Paged attention on a GPU, in Triton's interpreter, beside fp64."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from localllm.cache.kv_format import KV_FORMATS, KVFormat
from localllm.kernels import kv_page, reference
from localllm.kernels.gpu.activations import Codes, to_codes
from localllm.kernels.gpu.attention import PREFILL_ROWS, attend, block_rows, tasks_of
from localllm.kernels.gpu.attention_merge import new_parts
from localllm.kernels.gpu.launch import run_all
from localllm.kernels.gpu.page_masses import Watched, watch
from localllm.kernels.kv_page import PAGE_TOKENS
from tests.gpu.forward_support import LAYER, NAN, Forward, write_new
from tests.kv_support import random

# The others' codes are laid out as these are.
EVERY_FORMAT = [
    pytest.param(kv_format, id=name, marks=() if name in ("bf16", "k8v4") else pytest.mark.slow)
    for name, kv_format in KV_FORMATS.items()
]
BOTH_KINDS = [KV_FORMATS["bf16"], KV_FORMATS["k8v4"]]  # of pages


def in_turn(*cases: object) -> list[tuple[KVFormat, object]]:
    """Every case with a format: dense and coded pages in turn."""
    return list(zip(itertools.cycle(BOTH_KINDS), cases, strict=False))


# Of fp32 sums of some hundred products; on a card, where operands are bf16, see the docstring of `attend`.
TOLERANCE = 2e-5


def run(
    forward: Forward,
    q: Tensor,
    *,
    scale: float = 0.2,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    sections: int | None = None,
    rows: int | None = None,
    empty_tasks: int = 0,
    out: Tensor | Codes | None = None,
) -> Tensor | Codes:
    """sections: as many as the longest segment has pages, where it is not said. Returns [M, H * D]."""
    M, H, D = q.shape
    rows = rows or block_rows(H // forward.KH, is_prefill=False)
    sections = sections or max(slot for _, slot in forward.rows) // PAGE_TOKENS + 1
    parts = new_parts(sections, M, H, D)
    for tensor in (parts.mixed, parts.peaks, parts.totals):
        tensor.fill_(NAN)
    out = torch.full((M, H * D), NAN) if out is None else out
    history = forward.history(rows // (H // forward.KH), empty_tasks=empty_tasks)
    launches = attend(
        q, out, forward.tokens(), history, parts, *forward.layouts, LAYER,
        scale=scale, window=forward.window, softcap=softcap, sinks=sinks, rows=rows,
    )  # fmt: skip
    run_all(launches)
    return out


def prepared(forward: Forward, H: int) -> Tensor:
    """The new tokens are written. Returns queries [M, H, D]."""
    M, D = forward.num_rows, forward.D
    k, v = random(2, M, forward.KH, D, seed=7)
    write_new(forward, k, v)
    return random(M, H, D, seed=8)


def check(forward: Forward, H: int, **options: object) -> None:
    q = prepared(forward, H)
    numbers = {name: options[name] for name in options if name in ("softcap", "sinks")}
    mixed = run(forward, q, **options)  # type: ignore[arg-type]
    expected = forward.expected(q, scale=0.2, **numbers)  # type: ignore[arg-type]
    real = len(forward.rows)
    assert (mixed - expected)[:real].abs().max() < TOLERANCE
    assert mixed[real:].isnan().all()  # of padding nothing is written


@pytest.mark.parametrize(("kv_format", "length"), in_turn(1, 64, 63, 65, 300, 257))
def test_a_token_attends_to_its_history(kv_format, length):
    check(Forward(kv_format, KH=1, D=64, pasts=[length - 1], counts=[1]), H=4)


@pytest.mark.parametrize(("kv_format", "sizes"), in_turn((128, 1), (64, 7), (32, 20), (128, 7)))
def test_heads_of_any_size_and_number_share_a_key_head(kv_format, sizes):
    D, G = sizes
    check(Forward(kv_format, KH=2, D=D, pasts=[140], counts=[1]), H=2 * G)


@pytest.mark.parametrize("D", [80, 96])
def test_heads_that_are_no_power_of_two_are_dense_or_masked(D):
    kv_format = KV_FORMATS["bf16" if D == 80 else "int4"]
    check(Forward(kv_format, KH=2, D=D, pasts=[270], counts=[4]), H=4)


@pytest.mark.parametrize("kv_format", EVERY_FORMAT)
def test_segments_of_any_length_straddle_pages_beside_padding(kv_format):
    forward = Forward(kv_format, KH=1, D=64, pasts=[0, 60, 120, 255, 300], counts=[1, 16, 16, 4, 1], padding=3)
    check(forward, H=4, empty_tasks=2)


@pytest.mark.parametrize("kv_format", BOTH_KINDS)
def test_dense_pages_of_bf16_are_read_as_they_are(kv_format):
    check(Forward(kv_format, KH=1, D=64, pasts=[130], counts=[4], dtype=torch.bfloat16), H=4)


@pytest.mark.parametrize(("kv_format", "window"), in_turn(1, 100, 257, 64))
def test_a_window_hides_what_lies_before_it(kv_format, window):
    check(Forward(kv_format, KH=1, D=32, pasts=[318, 20], counts=[4, 2], window=window), H=2)


@pytest.mark.parametrize("kv_format", BOTH_KINDS)
def test_a_softcap_bounds_the_scores(kv_format):
    check(Forward(kv_format, KH=1, D=64, pasts=[150], counts=[2]), H=4, softcap=1.5)


# Beside scores of every size: one that no key weighs anything against, and one that weighs nothing.
SINKS = torch.tensor([0.5, 30.0, -30.0, 2.0])


@pytest.mark.parametrize(("kv_format", "sizes"), in_turn({}, {"sections": 1, "rows": PREFILL_ROWS}))
def test_a_sink_takes_its_share_of_each_head(kv_format, sizes):
    """Of a history with a window and one that is all seen, over pages and within one."""
    for window, pasts in ((100, [318, 20]), (None, [130, 0])):
        forward = Forward(kv_format, KH=2, D=32, pasts=pasts, counts=[2, 1], window=window, padding=1)
        check(forward, H=4, sinks=SINKS, **sizes)


@pytest.mark.parametrize("kv_format", BOTH_KINDS)
@pytest.mark.parametrize(
    ("dtype", "window"), [(torch.float32, None), (torch.bfloat16, 90)], ids=["in small blocks", "at once"]
)
def test_a_long_prompt_is_read_in_larger_tasks_and_a_window_hides_what_lies_before_it(kv_format, dtype, window):
    forward = Forward(kv_format, KH=1, D=32, pasts=[0, 180], counts=[3, 30], dtype=dtype, window=window)
    check(forward, H=5, rows=PREFILL_ROWS, sections=1)


@pytest.mark.parametrize(("kv_format", "window"), in_turn(100, None))
@pytest.mark.usefixtures("products_row_by_row")
def test_a_row_has_the_same_bits_alone_and_among_others(kv_format, window):
    many = Forward(kv_format, KH=1, D=64, pasts=[40, 270, 600], counts=[3, 9, 1], window=window)
    q = prepared(many, H=4)
    together = run(many, q, sections=16)
    for row in (0, 3, 11, 12):
        assert torch.equal(run(*alone(many, q, row)), together[row : row + 1])


def alone(many: Forward, q: Tensor, row: int) -> tuple[Forward, Tensor]:
    """The same forward with one of its rows, over the same pages."""
    segment, slot = many.rows[row]
    one = dataclasses.replace(many, pasts=[0], counts=[1], window=None)
    one.pasts, one.window, one.stores = [slot], many.window, [many.stores[segment]]
    return one, q[row : row + 1]


@pytest.mark.parametrize("kv_format", EVERY_FORMAT)
@pytest.mark.parametrize(
    ("window", "softcap", "sinks"),
    [(None, None, None), (100, 1.5, SINKS), (None, None, SINKS)],
    ids=["all", "a capped window with sinks", "all with sinks"],
)
@pytest.mark.usefixtures("products_row_by_row")
def test_a_prompts_row_has_the_bits_of_a_step(kv_format, window, softcap, sinks):
    """One program for all pages of many rows, and one for each page of a few."""
    forward = Forward(kv_format, KH=1, D=64, pasts=[190, 0], counts=[30, 5], window=window)
    q, options = prepared(forward, H=4), {"softcap": softcap, "sinks": sinks}
    together = run(forward, q, **options, sections=1, rows=PREFILL_ROWS)
    for first in (0, 1, 2, 29, 33):
        assert torch.equal(run(*alone(forward, q, first), **options), together[first : first + 1])


@pytest.mark.parametrize("group", [32, 64])
def test_codes_for_the_next_matrix_are_those_of_the_floats(group):
    forward = Forward(KV_FORMATS["k8v4"], KH=1, D=64, pasts=[130], counts=[3], padding=1)
    q = prepared(forward, H=4)
    expected, found = (Codes.empty(4, 256, group, q.device) for _ in range(2))
    to_codes(run(forward, q), expected, 256).run()
    run(forward, q, out=found)
    for part in (lambda codes: codes.q[:3], lambda codes: codes.scale[:, :3], lambda codes: codes.bias[:, :3]):
        assert torch.equal(part(found), part(expected))


@pytest.mark.parametrize("part", [1, 3], ids=["key", "value"])
@pytest.mark.parametrize("kv_format", EVERY_FORMAT[1:])
def test_a_scale_that_is_not_finite_reaches_those_who_see_its_token(kv_format, part):
    forward = Forward(kv_format, KH=1, D=64, pasts=[330], counts=[4], window=203)
    q = prepared(forward, H=4)
    _, coded = forward.layouts
    scales = coded.parts(forward.table_page(0, 2))[part]
    scales[0, 0, 130 - 2 * PAGE_TOKENS] = kv_page.NOT_FINITE  # seen from 330 to 332
    mixed = run(forward, q)
    assert mixed[:3].isnan().any(-1).all() and mixed[3:].isfinite().all()


@pytest.mark.parametrize(("kv_format", "sinks"), in_turn(SINKS, None))
def test_the_attention_that_pages_get_is_that_of_the_weights(kv_format, sinks):
    """What a step leaves is summed up; of a prompt it is computed for the rows that count."""
    forward, watched = Forward(kv_format, KH=2, D=32, pasts=[318, 20], counts=[3, 2], padding=1), [0, 2, 4]
    q, pages = prepared(forward, 4), 6
    parts, rows = new_parts(pages, forward.num_rows, 4, 32), block_rows(2, is_prefill=False)
    history, options = forward.history(rows // 2), {"scale": 0.2, "softcap": 1.5, "sinks": sinks}
    out = torch.empty(forward.num_rows, 128)
    run_all(attend(q, out, forward.tokens(), history, parts, *forward.layouts, LAYER, **options, rows=rows))
    for own in (parts, None):
        sums = torch.zeros(len(watched), 2, pages)
        tasks = [(row, 1, forward.rows[row][0], row if own else i) for i, row in enumerate(watched)]
        places = torch.tensor([[each.data_ptr(), pages] for each in sums] + [[0, 0]])
        counted = Watched(torch.tensor([*tasks, (0, 0, 0, 0)], dtype=torch.int32), places)
        for _ in range(2):  # layers add to the same
            run_all(watch(q, forward.tokens(), history, counted, own, pages, *forward.layouts, LAYER, **options))
        for row, found in zip(watched, sums, strict=True):
            torch.testing.assert_close(found, 2 * _masses(forward, q[row], row, pages, sinks), rtol=1e-4, atol=1e-5)


def _masses(forward: Forward, query: Tensor, row: int, pages: int, sinks: Tensor | None) -> Tensor:
    keys, _ = forward.seen_by(*forward.rows[row])
    scores = 1.5 * torch.tanh(query.double().view(2, 2, -1) @ keys.mT * 0.2 / 1.5)
    weights = reference.softmax(scores.unsqueeze(2), sinks).sum((1, 2))
    return functional.pad(weights, (0, pages * PAGE_TOKENS - weights.shape[1])).view(2, pages, -1).sum(-1).float()


def test_tasks_stand_in_one_page_and_have_so_many_tokens_at_most():
    assert list(tasks_of(2, 10, 60, 9, 4)) == [(10, 4, 2, 10), (14, 4, 2, 14), (18, 1, 2, 18)]
    assert list(tasks_of(0, 0, 62, 4, 16)) == [(0, 2, 0, 0), (2, 2, 0, 2)]
