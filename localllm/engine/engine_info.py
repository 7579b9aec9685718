"""What a front end may know and ask of a loaded engine, wherever that runs. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from localllm.engine.request import Request
    from localllm.models.config import ModelConfig
    from localllm.offload.planner.plan import Plan
    from localllm.text.chat_template import ChatTemplate
    from localllm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class EngineFacts:
    """How a model was loaded. weights, kv: formats. weight_bytes: of the whole model; 0 where there is no plan. ledger:
    bytes of each owner in each tier; limits: of each tier; bound_by: what a step waits for. streamed_bytes: read from
    the disk at every step. host_bytes: of the host's memory, what the model has. contents: of the files, as
    `hub.contents` has it, when they were read; "" where nobody looked."""

    ctx: int
    weights: str
    kv: str
    load_s: float = 0.0
    weight_bytes: int = 0
    ledger: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    bound_by: str = ""
    streamed_bytes: int = 0
    host_bytes: int = 0
    contents: str = ""

    def held_bytes(self, tier: str) -> int:
        """Of a tier, by the plan."""
        return sum(self.ledger.get(tier, {}).values())


@dataclass(frozen=True)
class SlotFacts:
    """A request that runs: num_read of the prompt's tokens are computed, num_said were drawn."""

    request_id: int
    num_prompt_tokens: int
    num_read: int
    num_said: int


@dataclass(frozen=True)
class EngineStatus:
    """What an engine is doing. idle_s: since something was asked of it, or an answer ended."""

    running: tuple[SlotFacts, ...] = ()
    num_waiting: int = 0
    idle_s: float = 0.0

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
        """As `EngineFacts` has it."""
        ...

    @property
    def flags_for(self) -> Callable[[int], str]:
        """With which flags a context of so many tokens fits; "" where none does."""
        ...

    def check(self, request: Request) -> None:
        """Raises ContextOverflowError or UsageError for a request that cannot run."""
        ...

    def encode(self, prompt: str | Sequence[int] | Sequence[dict[str, Any]]) -> list[int]:
        """The ids of a prompt: a text, with the BOS token where the model wants one; ids; or chat messages."""
        ...

    @property
    def current_plan(self) -> Plan | None:
        """By which the model is placed; None where it is in another process, or not by a plan."""
        ...

    def facts(self) -> EngineFacts:
        """As they are now. Raises EngineGoneError, as `status` does."""
        ...

    def status(self) -> EngineStatus: ...
