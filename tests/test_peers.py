"""The harness that measures localllm beside its peers: without any of them."""

from __future__ import annotations

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
    Contender,
    Figure,
    Match,
    Task,
    num_weights,
    play,
    summary,
    table,
    tables,
    update,
)
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


def test_localllm_and_transformers_answer_as_sides_and_read_all_but_the_embedding() -> None:
    from benchmarks.peers_torch import Localllm, Transformers

    threads = torch.get_num_threads()
    for side, options in (Localllm(), {"weights": "bf16", "context": 128}), (Transformers(), {}):
        facts = side.load(shape=TOY, threads=threads, **options)
        # localllm keeps its norms in fp32, transformers in bf16.
        assert facts["weight_bytes_per_token"] == pytest.approx(2 * (num_weights(TOY) - 320 * 256), rel=0.01)
        assert side.prefill(tokens=16) > 0
        assert side.decode(tokens=4, depth=16) > 0


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
    assert peers.kv_bytes(tinyllama) == 22 * 4 * 64 * 2 * 2
