"""A check whether a model would run on this machine, and how fast: from its shape, before a byte of it is fetched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from localllm.config import ResolvedSettings, format_figure
from localllm.errors import DoesNotFitError, LocalLLMError, ModelNotFoundError
from localllm.runtime.engine_loader import engine_config


@dataclass(frozen=True)
class Verdict:
    """kind: "fits" where all of it stays where it is computed fastest, "offloads" where it runs all the same; "unknown"
    where nobody can say without its files, or they cannot be run: then `why` says so. weights: the format."""

    kind: Literal["fits", "offloads", "too large", "unknown"]
    tok_s: float | None = None
    ctx: int | None = None
    weights: str = ""
    why: str = ""

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
    def short_text(self) -> str:
        """Return the result in few words, for a narrow screen."""
        return self.text.replace("fits with offload, about", "fits, offload ~").replace("~ ", "~")

    @property
    def details(self) -> str:
        """Return with what it would be run, and how fast."""
        if self.tok_s is None:
            return self.why
        return f"about {format_figure(self.tok_s)} tok/s in {self.weights}, with {self.ctx} tokens of context"


def judge(name: str, resolved: ResolvedSettings, say: Callable[[str], None]) -> Verdict:
    """Milliseconds; seconds where this machine has not been measured yet, of which `say` hears beforehand. It may
    raise. Uses no network; imports torch."""
    try:
        return _foreseen(name, resolved, say)
    except ModelNotFoundError:
        return Verdict("unknown", why="its shape is known once it is here")
    except DoesNotFitError as error:
        return Verdict("too large", why=error.why)
    except LocalLLMError as error:
        return Verdict("unknown", why=f"{error.what}: {error.why}" if error.why else error.what)


def _foreseen(name: str, resolved: ResolvedSettings, say: Callable[[str], None]) -> Verdict:
    from localllm.offload.planner.machine_memory import require_address_space

    require_address_space()  # before torch is imported
    from localllm import hub
    from localllm.engine.model_plan import foresee
    from localllm.models.shapes import find_shape

    shape = find_shape(name)
    try:
        files = hub.locate(name, offline=True)
    except ModelNotFoundError:
        files = None
    plan = foresee(shape, files, engine_config(resolved, lambda _: None), say)
    return Verdict("fits" if plan.is_whole else "offloads", plan.decode_tok_s, plan.ctx, plan.shape.weights)
