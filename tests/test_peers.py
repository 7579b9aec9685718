"""The harness that measures localllm beside its peers: without any of them."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import peers
from benchmarks.measure import known, with_section
from benchmarks.peers import (
    BEGIN,
    END,
    MODELS,
    Contender,
    Figure,
    Match,
    Task,
    cut_to,
    kv_bytes,
    num_weights,
    play,
    summary,
    table,
    tables,
    update,
)
from localllm.models.shapes import shipped_shapes
from tests.thinning import every_other

PREFILL, SHALLOW = Task("prefill", tokens=512), Task("decode", depth=128)

# A side whose seconds are what it is told at its load, so that every figure is known beforehand.
FAKE_SIDE = """
import os
from benchmarks.peers_protocol import UnavailableError, serve

class Side:
    def load(self, *, seconds_a_token, is_built=True):
        self.seconds_a_token = seconds_a_token
        if not is_built:
            raise UnavailableError("not built", "build it")
        print("a library talks on stdout")
        os.write(1, b"and below python\\n")
        return {"weight_bytes_per_token": 1000}
    def dram_read(self):
        return 2e-6
    def prefill(self, *, tokens, factor=1):
        return self.seconds_a_token * tokens * factor
    def decode(self, *, tokens, depth, factor=1):
        return self.seconds_a_token * tokens * factor

serve(Side())
"""
COMMAND = [sys.executable, "-c", FAKE_SIDE]


@pytest.fixture
def match() -> Iterator[Match]:
    started = Match()
    yield started
    started.close()


def contender(name: str, seconds_a_token: float, **more: object) -> Contender:
    options = {"seconds_a_token": seconds_a_token, **more}
    variants = {"": {}} if name == peers.OURS else {"slow": {"factor": 3}, "fast": {"factor": 1}}
    return Contender(name, f"{name} fake", COMMAND, options, needed_bytes=0, gen_tokens=4, variants=variants)


def result_of(match: Match, rounds: int = 2) -> dict[str, object]:
    speeds, floors = play(match, [PREFILL, SHALLOW], rounds)
    sides = {name: {"title": side.title, **match.facts[name]} for name, (side, _) in match.running.items()}
    skipped = {name: {"reason": error.reason, "fix": error.fix} for name, error in match.skipped.items()}
    common = {"machine": {"cpu": "abacus", "threads": 1}, "rounds": rounds, "waiting_cpu_share": 0.0}
    return {**common, "sides": sides, "skipped": skipped, **summary(speeds, floors, match.facts, 1)}


def test_a_side_that_does_not_fit_beside_the_others_is_not_even_started(match: Match) -> None:
    most = 2 * match.budget_bytes // 3
    for name, command in {"first": COMMAND, "second": ["/nonexistent"]}.items():
        match.start(Contender(name, name, command, {"seconds_a_token": 1}, needed_bytes=most))
    assert list(match.running) == ["first"]
    assert "it needs" in match.skipped["second"].reason


SPINNER = """
import threading

def spin():
    while True:
        pass

threading.Thread(target=spin, daemon=True).start()
"""
SLEEPER = FAKE_SIDE.replace("return 2e-6", "import time; time.sleep(0.5); return 1.0")


@pytest.mark.parametrize(("beside", "spins"), every_other([(SPINNER + FAKE_SIDE, True), (FAKE_SIDE, False)]))
def test_a_waiting_side_that_spins_is_noticed(match: Match, beside: str, spins: bool) -> None:
    for name, code in {"beside": beside, "computing": SLEEPER}.items():
        match.start(Contender(name, name, [sys.executable, "-c", code], {"seconds_a_token": 1}, needed_bytes=0))
    match.call("computing", "dram_read")
    assert (match.waiting_cpu_share > peers.SPINNING_SHARE) is spins


@pytest.fixture
def both(match: Match) -> Match:
    match.start(contender(peers.OURS, 0.1))
    match.start(contender(peers.LLAMA, 0.2))
    return match


def test_every_side_does_every_task_in_every_round_but_the_first(both: Match) -> None:
    speeds, floors = play(both, [PREFILL, SHALLOW], rounds=3)
    assert floors == {PREFILL: [2e-6] * 3, SHALLOW: [2e-6] * 3}
    assert speeds[Figure(peers.OURS, "", PREFILL, 512)] == pytest.approx([10.0] * 3)
    assert speeds[Figure(peers.LLAMA, "fast", SHALLOW, 4)] == pytest.approx([5.0] * 3)
    assert len(speeds) == 2 + 4


def test_the_table_takes_the_better_variant_and_the_fraction_of_the_floor(both: Match) -> None:
    result = result_of(both)
    run = peers.best(result["runs"], peers.LLAMA, SHALLOW)
    assert run["variant"] == "fast"
    assert run["bytes_per_token"] == 1000 + 128 + 4 // 2
    assert run["floor_fraction"]["median"] == pytest.approx(5 * 1130 / 1e9 / 2e-6)
    assert run["localllm_ratio"]["median"] == pytest.approx(2)
    lines = table("toy", result).splitlines()
    assert "| | localllm fake | llama.cpp fake |" in lines
    assert "| **decode at 128**, tok/s | 10 (10 to 10) | 5 (5 to 5), fast |" in lines
    assert "| localllm's speed to it |  | 2 (2 to 2) |" in lines


def test_a_side_that_cannot_load_is_left_out_with_its_reason_and_what_mends_it(match: Match) -> None:
    match.start(contender(peers.OURS, 0.1))
    match.start(contender(peers.LLAMA, 0.2, is_built=False))
    text = table("toy", result_of(match))
    assert "llama.cpp did not run: not built. To have it: `build it`" in text
    assert "llama.cpp fake" not in text


def test_without_llama_cpp_its_side_says_how_to_build_it(match: Match) -> None:
    code = "import sys; sys.modules['llama_cpp'] = None; from benchmarks.peers_llama import *; serve(LlamaCpp())"
    options = {"shape": {}, "threads": 1, "directory": "."}
    match.start(Contender(peers.LLAMA, "", [sys.executable, "-c", code], options, needed_bytes=0))
    assert "llama_cpp or gguf cannot be imported" in match.skipped[peers.LLAMA].reason
    told = match.skipped[peers.LLAMA].fix
    cmake_args, pip = re.fullmatch(r'CMAKE_ARGS="(.*?)" (pip install .*)', told).groups()
    page = peers.PAGE.read_text()
    assert cmake_args in page
    assert pip in page


TOY = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip


_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64}
_LATENTS = {
    "num_attention_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}  # fmt: skip
_RANKS = {"decay_low_rank_dim": 32, "a_low_rank_dim": 32, "v_low_rank_dim": 64, "gate_low_rank_dim": 96}
_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
# What makes the shapes small that have other mixers than attention alone, two layers of each.
SMALLER = {
    "glm-4.7-flash": {"intermediate_size": 512, **_LATENTS, **_EXPERTS},
    "lfm2-1.2b": {"block_ff_dim": 700, "full_attn_idxs": [1], **_HEADS},
    "granite-4.0-h-micro": {
        "shared_intermediate_size": 512, "layer_types": ["mamba", "attention"], **_HEADS, **_MAMBA2,
    },
    "falcon-h1-0.5b": {"intermediate_size": 512, "mamba_d_ssm": 512, **_HEADS, **_MAMBA2},
    "rwkv7-1.5b": {"intermediate_size": 512, **_RANKS},
}  # fmt: skip


def small(model: str) -> dict[str, object]:
    common = {"vocab_size": 320, "hidden_size": 256, "num_hidden_layers": 2, "max_position_embeddings": 128}
    return {**shipped_shapes()[model], **common, **SMALLER[model]}


def read_weights(shape: dict[str, object]) -> int:
    """All weights but those of an embedding that is not the head's."""
    is_tied = shape.get("tie_word_embeddings", shape["model_type"] == "lfm2")
    return num_weights(shape) - (0 if is_tied else 320 * 256)


@pytest.mark.parametrize(
    "shape",
    [TOY, *map(small, ("lfm2-1.2b", "granite-4.0-h-micro", "falcon-h1-0.5b"))],
    ids=lambda each: each["model_type"],
)
def test_localllm_and_transformers_answer_as_sides_and_read_all_but_the_embedding(shape: dict[str, object]) -> None:
    from benchmarks.peers_torch import Localllm, Transformers

    threads = torch.get_num_threads()
    for side, options in (Localllm(), {"weights": "bf16", "context": 128}), (Transformers(), {}):
        facts = side.load(shape=shape, threads=threads, **options)
        # localllm keeps its norms in fp32, transformers in bf16.
        assert facts["weight_bytes_per_token"] == pytest.approx(2 * read_weights(shape), rel=0.01)
        assert side.prefill(tokens=16) > 0
        assert side.decode(tokens=4, depth=16) > 0


def test_transformers_reads_the_experts_of_a_token() -> None:
    from benchmarks.peers_torch import Transformers

    shape = small("glm-4.7-flash")
    facts = Transformers().load(shape=shape, threads=torch.get_num_threads())
    others = 6 * 3 * 128 * 256  # of eight experts
    assert facts["weight_bytes_per_token"] == pytest.approx(2 * (read_weights(shape) - others), rel=0.01)


def test_without_a_family_of_transformers_its_side_says_so() -> None:
    from benchmarks.peers_protocol import UnavailableError
    from benchmarks.peers_torch import Transformers

    with pytest.raises(UnavailableError, match="model type rwkv7"):
        Transformers().load(shape=small("rwkv7-1.5b"), threads=1)


def test_the_random_gguf_file_holds_every_tensor_in_its_type(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="comes with the extra `peers`")
    from benchmarks.peers_gguf import write_random

    facts = write_random(tmp_path / "toy.gguf", TOY, "Q6_K")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "toy.gguf").tensors}
    assert len(tensors) == 3 + 2 * 9
    assert tensors["blk.1.ffn_down.weight"].tensor_type.name == "Q4_0"
    assert tensors["blk.1.ffn_down.weight"].shape.tolist() == [512, 256]
    assert tensors["output.weight"].tensor_type.name == "Q6_K"
    for name in ("blk.1.ffn_down.weight", "output.weight"):
        values = gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)
        assert 0.005 < values.std() < 0.1
    assert facts["weight_bytes_per_token"] == sum(tensor.n_bytes for tensor in tensors.values()) - 320 * 256 * 9 // 16


MIXTURE = TOY | {
    "model_type": "qwen3_moe", "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
}  # fmt: skip


def test_the_random_gguf_file_of_a_mixture_has_each_matrix_for_all_experts(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="comes with the extra `peers`")
    from benchmarks.peers_gguf import write_random

    facts = write_random(tmp_path / "toy.gguf", MIXTURE, "Q6_K")
    reader = gguf.GGUFReader(tmp_path / "toy.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert tensors["blk.1.ffn_down_exps.weight"].shape.tolist() == [64, 256, 8]
    assert tensors["blk.0.ffn_gate_inp.weight"].shape.tolist() == [256, 8]
    assert tensors["blk.0.attn_q.weight"].shape.tolist() == [256, 128]
    assert reader.get_field("qwen3moe.expert_used_count").contents() == 2
    experts = sum(tensor.n_bytes for name, tensor in tensors.items() if "_exps" in name)
    rest = sum(tensor.n_bytes for tensor in tensors.values()) - experts - 320 * 256 * 9 // 16
    assert facts["weight_bytes_per_token"] == rest + experts // 4


@pytest.mark.parametrize("model", MODELS)
def test_the_gguf_file_of_each_shape_has_the_tensors_of_its_architecture_and_the_weights_of_the_model(
    model: str,
) -> None:
    gguf = pytest.importorskip("gguf", reason="comes with the extra `peers`")
    from benchmarks.peers_architectures import architecture
    from benchmarks.peers_gguf import model_tensors

    shape = cut_to(shipped_shapes()[model], 7)
    names = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    known = {gguf.TENSOR_NAMES[each] for each in gguf.MODEL_TENSORS[names[architecture(shape).name]]}
    tensors = list(model_tensors(shape, "Q6_K"))
    stems = {re.sub(r"\.(weight|bias)$", "", tensor.name) for tensor in tensors}
    assert {re.sub(r"^blk\.\d+\.", "blk.{bid}.", stem) for stem in stems} <= known
    assert {int(stem.split(".")[1]) for stem in stems if stem.startswith("blk.")} == set(range(7))
    weights = sum(math.prod(tensor.shape) for tensor in tensors if len(tensor.shape) > 1)
    assert weights == pytest.approx(num_weights(shape), rel=0.005)


@pytest.mark.parametrize("mix", every_other(["Q4_0", "Q4_K_M"]))
@pytest.mark.parametrize("model", SMALLER)
def test_llama_cpp_computes_the_file_of_each_mixer(model: str, mix: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="comes with the extra `peers`")
    from benchmarks.peers_llama import LlamaCpp

    side = LlamaCpp()
    side.load(shape=small(model), threads=1, directory=str(tmp_path), mix=mix)
    for flash in (False, True):
        assert side.prefill(tokens=40, flash=flash) > 0
        assert side.decode(tokens=4, depth=32, flash=flash) > 0


@pytest.mark.parametrize("mix", every_other(["Q4_K_M", "Q4_0"]))
@pytest.mark.parametrize("model", [model for model in SMALLER if model != "rwkv7-1.5b"])
def test_localllm_computes_the_file_of_each_mixer(
    model: str, mix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf", reason="comes with the extra `peers`")
    from benchmarks.peers_gguf import write_random
    from benchmarks.peers_torch import Localllm

    monkeypatch.setenv("LOCALLLM_CACHE", "")  # the side sets it
    shape, side = small(model), Localllm()
    facts = write_random(tmp_path / "toy.gguf", shape, "Q6_K", mix)
    own = side.load(shape=shape, threads=1, weights="", context=128, file=str(tmp_path / "toy.gguf"))
    assert own["weight_bytes_per_token"] == pytest.approx(facts["weight_bytes_per_token"], rel=0.25)
    assert side.decode(tokens=4, depth=16) > 0


def test_what_stays_of_a_shape_in_fp32_and_fp16_is_what_llama_quantize_keeps() -> None:
    pytest.importorskip("gguf", reason="comes with the extra `peers`")
    from benchmarks.peers_gguf import model_tensors

    tensors = [tensor for model in SMALLER for tensor in model_tensors(small(model), "Q6_K") if len(tensor.shape) > 1]
    kept = {
        kind: {re.sub(r"^blk\.\d+\.", "", tensor.name) for tensor in tensors if tensor.type.name == kind}
        for kind in ("F32", "F16", "Q6_K")
    }
    assert kept["F32"] == {
        "ffn_gate_inp.weight", "shortconv.conv.weight", "ssm_conv1d.weight", "ssm_a", "ssm_d", "ssm_norm.weight",
        "time_mix_lerp_fused.weight", "time_mix_w1.weight", "time_mix_w2.weight",
    }  # fmt: skip
    assert kept["F16"] == {f"time_mix_{part}{number}.weight" for part in "avg" for number in (1, 2)}
    assert kept["Q6_K"] == {"token_embd.weight", "output.weight"}


def test_rows_that_blocks_of_256_do_not_divide_have_smaller_blocks() -> None:
    pytest.importorskip("gguf", reason="comes with the extra `peers`")
    from benchmarks.peers_gguf import model_tensors

    types = {tensor.name: tensor.type.name for tensor in model_tensors(small("glm-4.7-flash"), "Q6_K", "Q4_K_M")}
    assert types["blk.0.attn_k_b.weight"] == "Q5_0"
    assert types["blk.0.ffn_down.weight"] == "Q4_K"
    assert types["blk.1.ffn_down_exps.weight"] == "Q8_0"


def test_a_shape_that_is_too_large_loses_layers_until_both_sides_have_room() -> None:
    arguments = peers.parse_arguments([])
    cut = peers.fitting(arguments, MIXTURE | {"num_hidden_layers": 40}, 2 * peers.GIB + (20 << 20))
    assert 0 < cut["num_hidden_layers"] < 40
    assert peers.fitting(arguments, MIXTURE, 1 << 40) == MIXTURE


def test_saving_one_model_leaves_the_others_figures_and_the_rest_of_the_page(match: Match, tmp_path: Path) -> None:
    match.start(contender(peers.OURS, 0.1))
    result, page = result_of(match), tmp_path / "peers.md"
    page.write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nThe end.\n")
    for model in ("first", "second", "first"):
        update(model, result, tmp_path, page)
    assert list(known("peers", tmp_path)["models"]) == ["first", "second"]
    text = page.read_text()
    assert text.startswith(f"# Title\n\n{BEGIN}\n\n### first\n")
    assert text.endswith(f"{END}\n\nThe end.\n")
    assert text.count("### first") == text.count("### second") == 1
    assert "old" not in text


def test_the_page_shows_the_results_that_are_kept() -> None:
    page = peers.PAGE.read_text()
    assert with_section(page, BEGIN, END, tables(known("peers")["models"])) == page


def test_the_weights_of_a_shape_are_counted_as_the_model_counts_them() -> None:
    tinyllama = peers.shipped_shapes()["tinyllama-1.1b"]
    assert num_weights(tinyllama) == 1_099_956_224  # its 1,100,048,384 parameters without the norms'
    assert kv_bytes(tinyllama) == 22 * 4 * 64 * 2 * 2


def test_only_layers_that_attend_keep_something_of_a_token_and_latents_are_keys_and_values_at_once() -> None:
    assert kv_bytes(shipped_shapes()["glm-4.7-flash"]) == 47 * (512 + 64) * 2
    assert kv_bytes(shipped_shapes()["lfm2-1.2b"]) == 6 * 8 * 64 * 2 * 2
    assert kv_bytes(shipped_shapes()["granite-4.0-h-micro"]) == 4 * 8 * 64 * 2 * 2
    assert kv_bytes(shipped_shapes()["falcon-h1-0.5b"]) == 36 * 2 * 64 * 2 * 2
    assert kv_bytes(shipped_shapes()["rwkv7-1.5b"]) == 0


def test_the_lists_of_a_shape_are_cut_with_its_layers() -> None:
    assert cut_to(shipped_shapes()["lfm2-1.2b"], 6)["full_attn_idxs"] == [2, 5]
    assert cut_to(shipped_shapes()["granite-4.0-h-micro"], 6)["layer_types"] == ["mamba"] * 5 + ["attention"]
