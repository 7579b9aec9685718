"""Our kernels of a GPU, compared with their references in the ways in which a model uses them, before it is loaded."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from localllm.cache.kv_format import choose_format
from localllm.engine.runner import operators_compute
from localllm.kernels.gpu.ready import CheckScope, Tell, Ways, check_once, lacks_for_triton, missing, why_not
from localllm.models.config import ModelConfig
from localllm.quant.int4 import Int4
from localllm.quant.int8 import Int8
from localllm.quant.recipe import Recipe
from localllm.repairs import install_compiler, install_python_headers


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


def scope_of(config: ModelConfig, recipe: Recipe, kv: str, dtype: torch.dtype) -> CheckScope:
    """Return what of the kernels a model uses. kv: as the setting; dtype: of its activations."""
    formats = (recipe.blocks, recipe.embedding)
    groups = {form.group if isinstance(form, Int4) else None for form in formats if isinstance(form, Int4 | Int8)}
    kv_format = choose_format(kv, config.head_dim, dtype.itemsize)
    attention = [
        {
            "keys": kv_format.keys,
            "values": kv_format.values,
            "head_dim": config.head_dim,
            "heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
            # Within what is tried, and at a height that is felt: the kernels are the same for any.
            "window": 300 if has_window else None,
            "softcap": 5.0 if config.attention_softcap is not None else None,
            "has_norms": config.qk_norm == "head",
            "rotary": config.rotary_dim / config.head_dim,
            "dtype": str(dtype).removeprefix("torch."),
        }
        for has_window in sorted({window is not None for window in config.windows})
    ]
    in_order = sorted(groups, key=lambda group: group or 0)
    return CheckScope.of(Ways(groups=in_order, attention=attention, activation=config.activation))
