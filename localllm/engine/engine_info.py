"""The engine as front ends see it, wherever it runs. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from localllm.errors import Fix

if TYPE_CHECKING:
    from localllm.engine.request import Request
    from localllm.models.architecture import ModelConfig
    from localllm.offload.planner.plan import Plan
    from localllm.text.chat_template import ChatTemplate
    from localllm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class EngineFacts:
    """How a model is loaded."""

    ctx: int
    weights: str  # their format
    kv: str  # the format of keys and values
    load_s: float = 0.0
    weight_bytes: int = 0  # of the whole model; 0 where there is no plan
    ledger: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # bytes of each owner in each tier
    limits: Mapping[str, int] = field(default_factory=dict)  # of each tier
    bound_by: str = ""  # what a step waits for
    streamed_bytes: int = 0  # that are read from the disk at every step
    num_experts: int = 0  # of a mixture, all layers together
    experts_in_memory: int = 0  # the most of them at a time
    experts_tier: str = "ram"  # of that memory
    experts_wanted: int = 0  # by single tokens, since the model was loaded, while some of them have slots
    expert_hits: int = 0  # of these, that were in memory and not because they were foreseen
    host_bytes: int = 0  # of the host's memory that the model has
    contents: str = ""  # of the files when they were read, as `hub.contents` has it; "" where nobody looked

    @property
    def hit_rate(self) -> float | None:
        """The share of wanted experts that were in memory; None before any was wanted from there."""
        return self.expert_hits / self.experts_wanted if self.experts_wanted else None

    def held_bytes(self, tier: str) -> int:
        """Return the bytes that the plan has in a tier."""
        return sum(self.ledger.get(tier, {}).values())


@dataclass(frozen=True)
class SlotFacts:
    """A request that runs."""

    request_id: int
    num_prompt_tokens: int
    num_read: int  # of the prompt's tokens, that are computed
    num_said: int  # tokens that were sampled


@dataclass(frozen=True)
class EngineStatus:
    """The requests of an engine."""

    running: tuple[SlotFacts, ...] = ()
    num_waiting: int = 0
    idle_s: float = 0.0  # since a request came, or one ended
    adapters: tuple[str, ...] = ()  # the names of those in memory

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.num_waiting


class LoadedEngine(Protocol):
    """An engine as front ends see it: `Engine`, or one of another process (`RemoteEngine`)."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def template(self) -> ChatTemplate:
        """Raises TemplateError where the model has none, or a broken one."""
        ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def ctx(self) -> int: ...

    @property
    def weights(self) -> str: ...

    @property
    def contents(self) -> str:
        """The contents of its files, as `EngineFacts` has it."""
        ...

    @property
    def fixes_for(self) -> Callable[[int], list[Fix]]:
        """Returns the flags with which a context of so many tokens fits; "" where none does."""
        ...

    def check(self, request: Request) -> None:
        """Raise ContextOverflowError or UsageError for a request that cannot run."""
        ...

    def unload_adapter(self, path: str) -> int:
        """Give up the adapter at a path, at once or when no answer uses it any more; return how many went at once."""
        ...

    def encode(self, prompt: str | Sequence[int] | Sequence[dict[str, Any]]) -> list[int]:
        """Return the ids of a prompt: a text, with the BOS token where the model wants one; ids; or chat messages."""
        ...

    @property
    def current_plan(self) -> Plan | None:
        """The plan that the model is placed by; None where it is in another process, or not by a plan."""
        ...

    def facts(self) -> EngineFacts:
        """Return how the model is loaded now. Raises EngineGoneError, as `status` does."""
        ...

    def status(self) -> EngineStatus: ...
