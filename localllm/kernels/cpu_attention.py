"""Causal grouped-query attention over a bf16 KV cache on the CPU: one kernel for decode, verification and prefill.

Keys are read in runs of SPLIT, softmax is merged from run to run (arXiv:2205.14135). A row is one query head of one
token; the rows of a task share a key head and so each load of its keys and values. Runs begin at multiples of SPLIT
whatever is asked, and a run that a row cannot see changes no bit of it: a token's attention does not depend on which
others are computed beside it.
"""

from __future__ import annotations

from functools import cache

from localllm.kernels import cpu_math
from localllm.kernels.cpu_ir import F32, F32V, I32, I32V, I64, LANES, Kernel, Value
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native, compile_kernel
from localllm.kernels.cpu_rope import TOKEN_WORDS

SPLIT = 256  # keys: 8 KB of scores for 8 rows, in the first-level cache beside the values
MAX_ROWS = 8  # of a task; 16 sums in registers are 8 rows x 2 keys
NOTHING = -1e30  # a maximum over no key: finite, so that differences of it are
TASK_WORDS = (
    "first_token",
    "first_row",
    "rows",
)  # rows of a segment count from its first token, heads of a group first


def attention_source(head_dim: int, rows: int, *, has_softcap: bool) -> Kernel:
    """q fp32 [T, stride] rotated and scaled; out fp32 [T, H * D].

    tasks: int64 [tasks, 3], see TASK_WORDS; tokens: see `cpu_rope`. shape: a pointer to the number of tasks. group:
    query heads a key head. window: keys that a query sees, itself included. softcap: the bits of a float.
    """
    k = Kernel("attention", "q out tasks tokens shape | kv_heads group stride layer window softcap")
    a = k.arg
    begin, end = k.share(a.shape.load(I64, 8) * a.kv_heads)
    task = _Task(k, head_dim, rows, has_softcap)
    with k.range(begin, end) as item:
        task.start(a.tasks.at((item / a.kv_heads) * (8 * len(TASK_WORDS))), item % a.kv_heads)
        with k.range(task.first_key / SPLIT, task.last_key / SPLIT + 1) as split:
            begin_key = k.larger(split * SPLIT, task.first_key & -LANES)
            count = k.smaller((split + 1) * SPLIT, task.last_key + 1) - begin_key
            task.score(begin_key, count)
            task.soften(begin_key, count)
            task.mix(begin_key, count)
        task.finish()
    return k


class _Task:
    """The rows of one task: what is known of each, and the stages that their keys go through."""

    def __init__(self, k: Kernel, head_dim: int, rows: int, has_softcap: bool) -> None:
        self.k, self.D, self.R, self.has_softcap = k, head_dim, rows, has_softcap
        self.keys_a_step = LANES // rows
        self.queries = k.stack(F32V, rows * head_dim // LANES)  # [R, D / 32, even | odd, 16]
        self.mixed = k.stack(F32V, rows * head_dim // LANES)  # likewise
        self.scores = k.stack(F32V, rows * SPLIT // LANES)  # [R, SPLIT]
        self.peaks, self.totals, self.shrink = (k.stack(F32, rows) for _ in range(3))
        self.lows, self.highs = k.stack(I64, rows), k.stack(I64, rows)  # the keys that a row sees, both included

    def start(self, task: Value, kv_head: Value) -> None:
        k, a = self.k, self.k.arg
        self.first_token, self.first_row = task.load(I64, 8), task.at(8).load(I64, 8)
        self.last_row = task.at(16).load(I64, 8) - 1
        self.kv_head = kv_head
        for r in range(self.R):
            token, head = self._row(r)
            position = a.tokens.at(token * (8 * len(TOKEN_WORDS)) + 24).load(I64, 8)
            self.highs.at(8 * r).store(position, 8)
            seen = k.smaller(a.window - 1, position)
            self.lows.at(8 * r).store(position - seen, 8)
            self.peaks.at(4 * r).store(k.constant(F32, NOTHING))
            self.totals.at(4 * r).store(k.constant(F32, 0))
            q = a.q.at((token * a.stride + head * self.D) * 4)
            for c in range(self.D // 32):
                low, high = q.at(128 * c).load(F32V), q.at(128 * c + 64).load(F32V)
                for odd in (0, 1):
                    at = self._vector(r, c, odd)
                    self.queries.at(at).store(k.shuffle(low, high, list(range(odd, 32, 2))), 64)
                    self.mixed.at(at).store(k.f32v(0), 64)
        self.first_key, self.last_key = self.lows.load(I64, 8), self.highs.at(8 * (self.R - 1)).load(I64, 8)
        token = a.tokens.at(self.first_token * (8 * len(TOKEN_WORDS)))
        run = (a.layer * a.kv_heads + kv_head) * token.at(16).load(I64, 8) * (self.D * 2)
        self.keys, self.values = token.load("ptr", 8).at(run), token.at(8).load("ptr", 8).at(run)

    def score(self, begin_key: Value, count: Value) -> None:
        """scores[r, i] = q[r] . keys[begin_key + i]."""
        k = self.k
        pairs = [(r, j) for r in range(self.R) for j in range(self.keys_a_step)]
        with k.range(k.i64(0), count, self.keys_a_step) as i:
            at = [k.smaller(begin_key + i + j, self.last_key) * (self.D * 2) for j in range(self.keys_a_step)]
            self._prefetch(self.values, begin_key, i * (self.D * 2), self.keys_a_step * self.D * 2)
            sums = [k.f32v(0)] * len(pairs)
            for c in range(self.D // 32):
                keys = [cpu_math.from_bf16_pairs(self.keys.at(o).at(64 * c).load(I32V)) for o in at]
                for odd in (0, 1):
                    query = [self.queries.at(self._vector(r, c, odd)).load(F32V, 64) for r in range(self.R)]
                    sums = [k.fma(keys[j][odd], query[r], sums[n]) for n, (r, j) in enumerate(pairs)]
            total = cpu_math.totals(k, sums)
            for r in range(self.R):
                lanes = list(range(r * self.keys_a_step, (r + 1) * self.keys_a_step))
                self.scores.at(i * 4).at(4 * r * SPLIT).store(k.shuffle(total, total, lanes))

    def soften(self, begin_key: Value, count: Value) -> None:
        """scores -> exp(score - peak); what a row must not see becomes 0."""
        k = self.k
        with k.range(k.i64(0), k.i64(self.R)) as r:
            row = self.scores.at(r * (4 * SPLIT))
            low = (self.lows.at(r * 8).load(I64, 8) - begin_key).convert("trunc", I32).splat()
            high = (self.highs.at(r * 8).load(I64, 8) - begin_key).convert("trunc", I32).splat()
            before = self.peaks.at(r * 4).load(F32)
            peaks = k.variable(before.splat())

            def seen(i: Value) -> Value:
                key = k.lane_numbers() + i.convert("trunc", I32).splat()
                return key.compare("sge", low) & key.compare("sle", high)

            with k.range(k.i64(0), count, LANES) as i:
                score = row.at(i * 4).load(F32V, 64)
                if self.has_softcap:
                    cap = k.arg.softcap.convert("trunc", I32).convert("bitcast", F32).splat()
                    score = cap * cpu_math.tanh(k, score / cap)
                    row.at(i * 4).store(score, 64)
                peaks.set(k.larger(seen(i).choose(score, k.f32v(NOTHING)), peaks.get()))
            peak = cpu_math.largest(k, peaks.get())
            totals = k.variable(k.f32v(0))
            with k.range(k.i64(0), count, LANES) as i:
                weight = cpu_math.exp(k, row.at(i * 4).load(F32V, 64) - peak.splat())
                weight = seen(i).choose(weight, k.f32v(0))
                share = self.D * LANES // self.R
                self._prefetch(self.keys, begin_key + SPLIT, (r * SPLIT + i) / LANES * share, share)
                row.at(i * 4).store(weight, 64)
                totals.add(weight)
            shrink = k.lane(cpu_math.exp(k, (before - peak).splat()), 0)
            total = k.fma(self.totals.at(r * 4).load(F32), shrink, cpu_math.total(k, totals.get()))
            self.peaks.at(r * 4).store(peak)
            self.totals.at(r * 4).store(total)
            self.shrink.at(r * 4).store(shrink)

    def mix(self, begin_key: Value, count: Value) -> None:
        """mixed[r] = mixed[r] * shrink[r] + sum of weights[r, i] * values[begin_key + i]."""
        k, chunks = self.k, self.D // 32
        wide = max(n for n in range(1, chunks + 1) if chunks % n == 0 and 2 * n * self.R <= LANES)
        run = self.values.at(begin_key * (self.D * 2))
        for first in range(0, chunks, wide):
            places = [(r, c, odd) for r in range(self.R) for c in range(first, first + wide) for odd in (0, 1)]
            sums = {}
            for r, c, odd in places:
                so_far = self.mixed.at(self._vector(r, c, odd)).load(F32V, 64)
                sums[r, c, odd] = k.variable(so_far * self.shrink.at(4 * r).load(F32).splat())
            with k.range(k.i64(0), count) as i:
                pointer = run.at(i * (self.D * 2))
                if first == 0:
                    self._prefetch(self.keys, begin_key + 3 * SPLIT // 2, i * self.D, self.D)
                chunk = range(first, first + wide)
                value = {c: cpu_math.from_bf16_pairs(pointer.at(64 * c).load(I32V)) for c in chunk}
                for r in range(self.R):
                    weight = self.scores.at(i * 4).at(4 * r * SPLIT).load(F32).splat()
                    for c in chunk:
                        for odd in (0, 1):
                            total = sums[r, c, odd]
                            total.set(k.fma(weight, value[c][odd], total.get()))
            for place, total in sums.items():
                self.mixed.at(self._vector(*place)).store(total.get(), 64)

    def finish(self) -> None:
        """out = mixed / totals, the features in their order again."""
        k, a = self.k, self.k.arg
        for r in range(self.R):
            token, head = self._row(r)
            inverse = (k.constant(F32, 1.0) / self.totals.at(4 * r).load(F32)).splat()
            out = a.out.at(((token * a.kv_heads * a.group) + head) * (self.D * 4))
            for c in range(self.D // 32):
                even, odd = (self.mixed.at(self._vector(r, c, n)).load(F32V, 64) * inverse for n in (0, 1))
                for half in (0, 1):
                    order = [n // 2 + 8 * half + LANES * (n % 2) for n in range(LANES)]
                    out.at(128 * c + 64 * half).store(k.shuffle(even, odd, order))

    def _prefetch(self, rows: Value, begin_key: Value, at: Value, num_bytes: int) -> None:
        """Values are fetched while scores are computed; half of the next run's keys in each of the later stages: memory
        works all the time, 22 GB/s of 34 where it waited in two of the three stages and reached 16 (8 rows of 64)."""
        start = rows.at(begin_key * (self.D * 2)).at(at)
        for offset in range(0, num_bytes, 64):
            self.k.prefetch(start.at(offset))

    def _row(self, r: int) -> tuple[Value, Value]:
        """Token and query head of row r; where the task has fewer rows, its last one again."""
        k, a = self.k, self.k.arg
        row = self.first_row + k.smaller(k.i64(r), self.last_row)
        return self.first_token + row / a.group, self.kv_head * a.group + row % a.group

    def _vector(self, r: int, c: int, odd: int) -> int:
        return 64 * ((r * (self.D // 32) + c) * 2 + odd)


@cache
def attention(isa: Isa, head_dim: int, rows: int, *, has_softcap: bool) -> Native:
    return compile_kernel(attention_source(head_dim, rows, has_softcap=has_softcap), isa)
