"""Measure this machine for plans of one format and store the result: `python -m localllm.offload.measurements int4-g64
bf16`.

The planner starts this if torch is not loaded yet. A line is printed before each measurement.
"""

from __future__ import annotations

import sys
from functools import partial

from localllm.offload.measurements.measurement import measured
from localllm.offload.planner.profile import kept_profile
from localllm.quant.layouts import blocks_of, torch_dtype
from localllm.quant.recipe import computing

if __name__ == "__main__":
    weights, dtype = sys.argv[1:]
    measured(kept_profile(), weights, computing(blocks_of(weights)), torch_dtype(dtype), partial(print, flush=True))
