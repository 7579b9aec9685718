"""StableLM 2 and 3: a quarter of each head rotates, norms by mean and variance; the 12B's blocks read one of them."""

from __future__ import annotations

from localllm.models.architecture import ModelConfig, StoredForm
from localllm.models.families.reading import dense_layers, read_attentions, read_mlp, read_model, with_defaults
from localllm.models.fields import Fields

DEFAULTS: dict[str, object] = {
    "vocab_size": 50304,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "max_position_embeddings": 4096,
    "layer_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "partial_rotary_factor": 0.25,
}
RENAMES = ((".q_layernorm.norms.", ".q_norm."), (".k_layernorm.norms.", ".k_norm."))


def parse(fields: Fields) -> ModelConfig:
    fields = with_defaults(fields, DEFAULTS)
    qk_norm = "own" if fields.flag("qk_layernorm") else None
    has_bias = fields.flag("use_qkv_bias")
    attentions = read_attentions(fields, rotates_partially=True, qk_norm=qk_norm, has_bias=has_bias)
    return read_model(
        fields,
        dense_layers(attentions, read_mlp(fields), "parallel" if fields.flag("use_parallel_residual") else "pre"),
        norm_kind="layer",
        norm_eps=fields.number("layer_norm_eps", 0.0, 1.0),
        stored=StoredForm(RENAMES),
    )
