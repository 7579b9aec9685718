"""Settings that a model or a device cannot take: refused where they are typed, said and left aside where they are
stored."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm.config import load_settings
from localllm.engine.model_options import idle_on, idle_with, require_agreement, require_effect
from localllm.errors import Fix, UsageError
from localllm.models.families import parse_config
from localllm.runtime.engine_loader import Opening
from localllm.runtime.engine_process import Caps, LoadObserver, start_engine
from localllm.runtime.selection import selected
from localllm.settings import EngineConfig
from tests import checkpoints
from tests.cli_support import run_cli, write_checkpoint, write_settings

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
}  # fmt: skip
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "factor": 2.0}
MODELS = {
    "llama": LLAMA,
    "some windows": LLAMA | {"model_type": "gemma2", "query_pre_attn_scalar": 32, "sliding_window": 70},
    "windows": LLAMA | {"model_type": "mistral", "sliding_window": 70},
    "latents": LLAMA | {
        "model_type": "deepseek_v2", "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32, "v_head_dim": 32, "first_k_dense_replace": 2, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    },
    "states": {
        "model_type": "mamba2", "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4,
        "head_dim": 32, "state_size": 16, "n_groups": 1, "conv_kernel": 4, "expand": 2,
    },
    "dynamic": LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "longrope": LLAMA | {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 128}},
    "late norms": LLAMA | {"model_type": "hunyuan_v1_dense", "use_qk_norm": True},
}  # fmt: skip
ALL: dict[str, Any] = {
    "kv": "int8", "kv_offload": "auto", "attend": "top:64", "kv_evict": "heavy:512", "reuse": "chunks",
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "idle"),
    [
        ("llama", {}),
        ("some windows", {}),
        ("windows", dict.fromkeys(("kv_offload", "attend", "kv_evict"), "at most 70 tokens")),
        ("latents", {"attend": "latents", "kv_evict": "sinks:512"}),
        ("states", dict.fromkeys(("kv", "kv_offload", "attend", "kv_evict"), "a state") | {"reuse": "2 recurrent"}),
        ("dynamic", {"reuse": "dynamic"}),
        ("longrope", {"reuse": "longrope"}),
        ("late norms", {"reuse": "normalised behind their rotation"}),
    ],
)
def test_each_model_has_one_reason_for_what_it_cannot_take(model: str, idle: dict[str, str]) -> None:
    found = idle_with(parse_config(MODELS[model], "a test's config"), EngineConfig(**ALL))
    assert found.keys() == idle.keys()
    for name, error in found.items():
        possible = Fix.flag("--kv-evict", "sinks:512") if "sinks" in idle[name] else None
        assert idle[name] in error.why and error.fixes == (possible or Fix.without("--" + name.replace("_", "-")),)
    assert not idle_with(parse_config(MODELS[model], "a test's config"), EngineConfig())


def test_what_a_device_cannot_do_is_told_with_what_can() -> None:
    wanted = EngineConfig(**ALL, vram=1 << 30)
    assert {*idle_on("cpu", wanted)} == {"vram"} and not idle_on("cuda:0", wanted)
    assert idle_on("cpu", wanted)["vram"].fixes == (Fix.without("--vram"),)
    with pytest.raises(UsageError, match="--vram cannot take effect"):
        require_effect(parse_config(LLAMA, "a test's config"), EngineConfig(vram=1 << 30), "cpu")


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"kv_offload": "auto"}, "read by no token"),
        ({"attend": "top:8"}, "chooses among all pages"),
        ({"reuse": "chunks"}, "reused tokens are not computed"),
    ],
)
def test_what_contradicts_eviction_is_refused(other: dict[str, Any], why: str) -> None:
    wanted = EngineConfig(kv_evict="sinks:64", **other)
    with pytest.raises(UsageError, match="cannot go together") as caught:
        require_agreement(wanted)
    assert why in caught.value.why and len(caught.value.fixes) == 2
    require_agreement(replace(wanted, kv_evict="off"))


@pytest.fixture
def stateful(own_folders: None, tmp_path: Path) -> Path:
    checkpoints.write_checkpoint(tmp_path / "model", "mamba2")
    return tmp_path / "model"


@pytest.mark.parametrize(("name", "value"), ALL.items())
def test_what_is_typed_for_a_model_that_cannot_take_it_is_refused(stateful: Path, name: str, value: str) -> None:
    flag = "--" + name.replace("_", "-")
    commands = [["run", str(stateful), "--raw", "-p", "hi", "--max-tokens", "2"]]
    commands += [] if name == "reuse" else [["plan", str(stateful)], ["plan", "rwkv7-1.5b", "--gpu", "rtx4060"]]
    for command in commands:
        refused = run_cli(*command, flag, value)
        assert refused.code == 2 and refused.error_lines[0] == f"error: {flag} cannot take effect with {command[1]}"
        assert refused.error_lines[2] == f"fix:   localllm {shlex.join(command)}"
        if name == "attend":
            refused = run_cli(*command, flag, value, "--kv-evict", "sinks:64")
            assert "neither can --kv-evict" in refused.err
            assert refused.error_lines[2] == f"fix:   localllm {shlex.join(command)}"


def test_what_is_stored_is_left_aside_where_a_model_cannot_take_it_and_said_once(stateful: Path) -> None:
    write_settings(stateful.parent, "".join(f'{name} = "{value}"\n' for name, value in ALL.items()))
    run = ["run", str(stateful), "--raw", "-p", "hi", "--max-tokens", "2", "--private"]
    for command in (run, ["plan", str(stateful)], ["plan", "rwkv7-1.5b", "--gpu", "all"]):
        result = run_cli(*command)
        assert result.code == 0, result.err
        told = [line.split()[2] for line in result.err.splitlines() if "is left aside" in line]
        assert sorted(told) == sorted(ALL if command is run else ALL.keys() - {"reuse"})


def test_what_is_stored_is_left_aside_on_several_cards_and_said_once(
    stateful: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALLLM_ATTEND", "top:8")
    planned = run_cli("plan", str(stateful), "--gpu", "rtx4060", "--gpu", "rtx4090", "--gpu", "none")
    assert planned.code == 0 and planned.err.count("LOCALLLM_ATTEND is left aside") == 1


def test_a_contradiction_is_refused_where_one_of_the_two_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALLLM_ATTEND", "top:8")
    line = ["plan", str(write_checkpoint(tmp_path)), "--kv-evict", "sinks:64"]
    refused = run_cli(*line)
    assert refused.code == 2 and "LOCALLLM_ATTEND" in refused.error_lines[1]
    for fix in refused.error_lines[2:4]:
        assert run_cli(*shlex.split(fix.partition("localllm ")[2])).code == 0


def test_a_stored_way_of_reuse_keeps_no_text_from_being_measured_and_no_plan_from_being_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALLLM_REUSE", "chunks")
    (text := tmp_path / "text").write_text("the fox and the lantern once upon a time")
    model = write_checkpoint(tmp_path / "m")
    for command in (["perplexity", model, "-f", text], ["plan", model], ["plan", "tiny", "--gpu", "none"]):
        assert run_cli(*command, "--kv-evict", "sinks:64").code == 0


def test_a_stored_cap_on_the_gpu_is_left_aside_by_a_server_that_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    resolved = load_settings({}, environ={"LOCALLLM_VRAM": "2GiB"})
    process = start_engine(selected(resolved, "tiny"), Opening(), Caps(vram=1 << 30), LoadObserver())
    assert process.wait_loaded() is not None
    process.close()
