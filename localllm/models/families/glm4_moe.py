"""GLM 4.5 to 4.7 with experts: DeepSeek's router, a shared expert, first layers without any; half of a head rotates."""

from __future__ import annotations

from localllm.models.architecture import ModelConfig, StoredForm
from localllm.models.families.reading import (
    MAX_LAYERS,
    grouped_layers,
    num_layers,
    read_attentions,
    read_model,
    with_defaults,
    with_draft_head,
)
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    "vocab_size": 151552,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "partial_rotary_factor": 0.5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}
RENAMES = ((".shared_experts.", ".shared_expert."),)


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    qk_norm = "head" if fields.flag("use_qk_norm") else None
    has_bias, extra = fields.flag("attention_bias"), fields.optional_integer("num_nextn_predict_layers", 0, MAX_LAYERS)
    attentions = read_attentions(fields, rotates_partially=True, qk_norm=qk_norm, has_bias=has_bias)
    layers, count = grouped_layers(fields, attentions), num_layers(fields)
    model = read_model(fields, layers, stored=StoredForm(RENAMES, num_extra_layers=extra or 0))
    return with_draft_head(model, layers[-1], draft_renames(count)) if extra else model


def draft_renames(layer: int) -> tuple[tuple[str, str], ...]:
    """Return how the tensors of a layer that drafts are called, which DeepSeek's files number behind the last."""
    own = f"model.layers.{layer}."
    parts = {
        "eh_proj": "fc",
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "shared_head.norm": "norm",
    }
    return (*((f"{own}{theirs}.", f"mtp.{ours}.") for theirs, ours in parts.items()), (own, "mtp.layers.0."))
