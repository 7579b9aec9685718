"""What the settings ask of a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from localllm.config import ResolvedSettings
from localllm.runtime.vram import vram_cap

if TYPE_CHECKING:
    from localllm.engine.model_plan import Wishes
    from localllm.offload.planner.plan import JobShape


def wishes_of(resolved: ResolvedSettings, tell: Callable[[str], None], job: JobShape | None = None) -> Wishes:
    """tell: as `vram_cap` has it. Imports torch. Raises UsageError for a cap on a GPU's memory where none is used."""
    from localllm.engine.memory import choose_device
    from localllm.engine.model_plan import Wishes
    from localllm.engine.planner import has_card

    settings = resolved.settings
    wishes = {field: getattr(settings, field) for field in Wishes.__dataclass_fields__ if field != "job"}
    wishes["vram"] = vram_cap(resolved, tell, has_gpu=has_card(choose_device(settings.device)))
    return Wishes(**wishes, job=job)
