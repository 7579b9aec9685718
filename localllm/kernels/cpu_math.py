"""Functions of a vector of floats, for the CPU kernels: reductions over its lanes, exp, the activations, bf16."""

from __future__ import annotations

from collections.abc import Callable

from localllm.kernels.cpu_ir import F32V, I32, I32V, LANES, Kernel, Value, vector_of

Combine = Callable[[Value, Value], Value]


def add(a: Value, b: Value) -> Value:
    return a + b


def reduce(k: Kernel, vector: Value, combine: Combine) -> Value:
    """All lanes combined into a scalar, halves with halves."""
    width = LANES
    while width > 1:
        width //= 2
        low = k.shuffle(vector, vector, list(range(width)))
        vector = combine(low, k.shuffle(vector, vector, list(range(width, 2 * width))))
    return k.lane(vector, 0)


def total(k: Kernel, vector: Value) -> Value:
    return reduce(k, vector, add)


def largest(k: Kernel, vector: Value) -> Value:
    return reduce(k, vector, k.larger)


def totals(k: Kernel, vectors: list[Value], combine: Combine = add) -> Value:
    """The sums of 16 vectors as one: lane i is the sum of vector i. Every one is added up in the same order. combine:
    of two vectors, in place of a sum."""
    width = LANES // 2
    while width:
        low = [
            i for first in range(0, LANES, 2 * width) for j in (0, LANES) for i in range(j + first, j + first + width)
        ]
        high = [i + width for i in low]
        half = len(vectors) // 2
        pairs = zip(vectors[:half], vectors[half:], strict=True)
        vectors = [combine(k.shuffle(a, b, low), k.shuffle(a, b, high)) for a, b in pairs]
        width //= 2
    return vectors[0]


def order(k: Kernel, x: Value) -> Value:
    """Whole numbers in the order of floats, a scalar or a vector: -0 like 0, and any NaN above all others."""
    kind = I32V if x.kind == F32V else I32
    bits = x.compare("uno", x).choose(k.constant(kind, 0x7FC00000), (x + 0.0).convert("bitcast", kind))
    return mirrored(bits)


def mirrored(bits: Value) -> Value:
    """Negative ones in reverse order: what is done twice undoes itself."""
    return bits ^ (bits.shift_signed(31) & 0x7FFFFFFF)


def exp(k: Kernel, x: Value) -> Value:
    """e ** x within 2e-7 relative; 0 below -87, e ** 88 above 88, NaN of NaN. exp(0) is exactly 1.

    Cephes' expf: x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial in r, the exponent's bits for 2 ** n.
    """
    clipped = k.smaller(k.f32v(88.0), k.larger(k.f32v(-104.0), x))  # in this order NaN stays
    n = k.unary("rint", clipped * 1.44269504088896341)
    r = k.fma(n, k.f32v(-0.693359375), clipped)
    r = k.fma(n, k.f32v(2.12194440e-4), r)
    polynomial = k.f32v(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        polynomial = k.fma(polynomial, r, k.f32v(coefficient))
    value = k.fma(polynomial, r * r, r) + 1.0
    exponent = (n.convert("fptosi", I32V).freeze() + 127) << 23
    scaled = value * exponent.convert("bitcast", F32V)
    return x.compare("olt", -87.0).choose(k.f32v(0.0), scaled)


def sigmoid(k: Kernel, x: Value) -> Value:
    return k.f32v(1.0) / (exp(k, k.f32v(0.0) - x) + 1.0)


def tanh(k: Kernel, x: Value) -> Value:
    return k.f32v(1.0) - k.f32v(2.0) / (exp(k, x * 2.0) + 1.0)


def silu(k: Kernel, x: Value) -> Value:
    return x * sigmoid(k, x)


def gelu_tanh(k: Kernel, x: Value) -> Value:
    inner = (x * x * x * 0.044715 + x) * 0.7978845608028654
    return x * 0.5 * (tanh(k, inner) + 1.0)


def gelu(k: Kernel, x: Value) -> Value:
    """x * Phi(x) by Abramowitz and Stegun's 7.1.26, which is within 1.5e-7."""
    z = k.unary("fabs", x) * 0.7071067811865476
    t = k.f32v(1.0) / (z * 0.3275911 + 1.0)
    polynomial = k.f32v(1.061405429)
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        polynomial = k.fma(polynomial, t, k.f32v(coefficient))
    tail = polynomial * t * exp(k, k.f32v(0.0) - z * z) * 0.5  # 1 - Phi(|x|)
    return x * x.compare("olt", 0.0).choose(tail, k.f32v(1.0) - tail)


def quick_gelu(k: Kernel, x: Value) -> Value:
    return x * sigmoid(k, x * 1.702)


def relu2(k: Kernel, x: Value) -> Value:
    positive = k.larger(k.f32v(0.0), x)
    return positive * positive


ACTIVATIONS: dict[str, Callable[[Kernel, Value], Value]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu2": relu2,
    "tanh": tanh,
    "sigmoid": sigmoid,
}


def to_bf16(k: Kernel, x: Value) -> Value:
    """<16 x i16>: rounded to nearest even by hand. Without AVX512-BF16 LLVM makes `fptrunc` a call."""
    bits = x.convert("bitcast", I32V)
    rounded = (bits + ((bits >> 16) & 1) + 32767) >> 16
    kept = x.compare("uno", x).choose(k.constant(I32V, 0x7FC0), rounded)
    return kept.convert("trunc", vector_of("i16"))


def from_bf16_pairs(words: Value) -> tuple[Value, Value]:
    """<16 x i32> of 32 bf16 values -> those with even numbers and those with odd ones, fp32."""
    even = (words << 16).convert("bitcast", F32V)
    return even, (words & -65536).convert("bitcast", F32V)
