"""Granite 3 with experts: Llama with four multipliers, and a softmax over the chosen logits alone."""

from __future__ import annotations

from localllm.layers.config import MoEConfig
from localllm.models.architecture import LayerConfig, ModelConfig, StoredForm
from localllm.models.families import granite
from localllm.models.families.reading import num_layers, read_mlp, read_router, with_defaults
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    **granite.DEFAULTS,
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
    moe = MoEConfig(read_router(fields, "chosen", num_experts="num_local_experts"), read_mlp(fields))
    layers = [LayerConfig(granite.read_attention(fields), moe)] * num_layers(fields)
    return granite.granite(fields, layers, stored=StoredForm(RENAMES))
