"""The contract: our decoder computes what transformers computes, however the tokens reach it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from localllm.engine.engine import Engine
from localllm.engine.events import FinishedEvent
from localllm.engine.loader import LoadedModel
from localllm.engine.request import Request, SamplingParams
from localllm.engine.step_types import Chunk, Limits
from localllm.settings import EngineConfig
from tests.checkpoints import FAMILIES, SHAPE, write_byte_tokenizer, write_checkpoint
from tests.engine_support import answered
from tests.thinning import thinned

TOLERANCE = 1e-4


@dataclass
class Pair:
    """The same model twice."""

    engine: Engine
    peer: Any
    family: str


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp(request.param)
    peer = write_checkpoint(directory, request.param)
    yield Pair(Engine.load(directory, EngineConfig(device="cpu", dtype="fp32")), peer, request.param)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


def forget_longest_input(peer: Any) -> None:
    """transformers' dynamic RoPE keeps the frequencies of the longest input that it saw until a short one comes."""
    peer(torch.tensor([[0]]), use_cache=False)


@torch.inference_mode()
def peer_logits(peer: Any, token_ids: list[int]) -> Tensor:
    forget_longest_input(peer)
    return peer(torch.tensor([token_ids]), use_cache=False).logits[0]


@torch.inference_mode()
def our_logits(engine: Engine, token_ids: list[int], chunk_sizes: list[int]) -> Tensor:
    """Logits of every token, the prompt fed in chunks."""
    kv = engine.residency.new_kv(len(token_ids))
    return torch.cat([engine.runner.forward([Chunk(token_ids, kv, n, all_logits=True)]) for n in chunk_sizes])


def test_prefill_computes_the_logits_of_transformers_whole_and_in_chunks(pair):
    for length, splits in ((1, []), (37, []), (90, [[7] * 12 + [6], [64, 26], [1, 88, 1], [33, 1, 1, 55]])):
        ids = prompt(length)
        expected = peer_logits(pair.peer, ids)
        for sizes in ([length], *splits):
            torch.testing.assert_close(our_logits(pair.engine, ids, sizes), expected, rtol=0, atol=TOLERANCE)


BOUNDED = ("bamba-bounded",)  # Mamba 2 whose steps have bounds that matter


# From 5.24 on transformers calls it `cache`, a name that 5.20 to 5.23 do not know.
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@torch.inference_mode()
def test_decode_computes_the_logits_of_transformers_with_its_own_cache(pair):
    if pair.family in BOUNDED:
        pytest.skip("transformers bounds the steps of a prompt alone")
    ids = prompt(40)
    forget_longest_input(pair.peer)
    first = pair.peer(torch.tensor([ids]), use_cache=True)
    name = "cache" if "cache" in first else "past_key_values"
    expected = [first.logits[0, -1]]
    tail = prompt(7, seed=1)  # stays under phi3-longrope's 48 trained tokens: past them transformers starts anew
    for position, token in enumerate(tail, len(ids)):
        places = {"position_ids": torch.tensor([[position]])}  # Bamba's are else those of a prompt
        step = pair.peer(torch.tensor([[token]]), **{name: first[name]}, **places, use_cache=True)
        expected.append(step.logits[0, -1])

    kv, so_far = pair.engine.residency.new_kv(60), list(ids)
    ours = [pair.engine.runner.forward([Chunk(so_far, kv, len(ids))])[0]]
    for token in tail:
        so_far.append(token)
        ours.append(pair.engine.runner.forward([Chunk(so_far, kv, 1)])[0])
    torch.testing.assert_close(torch.stack(ours), torch.stack(expected), rtol=0, atol=TOLERANCE)


WITH_STATES = (
    "qwen3_next", "qwen3_5", "olmo_hybrid", "bamba", "mamba", "falcon_mamba", "granitemoehybrid", "nemotron_h",
    "falcon_h1", "jamba", "rwkv7", "lfm", "kimi_linear",
)  # fmt: skip
HYBRIDS = [name for name in FAMILIES if name.startswith(WITH_STATES)]


@pytest.mark.parametrize("pair", HYBRIDS, indirect=True)
def test_a_hybrid_decodes_256_tokens_to_the_logits_of_transformers(pair):
    """transformers takes them in 64 at a time, and these begin between its borders."""
    ids = prompt(50 + 256)
    expected = peer_logits(pair.peer, ids)
    ours = our_logits(pair.engine, ids, [50, *[1] * 256])
    torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("pair", HYBRIDS, indirect=True)
@torch.inference_mode()
def test_drafts_of_a_hybrid_have_the_logits_of_transformers(pair):
    """Where drafts attend one by one, each is a segment of its own."""
    ids = prompt(50)
    kv, runner = pair.engine.residency.new_kv(len(ids)), pair.engine.runner
    runner.forward([Chunk(ids, kv, 40)])
    ours = runner.forward([Chunk(ids, kv, 10, num_drafted=9)])
    torch.testing.assert_close(ours, peer_logits(pair.peer, ids)[-10:], rtol=0, atol=TOLERANCE)


# The others differ in what the logits of a prompt and of decoding show too.
OFTEN = {"llama-dynamic-rope", "mistral-windowed", "phi3-longrope", "gemma2", "gemma3", "qwen3"}
some_families = pytest.mark.parametrize("pair", thinned(FAMILIES, OFTEN.__contains__), indirect=True)


def greedy(engine: Engine, prompts: list[list[int]], max_tokens: int = 64) -> list[list[int]]:
    """All prompts at once through the engine's steps."""
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    answers = answered(engine, *(Request(tuple(ids), sampling) for ids in prompts))
    assert {answer.finished.finish_reason for answer in answers} == {"length"}
    return [answer.token_ids for answer in answers]


@some_families
def test_greedy_tokens_are_those_of_transformers_over_64_steps(pair):
    if pair.family in BOUNDED:
        pytest.skip("transformers bounds the steps of a prompt alone")
    ids = prompt(21)
    if pair.family == "llama-dynamic-rope":
        pair.engine.ctx = 256  # dynamic scaling exists to go past the trained length
    forget_longest_input(pair.peer)
    generated = pair.peer.generate(
        torch.tensor([ids]), max_new_tokens=64, min_new_tokens=64, do_sample=False, eos_token_id=None
    )
    assert greedy(pair.engine, [ids]) == [generated[0, len(ids) :].tolist()]


@some_families
def test_neither_a_batch_nor_small_chunks_change_a_token(pair):
    prompts = [prompt(length, seed=length) for length in (5, 39, 13, 1)]
    alone = [greedy(pair.engine, [ids], max_tokens=10)[0] for ids in prompts]
    chunked = Engine(LoadedModel(pair.engine.model, 256), pair.engine.tokenizer, limits=Limits(chunk_tokens=8))
    assert greedy(pair.engine, prompts, max_tokens=10) == greedy(chunked, prompts, max_tokens=10) == alone


def test_a_sharded_checkpoint_is_the_same_model(tmp_path):
    peer = write_checkpoint(tmp_path, "qwen2", shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ids = prompt(20)
    ours = our_logits(Engine.load(tmp_path, EngineConfig(device="cpu", dtype="fp32")), ids, [20])
    torch.testing.assert_close(ours, peer_logits(peer, ids), rtol=0, atol=TOLERANCE)


@pytest.mark.usefixtures("empty_cache")
def test_a_checkpoint_in_fp64_with_strays_and_an_index_that_promises_too_much_is_the_same_model(tmp_path):
    peer = write_checkpoint(tmp_path, "llama-biases-tied", shard_size="50KB")
    for shard in tmp_path.glob("*.safetensors"):
        save_file({name: tensor.double() for name, tensor in load_file(shard).items()}, shard)
    index = tmp_path / "model.safetensors.index.json"
    promised = json.loads(index.read_text())
    first = promised["weight_map"]["model.embed_tokens.weight"]
    strays = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "score.weight": torch.ones(2).to(torch.int8),
    }
    save_file(load_file(tmp_path / first) | strays, tmp_path / first)
    promised["weight_map"] |= dict.fromkeys([*strays, "lm_head.weight", "model.layers.1.self_attn.masked_bias"], first)
    index.write_text(json.dumps(promised))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": None, "torch_dtype": "auto"}))
    engine = Engine.load(tmp_path, EngineConfig(device="cpu", dtype="fp32"))
    torch.testing.assert_close(our_logits(engine, prompt(9), [9]), peer_logits(peer, prompt(9)), atol=TOLERANCE, rtol=0)
    packed = Engine.load(tmp_path, EngineConfig(device="cpu", weights="int8"))
    assert [type(event) for event in packed.generate("a", SamplingParams(max_tokens=1))][-1] is FinishedEvent


def test_the_text_model_of_a_multimodal_gemma3_folder_runs(tmp_path):
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config={**SHAPE, **FAMILIES["gemma3"][1]},
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=1,
        image_token_index=270,
        boi_token_index=268,
        eoi_token_index=269,
    )
    peer = Gemma3ForConditionalGeneration(config).eval()
    peer.save_pretrained(tmp_path)
    write_byte_tokenizer(tmp_path)
    ids = prompt(40)
    ours = our_logits(Engine.load(tmp_path, EngineConfig(device="cpu", dtype="fp32")), ids, [40])
    torch.testing.assert_close(ours, peer_logits(peer, ids), rtol=0, atol=TOLERANCE)
