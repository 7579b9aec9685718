"""The keys of llama.cpp's architectures whose layers, or some of them, have states in place of keys and values."""

from __future__ import annotations

from localllm.gguf.common_keys import FULL, LINEAR, all_experts, grouped_experts, multipliers, top_k
from localllm.gguf.latents import SIGMOID, latent_attention
from localllm.gguf.metadata import Json, Metadata
from localllm.gguf.rope import share_of

_RECURRENT = "attention.recurrent_layers"


def qwen3next(file: Metadata) -> Json:
    return {"model_type": "qwen3_next", "norm_topk_prob": True, **_delta_net(file), **all_experts(file)}


def qwen35(file: Metadata) -> Json:
    return {"model_type": "qwen3_5_text", **_delta_net(file)}


def qwen35moe(file: Metadata) -> Json:
    return {"model_type": "qwen3_5_moe_text", **_delta_net(file), **all_experts(file)}


def _delta_net(file: Metadata) -> Json:
    heads = "linear_num_value_heads", "linear_value_head_dim", "linear_num_key_heads", "linear_key_head_dim"
    return {**_state_sizes(file, *heads, "linear_conv_kernel_dim"), "layer_types": _mixer_types(file)}


def _mixer_types(file: Metadata) -> list[str]:
    """Return the kind of each layer: as the file lists them, those that predict further tokens included, or every so
    many full."""
    listed = file.keys.get(f"{file.architecture}.{_RECURRENT}")
    if listed is None:
        every = file.integer("full_attention_interval", 4)
        if not every:
            raise file.refused("full_attention_interval", every, "a positive number")
        return [LINEAR if (layer + 1) % every else FULL for layer in range(file.num_layers)]
    count = file.integer("block_count")
    if not isinstance(listed, list) or len(listed) != count or not all(isinstance(each, bool) for each in listed):
        raise file.refused(_RECURRENT, listed, f"true or false for each of the {count} layers of block_count")
    return [LINEAR if is_recurrent else FULL for is_recurrent in listed[: file.num_layers]]


def mamba(file: Metadata) -> Json:
    """Return the keys of Mamba, and of Falcon Mamba, whose norms' own eps files do not have."""
    return {
        "model_type": "falcon_mamba" if file.get("ssm.dt_b_c_rms") is True else "mamba",
        "layer_norm_epsilon": file.norm_eps,
        "intermediate_size": file.integer("ssm.inner_size"),
        **_scan_sizes(file, "time_step_rank", "state_size", "conv_kernel", "use_conv_bias", "use_bias"),
    }


def jamba(file: Metadata) -> Json:
    attends = [bool(heads) for heads in file.listed("attention.head_count_kv")]
    mixes = [f"blk.{layer}.ffn_gate_inp.weight" in file.tensors for layer in range(file.num_layers)]
    names = "mamba_dt_rank", "mamba_d_state", "mamba_d_conv", "mamba_conv_bias", "mamba_proj_bias"
    return {
        "model_type": "jamba",
        **_every(file, "attn", attends),
        **_every(file, "expert", mixes),
        **({"num_experts": file.integer("expert_count"), **top_k(file)} if any(mixes) else {"num_experts": 1}),
        **_scan_sizes(file, *names),
        "mamba_expand": _expansion(file),
    }


def _scan_sizes(file: Metadata, *names: str) -> Json:
    """Return the sizes of Mamba. names: of the rank of steps, the size of a state, the width of the convolution, and
    whether that and the projections have biases."""
    sizes = (file.integer(f"ssm.{key}") for key in ("time_step_rank", "state_size", "conv_kernel"))
    return dict(zip(names, (*sizes, file.has("ssm_conv1d.bias"), file.has("ssm_in.bias")), strict=True))


def _every(file: Metadata, kind: str, layers: list[bool]) -> Json:
    """Return every how many layers one is of a kind, and the first of them: behind the last one where none is."""
    first, *others = [number for number, is_so in enumerate(layers) if is_so] or [len(layers)]
    period = others[0] - first if others else len(layers) + 1
    if layers != [number % period == first for number in range(len(layers))]:
        raise file.unsupported(f"{kind} layers at irregular places")
    return {f"{kind}_layer_period": period, f"{kind}_layer_offset": first}


def mamba2(file: Metadata) -> Json:
    return {
        "model_type": "mamba2",
        **_state_sizes(file, "num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"),
        "expand": _expansion(file),
        "layer_norm_epsilon": file.norm_eps,
        "use_bias": file.has("ssm_in.bias"),
        "use_conv_bias": file.has("ssm_conv1d.bias"),
    }


def granitehybrid(file: Metadata) -> Json:
    """Return the keys of Granite 4. Files whose heads rotate are refused: Bamba's have pairs over all of a head,
    although half of it rotates."""
    if file.get("rope.scaling.finetuned") is not False:
        raise file.unsupported("heads that rotate (Bamba)")
    experts = file.integer("expert_count", 0)
    own: Json = (
        {"shared_intermediate_size": file.width("ffn_down.weight")}
        if not experts
        else {
            "shared_intermediate_size": file.width("ffn_down_shexp.weight"),
            "intermediate_size": file.width("ffn_down_exps.weight"),
            **top_k(file),
        }
    )
    return {
        "model_type": "granitemoehybrid",
        "layer_types": _kinds_by_keys(file, LINEAR),
        "position_embedding_type": "nope",
        "partial_rotary_factor": 1.0,
        **_mamba2_sizes(file),
        "mamba_expand": _expansion(file),
        "num_local_experts": experts,
        **multipliers(file),
        **own,
    }


def falcon_h1(file: Metadata) -> Json:
    """Return the keys of Falcon H1, whose multipliers are in the weights."""
    return {
        "model_type": "falcon_h1",
        "mamba_d_ssm": file.integer("ssm.inner_size"),
        "mamba_rms_norm": file.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": file.has("ssm_out.bias"),
        **_mamba2_sizes(file),
    }


def nemotron_h(file: Metadata) -> Json:
    """Return the keys of Nemotron H, of which a layer's tensors show what it is."""
    sizes = "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"
    config: Json = {
        "model_type": "nemotron_h",
        "partial_rotary_factor": 1.0,  # of what does not rotate
        "layers_block_type": [_single_block(file, layer) for layer in range(file.num_layers)],
        "layer_norm_epsilon": file.norm_eps,
        **_state_sizes(file, *sizes),
        "use_conv_bias": file.has("ssm_conv1d.bias"),
        "use_bias": file.has("ssm_in.bias"),
        "mlp_bias": file.has("ffn_up.bias"),
        "moe_latent_size": file.integer("moe_latent_size", 0) or None,
    }
    if file.has("ffn_down.weight"):
        config["intermediate_size"] = file.width("ffn_down.weight")
    if not file.has("ffn_down_exps.weight"):
        return config
    shared = {"moe_shared_expert_intermediate_size": file.width("ffn_down_shexp.weight")}
    return config | shared | grouped_experts(file)


def _single_block(file: Metadata, layer: int) -> str:
    """Return the kind of a layer that is one block."""
    kinds = {"ssm_in": LINEAR, "attn_q": FULL, "ffn_down_exps": "moe", "ffn_down": "mlp"}
    return next((kind for part, kind in kinds.items() if f"blk.{layer}.{part}.weight" in file.tensors), "")


def lfm2(file: Metadata) -> Json:
    return {
        "model_type": "lfm2",
        "layer_types": _kinds_by_keys(file, "conv"),
        "conv_L_cache": file.integer("shortconv.l_cache"),
        "conv_bias": file.has("shortconv.conv.bias"),
        "norm_eps": file.norm_eps,
        "block_auto_adjust_ff_dim": False,  # the width is what is left of it
    }


def lfm2moe(file: Metadata) -> Json:
    return {
        **lfm2(file),
        "model_type": "lfm2_moe",
        "num_dense_layers": file.integer("leading_dense_block_count", 0),
        "num_experts": file.integer("expert_count"),
        "moe_intermediate_size": file.width("ffn_down_exps.weight"),
        "use_expert_bias": file.has("exp_probs_b.bias"),
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        **top_k(file),
    }


def kimi_linear(file: Metadata) -> Json:
    """Return the keys of Kimi Linear, whose layers without heads of keys are those with states."""
    if (gating := file.integer("expert_gating_func", SIGMOID)) != SIGMOID:
        raise file.unsupported(f"experts that are chosen in another way (expert_gating_func {gating})")
    sizes = (file.integer(f"attention.{each}_length_mla") for each in ("key", "value"))
    return {
        "model_type": "kimi_linear",
        "layer_types": _kinds_by_keys(file, LINEAR),
        "linear_num_heads": file.height("ssm_beta.weight"),
        "linear_head_dim": file.integer("kda.head_dim"),
        "linear_conv_kernel_dim": file.integer("ssm.conv_kernel"),
        **grouped_experts(file),
        "norm_topk_prob": True,  # of all models; files do not say it
        **latent_attention(file, *sizes),
    }


def rwkv7(file: Metadata) -> Json:
    ranks = {"decay": "decay", "a": "iclr", "v": "value_residual_mix", "gate": "gate"}
    return {
        "model_type": "rwkv7",
        "head_dim": file.integer("wkv.head_size"),
        **{f"{ours}_low_rank_dim": file.integer(f"attention.{theirs}_lora_rank") for ours, theirs in ranks.items()},
        "norm_eps": file.norm_eps,
        "norm_bias": file.has("attn_norm.bias"),
        "norm_first": "token_embd_norm.weight" in file.tensors,
    }


def _kinds_by_keys(file: Metadata, other: str) -> list[str]:
    """Return the kind of each layer, of which those without heads of keys are of the other one."""
    return [FULL if heads else other for heads in file.listed("attention.head_count_kv")]


def _mamba2_sizes(file: Metadata) -> Json:
    """Return the sizes of Mamba 2 by the keys that most families have for them."""
    return {
        **_state_sizes(file, "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
        "mamba_conv_bias": file.has("ssm_conv1d.bias"),
        "mamba_proj_bias": file.has("ssm_in.bias"),
    }


def _expansion(file: Metadata) -> float:
    return share_of(file.integer("ssm.inner_size"), file.integer("embedding_length"))


def _state_sizes(file: Metadata, *names: str) -> Json:
    """Return the sizes of layers with states. names: of the heads that have one, the features of each, the groups of
    heads, the size of a state, and the width of the convolution."""
    heads, features = file.integer("ssm.time_step_rank"), file.integer("ssm.inner_size")
    if not heads or features % heads:
        raise file.refused("ssm.inner_size", features, f"a multiple of the {heads} heads of ssm.time_step_rank")
    others = (file.integer(f"ssm.{key}") for key in ("group_count", "state_size", "conv_kernel"))
    return dict(zip(names, (heads, features // heads, *others), strict=True))
