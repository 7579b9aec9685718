"""A pull as the settings want it, whose refusals name what would let it through."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

from localllm.config import ResolvedSettings
from localllm.errors import ModelNotFoundError
from localllm.runtime.selection import is_model

if TYPE_CHECKING:
    from localllm.hub import ModelFiles, Progress


def fetch(name: str, resolved: ResolvedSettings, progress: Progress) -> ModelFiles:
    """Goes on where an earlier one stopped. Raises what `hub.pull` does, and what `progress` raises."""
    from localllm import hub

    try:
        return hub.pull(name, offline=resolved.settings.offline, progress=progress)
    except ModelNotFoundError as error:
        if is_model(name):
            error.fix = _online_again(resolved, name) or error.fixes
        raise


def _online_again(resolved: ResolvedSettings, model: str) -> str:
    """The command without what keeps it offline; "" where nothing does."""
    from huggingface_hub import constants

    command = f"localllm pull {shlex.quote(model)}"
    origin = resolved.origins["offline"]
    if resolved.settings.offline and origin.kind == "file":
        return f"offline = false in {origin.where}, or for once: LOCALLLM_OFFLINE=0 {command}"
    variables = [
        name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if constants.HF_HUB_OFFLINE and os.environ.get(name)
    ]
    if origin.kind == "environment" and resolved.settings.offline:
        variables.append(origin.where)
    if variables:
        return f"env {' '.join(f'-u {name}' for name in variables)} {command}"
    return command if resolved.settings.offline else ""
