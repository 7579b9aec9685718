"""This machine, and whether a model would run on it, and how fast: from its shape, before a byte of it is fetched."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from localllm.config import ResolvedSettings, format_bytes, format_figure
from localllm.errors import DoesNotFitError, LocalLLMError, ModelNotFoundError
from localllm.runtime.engine_loader import engine_config
from localllm.runtime.plan_request import shape_and_files


@dataclass(frozen=True)
class Verdict:
    """kind: "fits" where all of it stays where it is computed fastest, "offloads" where it runs all the same; "unknown"
    where nobody can say without its files, or they cannot be run: then `why` says so. weights: the format.
    memory_bytes: of all weights in it."""

    kind: Literal["fits", "offloads", "too large", "unknown"]
    tok_s: float | None = None
    ctx: int | None = None
    weights: str = ""
    why: str = ""
    memory_bytes: int | None = None

    @property
    def text(self) -> str:
        match self.kind:
            case "fits":
                return "fits"
            case "offloads" if self.tok_s is not None:
                return f"fits with offload, about {format_figure(self.tok_s, 2)} tok/s"
            case "offloads":
                return "fits with offload"
            case "too large":
                return "does not fit"
            case "unknown":
                return "not known"

    @property
    def details(self) -> str:
        """Return with what it would be run, and how fast."""
        if self.tok_s is None:
            return self.why
        return f"about {format_figure(self.tok_s)} tok/s in {self.weights}, with {self.ctx} tokens of context"


def judge(name: str, resolved: ResolvedSettings, say: Callable[[str], None]) -> Verdict:
    """Milliseconds; seconds where this machine has not been measured yet, of which `say` hears before; it
    may raise. Uses no network."""
    from localllm.offload.planner.machine_memory import require_address_space

    try:
        require_address_space()  # before torch is imported
        from localllm.engine.model_plan import foresee

        shape, files = shape_and_files(name)
        plan = foresee(shape, files, engine_config(resolved, shape.config, lambda _: None), say)
    except ModelNotFoundError:
        return Verdict("unknown", why="its shape is known once it is here")
    except DoesNotFitError as error:
        return Verdict("too large", why=error.why)
    except LocalLLMError as error:
        return Verdict("unknown", why=f"{error.what}: {error.why}" if error.why else error.what)
    kind: Literal["fits", "offloads"] = "fits" if plan.is_whole else "offloads"
    return Verdict(kind, plan.decode_tok_s, plan.ctx, plan.shape.weights, memory_bytes=plan.shape.num_bytes)


def machine_line() -> str:
    """Return what a model can use here. Asking the system and the driver takes tens of milliseconds."""
    import psutil

    from localllm.offload.planner.nvml import gpus

    memory = psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parts = [f"{cores} core{'' if cores == 1 else 's'}"]
    parts.append(f"{format_bytes(memory.available)} of {format_bytes(memory.total)} memory free")
    for gpu in gpus():
        free = "" if gpu.free_bytes is None else f", {format_bytes(gpu.free_bytes)} free"
        parts.append(f"{gpu.name or 'a GPU'}{free}")
    return "; ".join(parts) if len(parts) > 2 else "; ".join([*parts, "no NVIDIA GPU"])
