"""Granite 3 with experts: Llama with four multipliers, and a softmax over the chosen logits alone."""

from __future__ import annotations

from localllm.layers.config import MoEConfig
from localllm.models.architecture import LayerConfig, ModelConfig, StoredForm
from localllm.models.families.reading import read_attentions, read_mlp, read_model, read_router, with_defaults
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
RENAMES = (
    (".block_sparse_moe.input_linear.", ".mlp.experts.gate_up_proj."),
    (".block_sparse_moe.output_linear.", ".mlp.experts.down_proj."),
    (".block_sparse_moe.router.layer.", ".mlp.gate."),
)


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    has_bias = fields.flag("attention_bias")
    moe = MoEConfig(read_router(fields, "chosen", num_experts="num_local_experts"), read_mlp(fields))
    scale = fields.number("attention_multiplier", 1e-9, 1e9)
    attentions = read_attentions(fields, scale=scale, has_bias=has_bias, has_output_bias=has_bias)
    return read_model(
        fields,
        [LayerConfig(attention, moe) for attention in attentions],
        embedding_scale=fields.number("embedding_multiplier", 1e-9, 1e9),
        residual_scale=fields.number("residual_multiplier", 1e-9, 1e9),
        logit_scale=1 / fields.number("logits_scaling", 1e-9, 1e9),
        stored=StoredForm(RENAMES),
    )
