"""What an engine answers to a test's requests, by its steps or by its events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from localllm.engine.engine import Engine
from localllm.engine.events import Event, FinishedEvent, TokenEvent
from localllm.engine.request import Request, SamplingParams


@dataclass
class Heard:
    """What was told of one request."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    end: FinishedEvent | None = None

    @property
    def finished(self) -> FinishedEvent:
        assert self.end is not None
        return self.end

    def take(self, event: Event) -> None:
        assert self.end is None, "nothing is told of a request that has ended"
        if isinstance(event, TokenEvent):
            self.token_ids.append(event.token_id)
        if isinstance(event, TokenEvent | FinishedEvent):
            self.text += event.text
        if isinstance(event, FinishedEvent):
            self.end = event


def answered(engine: Engine, *requests: Request) -> list[Heard]:
    """All of them at once, to their ends."""
    heard = {engine.submit(request): Heard() for request in requests}
    for event in steps(engine):
        heard[event.request_id].take(event)
    return list(heard.values())


def steps(engine: Engine) -> Iterator[Event]:
    """Until nothing is left."""
    while engine.has_work:
        yield from engine.step()


def finish_reasons(engine: Engine) -> dict[int, str]:
    """Of all that run, by request, in the order in which they end."""
    return {event.request_id: event.finish_reason for event in steps(engine) if isinstance(event, FinishedEvent)}


def token_ids(events: Iterable[Event]) -> list[int]:
    """Of one answer. Raises what ended it."""
    found = []
    for event in events:
        if isinstance(event, TokenEvent):
            found.append(event.token_id)
        elif isinstance(event, FinishedEvent) and event.error is not None:
            raise event.error
    return found


def generated(engine: Engine, prompt: str | Sequence[int], max_tokens: int, **sampling: Any) -> list[int]:
    """So many tokens, the likeliest ones where nothing else is asked. Raises what ended the answer."""
    params = SamplingParams(**{"temperature": 0, "ignore_eos": True, **sampling}, max_tokens=max_tokens)
    return token_ids(engine.generate(prompt, params))
