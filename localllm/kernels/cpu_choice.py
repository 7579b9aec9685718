"""The choice of the pages that a token attends to, on the CPU (see `page_choice`): for each token and key head a table
of the pages with the largest scores.

The attention reads that table as if the sequence had no other pages: a token's position is its place in there.
"""

from __future__ import annotations

from functools import cache

from localllm.kernels import cpu_math
from localllm.kernels.cpu_ir import F32V, I32, I32V, I64, LANES, PTR, Kernel, Value, Variable
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native, compile_kernel
from localllm.kernels.cpu_rope import TOKEN_BYTES
from localllm.kernels.cpu_sketch import MASS_BYTES, PageScores, words_of
from localllm.kernels.kv_page import PAGE_TOKENS
from localllm.kernels.sizes import CHOICE_WORDS, FIXED_PAGES, SKETCH_WORDS, SketchLayout

_TAKEN = -(1 << 31)  # the key of what is not to be chosen: below that of any number


def choose_source(isa: Isa, head_dim: int, *, is_rotated: bool) -> Kernel:
    """q fp32 [T, stride] rotated and scaled; tokens: see `cpu_rope`; choices: int64 [T, 4], see CHOICE_WORDS. chosen:
    the words of tokens as the attention is to read them, for one key head after the other, `chosen_stride` bytes apart.
    tables: int64, the addresses of what those attend to.

    scratch: room for `scratch_stride` bytes of each thread, SCRATCH_BYTES for each page of the longest sequence.
    sequences, shape, layer: as in `sketch_source`, whose step has made the sketches. group: query heads a key head.
    is_rotated: pages are coded, and queries rotated like them.
    """
    words = "q tokens choices chosen tables scratch sequences shape"
    words += " | kv_heads group stride layer chosen_stride scratch_stride"
    k = Kernel("choose", words)
    a, made_of, pages = k.arg, SketchLayout(head_dim), PageScores(k, isa, head_dim, is_rotated=is_rotated)
    masses = a.scratch.at(k.thread * a.scratch_stride)
    with k.when(k.thread.compare("eq", 0)), k.range(k.i64(0), a.shape.at(8).load(I64, 8)) as number:
        own = words_of(a.sequences, number, SKETCH_WORDS)
        made = own["made"].load(PTR, 8).at(a.layer * 8)
        made.store(k.larger(made.load(I64, 8), own["wanted"].load(I64, 8)), 8)
    # Dealt out one by one, as in the attention.
    with k.range(k.i64(0), (a.shape.load(I64, 8) * a.kv_heads + k.threads - 1 - k.thread) / k.threads) as turn:
        item = turn * k.threads + k.thread
        token, kv_head = item / a.kv_heads, item % a.kv_heads
        choice, source = words_of(a.choices, token, CHOICE_WORDS), a.tokens.at(token * TOKEN_BYTES)
        target = a.chosen.at(kv_head * a.chosen_stride).at(token * TOKEN_BYTES)
        for offset in range(0, TOKEN_BYTES, 8):
            target.at(offset).store(source.at(offset).load(I64, 8), 8)
        with k.when(choice["sketches"].load(I64, 8).compare("ne", 0)):
            q = a.q.at((token * a.stride + kv_head * a.group * head_dim) * 4)
            room = choice["room"].load(I64, 8)
            sketches = choice["sketches"].load(PTR, 8).at((a.layer * a.kv_heads + kv_head) * room * made_of.nbytes)
            position, count = source.at(24).load(I64, 8), choice["pages"].load(I64, 8)
            newest, keys = position / PAGE_TOKENS - 1, masses.at(room * MASS_BYTES)
            pages.compute(q, a.group, sketches, newest, masses, keys)
            _order(k, keys, newest)
            first = choice["table"].load(I64, 8) * a.kv_heads + kv_head * (count + FIXED_PAGES)
            table = a.tables.at(first * 8)
            _write_table(k, keys, newest, count, source.load(PTR, 8), table)
            target.store(table, 8)
            target.at(24).store((count + (FIXED_PAGES - 1)) * PAGE_TOKENS + position % PAGE_TOKENS, 8)
    return k


def _order(k: Kernel, scores: Value, newest: Value) -> None:
    """Turn the score of each page that may be chosen into its key: whole numbers in the order of the scores."""
    with k.range(k.i64(0), newest, LANES) as first:
        place, page = scores.at(first * 4), k.lane_numbers() + first.convert("trunc", I32).splat()
        can_be = page.compare("ugt", 0) & page.compare("ult", newest.convert("trunc", I32).splat())
        place.store(can_be.choose(cpu_math.order(k, place.load(F32V)), k.constant(I32V, _TAKEN)))


def _write_table(k: Kernel, keys: Value, newest: Value, count: Value, pages: Value, table: Value) -> None:
    """Write the addresses of the first page, of the `count` with the largest keys, the first ones of those that are
    alike, of the newest full page and of the own one, by their numbers."""
    threshold = _threshold(k, keys, newest, count)
    ties = k.variable(count - _count(k, keys, newest, threshold.get(), "sgt"))
    place = k.variable(table.at(8).convert("ptrtoint", I64))
    table.store(pages.load(I64, 8), 8)
    with k.range(k.i64(1), newest) as page:
        key = keys.at(page * 4).load(I32)
        is_above, is_alike = key.compare("sgt", threshold.get()), key.compare("eq", threshold.get())
        is_chosen = is_above | (is_alike & ties.get().compare("ne", 0))
        place.get().convert("inttoptr", PTR).store(pages.at(page * 8).load(I64, 8), 8)  # written over where it is not
        place.add(is_chosen.choose(k.i64(8), k.i64(0)))
        ties.set(ties.get() - (is_chosen & is_alike).convert("zext", I64))
    for n in range(2):
        place.get().convert("inttoptr", PTR).at(8 * n).store(pages.at((newest + n) * 8).load(I64, 8), 8)


def _threshold(k: Kernel, keys: Value, end: Value, count: Value) -> Variable:
    """Return the largest number that `count` keys or more are not below, bit by bit."""
    found = k.variable(k.constant(I32, _TAKEN))
    with k.range(k.i64(0), k.i64(32)) as n:
        bit = k.constant(I32, 1) << (k.constant(I32, 31) - n.convert("trunc", I32))
        candidate = found.get() ^ bit  # the highest one tells what is not negative
        enough = _count(k, keys, end, candidate, "sge").compare("uge", count)
        found.set(enough.choose(candidate, found.get()))
    return found


def _count(k: Kernel, keys: Value, end: Value, limit: Value, predicate: str) -> Value:
    """Return how many keys are above a limit, or not below it."""
    total = k.variable(k.constant(I32V, 0))
    with k.range(k.i64(0), end, LANES) as i:
        is_one = keys.at(i * 4).load(I32V).compare(predicate, limit.splat())
        total.add(is_one.convert("zext", I32V))
    return cpu_math.total(k, total.get()).convert("zext", I64)


@cache
def choose(isa: Isa, head_dim: int, *, is_rotated: bool) -> Native:
    return compile_kernel(choose_source(isa, head_dim, is_rotated=is_rotated), isa)
