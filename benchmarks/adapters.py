"""The cost of adapters (LoRA): `python -m benchmarks.adapters`.

A model (random INT4 weights of a real shape, which cost what trained ones do) answers eight requests at once: without
adapters, without any in an engine that has some, with one for all, and with eight different ones: each way in an engine
of its own, and their steps take turns, so that a load on the machine falls on all alike. Then single requests take
turns between adapters that are in memory, beside requests that keep theirs; and adapters are read from the disk.
Medians of rounds with their lowest and highest. Results go to benchmarks/results/adapters.json.
"""

from __future__ import annotations

import itertools
import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.measure import RESULTS, interleaved, machine, paired, parser, save, spread
from benchmarks.random_files import random_model
from localllm.engine.engine import Engine
from localllm.engine.events import TokenEvent
from localllm.engine.request import AdapterRef, Request, SamplingParams
from localllm.models.architecture import ModelConfig
from localllm.models.block_layouts import block_layouts
from localllm.models.shapes import find_shape
from localllm.quant.recipe import RECIPES
from localllm.settings import EngineConfig

NAME, RECIPE = "tinyllama-1.1b", "int4-g64"
SEQUENCES, PROMPT_TOKENS, STEPS, SKIPPED = 8, 16, 32, 3
PREFILL_TOKENS = 512


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--model", default=NAME, help="whose shape is taken")
    arguments.add_argument("--rank", type=int, default=16)
    arguments.add_argument("--targets", default="", help="matrices that are changed, q_proj,v_proj; all without it")
    arguments.add_argument("--save", type=Path, default=RESULTS, help="a folder for the results")
    options = arguments.parse_args()
    targets = tuple(filter(None, options.targets.split(",")))
    result = {"machine": machine(), "shape": options.model, "rank": options.rank, "targets": targets or "all"}
    result |= measured(options.model, options.rank, targets, options.rounds)
    print(f"wrote {save('adapters', result, options.save)}")


def write_adapter(folder: Path, config: ModelConfig, rank: int, targets: Sequence[str], seed: int) -> AdapterRef:
    """Write random bf16 matrices in PEFT's form. targets: ends of the names of what is changed; none: all."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layout in block_layouts(config)[1:-1]:
        for matrix in layout.matrices:
            for name, rows in matrix.parts.items():
                if targets and not name.endswith(tuple(targets)):
                    continue
                a = torch.randn(rank, matrix.in_features, generator=generator) * matrix.in_features**-0.5
                b = torch.randn(rows, rank, generator=generator) * 0.01
                tensors[f"base_model.model.{name}.lora_A.weight"] = a.bfloat16()
                tensors[f"base_model.model.{name}.lora_B.weight"] = b.bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    named = sorted({name.split(".")[-3] for name in tensors})
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": named}
    (folder / "adapter_config.json").write_text(json.dumps(told), encoding="utf-8")
    return AdapterRef(str(folder), name=folder.name)


def measured(name: str, rank: int, targets: Sequence[str], rounds: int) -> dict[str, Any]:
    shape = find_shape(name)
    config = EngineConfig(weights=RECIPE, ctx=1024, speculate="off")
    with (
        random_model(name, shape.raw_config, RECIPES[RECIPE]) as files,
        tempfile.TemporaryDirectory() as directory,
    ):
        refs = [write_adapter(Path(directory) / f"a{i}", shape.config, rank, targets, i) for i in range(SEQUENCES)]
        ways: dict[str, list[tuple[AdapterRef, ...]]] = {
            "base": [()] * SEQUENCES,
            "beside": [()] * SEQUENCES,
            "one": [(refs[0],)] * SEQUENCES,
            "eight": [(ref,) for ref in refs],
        }
        engines = {way: Engine.load(files, config) for way in ways}
        engines["beside"].adapters.check(refs)
        adapted = engines["eight"]
        began = time.perf_counter()
        adapted.adapters.check(refs)
        result: dict[str, Any] = {"read_ms_each": round(1e3 * (time.perf_counter() - began) / len(refs), 1)}
        result["adapter_bytes"] = adapted.adapters.used_bytes // len(refs)
        result |= decoding(engines, ways, rounds) | prefill(adapted, refs, rounds)
        result["switch_ms"] = switching(adapted, refs, rounds)
        for engine in engines.values():
            engine.close()
    for key, value in result.items():
        print(f"{key}: {value}")
    return result


def decoding(
    engines: Mapping[str, Engine], ways: Mapping[str, Sequence[Sequence[AdapterRef]]], rounds: int
) -> dict[str, Any]:
    """Milliseconds a step of eight answers, and their ratios to the plain engine's."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    ratios: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds + 1):
        steps = steps_ms(engines, ways)
        for way, own in steps.items():
            times[way].append(median(own))
            ratios[way].append(median(base / each for base, each in zip(steps["base"], own, strict=True)))
    found: dict[str, Any] = {f"step_ms_{way}": spread(values[1:]) for way, values in times.items()}
    return found | {f"decode_{way}": spread(values[1:]) for way, values in ratios.items() if way != "base"}


def steps_ms(
    engines: Mapping[str, Engine], ways: Mapping[str, Sequence[Sequence[AdapterRef]]]
) -> dict[str, list[float]]:
    """Milliseconds of each step in which all answers of an engine get a token; the engines take turns."""
    for way, uses in ways.items():
        for use in uses:
            engines[way].submit(_request(PROMPT_TOKENS, STEPS + SEQUENCES, use))
    times: dict[str, list[float]] = {way: [] for way in ways}
    while any(engine.has_work for engine in engines.values()):
        for way, engine in engines.items():
            began = time.perf_counter()
            events = engine.step()
            if sum(isinstance(event, TokenEvent) for event in events) == SEQUENCES:
                times[way].append(1e3 * (time.perf_counter() - began))
    return {way: own[SKIPPED:] for way, own in times.items()}


def prefill(engine: Engine, refs: Sequence[AdapterRef], rounds: int) -> dict[str, Any]:
    """Seconds to the first token of a prompt, and the ratio of their rates."""
    ways = {way: partial(first_token_s, engine, PREFILL_TOKENS, use) for way, use in (("base", ()), ("one", refs[:1]))}
    times = interleaved(ways, rounds)
    return {"prefill_s_one": spread(times["one"]), "prefill_one": paired(times["base"], times["one"])}


def switching(engine: Engine, refs: Sequence[AdapterRef], rounds: int) -> Any:
    """Milliseconds to the first token of a short prompt whose adapter is another one than the last one's, less those
    where it is the same."""
    others = itertools.cycle(refs)
    times = interleaved(
        {
            "same": partial(first_token_s, engine, PROMPT_TOKENS, refs[:1]),
            "other": lambda: first_token_s(engine, PROMPT_TOKENS, (next(others),)),
        },
        4 * rounds,
    )
    return spread([1e3 * (other - same) for same, other in zip(times["same"], times["other"], strict=True)])


def _request(num_tokens: int, max_tokens: int, adapters: Sequence[AdapterRef]) -> Request:
    ids = tuple(random.choices(range(10, 30000), k=num_tokens))
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return Request(ids, sampling, adapters=tuple(adapters))


def first_token_s(engine: Engine, num_tokens: int, adapters: Sequence[AdapterRef]) -> float:
    began = time.perf_counter()
    engine.submit(_request(num_tokens, 1, adapters))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
