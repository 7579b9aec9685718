"""The choice of the pages that a token attends to, on the CPU (see `page_choice`): bounds of pages that have become
full, and for each token and key head a table of the pages with the largest bounds.

The attention reads that table as if the sequence had no other pages: a token's position is its place in there.
"""

from __future__ import annotations

from functools import cache

from localllm.kernels import cpu_kv, cpu_math
from localllm.kernels.cpu_ir import F32, F32V, I32, I32V, I64, LANES, PTR, Kernel, Value, Variable, vector_of
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native, compile_kernel
from localllm.kernels.cpu_kv import HeadPlan
from localllm.kernels.cpu_rope import TOKEN_BYTES
from localllm.kernels.kv_page import GROUP, INT4_ZERO, PAGE_TOKENS, PageLayout
from localllm.kernels.page_choice import BOUND_BYTES, BOUND_PAGES, FIXED_PAGES
from localllm.kernels.sizes import BOUND_WORDS, CHOICE_WORDS

_LINE = 2 * BOUND_PAGES * BOUND_BYTES  # a feature's bounds in a block of pages
_ROWS_AT_ONCE = 4  # features whose sums do not wait for each other
_TAKEN = -(1 << 31)  # the key of what is not to be chosen: below that of any number


def bounds_source(layout: PageLayout) -> Kernel:
    """Make the bounds of all pages in front of `wanted` that have none.

    layout: of all pages but a sequence's first, which needs none. sequences: int64 [sequences, 5], see BOUND_WORDS.
    shape: a pointer to {tokens, sequences}. layer: as in `attention_source`.
    """
    k = Kernel("bounds", "sequences shape | kv_heads layer")
    a, plan = k.arg, HeadPlan(layout)
    with k.range(k.i64(0), a.shape.at(8).load(I64, 8)) as number:
        words = _words(a.sequences, number, BOUND_WORDS)
        pages, bounds, made = (words[name].load(PTR, 8) for name in ("pages", "bounds", "made"))
        first = k.larger(made.at(a.layer * 8).load(I64, 8), k.i64(1))
        end = k.larger(words["wanted"].load(I64, 8), first)
        begin, stop = k.share((end - first) * a.kv_heads)
        with k.range(begin, stop) as item:
            page, part = first + item / a.kv_heads, a.layer * a.kv_heads + item % a.kv_heads
            head = pages.at(page * 8).load(PTR, 8).at(part * layout.head_bytes)
            blocks = bounds.at((part * words["blocks"].load(I64, 8) + page / BOUND_PAGES) * (layout.head_dim * _LINE))
            _bound_page(k, plan, head, blocks.at(page % BOUND_PAGES * BOUND_BYTES))
    return k


def _bound_page(k: Kernel, plan: HeadPlan, head: Value, column: Value) -> None:
    """column: where the first feature's least number goes."""
    coding = plan.layout.keys
    features = GROUP if coding == "int4" else LANES  # of which one row of codes after the other has one, or two
    with k.range(k.i64(0), k.i64(plan.layout.head_dim), features) as first:
        scales = []
        if coding != "dense":
            row = head.at(plan.offsets[1]).at(first / GROUP * PAGE_TOKENS)
            scales = [cpu_kv.scales(row.at(LANES * n)) for n in range(PAGE_TOKENS // LANES)]
        found: dict[int, list[list[Value]]] = {}
        for i in range(LANES):
            for further, vectors in plan.keys(head, first + i, PAGE_TOKENS):
                if coding == "int4":
                    vectors = [vector - INT4_ZERO for vector in vectors]
                if scales:
                    vectors = [vector * scale for vector, scale in zip(vectors, scales, strict=True)]
                found.setdefault(further, []).append(vectors)
        for further, rows in found.items():
            _store_bounds(k, rows, column.at((first + further) * _LINE))


def _store_bounds(k: Kernel, rows: list[list[Value]], column: Value) -> None:
    """rows: of 16 features, the numbers of a page's tokens. Where one is not finite, the bounds are NaN."""
    spreads, least, largest = [], [], []
    for vectors in rows:
        low = high = vectors[0]
        spread = low - low
        for vector in vectors[1:]:
            low, high, spread = k.smaller(low, vector), k.larger(high, vector), spread + (vector - vector)
        spreads.append(spread)
        least.append(low)
        largest.append(high)
    spread = cpu_math.totals(k, spreads)
    bounds = cpu_math.totals(k, least, k.smaller), cpu_math.totals(k, largest, k.larger)
    for side, bound in enumerate(bounds):
        rounded = cpu_math.to_bf16(k, bound + spread)
        for lane in range(LANES):
            column.at(lane * _LINE + side * BOUND_PAGES * BOUND_BYTES).store(k.lane(rounded, lane), BOUND_BYTES)


def choose_source(head_dim: int) -> Kernel:
    """q fp32 [T, stride] rotated and scaled; tokens: see `cpu_rope`; choices: int64 [T, 4], see CHOICE_WORDS. chosen:
    the words of tokens as the attention is to read them, for one key head after the other, `chosen_stride` bytes apart.
    tables: int64, the addresses of what those attend to.

    keys: room for `keys_stride` bytes of each thread, 4 for each page of the longest sequence in whole blocks.
    sequences, shape, layer: as in `bounds_source`, whose step has made the bounds. group: query heads a key head.
    """
    words = (
        "q tokens choices chosen tables keys sequences shape | kv_heads group stride layer chosen_stride keys_stride"
    )
    k = Kernel("choose", words)
    a = k.arg
    keys = a.keys.at(k.thread * a.keys_stride)
    with k.when(k.thread.compare("eq", 0)), k.range(k.i64(0), a.shape.at(8).load(I64, 8)) as number:
        own = _words(a.sequences, number, BOUND_WORDS)
        made = own["made"].load(PTR, 8).at(a.layer * 8)
        made.store(k.larger(made.load(I64, 8), own["wanted"].load(I64, 8)), 8)
    # Dealt out one by one, as in the attention.
    with k.range(k.i64(0), (a.shape.load(I64, 8) * a.kv_heads + k.threads - 1 - k.thread) / k.threads) as turn:
        item = turn * k.threads + k.thread
        token, kv_head = item / a.kv_heads, item % a.kv_heads
        choice, source = _words(a.choices, token, CHOICE_WORDS), a.tokens.at(token * TOKEN_BYTES)
        target = a.chosen.at(kv_head * a.chosen_stride).at(token * TOKEN_BYTES)
        for offset in range(0, TOKEN_BYTES, 8):
            target.at(offset).store(source.at(offset).load(I64, 8), 8)
        with k.when(choice["bounds"].load(I64, 8).compare("ne", 0)):
            q = a.q.at((token * a.stride + kv_head * a.group * head_dim) * 4)
            part = (a.layer * a.kv_heads + kv_head) * choice["blocks"].load(I64, 8)
            bounds = choice["bounds"].load(PTR, 8).at(part * (head_dim * _LINE))
            position, count = source.at(24).load(I64, 8), choice["pages"].load(I64, 8)
            newest = position / PAGE_TOKENS - 1
            _score(k, q, head_dim, bounds, newest, keys)
            first = choice["table"].load(I64, 8) * a.kv_heads + kv_head * (count + FIXED_PAGES)
            table = a.tables.at(first * 8)
            _write_table(k, keys, newest, count, source.load(PTR, 8), table)
            target.store(table, 8)
            target.at(24).store((count + (FIXED_PAGES - 1)) * PAGE_TOKENS + position % PAGE_TOKENS, 8)
    return k


def _score(k: Kernel, q: Value, head_dim: int, bounds: Value, newest: Value, keys: Value) -> None:
    """Write the key of each page in front of the newest full one: whole numbers in the order of the sums of the bounds
    of a group's heads."""
    positive, negative = (k.stack(F32V, head_dim // LANES) for _ in range(2))
    zero = k.f32v(0)
    for i in range(head_dim // LANES):
        sums = k.variable(zero), k.variable(zero)
        with k.range(k.i64(0), k.arg.group) as head:
            vector = q.at(head * (head_dim * 4)).at(64 * i).load(F32V)
            is_above = vector.compare("ogt", 0.0)
            sums[0].add(is_above.choose(vector, zero))
            sums[1].add(is_above.choose(zero, vector))  # with a NaN
        positive.at(64 * i).store(sums[0].get(), 64)
        negative.at(64 * i).store(sums[1].get(), 64)
    with k.range(k.i64(0), newest, BOUND_PAGES) as first:
        block = bounds.at(first / BOUND_PAGES * (head_dim * _LINE))
        totals = [k.variable(zero) for _ in range(2 * _ROWS_AT_ONCE)]
        with k.range(k.i64(0), k.i64(head_dim), _ROWS_AT_ONCE) as feature:
            for n in range(_ROWS_AT_ONCE):
                line = block.at(feature * _LINE).at(n * _LINE)
                for side, queries in enumerate((negative, positive)):
                    query = queries.at(feature * 4).at(4 * n).load(F32).splat()
                    bound = _from_bf16(line.at(side * BOUND_PAGES * BOUND_BYTES))
                    total = totals[2 * n + side]
                    total.set(k.fma(query, bound, total.get()))
        score = _sum([total.get() for total in totals])
        page = k.lane_numbers() + first.convert("trunc", I32).splat()
        can_be = page.compare("ugt", 0) & page.compare("ult", newest.convert("trunc", I32).splat())
        keys.at(first * 4).store(can_be.choose(cpu_math.order(k, score), k.constant(I32V, _TAKEN)), 64)


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
        is_one = keys.at(i * 4).load(I32V, 64).compare(predicate, limit.splat())
        total.add(is_one.convert("zext", I32V))
    return cpu_math.total(k, total.get()).convert("zext", I64)


def _from_bf16(at: Value) -> Value:
    return (at.load(vector_of("i16"), 2).convert("zext", I32V) << 16).convert("bitcast", F32V)


def _sum(vectors: list[Value]) -> Value:
    """In pairs."""
    while len(vectors) > 1:
        vectors = [a + b for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def _words(table: Value, row: Value, names: tuple[str, ...]) -> dict[str, Value]:
    """Return where each word of a table's row is."""
    return {name: table.at(row * (8 * len(names))).at(8 * n) for n, name in enumerate(names)}


@cache
def bounds(isa: Isa, layout: PageLayout) -> Native:
    return compile_kernel(bounds_source(layout), isa)


@cache
def choose(isa: Isa, head_dim: int) -> Native:
    return compile_kernel(choose_source(head_dim), isa)
