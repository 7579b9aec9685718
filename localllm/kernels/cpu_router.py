"""A mixture's router on the CPU: logits of its experts for each token, and which experts compute it.

`reference.route` says what a row of the table of routers means. Equal scores go to the expert with the lower number; a
NaN counts as the largest, as torch has it, so that it comes out in the weights, and the experts are always some of
those that there are. What is computed of a token does not depend on the tokens beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache

from localllm.kernels import cpu_math
from localllm.kernels.cpu_ir import F32, F32V, I32, I32V, I64, LANES, Kernel, Value
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native, compile_kernel
from localllm.kernels.cpu_quantize import inverse_rms
from localllm.kernels.expert_block import load_word
from localllm.kernels.sizes import RouterConfig

EXPERTS_AT_ONCE = 4  # rows of the matrix that a thread multiplies side by side: so many sums do not wait for another
TAKEN = -(1 << 31)  # the key of an expert that is no longer to be had; no float's
MINUS_INFINITY = float("-inf")


def logits_source(isa: Isa, *, has_norm: bool, has_bias: bool) -> Kernel:
    """y = norm(x) @ matrix.T + bias, all of it fp32.

    x, `stride` floats a row; matrix [outputs, features]; y [T, outputs]; bias [outputs]. norm(x) is
    x / rms(x) * weight, as in `cpu_quantize`, or x. shape: a pointer to {T}. eps: the bits of a float.
    features % 16 == 0. Threads share out rows of x by rows of the matrix, so that one token's are shared out too.
    """
    k = Kernel("logits", "x weight matrix bias y shape | features stride outputs eps")
    a = k.arg
    num_rows = a.shape.load(I64, 8)
    rows = 4 if isa.max_rows > 4 else 1  # sums of 4 x 4 fit into 32 registers of 16 lanes
    inverses = k.stack(F32, rows)
    row_blocks, expert_blocks = (num_rows + (rows - 1)) / rows, (a.outputs + (EXPERTS_AT_ONCE - 1)) / EXPERTS_AT_ONCE
    with k.share_pairs(row_blocks, expert_blocks) as (block, first, last):
        first_row = block * rows
        filled = k.smaller(num_rows - first_row, k.i64(rows))
        if has_norm:
            with k.range(k.i64(0), filled) as r:
                x = a.x.at((first_row + r) * a.stride * 4)
                inverses.at(r * 4).store(inverse_rms(k, x, a.features))
        with k.range(first, last) as experts:
            # Where the last experts are fewer than are multiplied at once, the last one is several times.
            numbers = [k.smaller(experts * EXPERTS_AT_ONCE + i, a.outputs - 1) for i in range(EXPERTS_AT_ONCE)]
            with k.when(filled.compare("eq", rows)):
                _products(k, first_row, [inverses.at(4 * m) for m in range(rows)], numbers, has_norm, has_bias)
            with k.when(filled.compare("ult", rows)), k.range(k.i64(0), filled) as r:
                _products(k, first_row + r, [inverses.at(r * 4)], numbers, has_norm, has_bias)
    return k


def _products(
    k: Kernel, first_row: Value, inverses: list[Value], outputs: list[Value], has_norm: bool, has_bias: bool
) -> None:
    """As many rows of x as there are inverses, from the first one on, times some rows of the matrix."""
    a = k.arg
    sources = [a.x.at((first_row + m) * a.stride * 4) for m in range(len(inverses))]
    matrix = [a.matrix.at(output * a.features * 4) for output in outputs]
    factors = [inverse.load(F32).splat() for inverse in inverses] if has_norm else []
    sums = [[k.variable(k.f32v(0)) for _ in outputs] for _ in inverses]
    with k.range(k.i64(0), a.features, LANES) as i:
        x = [source.at(i * 4).load(F32V) for source in sources]
        if has_norm:
            weight = a.weight.at(i * 4).load(F32V)
            x = [value * factor * weight for value, factor in zip(x, factors, strict=True)]
        for j, row in enumerate(matrix):
            w = row.at(i * 4).load(F32V)
            for m, value in enumerate(x):
                sums[m][j].set(k.fma(value, w, sums[m][j].get()))
    for m, row_sums in enumerate(sums):
        for output, variable in zip(outputs, row_sums, strict=True):
            total = cpu_math.total(k, variable.get())
            total = total + a.bias.at(output * 4).load(F32) if has_bias else total
            a.y.at(((first_row + m) * a.outputs + output) * 4).store(total)


def route_source(router: RouterConfig) -> Kernel:
    """logits fp32 [T, stride], of which the first are the experts'; correction, scales fp32 [num_experts].

    experts int32 [T, top_k], best first, and their weights fp32 [T, top_k]. shape: a pointer to {T}. Threads share out
    the rows.
    """
    assert 0 < router.top_k <= router.num_experts and router.num_experts % router.groups == 0
    k = Kernel("route", "logits correction scales experts weights shape | stride")
    a = k.arg
    row = _Row(k, router)
    begin, end = k.share(a.shape.load(I64, 8))
    with k.range(begin, end) as t:
        row.read(a.logits.at(t * a.stride * 4))
        row.choose(a.experts.at(t * (router.top_k * 4)))
        row.weigh(a.experts.at(t * (router.top_k * 4)), a.weights.at(t * (router.top_k * 4)))
    return k


class _Row:
    """One token's scores on the stack, in whole vectors: -inf, and a key that cannot be chosen, behind the last one."""

    def __init__(self, k: Kernel, router: RouterConfig) -> None:
        self.k, self.router = k, router
        self.padded, self.chosen_padded = _padded(router.num_experts), _padded(router.top_k)
        self.scores = k.stack(F32, self.padded)  # the logits where no other score is asked for
        self.correction = k.stack(F32, self.padded)
        self.keys = k.stack(I32, self.padded)  # of what is left to be chosen
        self.group_keys = k.stack(I32, _padded(router.groups))
        self.chosen = k.stack(F32, self.chosen_padded)  # weights of the chosen ones
        if router.has_correction:
            self._copy(k.arg.correction, self.correction)

    def read(self, logits: Value) -> None:
        """Fill scores and keys."""
        k, router = self.k, self.router
        self._copy(logits, self.scores)
        if router.scores == "softmax":
            _softmax(k, self.scores, self.padded)
        elif router.scores == "sigmoid":
            with _vectors(k, self.scores, self.padded) as (_, score):
                score.store(cpu_math.sigmoid(k, score.load(F32V, 64)), 64)
        is_corrected = router.has_correction and router.scores in ("softmax", "sigmoid")
        with _vectors(k, self.scores, self.padded) as (i, score):
            choice = score.load(F32V, 64)
            choice = choice + self.correction.at(i * 4).load(F32V, 64) if is_corrected else choice
            is_expert = _numbers(k, i).compare("ult", router.num_experts)
            self.keys.at(i * 4).store(is_expert.choose(cpu_math.order(k, choice), k.constant(I32V, TAKEN)), 64)
        if router.top_groups < router.groups and router.scores in ("softmax", "sigmoid"):
            self._leave_best_groups()

    def choose(self, experts: Value) -> None:
        """Write the best experts, and put down what each weighs by itself."""
        k, router = self.k, self.router
        with _vectors(k, self.chosen, self.chosen_padded) as (_, chosen):
            chosen.store(k.f32v(MINUS_INFINITY), 64)
        with k.range(k.i64(0), k.i64(router.top_k)) as slot:
            # Those that are taken are left out of a share, the one that is being chosen is not.
            expert = _best(k, self.keys, self.padded)
            score = self.scores.at(expert * 4).load(F32)
            weight = self._share(score) if router.scores == "sparsemixer" else score
            self.keys.at(expert * 4).store(k.constant(I32, TAKEN))
            experts.at(slot * 4).store(expert.convert("trunc", I32))
            self.chosen.at(slot * 4).store(weight)

    def weigh(self, experts: Value, weights: Value) -> None:
        """Write the weights of the chosen experts."""
        k, router = self.k, self.router
        if router.scores == "chosen":
            _softmax(k, self.chosen, self.chosen_padded)
        divisor = k.variable(k.constant(F32, 0.0))
        is_normalized = router.normalizes and router.scores in ("softmax", "sigmoid")
        if is_normalized:
            with k.range(k.i64(0), k.i64(router.top_k)) as slot:
                divisor.add(self.chosen.at(slot * 4).load(F32))
            divisor.set(k.larger(k.constant(F32, router.sum_floor), divisor.get() + router.sum_epsilon))
        with k.range(k.i64(0), k.i64(router.top_k)) as slot:
            weight = self.chosen.at(slot * 4).load(F32)
            weight = weight / divisor.get() if is_normalized else weight
            weight = weight * router.scale
            if router.has_expert_scales:
                weight = weight * k.arg.scales.at(load_word(experts, slot) * 4).load(F32)
            weights.at(slot * 4).store(weight)

    def _share(self, best: Value) -> Value:
        """SparseMixer's weight of the best logit that is left: its share among those left that are near it."""
        k = self.k
        best, total = best.splat(), k.variable(k.f32v(0))
        with _vectors(k, self.scores, self.padded) as (i, score):
            logit = score.load(F32V, 64)
            distance = (best - logit) / k.larger(k.unary("fabs", logit), best)
            is_far = distance.compare("ogt", 2 * self.router.jitter)
            is_out = is_far | self.keys.at(i * 4).load(I32V, 64).compare("eq", TAKEN)
            total.add(is_out.choose(k.f32v(0), cpu_math.exp(k, logit - best)))
        return k.constant(F32, 1.0) / cpu_math.total(k, total.get())

    def _leave_best_groups(self) -> None:
        """Set the keys of all groups to zero's but for those whose two best scores have the largest sums."""
        k, router = self.k, self.router
        size = router.num_experts // router.groups
        with _vectors(k, self.group_keys, _padded(router.groups)) as (_, at):
            at.store(k.constant(I32V, TAKEN), 64)
        with k.range(k.i64(0), k.i64(router.groups)) as group:
            best, second = k.variable(k.constant(I32, TAKEN)), k.variable(k.constant(I32, TAKEN))
            with k.range(group * size, (group + 1) * size) as expert:
                key = self.keys.at(expert * 4).load(I32)
                is_best = key.compare("sgt", best.get())
                loser = is_best.choose(best.get(), key)
                best.set(is_best.choose(key, best.get()))
                second.set(loser.compare("sgt", second.get()).choose(loser, second.get()))
            self.group_keys.at(group * 4).store(cpu_math.order(k, _float(best.get()) + _float(second.get())))
        with k.range(k.i64(0), k.i64(router.top_groups)):
            kept = _best(k, self.group_keys, _padded(router.groups))
            self.group_keys.at(kept * 4).store(k.constant(I32, TAKEN))
        with k.range(k.i64(0), k.i64(router.groups)) as group:
            is_left_out = self.group_keys.at(group * 4).load(I32).compare("ne", TAKEN)
            with k.when(is_left_out), k.range(group * size, (group + 1) * size) as expert:
                self.keys.at(expert * 4).store(k.constant(I32, TAKEN))

    def _copy(self, source: Value, target: Value) -> None:
        """As many numbers as there are experts, which may end anywhere, to the stack."""
        k, count = self.k, self.router.num_experts
        whole = count - count % LANES
        with k.range(k.i64(0), k.i64(whole), LANES) as i:
            target.at(i * 4).store(source.at(i * 4).load(F32V), 64)
        for rest in range(whole, self.padded):
            is_one = rest < count
            value = source.at(4 * rest).load(F32) if is_one else k.constant(F32, MINUS_INFINITY)
            target.at(4 * rest).store(value)


def _padded(count: int) -> int:
    return -(-count // LANES) * LANES


@contextlib.contextmanager
def _vectors(k: Kernel, numbers: Value, count: int) -> Iterator[tuple[Value, Value]]:
    """for i in range(0, count, 16): i, and the address of those numbers."""
    with k.range(k.i64(0), k.i64(count), LANES) as i:
        yield i, numbers.at(i * 4)


def _numbers(k: Kernel, first: Value) -> Value:
    """A vector of whole numbers, counting from `first`."""
    return k.lane_numbers() + first.convert("trunc", I32).splat()


def _softmax(k: Kernel, numbers: Value, count: int) -> None:
    """In place."""
    peaks, sums = k.variable(k.f32v(MINUS_INFINITY)), k.variable(k.f32v(0))
    with _vectors(k, numbers, count) as (_, at):
        peaks.set(k.larger(at.load(F32V, 64), peaks.get()))
    peak = cpu_math.largest(k, peaks.get()).splat()
    with _vectors(k, numbers, count) as (_, at):
        power = cpu_math.exp(k, at.load(F32V, 64) - peak)
        sums.add(power)
        at.store(power, 64)
    total = cpu_math.total(k, sums.get()).splat()
    with _vectors(k, numbers, count) as (_, at):
        at.store(at.load(F32V, 64) / total, 64)


def _float(key: Value) -> Value:
    """The scalar whose key this is."""
    return cpu_math.mirrored(key).convert("bitcast", F32)


def _best(k: Kernel, keys: Value, count: int) -> Value:
    """The place of the largest key, the first one of several."""
    best, place = k.variable(k.constant(I32V, TAKEN)), k.variable(k.constant(I32V, 0))
    with _vectors(k, keys, count) as (i, at):
        key = at.load(I32V, 64)
        is_better = key.compare("sgt", best.get())
        best.set(is_better.choose(key, best.get()))
        place.set(is_better.choose(_numbers(k, i), place.get()))
    return k.lane(_first_best(k, best.get(), place.get()), 0).convert("zext", I64)


def _first_best(k: Kernel, keys: Value, places: Value) -> Value:
    """A vector of one: of the places of the largest key, the first."""
    width = LANES
    while width > 1:
        width //= 2
        low, high = list(range(width)), list(range(width, 2 * width))
        low_key, high_key = k.shuffle(keys, keys, low), k.shuffle(keys, keys, high)
        low_place, high_place = k.shuffle(places, places, low), k.shuffle(places, places, high)
        is_earlier = high_key.compare("eq", low_key) & high_place.compare("ult", low_place)
        is_better = high_key.compare("sgt", low_key) | is_earlier
        keys, places = is_better.choose(high_key, low_key), is_better.choose(high_place, low_place)
    return places


@cache
def logits(isa: Isa, *, has_norm: bool, has_bias: bool = False) -> Native:
    return compile_kernel(logits_source(isa, has_norm=has_norm, has_bias=has_bias), isa)


@cache
def route(isa: Isa, router: RouterConfig) -> Native:
    return compile_kernel(route_source(router), isa)
