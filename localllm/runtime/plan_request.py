"""The plan of a model under given settings. Loads nothing, and uses no network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from localllm.config import Origin, ResolvedSettings, accepted
from localllm.runtime.engine_loader import engine_config, refuse_idle

if TYPE_CHECKING:
    from localllm.engine.model_plan import Considered
    from localllm.hub import ModelFiles
    from localllm.models.shapes import Shape
    from localllm.offload.planner.plan import JobShape

Goal = Literal["latency", "throughput"]

DEFAULT_PARALLEL = 32  # answers at once, where the memory for their KV cache allows it
_JOB_TOKENS = 1024  # of a prompt and its answer together, in a job of which nothing more is known


def considered(
    name: str,
    resolved: ResolvedSettings,
    goal: Goal,
    say: Callable[[str], None],
    tell: Callable[[str], None],
    placed_bytes: int = 0,
) -> Considered:
    """latency: one answer, as fast as can be; throughput: DEFAULT_PARALLEL prompts answered together. say: hears what
    is being measured; tell: of a setting that is left aside. placed_bytes: as `engine.model_plan.consider` has it.

    Raises ModelNotFoundError, and UsageError for what cannot be honoured.
    """
    from localllm.offload.planner.machine_memory import require_address_space

    require_address_space()  # before torch is imported
    from localllm.engine.model_plan import consider

    shape, files = shape_and_files(name)
    refuse_idle(resolved, shape.config, shape.name)
    job = job_of(goal, resolved)
    wanted = engine_config(resolved, shape.config, tell)
    return consider(shape, files, wanted, say, job=job, placed_bytes=placed_bytes)


def job_of(goal: Goal, resolved: ResolvedSettings) -> JobShape | None:
    """Return the job that a plan for throughput assumes; None for one answer."""
    from localllm.offload.planner.plan import JobShape

    tokens = min(_JOB_TOKENS, resolved.settings.ctx or _JOB_TOKENS)
    return JobShape(DEFAULT_PARALLEL, tokens, tokens) if goal == "throughput" else None


def shape_and_files(name: str) -> tuple[Shape, ModelFiles | None]:
    """Return a model's shape, and its files where it is on this disk. Raises ModelNotFoundError."""
    from localllm import hub
    from localllm.errors import ModelNotFoundError
    from localllm.models.shapes import find_shape

    shape, files = find_shape(name), None
    with suppress(ModelNotFoundError):
        files = hub.locate(name, offline=True)
    return shape, files


def with_changes(resolved: ResolvedSettings, changes: Mapping[str, Any]) -> ResolvedSettings:
    """The settings with `changes`, as a file would have them; None: as the model has it. Raises SettingsError."""
    origin = Origin("flag", "the plan")
    values = {
        key: (None if value is None else accepted(key, value, origin.where), origin) for key, value in changes.items()
    }
    return resolved.overlaid(values)
