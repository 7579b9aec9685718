"""Requests to an engine that is stepped by hand, and what became of its pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from localllm.engine.engine import Engine
from localllm.engine.request import Request, SamplingParams
from localllm.engine.sequence import Sequence as Running
from tests.kv_support import check_pages, check_prefix


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
