"""The modules that engines' processes have in memory when they are forked: torch, and all that an engine is made of.

Without collections of garbage meanwhile, which are an eighth of the time. None of it is looked through by the processes
later: each page that is touched would be copied.
"""

from __future__ import annotations

import gc

gc.disable()

import localllm.engine.engine  # noqa: E402
import localllm.engine.model_plan  # noqa: E402
import localllm.runtime.engine_server  # noqa: E402
import localllm.runtime.engine_thread  # noqa: E402, F401

gc.freeze()
gc.enable()
