"""Our kernels of a GPU, compared with their references in the ways in which a model uses them, before it is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import torch

from localllm.cache.kv_eviction import Eviction
from localllm.cache.kv_format import choose_format
from localllm.engine.runner import operators_compute
from localllm.kernels.gpu.ready import CheckScope, Tell, Ways, check_once, lacks_for_triton, missing, why_not
from localllm.kernels.sizes import Coding, Weights
from localllm.kernels.state_shapes import ConvShape, DeltaShape, Mamba2Shape, Rwkv7Shape
from localllm.layers.config import AttentionConfig
from localllm.models.architecture import ModelConfig
from localllm.models.capabilities import has_one_head_shape, is_for_gpu, is_latent_for_gpu, is_packed, is_plain
from localllm.quant.recipe import Recipe
from localllm.repairs import install_compiler, install_python_headers
from localllm.settings import EngineConfig


def note_device(device: torch.device, scopes: Iterable[CheckScope], measuring: Tell, noting: Tell) -> None:
    """Check our kernels where a GPU, or a use of them, is new; tell where they cannot be used.

    scopes: of the models that are about to be loaded. measuring, noting: as `Watcher` has them.
    """
    if device.type == "cpu":
        return
    for scope in scopes:
        check_once(device, measuring, scope)
    if reason := why_not(device):
        noting(operators_compute(reason) + _what_may_help(device))


def _what_may_help(device: torch.device) -> str:
    """Return what lets Triton launch them by its own means, if it cannot and they are not out of the question."""
    lacking = "" if missing(device) else lacks_for_triton()
    if not lacking:
        return ""
    command = install_compiler() if lacking == "a C compiler" else install_python_headers()
    return f"; Triton's own launcher needs {lacking}, which may help: {command}"


def scope_of(
    config: ModelConfig, recipe: Recipe, kv: str, dtype: torch.dtype, wanted: EngineConfig | None = None
) -> CheckScope:
    """Return what of the kernels a model uses. kv: as the setting; dtype: of its activations; wanted: what else is set
    for it."""
    wanted = wanted or EngineConfig()
    eviction, chooses = Eviction.of(wanted.kv_evict), wanted.chosen_pages is not None
    forms = dict.fromkeys(form.weights for form in recipe.formats if form.weights is not None)
    kv_format = choose_format(kv, config.kv_shapes, dtype.itemsize)
    attention = [
        {
            "keys": kv_format.keys,
            "values": kv_format.values,
            "head_dim": each.head_dim,
            "heads": each.num_heads,
            "kv_heads": each.num_kv_heads,
            # Within what is tried, and at a height that is felt: the kernels are the same for any.
            "window": 300 if each.window is not None else None,
            "softcap": 5.0 if each.softcap is not None else None,
            "has_norms": each.qk_norm == "head",
            "has_gate": each.has_output_gate,
            "gates_heads": each.gates_heads,
            "has_sinks": each.has_sinks,
            "has_growth": each.growth is not None,
            "watches": each.window is None and eviction is not None and eviction.kind == "heavy",
            "chooses": each.window is None and chooses,
            "rotary": each.rotary_dim / each.head_dim,
            "dtype": str(dtype).removeprefix("torch."),
        }
        for each in _kinds(config)
    ]
    groups = [_way(weights) for weights in sorted(forms, key=lambda weights: (weights.group or 0, weights.name))]
    glus = dict.fromkeys(mlp.glu for mlp in config.mlps if mlp.is_plain)
    ways = Ways(groups=groups, attention=attention, glus=[asdict(glu) for glu in glus])
    mixtures = [each for each in config.mixtures if is_for_gpu(each)]
    if mixtures and is_packed(recipe):
        ways["routers"] = [asdict(router) for router in dict.fromkeys(each.router for each in mixtures)]
        ways["expert_biases"] = list(dict.fromkeys(each.expert.has_bias for each in mixtures))
    shapes = [shape for shape in dict.fromkeys(config.state_shapes) if shape.fills_vectors]
    if deltas := [asdict(shape) for shape in shapes if isinstance(shape, DeltaShape)]:
        ways["deltas"] = deltas
    if convs := [asdict(shape) for shape in shapes if isinstance(shape, ConvShape)]:
        ways["convs"] = convs
    if mambas := [asdict(shape) for shape in shapes if isinstance(shape, Mamba2Shape)]:
        ways["mambas"] = mambas
    if rwkv7s := [asdict(shape) for shape in shapes if isinstance(shape, Rwkv7Shape)]:
        ways["rwkv7s"] = rwkv7s
    if latents := list(_latents(config, kv_format.keys, dtype)):
        ways["latents"] = latents
    return CheckScope.of(ways)


def _latents(config: ModelConfig, keys: Coding, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Yield the ways of latent attention that a GPU's kernels know."""
    known = filter(is_latent_for_gpu, config.latents) if has_one_head_shape(config) else ()
    for each in dict.fromkeys(known):
        yield {
            "keys": keys,
            "heads": each.num_heads,
            "latent_dim": each.latent_dim,
            "shared_dim": each.shared_dim,
            "rotary": each.rotary_dim,
            "dtype": str(dtype).removeprefix("torch."),
        }


def _way(weights: Weights) -> int | dict[str, Any] | None:
    """Return what `Ways` has for such codes."""
    if weights == Weights(8, None, has_bias=False):
        return None
    return weights.group if weights == Weights(4, weights.group) else asdict(weights)


def _kinds(config: ModelConfig) -> Iterable[AttentionConfig]:
    """Return one attention of each kind that the kernels tell apart, those without a window first. Torch's operators
    compute what the kernels do not know."""
    known = filter(is_plain, config.attentions) if has_one_head_shape(config) else ()
    kinds = {_kind(each): each for each in reversed([*known])}
    return [kinds[kind] for kind in sorted(kinds, key=lambda kind: kind[0])]


def _kind(each: AttentionConfig) -> tuple[Any, ...]:
    heads = each.kv_shape, each.num_heads, each.rotary_dim
    ends = each.softcap, each.qk_norm, each.gate_features, each.has_sinks, each.growth is not None
    return each.window is not None, *heads, *ends
