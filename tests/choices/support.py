"""Requests to an engine that is stepped by hand, and what became of its pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from localllm.engine.engine import Engine
from localllm.engine.events import Event, FinishedEvent, TokenEvent
from localllm.engine.request import Request, SamplingParams
from localllm.engine.sequence import Sequence as Running
from tests.kv_support import check_pages, check_prefix


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


def running(params: SamplingParams, num_prompt_tokens: int, seed: int = 0) -> Running:
    """A sequence as the sampler needs it: it makes no text."""
    request, no_text = Request((0,) * num_prompt_tokens, params), cast(Any, None)
    return Running(0, request, seed=seed, ctx=1 << 20, detokenizer=no_text, breaker_ids=frozenset())


def words(length: int, seed: int = 0) -> tuple[int, ...]:
    """Ids of a text that repeats nothing for long."""
    return tuple((seed * 131 + i * i * 7 + i * 13) % 251 for i in range(length))


def drawn(prompt: Sequence[int], seed: int = 0, max_tokens: int = 8, **more: object) -> Request:
    sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=max_tokens)
    return Request(tuple(prompt), sampling, **more)  # type: ignore[arg-type]


def searched(prompt: Sequence[int], beams: int = 4, max_tokens: int = 8, **more: object) -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    return Request(tuple(prompt), sampling, beams=beams, **more)  # type: ignore[arg-type]


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


def held_pages(engine: Engine) -> int:
    """Pages of all pools that somebody has now."""
    pools = {pool for group in engine.residency.kv_pages.groups for pool in group.pools}
    return sum(page.owners > 0 for pool in pools for page in pool.pages)


def require_whole(engine: Engine) -> None:
    """Nobody has a page, and none is promised to anyone."""
    pages = engine.residency.kv_pages
    check_pages(pages)
    assert not pages.sequences
    assert held_pages(engine) == 0
    assert all(pool.reserved == 0 for group in pages.groups for pool in group.pools)
    if engine.prefix is not None:
        check_prefix(engine.prefix)
