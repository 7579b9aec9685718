"""The modules that an engine's process has in memory when it is forked: torch, LLVM, and all that an engine is made of.

Imported again in each process, LLVM's and ours would take 30 ms of the 100 until a killed engine answers again. The
garbage collector is off meanwhile, which saves an eighth of the time, and never looks at these modules later: it would
copy each page that it touches.
"""

from __future__ import annotations

import gc
import importlib

gc.disable()

import huggingface_hub.constants  # noqa: E402, F401
import llvmlite.binding  # noqa: E402
import llvmlite.ir  # noqa: E402, F401

import localllm.engine.engine  # noqa: E402
import localllm.engine.model_plan  # noqa: E402
import localllm.runtime.engine_process  # noqa: E402
import localllm.runtime.engine_server  # noqa: E402
import localllm.runtime.engine_thread  # noqa: E402, F401
from localllm.registry import FAMILIES  # noqa: E402

for family in FAMILIES.values():
    importlib.import_module(f"localllm.models.families.{family}")

gc.freeze()
gc.enable()
