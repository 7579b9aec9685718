"""Names of GGUF files, and the forms that they store, against the gguf package's names and llama.cpp's conversion."""

from __future__ import annotations

import pytest

from localllm.gguf.names import hf_name, holds_weights, stored_form
from tests.gguf_metadata import ARCHITECTURES


@pytest.mark.parametrize("architecture", sorted({*ARCHITECTURES.values()} - {"muse-glimmer"}))
def test_every_tensor_that_the_gguf_package_lists_is_known(architecture: str) -> None:
    gguf = pytest.importorskip("gguf")
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = [gguf.TENSOR_NAMES[each].format(bid=7) + ".weight" for each in gguf.MODEL_TENSORS[kind]]
    assert names
    for name in names:
        if not name.startswith("dense_2") and "latent" not in name:  # of models that do not run
            assert (hf_name(name, architecture) is not None) == holds_weights(name), name


@pytest.mark.parametrize(
    ("name", "architecture", "plain"),
    [
        ("blk.3.attn_q.bias", "qwen2", "model.layers.3.self_attn.q_proj.bias"),
        ("blk.3.ffn_down.5.weight", "llama", "model.layers.3.mlp.experts.5.down_proj.weight"),
        ("blk.0.ffn_gate_up_exps.weight", "qwen3moe", "model.layers.0.mlp.experts.gate_up_proj"),
        ("blk.0.attn_q.scale", "llama", "model.layers.0.self_attn.q_proj.scale"),
        ("blk.3.exp_probs_b.bias", "glm4moe", "model.layers.3.mlp.gate.e_score_correction_bias"),
        ("blk.3.exp_probs_b", "ernie4_5-moe", "model.layers.3.mlp.gate.e_score_correction_bias"),
        ("output_norm.bias", "phimoe", "model.norm.bias"),
        ("blk.3.attn_kv_b.weight", "deepseek2", "model.layers.3.self_attn.kv_b_proj.weight"),
        ("blk.3.ssm_d", "mamba2", "model.layers.3.mamba.D"),
        ("blk.3.ssm_dt.bias", "mamba", "model.layers.3.mamba.dt_proj.bias"),
        ("blk.3.ssm_dt_norm.weight", "jamba", "model.layers.3.mamba.dt_layernorm.weight"),
        ("blk.3.ssm_dt.bias", "nemotron_h", "model.layers.3.mamba.dt_bias"),
        ("blk.3.ssm_conv1d.bias", "granitehybrid", "model.layers.3.mamba.conv1d.bias"),
        ("blk.3.ffn_norm", "falcon-h1", "model.layers.3.post_attention_layernorm.weight"),
        ("blk.3.shortconv.conv.weight", "lfm2", "model.layers.3.conv.conv.weight"),
        ("blk.3.shortconv.in_proj.weight", "llama", None),
        ("token_embd_norm.weight", "lfm2moe", "model.norm.weight"),
        ("blk.3.ffn_latent_up.weight", "nemotron_h_moe", None),
        ("blk.3.ssm_a", "qwen35", "model.layers.3.linear_attn.A_log"),
        ("blk.3.ffn_gate_inp.scale", "gemma4", "model.layers.3.router.scale"),
        ("blk.3.ffn_down_exps.scale", "gemma4", "model.layers.3.router.per_expert_scale"),
        ("blk.3.ffn_gate_up_exps.scale", "gemma4", "model.layers.3.mlp.experts.gate_up_proj.scale"),
        ("blk.3.ffn_down_exps.scale", "qwen3moe", "model.layers.3.mlp.experts.down_proj.scale"),
        ("blk.3.ffn_gate_exps.bias", "gpt-oss", "model.layers.3.mlp.experts.gate_proj.bias"),
        ("altup_proj.weight", "gemma3n", "model.altup_projections.weight"),
        ("blk.3.ssm_dt.bias", "qwen3next", "model.layers.3.linear_attn.dt_bias"),
        ("blk.3.attn_qkv.weight", "qwen3next", "model.layers.3.linear_attn.in_proj_qkv.weight"),
        ("blk.3.attn_gate.weight", "qwen3next", "model.layers.3.linear_attn.in_proj_z.weight"),
        ("rope_freqs.weight", "llama", None),
        ("blk.3.attn_q.5.weight", "llama", None),
        ("blk.3.ssm_in.weight", "llama", None),
        ("blk.999999999999.attn_q.weight", "llama", None),
        ("blk.x.attn_q.weight", "llama", None),
        ("", "llama", None),
    ],
)
def test_names_beside_the_usual_ones(name: str, architecture: str, plain: str | None) -> None:
    assert hf_name(name, architecture) == plain


def test_encoders_beside_a_text_model_are_not_its_weights() -> None:
    names = ("v.blk.0.attn_q.weight", "a.blk.0.ln1.weight", "mm.input_projection.weight", "blk.0.attn_v.weight")
    assert [holds_weights(name) for name in names] == [False, False, False, True]


def test_an_mlp_beside_a_router_is_a_shared_expert() -> None:
    stored = {"blk.1.ffn_gate_inp.weight"}
    names = [hf_name(f"blk.{layer}.ffn_up.weight", "gemma4", stored) for layer in (0, 1)]
    assert names == ["model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.shared_expert.up_proj.weight"]
    assert hf_name("blk.1.ffn_up.5.weight", "llama", stored) == "model.layers.1.mlp.experts.5.up_proj.weight"


def test_the_norm_of_a_layer_that_is_an_mlp_is_in_front_of_that() -> None:
    stored = {"blk.1.ffn_down.weight", "blk.2.ffn_down_exps.weight"}
    names = [hf_name(f"blk.{layer}.attn_norm.weight", "nemotron_h_moe", stored) for layer in range(3)]
    norms = ("input_layernorm", "post_attention_layernorm", "post_attention_layernorm")
    assert names == [f"model.layers.{layer}.{norm}.weight" for layer, norm in enumerate(norms)]
    assert hf_name("blk.1.attn_norm.weight", "granitehybrid", stored) == "model.layers.1.input_layernorm.weight"


def test_the_rows_of_permuted_heads_come_back() -> None:
    np = pytest.importorskip("numpy")
    heads, head_dim, K = 3, 8, 5
    weight = np.arange(heads * head_dim * K).reshape(heads * head_dim, K)
    # As llama.cpp's conversion stores it: the halves of a head become pairs.
    stored = weight.reshape(heads, 2, head_dim // 2, K).swapaxes(1, 2).reshape(weight.shape)
    # As `GgufForm` says.
    read = stored.reshape(heads, head_dim // 2, 2, K).swapaxes(1, 2).reshape(weight.shape)
    assert (read == weight).all()
    permuted = {"llama", "mistral3", "granite", "granitehybrid", "granitemoe", "smollm3", "arcee", "muse-glimmer"}
    paired_as_they_were = {"ernie4_5", "ernie4_5-moe", "chatglm", "glm4", "cohere2", "deepseek2"}
    paired = {name for name in ARCHITECTURES.values() if stored_form(name).pairs_heads}
    assert paired == permuted | paired_as_they_were


def test_the_forms_of_architectures() -> None:
    """As llama.cpp's conversion has them: `modify_tensors` in its files for these models."""
    names = set(ARCHITECTURES.values())
    with_offset = {"gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe", "nemotron", "muse-glimmer"}
    assert {name for name in names if stored_form(name).norm_offset} == with_offset
    assert {name for name in names if stored_form(name).tiles_value_heads} == {"qwen35", "qwen35moe"}
