"""Adapters on a model: what PEFT computes with them, in any batch and with any weights, within their memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from localllm.config import load_settings
from localllm.engine.engine import Engine
from localllm.engine.prefix_config import KVReuse
from localllm.engine.request import AdapterRef, Request, SamplingParams
from localllm.engine.step_types import Chunk
from localllm.errors import AdapterError, DoesNotFitError, UsageError
from localllm.layers.batch import Batch
from localllm.layers.config import MLPConfig
from localllm.layers.linear import Linear
from localllm.layers.low_rank import Adapter, AppliedAdapter, LowRank
from localllm.layers.mlp import MLP, SplitMLP
from localllm.layers.segment import Segment
from localllm.quant.dense import Dense
from localllm.runtime.engine_loader import with_room_for_adapters
from localllm.settings import EngineConfig
from tests.adapters import write_peft_adapter
from tests.checkpoints import OF_TRANSFORMERS, write_checkpoint
from tests.cli_support import share_kernels
from tests.engine_support import answered
from tests.test_parity import TOLERANCE, peer_logits, prompt
from tests.thinning import thinned

PARITY = (
    "llama",
    "qwen2",
    "phi3",
    "gemma2",
    "gemma3",
    "glm4",
    "granite",
    "qwen3_moe",
    "mixtral",
    "qwen3_next",
    "cohere2",
)


@pytest.fixture(scope="module", autouse=True)
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is packed here is in no list of models elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCALLLM_CACHE", str(share_kernels(tmp_path_factory.mktemp("adapted") / "cache")))
        yield


@dataclass
class Case:
    """A random model, and adapters of it as PEFT has them."""

    engine: Engine
    adapters: list[AdapterRef]
    peers: list[Any]

    def logits(self, token_ids: list[int], *adapters: AdapterRef, sizes: tuple[int, ...] = ()) -> Tensor:
        """Of every token, the prompt fed in chunks."""
        kv = self.engine.residency.new_kv(len(token_ids))
        kv.adapters = self.engine.adapters.take(adapters)
        parts = [
            self.engine.runner.forward([Chunk(token_ids, kv, n, all_logits=True)]) for n in sizes or (len(token_ids),)
        ]
        self.engine.adapters.give_back(kv.adapters)
        return torch.cat(parts)


def made(directory: Path, family: str, config: EngineConfig, *adapters: dict[str, Any], **sizes: int) -> Case:
    peer = write_checkpoint(directory / "model", family, **sizes)
    refs, peers = [], []
    for number, options in enumerate(adapters):
        folder = directory / f"adapter{number}"
        peers.append(write_peft_adapter(folder, peer, seed=number, size=0.05, **options))
        refs.append(AdapterRef(str(folder), name=folder.name))
    return Case(Engine.load(directory / "model", config), refs, peers)


FP32 = EngineConfig(device="cpu", dtype="fp32")


@pytest.mark.parametrize("family", thinned(OF_TRANSFORMERS, PARITY.__contains__))
def test_logits_are_those_of_peft(tmp_path: Path, family: str) -> None:
    case = made(tmp_path, family, FP32, {})
    ids, peer = prompt(40), case.peers[0]
    # PEFT computes no router that gives more than a matrix; transformers reads the weights of Mamba's dt_proj alone.
    if family.startswith(("phimoe", "mamba", "falcon_mamba", "jamba")):
        peer = peer.merge_and_unload()
    expected = peer_logits(peer, ids)
    assert not torch.allclose(case.logits(ids), expected, rtol=0, atol=10 * TOLERANCE), "it changes something"
    torch.testing.assert_close(case.logits(ids, *case.adapters), expected, rtol=0, atol=TOLERANCE)
    small = case.logits(ids, *case.adapters, sizes=(7, 26, 1, 6))
    torch.testing.assert_close(small, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [
        {"r": 1, "target_modules": ["q_proj"]},
        {"r": 256, "lora_alpha": 64, "target_modules": ["down_proj", "v_proj"]},
        {"r": 16, "use_rslora": True, "target_modules": r".*layers\.1\..*(q|k)_proj"},
        {"r": 3, "lora_alpha": 7, "target_modules": ["gate_proj", "o_proj"], "layers_to_transform": [1]},
        {"r": 5, "target_modules": ["embed_tokens", "lm_head"]},
        {"r": 4, "rank_pattern": {"v_proj": 9}, "alpha_pattern": {"v_proj": 1}, "target_modules": ["q_proj", "v_proj"]},
    ],
    ids=["rank 1", "rank 256", "rslora", "one layer", "embedding and head", "patterns"],
)
def test_any_rank_scale_and_targets_are_those_of_peft(tmp_path: Path, options: dict[str, Any]) -> None:
    case = made(tmp_path, "llama", FP32, options)
    ids = prompt(33)
    expected = peer_logits(case.peers[0], ids)
    torch.testing.assert_close(case.logits(ids, *case.adapters), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_that_are_stored_in_16_bits_are_computed_in_fp32(tmp_path: Path, dtype: torch.dtype) -> None:
    """A scale that is no power of two would be rounded with them."""
    case = made(tmp_path, "llama", FP32, {"r": 6, "lora_alpha": 16, "use_rslora": True})
    file = Path(case.adapters[0].path) / "adapter_model.safetensors"
    save_file({name: values.to(dtype) for name, values in load_file(file).items()}, file)
    for name, values in case.peers[0].named_parameters():
        if "lora_" in name:
            values.data = values.data.to(dtype).float()
    ids = prompt(33)
    expected = peer_logits(case.peers[0], ids)
    torch.testing.assert_close(case.logits(ids, *case.adapters), expected, rtol=0, atol=TOLERANCE)


def test_a_scale_multiplies_and_two_adapters_add_up(tmp_path: Path) -> None:
    """Of one matrix in the last layer, whose changes of the logits' input add up exactly."""
    targets = {"target_modules": ["lm_head"]}
    case = made(tmp_path, "llama", FP32, targets, {**targets, "r": 9})
    ids, (first, second) = prompt(20), case.adapters
    base = case.logits(ids)
    changes = [case.logits(ids, each) - base for each in (first, second)]
    half = AdapterRef(first.path, -0.5)
    torch.testing.assert_close(case.logits(ids, first, second), base + sum(changes), rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(case.logits(ids, half), base - 0.5 * changes[0], rtol=0, atol=TOLERANCE)
    none = AdapterRef(second.path, 0.0)
    torch.testing.assert_close(case.logits(ids, first, none), case.logits(ids, first), rtol=0, atol=TOLERANCE)


# Whole tiles and vectors, as the CPU's native steps need them.
NATIVE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
HYBRID = {
    "hidden_size": 128, "intermediate_size": 192, "head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
    "linear_num_key_heads": 2, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 48,
}  # fmt: skip
EIGHT: dict[str, tuple[str, dict[str, int]]] = {
    "int4": ("llama", NATIVE),
    "int8": ("llama", NATIVE),
    "fp32": ("llama", {}),
    "experts": ("qwen3_moe", {**NATIVE, "moe_intermediate_size": 64}),
    "hybrid": ("qwen3_5", HYBRID),
}


@pytest.fixture(scope="module", params=EIGHT)
def eight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """Eight adapters: of other ranks, other matrices, and one of all, which is for torch's operators where there are
    experts. The others are for native steps, but in fp32."""
    family, sizes = EIGHT[request.param]
    weights = {"experts": "int4", "hybrid": "int4", "fp32": "auto"}.get(request.param, request.param)
    config = EngineConfig(device="cpu", weights=weights, dtype="fp32" if request.param == "fp32" else "auto")
    attention = [{"r": rank, "target_modules": ["q_proj", "v_proj", "o_proj"]} for rank in (1, 8, 16, 40)]
    others = [{"r": 8, "target_modules": ["lm_head"]}, {"r": 2, "target_modules": ["embed_tokens", "k_proj"]}]
    directory = tmp_path_factory.mktemp(request.param)
    case = made(directory, family, config, {}, *attention, *others, {"target_modules": ["k_proj"]}, **sizes)
    assert (case.engine.runner.cpu_program is None) == (request.param == "fp32")
    yield case
    case.engine.close()


SAMPLING = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_a_batch_of_eight_answers_as_each_does_alone(eight: Case) -> None:
    requests = [Request(tuple(prompt(19, seed=i)), SAMPLING, adapters=(ref,)) for i, ref in enumerate(eight.adapters)]
    requests[3] = Request(requests[3].prompt_ids, SAMPLING)
    requests[5] = Request(requests[5].prompt_ids, SAMPLING, adapters=(*eight.adapters[:2], eight.adapters[4]))
    alone = [answered(eight.engine, request)[0].token_ids for request in requests]
    assert [each.token_ids for each in answered(eight.engine, *requests)] == alone
    assert eight.engine.adapters.used_bytes > 0


KINDS = {
    "llama": (NATIVE, ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head")),
    "qwen3_5": (HYBRID, ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "q_proj", "o_proj")),
}


@pytest.mark.parametrize("family", KINDS)
def test_native_steps_change_what_an_adapter_of_each_matrix_changes(tmp_path: Path, family: str) -> None:
    """The change of the logits beside that of an engine in fp32 from the same numbers."""
    sizes, matrices = KINDS[family]
    options = [{"target_modules": [matrix], "r": 20} for matrix in matrices]
    packed = made(tmp_path, family, EngineConfig(device="cpu", weights="int8"), *options, **sizes)
    assert packed.engine.runner.cpu_program is not None
    exact, ids = Case(Engine.load(tmp_path / "model", FP32), packed.adapters, []), prompt(40)
    bases = packed.logits(ids), exact.logits(ids)
    for matrix, adapter in zip(matrices, packed.adapters, strict=True):
        ref = AdapterRef(adapter.path, 30.0)  # by which each changes more than INT8 rounds
        found, wanted = packed.logits(ids, ref) - bases[0], exact.logits(ids, ref) - bases[1]
        assert torch.cosine_similarity(found.flatten(), wanted.flatten(), dim=0) > 0.95, matrix
    exact.engine.close()


def test_pages_of_an_adapter_are_found_by_itself_alone(tmp_path: Path) -> None:
    case = made(tmp_path, "llama", EngineConfig(device="cpu", weights="int4"), {}, {}, **NATIVE)
    ids, (first, second) = tuple(prompt(200)), case.adapters
    reuse = KVReuse(directory=tmp_path / "kv", ram_bytes=1 << 24)

    def cached(engine: Engine, *adapters: AdapterRef) -> int:
        (heard,) = answered(engine, Request(ids, SAMPLING, adapters=adapters))
        return heard.finished.usage.cached_tokens

    uses = [(), (first,), (second,), (first, second), (AdapterRef(first.path, 0.5),)]
    engine = Engine.load(tmp_path / "model", EngineConfig(device="cpu", weights="int4"), reuse=reuse)
    assert [cached(engine, *use) for use in uses] == [0] * len(uses)
    assert all(cached(engine, *use) >= 128 for use in uses)
    engine.close()
    again = Engine.load(tmp_path / "model", EngineConfig(device="cpu", weights="int4"), reuse=reuse)
    assert all(cached(again, *use) >= 128 for use in uses), "after a restart too"
    again.close()
    write_peft_adapter(Path(first.path), write_checkpoint(tmp_path / "same", "llama", **NATIVE), seed=9)
    renewed = Engine.load(tmp_path / "model", EngineConfig(device="cpu", weights="int4"), reuse=reuse)
    assert cached(renewed, first) == 0, "the files of the adapter are others"
    renewed.close()


def test_beams_are_searched_with_the_adapter(tmp_path: Path) -> None:
    case = made(tmp_path, "llama", FP32, {})
    ids, refs = prompt(15), tuple(case.adapters)
    sampling = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    (heard,) = answered(case.engine, Request(tuple(ids), sampling, beams=3, adapters=refs))
    found = case.peers[0].generate(
        input_ids=torch.tensor([ids]),
        max_new_tokens=10,
        min_new_tokens=10,
        num_beams=3,
        do_sample=False,
        eos_token_id=None,
    )
    assert heard.token_ids == found[0, len(ids) :].tolist()


def test_requests_of_different_adapters_do_not_follow_each_other(eight: Case) -> None:
    """The same prompt at the same time: no one begins with what another computed."""
    ids = tuple(prompt(150, seed=77))
    requests = [Request(ids, SAMPLING, adapters=use) for use in ((), *((ref,) for ref in eight.adapters[:3]))]
    alone = [answered(eight.engine, request)[0].token_ids for request in requests]
    assert [each.token_ids for each in answered(eight.engine, *requests, *requests)] == alone * 2


def test_streamed_blocks_take_adapters_that_are_in_memory(tmp_path: Path) -> None:
    case = made(tmp_path, "llama", EngineConfig(device="cpu", weights="int4"), {}, **NATIVE)
    engine, residency = case.engine, case.engine.residency
    requests = [Request(tuple(prompt(30, seed=i)), SAMPLING, adapters=use) for i, use in enumerate([case.adapters, ()])]
    requests = [replace(request, adapters=tuple(request.adapters)) for request in requests]
    expected = [heard.token_ids for heard in answered(engine, *requests)]
    residency.move([replace(b, tier="disk" if "layers" in b.name else b.tier) for b in residency.blocks])
    assert engine.model.stream.names
    assert [heard.token_ids for heard in answered(engine, *requests)] == expected


def test_a_draft_is_computed_with_the_adapter(tmp_path: Path) -> None:
    config = EngineConfig(device="cpu", weights="int4", speculate="ngram", draft_tokens=4)
    case = made(tmp_path, "llama", config, {}, **NATIVE)
    plain = Engine.load(tmp_path / "model", EngineConfig(device="cpu", weights="int4", speculate="off"))
    repeated = tuple(prompt(12) * 4)
    request = Request(
        repeated, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), adapters=(case.adapters[0],)
    )
    assert answered(case.engine, request)[0].token_ids == answered(plain, request)[0].token_ids
    plain.close()


def another(folder: Path, number: int) -> AdapterRef:
    """Another adapter of the same shape."""
    copy = folder.with_name(f"{folder.name}-{number}")
    copy.mkdir()
    (copy / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    generator = torch.Generator().manual_seed(number)
    tensors = load_file(folder / "adapter_model.safetensors")
    noise = {name: torch.randn(values.shape, generator=generator) * 0.3 for name, values in tensors.items()}
    save_file(noise, copy / "adapter_model.safetensors")
    return AdapterRef(str(copy), name=copy.name)


def test_many_adapters_pass_through_the_memory_of_a_few(tmp_path: Path) -> None:
    """200 in the memory of 20: what is not there is read again, what an answer uses stays, nothing is left over."""
    targets = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    case = made(tmp_path, "llama", EngineConfig(device="cpu", weights="int4"), targets, **NATIVE)
    (first,) = case.adapters
    engine, ids = case.engine, tuple(prompt(20))
    requests = [Request(ids, SAMPLING, adapters=(another(Path(first.path), number),)) for number in range(200)]
    expected = [answered(engine, request)[0].token_ids for request in requests]
    assert len({tuple(answer) for answer in expected}) > 150
    each = engine.adapters.used_bytes // 200
    engine.adapters.unload()
    engine.adapters.budget_bytes = 20 * each + each // 2
    for request, answer in itertools.islice(itertools.cycle(zip(requests, expected, strict=True)), 230):
        assert answered(engine, request)[0].token_ids == answer
        assert engine.adapters.used_bytes <= engine.adapters.budget_bytes
    engine.adapters.unload()
    engine.adapters.budget_bytes = 3 * each + each // 2
    assert [each.token_ids for each in answered(engine, *requests[:12])] == expected[:12], "more than there is room for"
    assert engine.adapters.used_bytes <= engine.adapters.budget_bytes
    assert engine.adapters.unload() == len(engine.adapters.names) or engine.adapters.used_bytes == 0
    engine.adapters.budget_bytes = each // 2
    with pytest.raises(DoesNotFitError) as refused:
        engine.submit(requests[0])
    assert any("--adapter-memory" in str(fix) for fix in refused.value.fixes)


def test_a_request_with_a_wrong_adapter_is_refused_before_it_runs(tmp_path: Path) -> None:
    case = made(tmp_path, "llama", FP32, {})
    other = made(tmp_path / "other", "llama", FP32, {}, hidden_size=96, num_attention_heads=4, head_dim=24)
    ids = tuple(prompt(9))
    with pytest.raises(AdapterError, match="adapter0"):
        case.engine.submit(Request(ids, SAMPLING, adapters=other.adapters[:1] and (other.adapters[0],)))
    with pytest.raises(AdapterError):
        case.engine.submit(Request(ids, SAMPLING, adapters=(AdapterRef(str(tmp_path / "none")),)))
    for scale in (float("nan"), float("inf"), 1000.0):
        with pytest.raises(UsageError):
            AdapterRef("x", scale)
    assert not case.engine.has_work


def test_an_mlp_cut_in_two_takes_an_adapter_of_the_whole() -> None:
    config = MLPConfig(48)
    batch = Batch(
        torch.zeros(5, dtype=torch.int64), torch.arange(5), (_segment(0, 2, ()),), torch.arange(5), rotaries=()
    )
    up, down = torch.randn(96, 32), torch.randn(32, 48)
    site = {"x.gate_up_proj": (96, 32), "x.down_proj": (32, 48)}
    parts = {name: (LowRank(torch.randn(3, k), torch.randn(n, 3)),) for name, (n, k) in site.items()}
    applied = AppliedAdapter(Adapter("a", b"", parts, {}), 0.5)
    batch = replace(batch, segments=(_segment(0, 2, ()), _segment(2, 5, (applied,))))
    whole = MLP(_linear("x.gate_up_proj", up), _linear("x.down_proj", down), config)
    cut = [
        MLP(
            _linear("x.gate_up_proj", torch.cat((up[a:b], up[48 + a : 48 + b]))),
            _linear("x.down_proj", down[:, a:b]),
            config,
        )
        for a, b in ((0, 16), (16, 48))
    ]
    x = torch.randn(5, 32)
    torch.testing.assert_close(SplitMLP(*cut)(x, batch), whole(x, batch), rtol=1e-4, atol=1e-3)


def _segment(begin: int, end: int, adapters: tuple[AppliedAdapter, ...]) -> Segment:
    return Segment(begin, end, SimpleNamespace(adapters=adapters), 0, 8)


def _linear(name: str, weight: Tensor) -> Linear:
    return Linear(Dense("fp32"), {"weight": weight.contiguous()}, *weight.shape, name=name)


def test_the_plan_sets_memory_aside_for_adapters_that_are_named(tmp_path: Path) -> None:
    case = made(tmp_path, "llama", EngineConfig(device="cpu", weights="int4", adapter_memory=8 << 20), {}, **NATIVE)
    assert case.engine.plan is not None and case.engine.plan.ledger["ram"]["adapters"] == 8 << 20
    assert case.engine.adapters.budget_bytes == 8 << 20
    named = load_settings({"adapter": [f"{case.adapters[0].path}:0.5"]}, environ={}).settings
    assert with_room_for_adapters(named).adapter_memory == 64 << 20, "room for small ones to switch to"
    assert with_room_for_adapters(load_settings({}, environ={}).settings).adapter_memory is None
