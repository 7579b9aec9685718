"""localllm: large language models on one consumer GPU, or on a plain CPU, from the terminal.

    from localllm import Engine, SamplingParams, TokenEvent

    engine = Engine.load("tiny")
    for event in engine.generate([{"role": "user", "content": "A tale about an owl, please."}]):
        if isinstance(event, TokenEvent):
            print(event.text, end="")

The names below are imported when they are first used: torch takes a second.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from localllm.version import __version__

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.engine.events import Event, FinishedEvent, GrownEvent, PrefillEvent, TokenEvent
    from localllm.engine.request import Request, SamplingParams
    from localllm.runtime.engine_thread import EngineThread
    from localllm.settings import EngineConfig
    from localllm.text.grammar.grammar import Grammar

__all__ = [
    "Engine",
    "EngineConfig",
    "EngineThread",
    "Event",
    "FinishedEvent",
    "Grammar",
    "GrownEvent",
    "PrefillEvent",
    "Request",
    "SamplingParams",
    "TokenEvent",
    "__version__",
]

_HOMES = {
    "Engine": "localllm.engine.engine",
    "EngineConfig": "localllm.settings",
    "EngineThread": "localllm.runtime.engine_thread",
    "Event": "localllm.engine.events",
    "FinishedEvent": "localllm.engine.events",
    "Grammar": "localllm.text.grammar.grammar",
    "GrownEvent": "localllm.engine.events",
    "PrefillEvent": "localllm.engine.events",
    "Request": "localllm.engine.request",
    "SamplingParams": "localllm.engine.request",
    "TokenEvent": "localllm.engine.events",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'localllm' has no attribute {name!r}")
