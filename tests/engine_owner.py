"""Starts an engine's process and asks it something, with nothing loaded that a front end would not load."""

from __future__ import annotations

from localllm.config import load_settings
from localllm.engine.request import Request, SamplingParams
from localllm.runtime.engine_client import EngineClient
from localllm.runtime.engine_loader import Opening
from localllm.runtime.engine_process import Caps, LoadObserver, start_engine
from localllm.runtime.selection import selected


def started() -> EngineClient:
    resolved = load_settings({}, environ={})
    selection = selected(resolved, "tiny")
    return start_engine(selection, Opening(), Caps(), LoadObserver())


def answer(client: EngineClient) -> str:
    engine = client.wait_loaded()
    assert engine is not None
    request = Request(tuple(engine.encode("Once upon a time")), SamplingParams(max_tokens=4, seed=1))
    return "".join(getattr(event, "text", "") for event in client.submit(request))
