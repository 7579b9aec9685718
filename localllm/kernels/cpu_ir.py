"""A small language in which the CPU kernels are written: Python that emits LLVM IR for one function.

`Value`s add, multiply and shift; `kernel.range(...)` is a loop, `kernel.when(...)` a branch, `kernel.variable(...)` a
value that changes. Vectors are 16 lanes of 32 bits whatever the CPU has: LLVM splits them where registers are
narrower. Nothing is reassociated or contracted: what is written is the order in which it is computed.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

LANES = 16
F32, I32, I64, PTR, I1 = "float", "i32", "i64", "ptr", "i1"
F32V, I32V = f"<{LANES} x float>", f"<{LANES} x i32>"
Number = int | float
REST, REST_STEP = 16, 2  # see Kernel.balanced


def vector_of(element: str, lanes: int = LANES) -> str:
    return f"<{lanes} x {element}>"


def _lanes(kind: str) -> int:
    """Lanes of a vector type; 0 for a scalar."""
    return int(kind[1 : kind.index(" ")]) if kind.startswith("<") else 0


def _element(kind: str) -> str:
    return kind[kind.index("x ") + 2 : -1] if kind.startswith("<") else kind


@dataclass(frozen=True)
class Value:
    """An SSA value. Both sides of an operator have one type; a Python number becomes a constant of the other's."""

    kernel: Kernel
    kind: str
    text: str

    @property
    def is_float(self) -> bool:
        return _element(self.kind) in ("float", "half", "double")

    def _binary(self, instruction: str, other: Value | Number) -> Value:
        right = self.kernel.constant(self.kind, other) if isinstance(other, int | float) else other
        assert right.kind == self.kind, f"{instruction} of {self.kind} and {right.kind}"
        return self.kernel.emit(self.kind, f"{instruction} {self.kind} {self.text}, {right.text}")

    def __add__(self, other: Value | Number) -> Value:
        return self._binary("fadd" if self.is_float else "add", other)

    def __sub__(self, other: Value | Number) -> Value:
        return self._binary("fsub" if self.is_float else "sub", other)

    def __mul__(self, other: Value | Number) -> Value:
        return self._binary("fmul" if self.is_float else "mul", other)

    def __truediv__(self, other: Value | Number) -> Value:
        return self._binary("fdiv" if self.is_float else "udiv", other)

    def __mod__(self, other: Value | Number) -> Value:
        return self._binary("urem", other)

    def __and__(self, other: Value | Number) -> Value:
        return self._binary("and", other)

    def __or__(self, other: Value | Number) -> Value:
        return self._binary("or", other)

    def __xor__(self, other: Value | Number) -> Value:
        return self._binary("xor", other)

    def __lshift__(self, other: Value | Number) -> Value:
        return self._binary("shl", other)

    def __rshift__(self, other: Value | Number) -> Value:
        return self._binary("lshr", other)

    def shift_signed(self, bits: int) -> Value:
        """Shift to the right; the sign comes in on the left."""
        return self._binary("ashr", bits)

    def compare(self, predicate: str, other: Value | Number) -> Value:
        """i1 (or a vector of them); predicate as LLVM's: ult, slt, eq, olt, uno ..."""
        right = self.kernel.constant(self.kind, other) if isinstance(other, int | float) else other
        result = vector_of(I1, _lanes(self.kind)) if _lanes(self.kind) else I1
        instruction = "fcmp" if self.is_float else "icmp"
        return self.kernel.emit(result, f"{instruction} {predicate} {self.kind} {self.text}, {right.text}")

    def choose(self, yes: Value, no: Value) -> Value:
        """Lane by lane where this is a vector of i1."""
        return self.kernel.emit(yes.kind, f"select {self.kind} {self.text}, {yes.kind} {yes.text}, {no.kind} {no.text}")

    def convert(self, instruction: str, kind: str) -> Value:
        """sitofp, fptosi, fpext, trunc, zext, sext, bitcast."""
        return self.kernel.emit(kind, f"{instruction} {self.kind} {self.text} to {kind}")

    def freeze(self) -> Value:
        """Some value, the same wherever it is used, where LLVM knows none: of NaN as a whole number, say."""
        return self.kernel.emit(self.kind, f"freeze {self.kind} {self.text}")

    def at(self, offset: Value | int) -> Value:
        """A pointer, `offset` bytes on."""
        text = f"{I64} {offset if isinstance(offset, int) else offset.text}"
        return self.kernel.emit(PTR, f"getelementptr i8, ptr {self.text}, {text}")

    def load(self, kind: str, align: int = 4) -> Value:
        return self.kernel.emit(kind, f"load {kind}, ptr {self.text}, align {align}")

    def store(self, value: Value, align: int = 4) -> None:
        self.kernel.line(f"store {value.kind} {value.text}, ptr {self.text}, align {align}")

    def splat(self, lanes: int = LANES) -> Value:
        """A vector with this scalar in every lane."""
        kind = vector_of(self.kind, lanes)
        one = self.kernel.emit(kind, f"insertelement {kind} poison, {self.kind} {self.text}, i32 0")
        return self.kernel.shuffle(one, one, [0] * lanes)


class Variable:
    """A value that changes; LLVM keeps it in a register."""

    def __init__(self, kernel: Kernel, first: Value) -> None:
        self.kernel, self.kind = kernel, first.kind
        self.slot = kernel.stack(first.kind)
        self.set(first)

    def get(self) -> Value:
        return self.slot.load(self.kind, align=64 if _lanes(self.kind) else 4)

    def set(self, value: Value) -> None:
        assert value.kind == self.kind
        self.slot.store(value, align=64 if _lanes(self.kind) else 4)

    def add(self, value: Value) -> None:
        self.set(self.get() + value)


class Kernel:
    """One function `name(args, thread, threads, counter)`; args is an array of 64-bit words, one for each of `words`.
    All threads see one counter, which is 0 when they begin.

    `words` names pointers first and then, behind a bar, whole numbers: "x y | rows features".
    """

    def __init__(self, name: str, words: str) -> None:
        self.name = name
        pointers, _, integers = words.partition("|")
        self.pointers, self.integers = pointers.split(), integers.split()
        self._declared: dict[str, str] = {}
        self._stack: list[str] = []
        self._body: list[str] = []
        self._metadata: list[str] = []
        self._count = 0
        self.thread, self.threads = Value(self, I64, "%thread"), Value(self, I64, "%threads")
        args = Value(self, PTR, "%args")
        loaded = {
            word: args.at(8 * i).load(PTR if i < len(self.pointers) else I64, align=8)
            for i, word in enumerate(self.words)
        }
        self.arg = SimpleNamespace(**loaded)

    @property
    def words(self) -> list[str]:
        return self.pointers + self.integers

    def source(self) -> str:
        """The module's LLVM IR."""
        declared = [f"declare {signature}" for signature in self._declared.values()]
        # Without it, a loop that clears a stack slot would become a call of memset, which nothing resolves.
        head = f"define void @{self.name}(ptr noalias readonly %args, i64 %thread, i64 %threads, ptr %counter)"
        head += ' "no-builtins" {'
        return "\n".join([*declared, head, "entry:", *self._stack, *self._body, "  ret void", "}", *self._metadata])

    def _rolled_loop(self) -> str:
        """What is written behind a loop's last branch, to keep it from being unrolled."""
        if not self._metadata:
            self._metadata.append('!0 = !{!"llvm.loop.unroll.disable"}')
        number = len(self._metadata)
        self._metadata.append(f"!{number} = distinct !{{!{number}, !0}}")
        return f", !llvm.loop !{number}"

    def line(self, text: str) -> None:
        self._body.append(f"  {text}")

    def _fresh(self) -> str:
        self._count += 1
        return str(self._count)

    def emit(self, kind: str, text: str) -> Value:
        value = Value(self, kind, f"%v{self._fresh()}")
        self.line(f"{value.text} = {text}")
        return value

    def constant(self, kind: str, number: Number) -> Value:
        element = _element(kind)
        text = str(int(number)) if element.startswith("i") else _float_text(float(number))
        return Value(self, kind, f"splat ({element} {text})" if _lanes(kind) else text)

    def f32v(self, number: float) -> Value:
        return self.constant(F32V, number)

    def i64(self, number: int) -> Value:
        return self.constant(I64, number)

    def f32_lanes(self, numbers: Sequence[float]) -> Value:
        """A vector of these."""
        return Value(self, vector_of(F32, len(numbers)), f"<{', '.join(f'float {_float_text(n)}' for n in numbers)}>")

    def byte_lanes(self, numbers: Sequence[int]) -> Value:
        """A vector of these, unsigned."""
        return Value(self, vector_of("i8", len(numbers)), f"<{', '.join(f'i8 {number}' for number in numbers)}>")

    def lane_numbers(self) -> Value:
        return Value(self, I32V, "<" + ", ".join(f"i32 {lane}" for lane in range(LANES)) + ">")

    def call(self, kind: str, intrinsic: str, *arguments: Value) -> Value:
        self._declared[intrinsic] = f"{kind} @{intrinsic}({', '.join(argument.kind for argument in arguments)})"
        passed = ", ".join(f"{argument.kind} {argument.text}" for argument in arguments)
        if kind == "void":
            self.line(f"call void @{intrinsic}({passed})")
            return Value(self, kind, "")
        return self.emit(kind, f"call {kind} @{intrinsic}({passed})")

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once."""
        suffix = f"v{_lanes(a.kind)}f32" if _lanes(a.kind) else "f32"
        return self.call(a.kind, f"llvm.fma.{suffix}", a, b, c)

    def unary(self, name: str, x: Value) -> Value:
        """fabs, sqrt, rint, floor of a float scalar or vector."""
        suffix = f"v{_lanes(x.kind)}f32" if _lanes(x.kind) else "f32"
        return self.call(x.kind, f"llvm.{name}.{suffix}", x)

    def larger(self, a: Value, b: Value) -> Value:
        """b where either is NaN."""
        return a.compare("ogt" if a.is_float else "ugt", b).choose(a, b)

    def smaller(self, a: Value, b: Value) -> Value:
        """b where either is NaN."""
        return a.compare("olt" if a.is_float else "ult", b).choose(a, b)

    def shuffle(self, a: Value, b: Value, indices: list[int]) -> Value:
        mask = ", ".join(f"i32 {index}" for index in indices)
        kind = vector_of(_element(a.kind), len(indices))
        operands = f"{a.kind} {a.text}, {b.kind} {b.text}"
        return self.emit(kind, f"shufflevector {operands}, <{len(indices)} x i32> <{mask}>")

    def lane(self, vector: Value, index: int) -> Value:
        return self.emit(_element(vector.kind), f"extractelement {vector.kind} {vector.text}, i32 {index}")

    def prefetch(self, pointer: Value, closeness: int = 3) -> None:
        """closeness: 3 for the first-level cache, 2 for the second."""
        reads, stays_close, data = (self.constant(I32, n) for n in (0, closeness, 1))
        self.call("void", "llvm.prefetch.p0", pointer, reads, stays_close, data)

    def stack(self, kind: str, count: int = 1) -> Value:
        """A pointer to room for `count` values, 64-byte aligned, for as long as the function runs."""
        slot = Value(self, PTR, f"%s{self._fresh()}")
        self._stack.append(f"  {slot.text} = alloca {kind}, i32 {count}, align 64")
        return slot

    def variable(self, first: Value) -> Variable:
        return Variable(self, first)

    @contextlib.contextmanager
    def range(self, begin: Value, end: Value, step: int = 1, *, rolled: bool = False) -> Iterator[Value]:
        """for i in range(begin, end, step), i64 and unsigned. rolled: LLVM must not unroll it."""
        name = self._fresh()
        counter = Variable(self, begin)
        self.line(f"br label %test{name}")
        self._label(f"test{name}")
        i = counter.get()
        self.line(f"br i1 {i.compare('ult', end).text}, label %body{name}, label %end{name}")
        self._label(f"body{name}")
        yield i
        counter.set(i + step)
        self.line(f"br label %test{name}" + (self._rolled_loop() if rolled else ""))
        self._label(f"end{name}")

    @contextlib.contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        name = self._fresh()
        self.line(f"br i1 {condition.text}, label %then{name}, label %else{name}")
        self._label(f"then{name}")
        yield
        self.line(f"br label %else{name}")
        self._label(f"else{name}")

    def _label(self, name: str) -> None:
        self._body.append(f"{name}:")

    def share(self, count: Value) -> tuple[Value, Value]:
        """This thread's part [begin, end) of `count` items."""
        return count * self.thread / self.threads, count * (self.thread + 1) / self.threads

    @contextlib.contextmanager
    def share_pairs(self, outer: Value, inner: Value) -> Iterator[tuple[Value, Value, Value]]:
        """for i, first, last: this thread's part of all pairs of range(outer) and range(inner), the pairs of one i
        being those with [first, last). Where that is nothing, an i with none may come all the same."""
        begin, end = self.share(outer * inner)
        with self.range(begin / inner, (end + inner - 1) / inner) as i:
            before = i * inner
            yield i, self.larger(begin, before) - before, self.smaller(end, before + inner) - before

    @contextlib.contextmanager
    def balanced(self, count: Value) -> Iterator[Value]:
        """for i in this thread's part of range(count): most of it known beforehand, the rest for whoever is first.

        A thread that is held up leaves more of the rest to the others; a part of its own, read in one go, is what
        memory likes best. A sixteenth to be had in twos makes reads of weights 5 to 10 % faster than equal parts alone;
        with all of it to be had they are 10 % slower.
        """
        own = count - count / REST
        begin, end = self.share(own)
        first, last = Variable(self, begin), Variable(self, end)
        name = self._fresh()
        self.line(f"br label %work{name}")
        self._label(f"work{name}")
        with self.range(first.get(), last.get()) as i:
            yield i
        taken = own + self.emit(I64, f"atomicrmw add ptr %counter, i64 {REST_STEP} monotonic")
        first.set(taken)
        last.set(self.smaller(taken + REST_STEP, count))
        self.line(f"br i1 {taken.compare('ult', count).text}, label %work{name}, label %rested{name}")
        self._label(f"rested{name}")


def _float_text(number: float) -> str:
    """LLVM wants a float's value as the bits of a double."""
    rounded = struct.unpack("<f", struct.pack("<f", number))[0]
    return f"0x{struct.unpack('<Q', struct.pack('<d', rounded))[0]:016X}"
