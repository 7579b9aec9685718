"""A card that emulates bf16, and of which Triton uses no tensor cores: answers by our kernels, prompts by operators."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from localllm.engine import device
from localllm.engine.kernel_check import scope_of
from localllm.engine.memory import choose_dtype
from localllm.engine.planner import ModelPlanner
from localllm.engine.step_types import Chunk
from localllm.kernels import int8, packed_linear
from localllm.kernels.gpu import check, check_cases, product, ready
from localllm.kernels.gpu.launch import recorded
from localllm.kernels.gpu.product import Dispatch
from localllm.kernels.packed_linear import halved_linear
from localllm.kernels.packed_matrix import PackedMatrix
from localllm.models.shapes import find_shape
from localllm.quant.recipe import RECIPES
from localllm.settings import EngineConfig
from tests.checkpoints import write_checkpoint
from tests.gpu.test_step import Engine, by_kernels, by_operators, ids, logits

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
FEW = Dispatch(multiprocessors=1, gemv_rows=16, most_rows=16)


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Of the card, as its last item."""
    found = [(7, 5)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: found[-1])
    monkeypatch.setattr(device, "no_gpu", lambda **_: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    ready.lacks_bf16.cache_clear()
    yield found
    ready.lacks_bf16.cache_clear()


def test_auto_is_never_a_type_that_is_emulated(capability):
    assert device.dtype_name("auto", "cuda:0") == "fp32" and device.dtype_name("auto", "cpu") == "bf16"
    assert choose_dtype("auto", CUDA) is torch.float32 and choose_dtype("auto", CPU) is torch.bfloat16
    assert device.dtype_name("bf16", "cuda:0") == "bf16"
    assert "7.5" not in ready.missing(CUDA)
    ready.lacks_bf16.cache_clear()
    capability.append((8, 0))
    assert device.dtype_name("auto", "cuda:0") == "bf16"


def planned(**wanted: str) -> ModelPlanner:
    shape = find_shape("qwen3-8b")
    return ModelPlanner.of(shape.name, None, shape.config, EngineConfig(**wanted), None, pytest.fail)


def test_fp32_that_nobody_asked_for_keeps_the_usual_formats(capability):
    assert (planned().dtype, planned().weights, planned().wanted.kv) == ("fp32", "int4-g64", "int8")
    assert (planned(dtype="fp32").wanted.kv, planned(kv="k8v4").wanted.kv) == ("auto", "k8v4")


def matrix_of(weights: Tensor) -> PackedMatrix:
    """weights [N, K] in INT8."""
    scale = weights.abs().amax(1) / 127
    return PackedMatrix(int8.pack((weights / scale[:, None]).round().to(torch.int8)), scale.view(-1, 16), None)


def test_products_in_fp16_overflow_at_no_activation():
    """A row of 1e6, which fp16 does not hold, one of zeros, one with a NaN."""
    torch.manual_seed(0)
    weights, x = torch.randn(32, 128), torch.randn(4, 128)
    x[1] *= 1e6
    x[2] = 0
    x[3, 5] = torch.nan
    matrix = matrix_of(weights)
    expected = x.double() @ matrix.dequantize(32, 128, torch.float32).double().T
    found = halved_linear(x, matrix, 32)
    assert found.dtype is torch.float32 and (found[2] == 0).all() and found[3].isnan().all()
    errors = (found[:2] - expected[:2]).norm(dim=1) / expected[:2].norm(dim=1)
    assert (errors < 2e-3).all(), errors


class OnCard(Tensor):
    """A tensor of the host that says it were on a card."""

    is_cuda = True


@pytest.mark.parametrize(
    ("rows", "is_older", "way"), [(16, True, "by kernels"), (17, True, "in fp16"), (17, False, "as it is")]
)
def test_more_rows_than_the_kernels_take_are_multiplied_in_fp16(rows, is_older, way, monkeypatch):
    """Of a card that has bf16, only what fp32 was asked for comes here."""
    matrix, taken = matrix_of(torch.randn(32, 128)), list[str]()
    monkeypatch.setattr(packed_linear.cpu_linear, "is_available", lambda: False)
    monkeypatch.setattr(packed_linear, "why_not", lambda _device: "")
    monkeypatch.setattr(packed_linear, "lacks_bf16", lambda _device: is_older)
    monkeypatch.setattr(packed_linear, "halved_linear", lambda *_: taken.append("in fp16"))
    monkeypatch.setattr(packed_linear, "dequantized_linear", lambda *_: taken.append("as it is"))
    monkeypatch.setattr(product, "packed_linear", lambda *_: taken.append("by kernels"))
    monkeypatch.setattr(product, "dispatch_for", lambda _device: FEW)
    packed_linear.packed_linear(torch.randn(rows, 128).as_subclass(OnCard), matrix, 32)
    assert taken == [way]


def test_the_table_of_such_a_card_has_no_tensor_cores(monkeypatch):
    properties = SimpleNamespace(major=7, minor=5, multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    assert product.dispatch_for.__wrapped__(CUDA) == FEW


def test_a_prompt_is_computed_by_operators_and_a_step_by_kernels(tmp_path, monkeypatch):
    monkeypatch.setattr(product, "dispatch_for", lambda _device: FEW)
    write_checkpoint(tmp_path, "llama", layers=1)
    engine = Engine.load(tmp_path, EngineConfig(device="cpu", weights="fp32"))
    token_ids = ids(21)
    expected = logits(engine, by_operators(engine.model), token_ids, [17, 4])
    runner, kv = by_kernels(engine.model), engine.residency.new_kv(len(token_ids))
    launched = []
    for size in (17, 4):
        with recorded(runs=True) as launches:
            found = runner.forward([Chunk(token_ids, kv, size, all_logits=True)])
        launched.append({launch.name for launch in launches})
    assert launched[0] == set() and {"_attend", "_rope_store"} < launched[1]
    assert float((found - expected[17:]).norm() / expected[17:].norm()) < 2e-5
    kv.close()
    engine.close()


def test_the_check_tries_what_such_a_card_launches(monkeypatch):
    """No product on tensor cores, no more rows than a step has, attention in fp32."""
    monkeypatch.setattr(check_cases, "dispatch_for", lambda _device: FEW)
    sizes = check.sizes_for(check_cases.CheckSizes(groups=(64, None)), FEW.most_rows, torch.float32)
    assert max(sizes.row_counts) == 16 and {heads.dtype for heads in sizes.attention} == {torch.float32}
    launches, count = check.launches_of(CPU, replace(sizes, N=20, K=600, attention=sizes.attention[:1]))
    names = {launch.name for launch in launches}
    assert "_gemv" in names and "_attend" in names and not names & {"_gemm", "_parts_added"} and count > 20
    assert check.sizes_for(check.BRIEF, Dispatch(1).most_rows) == check.BRIEF


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_models_own_ways_are_of_its_dtype(dtype):
    scope = scope_of(find_shape("qwen3-8b").config, RECIPES["int4-g64"], "int8", dtype)
    sizes = check.sizes_of(json.loads(scope.arguments[1]))
    assert [heads.dtype for heads in sizes.attention] == [dtype]


WAYS = json.dumps({"groups": [64], "attention": [{"keys": "int8", "dtype": "bfloat16"}], "glus": []})


@pytest.mark.parametrize(
    ("arguments", "dtype"), [((), torch.float32), (("--brief",), torch.float32), (("--ways", WAYS), torch.bfloat16)]
)
def test_the_program_of_the_check_tries_no_more_and_a_models_own_dtype(arguments, dtype, capability, monkeypatch):
    tried: list[check_cases.CheckSizes] = []
    monkeypatch.setattr(check, "_device", lambda _name: CUDA)
    monkeypatch.setattr(check, "dispatch_for", lambda _device: FEW)
    monkeypatch.setattr(check, "checked", lambda _device, sizes, _tell: tried.append(sizes) or check.Outcome([], []))
    monkeypatch.setattr(torch, "set_num_threads", lambda _count: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    with pytest.raises(SystemExit):
        check.main(["cuda:0", *arguments])
    (sizes,) = tried
    assert max(sizes.row_counts) <= 16 and {heads.dtype for heads in sizes.attention} == {dtype}
