"""LFM2 with experts: sigmoids and a correction choose them, the first layers have none."""

from __future__ import annotations

from localllm.layers.config import MoEConfig
from localllm.models.architecture import LayerConfig, ModelConfig, StoredForm
from localllm.models.families import lfm2
from localllm.models.families.reading import (
    MAX_LAYERS,
    declared_kinds,
    num_layers,
    read_mlp,
    read_model,
    read_router,
    with_defaults,
)
from localllm.models.fields import Fields
from localllm.models.rope_fields import FULL

DEFAULTS: dict[str, object] = {
    **lfm2.DEFAULTS,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "use_expert_bias": True,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}


def parse(fields: Fields) -> ModelConfig:
    fields = lfm2.with_tie(with_defaults(fields, DEFAULTS))
    kinds = declared_kinds(fields, (lfm2.CONV, FULL)) or (FULL,) * num_layers(fields)
    dense, moe = read_mlp(fields), _moe(fields)
    num_dense = fields.integer("num_dense_layers", 0, MAX_LAYERS)
    layers = [
        LayerConfig(mixer, dense if number < num_dense else moe)
        for number, mixer in enumerate(lfm2.read_mixers(fields, kinds))
    ]
    return read_model(fields, layers, norm_eps=lfm2.read_eps(fields), stored=StoredForm(lfm2.RENAMES))


def _moe(fields: Fields) -> MoEConfig:
    router = read_router(
        fields,
        "sigmoid",
        has_correction=fields.flag("use_expert_bias"),
        normalizes=fields.flag("norm_topk_prob"),
        sum_epsilon=1e-6,
        scale=fields.number("routed_scaling_factor", 1e-6, 1e6),
    )
    return MoEConfig(router, read_mlp(fields, "moe_intermediate_size"))
