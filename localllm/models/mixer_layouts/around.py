"""What a block's tensors depend on beside its own body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from localllm.models.architecture import ModelConfig, NormPlacement
from localllm.models.layout import Residual, Vector

# The norms around a block's body, by the family's placement: (before, after), in Hugging Face's names.
ATTENTION_NORMS = {
    "pre": ("input_layernorm", None),
    "post": (None, "post_attention_layernorm"),
    "sandwich": ("input_layernorm", "post_attention_layernorm"),
    "parallel": ("input_layernorm", None),
}


def norm_vectors(name: str, stored: str, config: ModelConfig, offset: float | None = None) -> tuple[Vector, ...]:
    """Return the weights of a norm, and its bias, if it has any. offset: of the weights; None: the model's."""
    offset = config.norm_weight_offset if offset is None else offset
    weight = Vector(name, f"{stored}.weight", config.hidden_size, offset=offset)
    if config.norm_kind == "rms" or not config.has_norm_bias:
        return (weight,)
    return weight, Vector(f"{name}_bias", f"{stored}.bias", config.hidden_size, is_norm_weight=False)


@dataclass(frozen=True)
class Around:
    """What a block's tensors depend on beside its own body. prefix: of the layer's tensors in a checkpoint."""

    prefix: str
    model: ModelConfig
    norm_placement: NormPlacement

    @property
    def residual(self) -> Residual:
        return Residual(self.model.hidden_size, self.model.residual_scale)

    def norms(self, placements: Mapping[str, tuple[str | None, str | None]]) -> tuple[Vector, ...]:
        names = zip(("norm_in", "norm_out"), placements[self.norm_placement], strict=True)
        return tuple(
            vector
            for name, stored in names
            if stored is not None
            for vector in norm_vectors(name, f"{self.prefix}.{stored}", self.model)
        )
