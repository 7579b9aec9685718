"""Which settings of keys, values and memory cannot take effect with a model or on a device, and which of them
contradict each other. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from localllm.cache.kv_eviction import Eviction
from localllm.engine.device import has_card
from localllm.errors import Fix, UsageError
from localllm.layers.config import AttentionConfig
from localllm.settings import EngineConfig

if TYPE_CHECKING:
    from localllm.models.architecture import ModelConfig


def idle_with(config: ModelConfig, wanted: EngineConfig, name: str = "this model") -> dict[str, UsageError]:
    """Return the settings that cannot take effect with a model, each with the error for one that was typed."""
    stateful = "" if config.kv_shapes else "each of its layers keeps a state of a fixed size, and no keys and values"
    longest = max((each for each in config.windows if each is not None), default=0)
    windowed = (
        "" if None in config.windows else f"each of its layers with keys sees a window, of at most {longest} tokens"
    )
    near = stateful or windowed
    eviction, latent = Eviction.of(wanted.kv_evict), ""
    if config.latents and eviction is not None and eviction.kind == "heavy":
        latent = f"latent attention does not tell what a page gets of it; sinks:{eviction.tokens} is possible"
    latents = "its layers keep latents, which are keys of all heads: a sketch of them tells no head's best pages"
    reasons = {
        "kv": stateful,
        "kv_offload": near,
        "attend": near or (latents if config.latents else ""),
        "kv_evict": near or latent,
        "reuse": why_not_moved(config),
    }
    found = _idle(wanted, reasons, f"with {name}")
    if latent and eviction is not None and not near:
        found["kv_evict"].fix = Fix.flag("--kv-evict", f"sinks:{eviction.tokens}")
    return found


def idle_on(device: str, wanted: EngineConfig) -> dict[str, UsageError]:
    """Return the same of a device."""
    no_gpu = "" if has_card(device) else "no GPU is used; --ram limits the memory of a CPU"
    return _idle(wanted, {"vram": no_gpu}, "here")


def _idle(wanted: EngineConfig, reasons: Mapping[str, str], where: str) -> dict[str, UsageError]:
    asked = {name: why for name, why in reasons.items() if why and getattr(wanted, name) != getattr(EngineConfig, name)}
    flags = {name: "--" + name.replace("_", "-") for name in asked}
    return {
        name: UsageError(f"{flags[name]} cannot take effect {where}", why=why, fix=Fix.without(flags[name]))
        for name, why in asked.items()
    }


def why_not_moved(config: ModelConfig) -> str:
    """Return why a model's keys and values cannot be taken to another position; "" where they can."""
    kinds = sorted({rope.kind for rope in config.ropes if rope.kind in ("dynamic", "longrope")})
    if config.state_shapes:
        num_states, num_layers = len(config.state_shapes), config.num_layers
        return f"{num_states} recurrent states in its {num_layers} layers are of all tokens before, not of a document"
    if kinds:
        return f"RoPE of the kind {kinds[0]} turns all keys differently as the prompt grows"
    if any(isinstance(each, AttentionConfig) and each.rotates_first for each in config.keepers):
        return "its keys are normalised behind their rotation, and cannot be turned further"
    return ""


EVICTION_AND_MOVED = "--kv-evict removes pages by what each token attends to, and reused tokens are not computed"


def require_agreement(wanted: EngineConfig) -> None:
    """Raise UsageError for settings that contradict each other with any model."""
    if Eviction.of(wanted.kv_evict) is None:
        return
    contradictions = {
        "kv_offload": "what has left is read by no token, and needs no room on the disk",
        "attend": "--attend chooses among all pages before a token, and --kv-evict removes some of them",
        "reuse": EVICTION_AND_MOVED,
    }
    for name, why in contradictions.items():
        if (value := getattr(wanted, name)) != (off := getattr(EngineConfig, name)):
            flag = "--" + name.replace("_", "-")
            # Both are named: one of them may be stored, and comes again where it is left out.
            pairs = (flag, off, "--kv-evict", wanted.kv_evict), (flag, value, "--kv-evict", "off")
            fixes = [Fix.flag(*pair) for pair in pairs]
            raise UsageError(f"--kv-evict {wanted.kv_evict} and {flag} {value} cannot go together", why=why, fix=fixes)


def require_effect(config: ModelConfig, wanted: EngineConfig, device: str) -> None:
    """Raise UsageError for what cannot take effect, or contradicts itself."""
    for error in (idle_with(config, wanted) | idle_on(device, wanted)).values():
        raise error
    require_agreement(wanted)
