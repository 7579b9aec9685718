"""The compiled CPU kernels against plain torch, on every instruction set that this machine runs."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels import (
    cpu_attention,
    cpu_choice,
    cpu_embed,
    cpu_gemv,
    cpu_isa,
    cpu_jit,
    cpu_linear,
    cpu_math,
    cpu_matmul,
    cpu_quantize,
    cpu_repack,
    cpu_rope,
    cpu_sketch,
    int8,
    reference,
    tile16,
)
from localllm.kernels.cpu_ir import F32V, LANES, Kernel, Value
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_linear import Activations, float_bits
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.kv_page import PageLayout
from localllm.kernels.packed_matrix import PackedMatrix
from localllm.kernels.sizes import CENTRED, Glu, Weights
from localllm.quant.layouts import TABLES
from tests.patience import PATIENCE_S
from tests.thinning import every_other, one_in

HOST_ISAS = cpu_isa.host_isas()
pytestmark = pytest.mark.skipif(not cpu_linear.is_available(), reason="no CPU kernel runs on this machine")
every_isa = pytest.mark.parametrize("isa", HOST_ISAS, ids=[isa.name for isa in HOST_ISAS])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def int4_matrix(N: int, K: int, group: int, seed: int = 0) -> tuple[PackedMatrix, Tensor]:
    """Random tensors of tile16, and what they mean, fp32 [N, K]."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (N, K), generator=generator, dtype=torch.uint8)
    scale = (torch.rand(N, K // group, generator=generator) * 0.01 + 0.001).half()
    bias = (-8 * scale.float() + 0.001 * torch.randn(N, K // group, generator=generator)).half()
    tensors = tile16.pack(codes), tile16.pack_groups(scale), tile16.pack_groups(bias)
    dense = scale.float().repeat_interleave(group, 1) * codes + bias.float().repeat_interleave(group, 1)
    return PackedMatrix(*tensors), dense


def int8_matrix(N: int, K: int, seed: int = 0) -> tuple[PackedMatrix, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (N, K), generator=generator, dtype=torch.int8)
    scale = torch.rand(N, generator=generator) * 0.01
    return PackedMatrix(int8.pack(codes), scale.view(-1, 16), None), codes * scale[:, None]


def matrix(form: Weights, N: int, K: int) -> tuple[PackedMatrix, Tensor]:
    """Random tensors of a form, and what they mean, fp32 [N, K]."""
    if form.group is None:
        return int8_matrix(N, K)
    if form.bits == 4 and form.table is None:
        return int4_matrix(N, K, form.group)
    generator = torch.Generator().manual_seed(0)
    lowest, highest = (-128, 127) if form.bits == 8 else (0, 15)
    codes = torch.randint(lowest, highest + 1, (N, K), generator=generator)
    values = codes if form.table is None else torch.tensor(form.table)[codes]
    scale = (torch.rand(N, K // form.group, generator=generator) * 0.01 + 0.001).half()
    dense = scale.float().repeat_interleave(form.group, 1) * values
    bias = None
    if form.has_bias:
        bias = torch.randn(N, K // form.group, generator=generator).half()
        dense = dense + bias.float().repeat_interleave(form.group, 1)
    pack = int8.pack if form.bits == 8 else tile16.pack
    packed = pack(codes.to(torch.int8 if form.bits == 8 else torch.uint8)), tile16.pack_groups(scale)
    return PackedMatrix(*packed, None if bias is None else tile16.pack_groups(bias), form.table), dense


def as_int8(x: Tensor, group: int) -> Tensor:
    """x as the kernels see it, fp32 [T, K]."""
    codes, scale = reference.int8_activations(x, group)
    return (codes * scale.unsqueeze(-1)).view(x.shape)


FORMS = [
    *(Weights(4, group) for group in (16, 32, 64, 128)),
    Weights(8, None, has_bias=False),
    *(Weights(8, group, has_bias=group > 16) for group in (16, 32, 64, 128)),
    Weights(8, 32, has_bias=False),
    *(Weights(4, group, has_bias=False, table=CENTRED) for group in (16, 32, 128)),
    *(Weights(4, 32, has_bias=False, table=TABLES[kind]) for kind in ("fp4", "iq4", "nf4", "bnb4")),
    Weights(4, 16, has_bias=False, table=TABLES["fp4"]),
]
every_form = pytest.mark.parametrize("form", FORMS, ids=[f"{number}-{form.name}" for number, form in enumerate(FORMS)])


@every_isa
@every_form
def test_a_packed_matrix_multiplies_int8_activations_exactly(isa, form):
    packed, dense = matrix(form, 208, 384)
    group = form.columns
    for rows in (1, 2, 3, 4, 7, 8, 12, 13, 40):
        x = random(rows, 384) * 3
        y = cpu_linear.packed_linear(x, packed, 208, isa)
        expected = as_int8(x, group).double() @ dense.double().T
        torch.testing.assert_close(y.double(), expected, rtol=0, atol=2e-6 * float(expected.abs().max()))


def extremes(rows: int, columns: int, lowest: float, highest: float) -> Tensor:
    """Rows of nothing but the highest, of nothing but the lowest, and of either, in turn."""
    x = torch.where(random(rows, columns, seed=3) > 0, lowest, highest)
    x[::3], x[1::3] = highest, lowest
    return x


@every_isa
@every_form
def test_the_largest_weights_times_the_largest_activations_overflow_nothing(isa, form):
    """Scales are powers of two, and whole numbers stay below 2 ** 24: fp32 rounds nothing, the formula's bits hold."""
    N, K, T = 48, 256, 13
    group = form.columns
    x = extremes(T, K, -127.0, 127.0)
    codes, x_scale = reference.int8_activations(x, group)
    assert torch.equal(codes.flatten(1).float(), x) and bool((x_scale == 1).all())
    scale, bias = (tile16.pack_groups(torch.full((N, K // group), value).half()) for value in (0.5, -4.0))
    scale = torch.full((N // 16, 16), 0.5) if form.group is None else scale
    qweight = int8.pack(extremes(N, K, -128, 127).char())
    if form.bits == 4:
        in_order = sorted(range(16), key=lambda code: form.table[code] if form.table else code)
        qweight = tile16.pack(extremes(N, K, in_order[0], in_order[-1]).byte())
    packed = PackedMatrix(qweight, scale, bias if form.has_bias else None, form.table)
    expected = x.double() @ packed.dequantize(N, K, torch.float32).double().T
    for rows in (1, 2, 3, 4, T):
        assert torch.equal(cpu_linear.packed_linear(x[:rows], packed, N, isa).double(), expected[:rows])


@every_form
def test_a_row_has_the_same_bits_beside_any_others_and_on_any_instruction_set(form):
    packed, _ = matrix(form, 80, 256)
    x = random(29, 256)
    alone = torch.cat([cpu_linear.packed_linear(row[None], packed, 80) for row in x])
    for isa in HOST_ISAS:
        assert torch.equal(cpu_linear.packed_linear(x, packed, 80, isa), alone)
        assert torch.equal(cpu_linear.packed_linear(x[:5], packed, 80, isa), alone[:5])


def test_the_number_of_threads_changes_no_bit(threads):
    packed, _ = int4_matrix(112, 256, 64)
    x = random(3, 256)
    results = []
    for count in (1, 2, 3, 5):
        threads(count)
        results.append(cpu_linear.packed_linear(x, packed, 112))
    assert all(torch.equal(result, results[0]) for result in results)


def test_tiles_read_side_by_side_give_the_same_bits(monkeypatch):
    packed, _ = int4_matrix(16 * 7, 256, 64)
    x = random(1, 256)
    one = cpu_linear.packed_linear(x, packed, 112)
    monkeypatch.setattr(Isa, "tiles_side_by_side", lambda *_: 4)
    cpu_matmul.matmul.cache_clear()
    try:
        assert torch.equal(cpu_linear.packed_linear(x, packed, 112), one)
    finally:
        cpu_matmul.matmul.cache_clear()


@every_isa
@pytest.mark.parametrize(("rows", "tiles"), [(5, 1), (1, 4)])
def test_a_matrix_adds_its_bias_once(isa, monkeypatch, rows, tiles):
    monkeypatch.setattr(Isa, "tiles_side_by_side", lambda *_: tiles)
    packed, dense = int8_matrix(96, 128)
    x, bias, before = random(rows, 128), random(96, seed=1), random(rows, 96, seed=2)
    room = Activations(rows, 128, 64)
    block_rows = room.resize(rows, isa)
    y = functional.pad(before, (0, 0, 0, block_rows))
    quantize = room.quantize(cpu_quantize.quantize(isa, 64, "plain"), x, 64, 128)
    source = cpu_matmul.matmul_source(isa, Weights(8, None, has_bias=False), block_rows, adds=True, has_bias=True)
    Tape([quantize, room.multiply(cpu_jit.compile_kernel(source, isa), packed, y, 96, bias)]).run()
    torch.testing.assert_close(y[:rows], as_int8(x, 64) @ dense.T + bias + before, rtol=1e-5, atol=1e-5)


@every_form
def test_what_is_not_finite_in_a_row_of_activations_comes_out_of_it_and_of_no_other(form):
    packed, _ = matrix(form, 32, 256)
    for value in (float("nan"), float("inf"), -float("inf")):
        x = random(3, 256)
        x[1, 77] = value
        finite = cpu_linear.packed_linear(x, packed, 32).isfinite()
        assert not finite[1].any() and finite[0].all() and finite[2].all()


def test_a_group_of_zeros_and_one_of_tiny_numbers_multiply_to_zero():
    packed, _ = int4_matrix(32, 128, 64)
    x = torch.zeros(2, 128)
    x[1] = 1e-38
    assert cpu_linear.packed_linear(x, packed, 32).abs().max() == 0


def apply(isa: Isa, function: Callable[[Kernel, Value], Value], x: Tensor) -> Tensor:
    """A function of cpu_math over a vector."""
    k = Kernel("apply", "x y | count")
    with k.range(k.i64(0), k.arg.count, LANES) as i:
        k.arg.y.at(i * 4).store(function(k, k.arg.x.at(i * 4).load(F32V)))
    native = cpu_jit.compile_kernel(k, isa)
    y = torch.empty_like(x)
    Tape([native.step(x=x, y=y, count=len(x))]).run()
    return y


@every_isa
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (cpu_math.silu, functional.silu),
        (cpu_math.gelu, functional.gelu),
        (cpu_math.gelu_tanh, lambda x: functional.gelu(x, approximate="tanh")),
        (cpu_math.tanh, torch.tanh),
    ],
)
def test_activations_equal_torch(isa, function, expected):
    x = torch.cat([torch.linspace(-30, 30, 4080), torch.tensor([0.0, -0.0, 80, -80, 1e-20, 1000, -1000, 1e30] * 2)])
    torch.testing.assert_close(apply(isa, function, x), expected(x), rtol=2e-6, atol=1e-6)


@every_isa
def test_exp_is_exact_at_zero_and_underflows_to_zero(isa):
    x = torch.tensor([0.0, -0.0, -1e30, -88.0, 1.0, -1.0, 80.0, -80.0] * 2)
    y = apply(isa, cpu_math.exp, x)
    assert y[:4].tolist() == [1.0, 1.0, 0.0, 0.0]
    torch.testing.assert_close(y[4:8], x[4:8].exp(), rtol=3e-7, atol=0)


@every_isa
def test_what_is_not_a_number_stays_so(isa):
    nan = torch.full((16,), float("nan"))
    functions = (cpu_math.exp, cpu_math.tanh, *cpu_math.ACTIVATIONS.values())
    assert all(bool(apply(isa, function, nan).isnan().all()) for function in functions)


@every_isa
@pytest.mark.parametrize("factor", [1.0, 11.3125])
def test_an_embedding_gives_the_rows_of_its_matrix_rounded_to_bf16(isa, factor):
    packed, dense = int8_matrix(48, 192)
    token_ids = torch.tensor([0, 47, 15, 16, 17, 47, 31, 48, -1, 1 << 60])
    x = torch.full((11, 192), -5.0)
    kernel = cpu_embed.embed(isa)
    words = {"shape": torch.tensor([10]), "vocab": 48, "features": 192, "factor": float_bits(factor)}
    step = kernel.step(qweight=packed.qweight, scale=packed.scale, token_ids=token_ids, x=x, **words)
    Tape([step]).run()
    assert torch.equal(x[:7], (dense[token_ids[:7]].bfloat16() * factor).float())
    assert bool(x[7:10].isnan().all()) and bool((x[10] == -5).all())


@every_isa
@pytest.mark.parametrize("adds", [True, False])
def test_a_norm_equals_the_formula(isa, adds):
    x, y, weight = random(5, 96), random(5, 64, seed=1), random(64, seed=2)
    expected = x[:, :64] * torch.rsqrt(x[:, :64].square().mean(-1, keepdim=True) + 1e-5) * weight
    expected = (expected + y) * 0.7 if adds else expected
    kernel = cpu_quantize.norm(isa, adds=adds)
    words = {"shape": torch.tensor([5]), "features": 64, "x_stride": 96, "y_stride": 64, "eps": float_bits(1e-5)}
    words["scale"] = float_bits(0.7)
    Tape([kernel.step(x=x, weight=weight, y=y, **words)]).run()
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


X86 = {
    "avx2": ("haswell", "znver3"),
    "avx-vnni": ("alderlake",),
    "avx512-vnni": ("cascadelake", "znver4", "sapphirerapids"),
}
DENSE = PageLayout(2, 128, "dense", "dense", torch.bfloat16)
CODED = PageLayout(2, 128, "int8", "int4", torch.bfloat16)
SOURCES: dict[str, Callable[[Isa], Kernel]] = {
    "int4": lambda isa: cpu_matmul.matmul_source(isa, Weights(), 4, adds=True, has_bias=True),
    "int8": lambda isa: cpu_matmul.matmul_source(isa, Weights(8, None, has_bias=False), 4, adds=False, has_bias=False),
    "repack": lambda _isa: cpu_repack.repack_source(cpu_repack.BlockForm(256, 110, "three-k", 32, "k3")),
    "int4-lut": lambda isa: cpu_matmul.matmul_source(
        isa, Weights(4, 32, has_bias=False, table=TABLES["iq4"]), 4, adds=False, has_bias=False
    ),
    "gated": lambda isa: cpu_quantize.quantize_source(64, "gated", Glu("gelu")),
    "norm quantize": lambda isa: cpu_quantize.quantize_source(64, "norm"),
    "rope": lambda isa: cpu_rope.rope_source(DENSE, CODED, 128, "first"),
    "attention": lambda isa: cpu_attention.attention_source(isa, DENSE, CODED, 4, has_softcap=True, has_sinks=True),
    "sketch": lambda _isa: cpu_sketch.sketch_source(PageLayout(2, 128, "int4", "int4", torch.bfloat16)),
    "choose": lambda isa: cpu_choice.choose_source(isa, 80, is_rotated=False),
    "combine": lambda isa: cpu_attention.combine_source(128, is_rotated=True, has_sinks=True),
    "norm": lambda isa: cpu_quantize.norm_source(adds=True),
    "gemv": lambda isa: cpu_gemv.gemv_source(8),
}


@pytest.mark.parametrize(
    ("source", "isa", "cpu"),
    [
        case
        for source in SOURCES
        for isa, cpus in X86.items()
        for case in one_in(len(cpus), [(source, isa, cpu) for cpu in cpus])
    ],
)
def test_on_every_x86_cpu_a_kernel_calls_nothing(source, isa, cpu):
    named = dataclasses.replace(next(known for known in cpu_isa.ISAS if known.name == isa), cpu=cpu)
    ir = SOURCES[source](named).source()
    assert cpu_jit.undefined_symbols(cpu_jit.machine_code(ir, named), ir) == set()


@pytest.mark.parametrize("source", SOURCES)
def test_for_arm_a_kernel_compiles_to_dot_products_and_calls_nothing(source):
    from llvmlite import binding as llvm

    try:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        llvm.Target.from_triple(cpu_isa.LLVM_TARGETS["aarch64"])
    except RuntimeError:
        pytest.skip("this llvmlite was built without the Arm target")
    neon = dataclasses.replace(cpu_isa.ISAS[-1], cpu="neoverse-n1")
    ir = SOURCES[source](neon).source()
    assert cpu_jit.undefined_symbols(cpu_jit.machine_code(ir, neon), ir) == set()
    if source.startswith("int"):
        machine = cpu_jit.target_machine(neon)
        assert "sdot" in machine.emit_assembly(llvm.parse_assembly(ir))


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (lambda k: k.call("void", "nowhere", k.arg.x), "nowhere"),
        (lambda k: k.line("not an instruction"), "LLVM refused"),
    ],
)
def test_a_kernel_of_unknown_functions_or_malformed_ir_is_refused(write, why):
    k = Kernel("f", "x")
    write(k)
    with pytest.raises(cpu_jit.KernelUnavailableError, match=why):
        cpu_jit.compile_kernel(k, HOST_ISAS[0])


def test_the_kernels_of_a_tape_run_one_after_another_on_all_threads(threads):
    """Each step adds up what all threads wrote in the one before it."""
    k = Kernel("sum", "x y | count")
    begin, end = k.share(k.arg.count)
    with k.range(begin, end) as i:
        total = k.variable(k.i64(0))
        with k.range(k.i64(0), k.arg.count) as j:
            total.add(k.arg.x.at(j * 8).load("i64", 8))
        k.arg.y.at(i * 8).store((total.get() + i) % 1000003, 8)
    native = cpu_jit.compile_kernel(k, HOST_ISAS[0])
    count, steps = 37, 200
    threads(4)
    a, b = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    pairs = [(a, b), (b, a)] * (steps // 2)
    tape = Tape([native.step(x=x, y=y, count=count) for x, y in pairs])
    tape.run(0, 100)
    tape.run(100)
    expected = list(range(count))
    for _ in range(steps):
        expected = [(sum(expected) + i) % 1000003 for i in range(count)]
    assert a.tolist() == expected


@pytest.mark.parametrize("limit", every_other([{"OMP_THREAD_LIMIT": "1"}, {"OMP_DYNAMIC": "true"}]), ids=str)
def test_a_team_that_is_smaller_than_was_asked_for_waits_for_nobody(limit):
    program = (
        "import torch; from localllm.quant.int8 import Int8; torch.set_num_threads(3); "
        "print(Int8().linear(torch.ones(1, 64), Int8().quantize(torch.ones(48, 64)), 48, None).sum().item())"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env={**os.environ, **limit}, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (result.stdout, result.stderr) == ("3072.0\n", "")


@pytest.fixture
def kept_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path))
    return tmp_path


def test_machine_code_is_kept_and_a_damaged_copy_is_compiled_anew(kept_code, monkeypatch):
    compiled = []
    compile_code = cpu_jit.machine_code
    monkeypatch.setattr(cpu_jit, "machine_code", lambda *args: compiled.append(1) or compile_code(*args))
    source = cpu_quantize.norm_source(adds=True).source()
    for _ in range(2):
        cpu_jit.link(source, "norm", HOST_ISAS[0])
    assert len(compiled) == 1
    (kept,) = kept_code.rglob("*.o")
    code = bytearray(kept.read_bytes())
    code[len(code) // 2] ^= 1
    kept.write_bytes(code)
    cpu_jit.link(source, "norm", HOST_ISAS[0])
    assert len(compiled) == 2 and bytes(code) != kept.read_bytes()


@pytest.mark.usefixtures("kept_code")
def test_machine_code_under_the_name_of_another_kernel_is_compiled_anew():
    sources = [cpu_quantize.norm_source(adds=adds).source() for adds in (True, False)]
    kept = [cpu_jit.KeptCode.of(source, HOST_ISAS[0]) for source in sources]
    for source in sources:
        cpu_jit.link(source, "norm", HOST_ISAS[0])
    kept[0].path.replace(kept[1].path)
    assert kept[1].read() is None


def test_without_a_cache_directory_that_can_be_written_kernels_compile_all_the_same(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path / "file"))
    assert cpu_jit.link(cpu_quantize.norm_source(adds=True).source(), "norm", HOST_ISAS[0])[0]
