"""Mixtral (arXiv:2401.04088): every layer is a mixture, whose weights are shares among the chosen experts."""

from __future__ import annotations

from localllm.layers.config import MoEConfig
from localllm.models.architecture import LayerConfig, ModelConfig, StoredForm
from localllm.models.families.reading import (
    one_kind,
    read_attentions,
    read_mlp,
    read_model,
    read_router,
    with_defaults,
)
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
# Names of its checkpoints, which other families have taken over.
RENAMES = ((".block_sparse_moe.", ".mlp."), (".w1.", ".gate_proj."), (".w3.", ".up_proj."), (".w2.", ".down_proj."))


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    router = read_router(fields, "softmax", num_experts="num_local_experts", normalizes=True)
    moe = MoEConfig(router, read_mlp(fields))
    layers = [LayerConfig(attention, moe) for attention in read_attentions(fields, one_kind(fields))]
    return read_model(fields, layers, stored=StoredForm(RENAMES))
