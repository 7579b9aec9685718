"""One model under one cap in a process of its own: `python -m benchmarks.offload_worker SPEC`, a JSON object.

Prints one JSON object: what was planned, what was measured, and what the streamed files give past the page cache,
read between the stretches of decoding.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks.engines import answer, random_ids
from benchmarks.measure import drop_from_cache, fill_cache
from localllm.bench.machine import PeakMemory
from localllm.engine.engine import Engine
from localllm.engine.prefix_config import NO_REUSE
from localllm.hub import locate
from localllm.hub.packed import packed_directory
from localllm.offload.measurements.measurement import measured
from localllm.offload.planner.disk_speed import files_read_gbs
from localllm.offload.planner.plan import JobShape, Plan
from localllm.offload.planner.profile import Profile, machine_key
from localllm.quant.recipe import RECIPES
from localllm.settings import EngineConfig


@dataclass(frozen=True)
class Spec:
    """sequences: more than one make a throughput job. is_cold: the page cache is emptied of the model's files first."""

    folder: str
    weights: str
    ram_bytes: int | None
    ctx: int
    prompt_tokens: int
    gen_tokens: int
    rounds: int = 5
    sequences: int = 1
    is_cold: bool = True


def measure(spec: Spec) -> dict[str, Any]:
    files = locate(spec.folder)
    paths = sorted(packed_directory(files, spec.weights).parent.glob("*/*.safetensors"))
    (drop_from_cache if spec.is_cold else fill_cache)(paths)
    peak = PeakMemory(torch.device("cpu"))
    job = JobShape(spec.sequences, spec.prompt_tokens + spec.gen_tokens, spec.ctx) if spec.sequences > 1 else None
    dtype = "fp32" if spec.weights == "fp32" else "bf16"
    started = time.perf_counter()
    config = EngineConfig(weights=spec.weights, dtype=dtype, ram=spec.ram_bytes, ctx=spec.ctx, speculate="off")
    engine = Engine.load(files, config, job=job, reuse=NO_REUSE)
    load_s = time.perf_counter() - started
    plan = engine.plan
    assert plan is not None
    packed = packed_directory(files, plan.shape.weights)
    streamed = [packed / f"{name}.safetensors" for name in plan.streamed]
    prompts = [random_ids(spec.prompt_tokens, engine.model.config.vocab_size, seed) for seed in range(spec.sequences)]
    answers = [answer(engine, prompts, spec.gen_tokens)]  # warm: kernels are compiled, the ring is full
    peaks = [peak.rss_bytes()]
    floors = [files_read_gbs(streamed)] if streamed else []
    between = []
    for _ in range(spec.rounds):
        peak = PeakMemory(torch.device("cpu"))  # without what the floor was read into
        answers.append(answer(engine, prompts, spec.gen_tokens))
        peaks.append(peak.rss_bytes())
        floors += [files_read_gbs(streamed)] if streamed else []
        between.append(by_rates_now(plan, spec))
    engine.close()
    rounds = answers[1:]
    return {
        "spec": asdict(spec),
        "load_s": load_s,
        "plan": planned(plan, spec),
        "decode_tok_s": [each.decode_tok_s for each in rounds],
        "job_tok_s": [each.job_tok_s for each in rounds],
        "ttft_s": [each.ttft_s for each in rounds],
        "streamed_bytes": plan.streamed_bytes,
        "floor_gbs": [statistics.harmonic_mean(pair) for pair in itertools.pairwise(floors)],
        "peak_rss_bytes": max(peaks),
        "decode_tok_s_by_rates_between": between,
        "token_ids": answers[0].token_ids,
    }


def by_rates_now(plan: Plan, spec: Spec) -> float:
    """The prediction of the plan had the machine been measured now."""
    recipe, costs = RECIPES[plan.shape.weights], plan.costs
    dtype = torch.float32 if spec.weights == "fp32" else torch.bfloat16
    rates = measured(Profile(machine_key()), recipe.name, recipe.blocks, dtype, lambda _text: None).rates(recipe.name)
    assert rates is not None
    costs = replace(costs, rates=replace(rates, cached_share=costs.rates.cached_share))
    return plan.sequences / costs.decode_s(spec.prompt_tokens + spec.gen_tokens // 2, plan.sequences)


def planned(plan: Plan, spec: Spec) -> dict[str, Any]:
    depth = spec.prompt_tokens + spec.gen_tokens // 2
    return {
        "decode_tok_s": plan.sequences / plan.costs.decode_s(depth, plan.sequences),
        "bound_by": plan.bound_by,
        "disk_gbs": plan.costs.rates.disk_gbs,
        "ledger_bytes": plan.total_bytes("ram"),
        "limit_bytes": plan.limits["ram"],
        "kv_bytes": plan.ledger["ram"]["kv"],
        "batch_rows": plan.batch_rows,
        "ctx": plan.ctx,
        "sequences": plan.sequences,
    }


if __name__ == "__main__":
    print(json.dumps(measure(Spec(**json.loads(sys.argv[1])))))
