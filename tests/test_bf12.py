"""bf16 in 12 bits: nothing is lost, products keep their bits, and what does not fit into it is streamed as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from localllm.engine import planner
from localllm.engine.engine import Engine
from localllm.hub import locate
from localllm.hub.packed import packed_recipes
from localllm.kernels import bf12, cpu_bf12, cpu_isa, cpu_linear
from localllm.kernels.bf12 import ManyExceptionsError
from localllm.offload.planner.machine import Memory
from localllm.quant.bf12 import BF12
from localllm.quant.dense import Dense
from localllm.quant.weight_format import NotCompactError
from localllm.settings import EngineConfig
from tests.cli_support import write_checkpoint
from tests.engine_support import generated

# Asked of other kernels: where these alone did not compile, nothing here may be skipped.
HAS_KERNELS = cpu_linear.is_available()
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="no CPU kernel runs on this machine")
every_isa = pytest.mark.parametrize("isa", cpu_isa.host_isas(), ids=lambda isa: isa.name)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Of 15 exponents a row wherever they are, a few others among them, and zeros of both signs."""
    N, K = draw(st.integers(1, 40)), draw(st.integers(1, 300))
    random = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=random, dtype=torch.int32)

    top = integers(draw(st.sampled_from((0, 15, 100, 240))), 255, N, 1)
    exponents = (top - integers(0, 15, N, K)).clamp(min=0)
    others = torch.rand((N, K), generator=random) < draw(st.sampled_from((0.0, 0.002)))
    exponents = torch.where(others, integers(0, 255, N, K) * top // 255, exponents)
    bits = integers(0, 2, N, K) << 15 | exponents << 7 | integers(0, 128, N, K)
    bits[torch.rand((N, K), generator=random) < 0.1] &= 0x8000
    return bits.to(torch.int16).view(torch.bfloat16)


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int16)


@given(matrices())
def test_every_bit_comes_back(weight: Tensor) -> None:
    N, K = weight.shape
    try:
        parts = bf12.pack(weight)
    except ManyExceptionsError:
        return
    assert torch.equal(bits(bf12.unpack(*parts, K)[:N].contiguous()), bits(weight))
    if HAS_KERNELS:
        assert torch.equal(bits(cpu_bf12.unpack(*parts)[:N, :K].contiguous()), bits(weight))


@needs_kernels
@every_isa
def test_every_instruction_set_unpacks_and_multiplies_alike(isa: cpu_isa.Isa) -> None:
    weight = (normal(37, 416) * 2.0 ** torch.randint(-12, 3, (37, 1))).bfloat16()
    weight[5, 17], weight[36, 415], weight[7], weight[8, 3] = 1e-30, -1e-35, 0, -0.0
    parts = bf12.pack(weight)
    assert torch.equal(bits(cpu_bf12.unpack(*parts, isa)[:37, :416].contiguous()), bits(weight))
    for rows in (1, 3, 8):
        x = normal(rows, 416, seed=rows)
        assert torch.equal(cpu_bf12.gemv(x, *parts, 37, isa), Dense().linear(x, {"weight": weight}, 37, None))


@needs_kernels
def test_a_file_that_is_written_to_meanwhile_reaches_no_memory_but_its_own() -> None:
    """What is mapped from the page cache may change while it is computed with."""
    packed, row, exceptions = bf12.pack(normal(64, 256))
    garbage = torch.Generator().manual_seed(0)
    for tensor in (row, exceptions):
        tensor.random_(-(2**31), 2**31 - 1, generator=garbage)
    assert cpu_bf12.gemv(normal(2, 256), packed, row, exceptions, 64).shape == (2, 64)
    assert cpu_bf12.unpack(packed, row, exceptions).shape == (64, 256)


@pytest.mark.parametrize(
    ("N", "K", "T"),
    [
        *((33, 416, T) for T in (1, 8, 9, 70, 512)),
        *((700, 128, 9), (700, 128, 512), (16, 8192, 1), (16, 8192, 70), (2050, 4096, 8), (600, 14336, 1)),
    ],
)
def test_a_product_has_the_bits_of_bf16(N: int, K: int, T: int) -> None:
    weight, x, bias = normal(N, K), normal(T, K, seed=1), normal(N, seed=2)
    assert torch.equal(
        BF12().linear(x, BF12().quantize(weight), N, bias), Dense().linear(x, {"weight": weight}, N, bias)
    )


def test_the_form_without_kernels_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = normal(50, 200), normal(20, 200, seed=1)
    tensors = BF12().quantize(weight)
    expected = BF12().linear(x, tensors, 50, None)
    monkeypatch.setattr(cpu_bf12, "is_available", lambda: False)
    assert torch.equal(BF12().linear(x, tensors, 50, None), expected)


def test_exponents_that_are_spread_too_widely_are_refused() -> None:
    weight = torch.ones((64, 1024), dtype=torch.bfloat16)
    weight[20, ::16] *= 2.0**-20  # 64 exceptions in one tile, the most that there may be
    BF12().quantize(weight)
    weight[21, 0] *= 2.0**-20
    with pytest.raises(NotCompactError, match="do not fit into 4 bits"):
        BF12().quantize(weight)


# A model whose weights do not fit, on a CPU


@pytest.fixture
def checkpoint(empty_cache: Path, tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", hidden=256, layers=3)


@contextmanager
def engine(checkpoint: Path, memory_bytes: int | None, weights: str = "bf16") -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        if memory_bytes is not None:
            memory = Memory(memory_bytes, 0, memory_bytes)
            patch.setattr(planner, "process_memory", lambda *_, **__: memory)
            patch.setattr(planner, "as_stored", lambda _files, _name, config, _weights: (config, None))
        loaded = Engine.load(checkpoint, EngineConfig(device="cpu", weights=weights, ctx=128))
    try:
        yield loaded
    finally:
        loaded.close()


def text(engine: Engine) -> list[int]:
    return generated(engine, tuple(range(40)), 12)


def small_memory(checkpoint: Path) -> int:
    """With which about half of the blocks are streamed."""
    return (checkpoint / "model.safetensors").stat().st_size // 2 + (1 << 20)


@needs_kernels
def test_bf16_that_does_not_fit_is_streamed_in_12_bits_with_the_same_text(checkpoint: Path) -> None:
    with engine(checkpoint, None) as whole:
        expected = text(whole)
    assert packed_recipes(locate(str(checkpoint))) == []
    with engine(checkpoint, small_memory(checkpoint)) as capped:
        assert capped.plan is not None and capped.plan.streamed
        assert capped.plan.shape.weights == "bf12"
        assert text(capped) == expected
    assert packed_recipes(locate(str(checkpoint))) == ["bf12"]
    with engine(checkpoint, None) as whole, engine(checkpoint, None, "bf12") as compact:
        assert whole.plan is not None and whole.plan.shape.weights == "bf16"  # it fits, and is read as it is
        assert text(compact) == expected


@needs_kernels
def test_bf16_that_has_no_such_form_is_streamed_as_it_is_from_then_on(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][:, ::4] *= 2.0**-20
    save_file(tensors, file)
    with engine(checkpoint, None) as whole:
        expected = text(whole)
    for _ in range(2):
        with engine(checkpoint, small_memory(checkpoint)) as capped:
            assert capped.plan is not None and capped.plan.streamed
            assert capped.plan.shape.weights == "bf16"
            assert text(capped) == expected
        assert packed_recipes(locate(str(checkpoint))) == ["bf16"]


def test_a_copy_in_12_bits_is_no_choice_of_a_format(checkpoint: Path) -> None:
    with engine(checkpoint, None, "bf12"):
        assert packed_recipes(locate(str(checkpoint))) == ["bf12"]
    with engine(checkpoint, None, "auto") as chosen:
        assert chosen.plan is not None and chosen.plan.shape.weights == "bf16"
