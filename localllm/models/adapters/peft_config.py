"""adapter_config.json: what PEFT's adapter is, and what of it is not computed here. Nothing in it is used as a path."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import AdapterError, show
from localllm.models.adapters.patterns import NamePatterns
from localllm.models.adapters.stored import LoraPair, unsupported
from localllm.models.fields import Fields, is_integer
from localllm.models.strict_json import JsonLimits, read_json_object

CONFIG = "adapter_config.json"
_LIMITS = JsonLimits()
_MAX_RANK, _MAX_ALPHA, _MAX_TARGETS = 1 << 20, 1e9, 100_000
_RANK_STABILIZED = "use_rslora"
# Keys that stand for another computation where they have a value.
_VARIANTS = {
    "use_dora": "DoRA",
    "lora_bias": "a trained bias",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "BD-LoRA",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "arrow_config": "Arrow's routing",
    "alora_invocation_tokens": "Activated LoRA",
    "invocation_string": "Activated LoRA",
    "layer_replication": "a model with repeated layers",
    "trainable_token_indices": "a set of trained tokens",
    "modules_to_save": "an adapter with whole matrices beside it",
}
# Beginnings that take a part of the base's weights away, which the saved adapter then lacks on the whole ones.
_TAKING = {"pissa": "PiSSA", "olora": "OLoRA", "corda": "CorDA", "loftq": "LoftQ", "lora_ga": "LoRA-GA"}


@dataclass(frozen=True)
class PeftConfig:
    """source: the file. base: the model that the adapter was made for, as it says, or "".

    targets: names of modules, or their ends, that it says it changes; () where it does not list them.
    parameters: of modules, that it changes in place of the modules.
    layers: the numbers of those that it changes; None where it does not list them.
    ties_embeddings: the head is changed as the embedding is, where it is that.
    """

    source: str
    base: str
    rank: int
    alpha: float
    ranks: NamePatterns[int]
    alphas: NamePatterns[float]
    is_rank_stabilized: bool
    targets: tuple[str, ...]
    parameters: tuple[str, ...]
    layers: frozenset[int] | None
    ties_embeddings: bool

    @classmethod
    def read(cls, folder: Path) -> PeftConfig:
        """Raises AdapterError and CheckpointError."""
        path = folder / CONFIG
        fields = Fields(read_json_object(path, _LIMITS), str(path))
        _require_lora(fields)
        has_exclusions = bool(fields.get("exclude_modules"))
        return cls(
            str(path),
            fields.optional_text("base_model_name_or_path") or "",
            fields.optional_integer("r", 1, _MAX_RANK) or 8,
            8.0 if (alpha := fields.optional_number("lora_alpha", -_MAX_ALPHA, _MAX_ALPHA)) is None else alpha,
            NamePatterns(_ranks(fields), f"{path}: rank_pattern"),
            NamePatterns(_alphas(fields), f"{path}: alpha_pattern"),
            fields.flag(_RANK_STABILIZED),
            () if has_exclusions else _names(fields, "target_modules"),
            _names(fields, "target_parameters"),
            _layers(fields),
            fields.flag("ensure_weight_tying"),
        )

    def require_rank(self, pair: LoraPair, rank: int, module: str) -> None:
        """Raise AdapterError unless a pair is of the rank that its module should have. module: its name in the base, or
        that of a parameter."""
        found = self.ranks.value(self._key(module))
        wanted = self.rank if found is None else found
        if rank != wanted:
            what = f"{pair.place}: {show(module)} has another rank than adapter_config.json says"
            why = f"{show(pair.a.name)} is {list(pair.a.shape)}: rank {rank}, by r and rank_pattern {wanted}"
            raise AdapterError(what, why=why, fix="fetch the adapter's files anew")

    def scale_of(self, module: str, rank: int) -> float:
        """Return what multiplies b @ a of a module."""
        own = self.alphas.value(self._key(module))
        alpha = self.alpha if own is None else own
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    def _key(self, module: str) -> str:
        """Return what patterns are compared with: a parameter's name where that is what was named."""
        weight = f"{module}.weight"
        is_parameter = any(weight == name or weight.endswith(f".{name}") for name in self.parameters)
        return weight if is_parameter else module


def _require_lora(fields: Fields) -> None:
    kind = fields.optional_text("peft_type")
    if kind != "LORA":
        raise unsupported(
            fields.source, f"an adapter of the type {show(kind)}" if kind else "an adapter without a type"
        )
    for key, name in _VARIANTS.items():
        if fields.get(key):
            raise unsupported(fields.source, f"{name} ({key})")
    for key, value in fields.raw.items():
        if key.startswith("use_") and key != _RANK_STABILIZED and value:
            raise unsupported(fields.source, f"a variant that is not known here ({show(key)})")
    bias = fields.optional_text("bias") or "none"
    if bias != "none":
        raise unsupported(fields.source, f"a trained bias (bias {show(bias)})")
    begun = fields.get("init_lora_weights")
    taking = next((name for word, name in _TAKING.items() if word in str(begun).lower()), None)
    if taking is not None:
        why = f"init_lora_weights is {show(begun)}: it was trained on base weights without a part that it took over"
        fix = "convert it with PEFT: save_pretrained(path, path_initial_model_for_weight_conversion=...)"
        raise unsupported(fields.source, f"{taking}, not converted to plain LoRA,", why, fix)


def _ranks(fields: Fields) -> Mapping[str, int]:
    section = fields.section("rank_pattern")
    return {} if section is None else {key: section.integer(key, 1, _MAX_RANK) for key in section.raw}


def _alphas(fields: Fields) -> Mapping[str, float]:
    section = fields.section("alpha_pattern")
    return {} if section is None else {key: section.number(key, -_MAX_ALPHA, _MAX_ALPHA) for key in section.raw}


def _names(fields: Fields, key: str) -> tuple[str, ...]:
    """Return a list of names; () where one expression stands in its place."""
    if isinstance(fields.get(key), str):
        return ()
    found = fields.items(key, _MAX_TARGETS) or []
    names = tuple(name for name in found if isinstance(name, str))
    if len(names) < len(found):
        raise fields.refuse(key, "a list of names")
    return names


def _layers(fields: Fields) -> frozenset[int] | None:
    """Return the layers that are listed, or the one that stands in the list's place."""
    key = "layers_to_transform"
    value = fields.get(key)
    found = [value] if is_integer(value) else fields.items(key, _MAX_TARGETS)
    if found is None:
        return None
    layers = frozenset(number for number in found if is_integer(number))
    if len(layers) < len(set(map(str, found))):
        raise fields.refuse(key, "numbers of layers")
    return layers
