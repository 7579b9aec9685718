"""What a front end may know and ask of a loaded engine, wherever that runs. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from localllm.engine.events import Event
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
    """An engine as front ends see it: `Engine`, or one of another process (`AttachedEngine`)."""

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


class Recipient(Protocol):
    """Where the events of several requests go together."""

    def put(self, item: Event | BaseException, /) -> None:
        """On the engine's thread, which waits for it. The last of a request is its FinishedEvent, or what broke the
        engine."""
        ...


class AnswerStream(Protocol):
    """The events of one request, in order, unless they go to a recipient; the last is a FinishedEvent. Raises what
    broke the engine, if anything."""

    request_id: int
    events: SimpleQueue[Event | BaseException]

    def __iter__(self) -> Iterator[Event]: ...

    def abort(self) -> None:
        """Stop the request; what was generated stays, and its FinishedEvent says "cancelled"."""
        ...


class Service(Protocol):
    """An engine on its way, and then at work: on a thread (`EngineService`), or in a process of its own."""

    def wait_loaded(self, timeout_s: float | None = None) -> LoadedEngine | None:
        """The engine once it is loaded; None if that takes longer than `timeout_s`, or the service is closed.

        Raises what stopped the load.
        """
        ...

    @property
    def is_settled(self) -> bool:
        """Whether the engine is loaded, or cannot be."""
        ...

    def submit(self, request: Request, recipient: Recipient | None = None) -> AnswerStream:
        """Queue a request. recipient: where its events go instead of into the stream."""
        ...

    def wait_ended(self) -> BaseException | None:
        """Until the engine takes no step any more; what broke it, or None where it was stopped."""
        ...

    def stop(self) -> None:
        """Cancel what runs, and take nothing on any more."""
        ...

    def close(self, timeout_s: float = 4.0) -> None:
        """`stop`, and end; returns after `timeout_s` even where a forward is still at work."""
        ...
