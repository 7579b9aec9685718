"""Models larger than their memory, beside the disk that they are read from and beside accelerate's disk offload.

    python -m benchmarks.offload [--part stream|job|predict|accelerate|experts|experts-llama|predict-experts|
                                         per-layer ...]
                                 [--rounds 5] [--llama-python PYTHON]

Random weights of real shapes, packed on the disk of the cache directory; every figure is taken in a process of its own
under a cap (--ram), whose peak of resident memory is compared with the plan's ledger. Results go to
benchmarks/results/offload.json, part by part: those that were not run stay there as they were.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import harmonic_mean, median
from typing import Any

from benchmarks import offload_accelerate
from benchmarks.measure import known, machine, paired, parser, plain, save, spread
from benchmarks.memory_group import bytes_from_disk, join, memory_group
from benchmarks.offload_experts import Spec as ExpertSpec
from benchmarks.offload_per_layer import Spec as PerLayerSpec
from benchmarks.offload_worker import Spec
from benchmarks.peers import Match
from benchmarks.peers_protocol import UnavailableError, Worker
from benchmarks.random_files import random_model
from localllm.config import user_directories
from localllm.engine.weights import compact_form
from localllm.hub import ModelFiles
from localllm.models.block_layouts import model_bytes
from localllm.models.families import parse_config
from localllm.models.shapes import shipped_shapes
from localllm.quant.recipe import RECIPES

MIB = 1 << 20
MIXTURE = "qwen3-30b-a3b"
ACCELERATE_LAYERS = 4  # of 48: 6 GB in bf16, of which accelerate reads the half for each token


def cut_shape(shape: str, layers: int | None) -> dict[str, Any]:
    """The config of a shape with so many of its layers; None: all."""
    raw_config = shipped_shapes()[shape]
    return raw_config if layers is None else {**raw_config, "num_hidden_layers": layers}


@contextlib.contextmanager
def packed(shape: str, weights: str, layers: int | None = None) -> Iterator[tuple[ModelFiles, int]]:
    """A random model on the disk, as `weights` are streamed, and the bytes of its matrices in `weights`."""
    raw_config, recipe = cut_shape(shape, layers), RECIPES[weights]
    config = parse_config(raw_config, shape)
    compact = compact_form(recipe, config, ())
    with random_model(shape, raw_config, recipe if compact is None else RECIPES[compact.name]) as files:
        yield files, model_bytes(config, recipe)


def run(files: ModelFiles, weights: str, ram_bytes: int | None, **rest: Any) -> dict[str, Any]:
    """The worker's object. Raises RuntimeError with its last words where it failed."""
    spec = Spec(folder=str(files.directory), weights=weights, ram_bytes=ram_bytes, **rest)
    return worker("benchmarks.offload_worker", asdict(spec))


def worker(module: str, spec: dict[str, Any]) -> dict[str, Any]:
    """The object that a worker prints. Raises RuntimeError with its last words where it failed."""
    command = [sys.executable, "-m", module, json.dumps(spec)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["it said nothing"])[-1])
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def stream(rounds: int) -> dict[str, Any]:
    """A 7B shape in INT4 under a quarter of its size, beside the read of its own blocks; its text beside the whole."""
    with packed("mistral-7b", "int4-g64") as (files, num_bytes):
        cap, sizes = num_bytes // 4, {"ctx": 256, "prompt_tokens": 200, "gen_tokens": 8}
        capped = run(files, "int4-g64", cap, rounds=rounds, **sizes)
        whole = run(files, "int4-g64", None, rounds=1, is_cold=False, **sizes)
        cached = run(files, "int4-g64", cap, rounds=2, is_cold=False, **sizes)
    rates = [tok_s * capped["streamed_bytes"] / 1e9 for tok_s in capped["decode_tok_s"]]
    return {
        "cap_bytes": cap,
        "decode_tok_s": spread(capped["decode_tok_s"]),
        "streamed_bytes": capped["streamed_bytes"],
        "disk_gbs": spread(capped["floor_gbs"]),
        "share_of_disk": paired(rates, capped["floor_gbs"]),
        "peak_rss_bytes": capped["peak_rss_bytes"],
        "rss_over_cap": capped["peak_rss_bytes"] / cap,
        "same_text": capped["token_ids"] == whole["token_ids"],
        "whole_decode_tok_s": spread(whole["decode_tok_s"]),
        "from_page_cache_tok_s": spread(cached["decode_tok_s"]),
    }


def experts(rounds: int) -> dict[str, Any]:
    """Qwen3-30B-A3B in INT4 under half its size, with a trace of experts such as a trained router would choose, beside
    the read of the experts that are missed, and the hits beside those of an ideal LRU. And a few of its layers beside
    accelerate under the same cap."""
    return {**_experts(rounds, None), "beside_accelerate": _experts_beside_accelerate(rounds)}


def _experts(rounds: int, layers: int | None) -> dict[str, Any]:
    with packed(MIXTURE, "int4-g64", layers) as (files, num_bytes):
        cap = _PROGRAM_BYTES + num_bytes // 2
        spec = ExpertSpec(str(files.directory), "int4-g64", cap, repetition=0.45, rounds=rounds)
        result = worker("benchmarks.offload_experts", asdict(spec))
    rates = zip(result["decode_tok_s"], result["missed_bytes"], strict=True)
    return {
        "layers": cut_shape(MIXTURE, layers)["num_hidden_layers"],
        "cap_bytes": cap,
        "model_bytes": num_bytes,
        "slots": [result["slots"], result["experts"]],
        "decode_tok_s": spread(result["decode_tok_s"]),
        "predicted_tok_s": result["predicted_tok_s"],
        "missed_bytes_per_token": spread(result["missed_bytes"]),
        "read_bytes_per_token": spread(result["read_bytes"]),  # with those of wrong guesses
        "disk_gbs": spread(result["floor_gbs"]),
        "share_of_disk": paired([tok_s * missed / 1e9 for tok_s, missed in rates], result["floor_gbs"]),
        "hit_rate": spread(result["hit_rate"]),
        "ideal_hit_rate": spread(result["ideal_hit_rate"]),
        "rss_over_cap": result["peak_rss_bytes"] / cap,
    }


def _experts_beside_accelerate(rounds: int) -> dict[str, Any]:
    """Both under a cap of half of what the layers have in bf16, the embedding and the head among them."""
    shape = cut_shape(MIXTURE, ACCELERATE_LAYERS)
    cap = model_bytes(parse_config(shape, MIXTURE), RECIPES["bf16"]) // 2
    with tempfile.TemporaryDirectory() as directory:
        theirs, peaks = _accelerate_sides(rounds, cap, Path(directory), shape)
    ours = {}
    for weights in ("int4-g64", "bf16"):
        with packed(MIXTURE, weights, ACCELERATE_LAYERS) as (files, _):
            result = run(files, weights, cap, ctx=256, prompt_tokens=64, gen_tokens=16, rounds=rounds)
        ours[f"localllm {weights}"] = {key: spread(result[key]) for key in ("decode_tok_s",)}
    return {"layers": ACCELERATE_LAYERS, "cap_bytes": cap, "accelerate": theirs, "peaks": peaks, **ours}


def experts_beside_llama(rounds: int, llama_python: str, layers: int | None = None) -> dict[str, Any]:
    """Qwen3-30B-A3B under half its size, beside llama.cpp with mapped pages in a control group of as much memory: each
    writes other tokens in every round, for which its random router chooses the experts. How often these are the same
    differs from model to model, so the bytes that were read for a token stand beside its speed."""
    shape, gen_tokens = cut_shape(MIXTURE, layers), 32
    cap = _PROGRAM_BYTES + model_bytes(parse_config(shape, MIXTURE), RECIPES["int4-g64"]) // 2
    theirs = []
    with tempfile.TemporaryDirectory(dir=user_directories().cache) as directory, memory_group(cap) as group:
        side = Worker([llama_python, "-m", "benchmarks.peers_llama"])
        with contextlib.closing(side):
            join(group, side.pid)
            facts = side.call("load", shape=shape, threads=2, directory=directory, repacks=False)
            for _ in range(rounds + 1):
                side.call("prefill", tokens=64, flash=False)  # as the other side does: it takes the memory of experts
                before = bytes_from_disk(side.pid)
                took = side.call("decode", tokens=gen_tokens, depth=64, flash=False)
                theirs.append((gen_tokens / took, (bytes_from_disk(side.pid) - before) / gen_tokens))
    with packed(MIXTURE, "int4-g64", layers) as (files, _):
        spec = ExpertSpec(str(files.directory), "int4-g64", cap, None, temperature=2.0, rounds=rounds)
        ours = worker("benchmarks.offload_experts", asdict(spec))
    rates, reads = zip(*theirs[1:], strict=True)
    return {
        "cap_bytes": cap,
        "localllm int4-g64": {
            "decode_tok_s": spread(ours["decode_tok_s"]),
            "read_bytes_per_token": spread(ours["read_bytes"]),
            "hit_rate": spread(ours["hit_rate"]),
        },
        "llama.cpp Q4_0": {"decode_tok_s": spread(rates), "read_bytes_per_token": spread(reads), **facts},
    }


def job(_rounds: int) -> dict[str, Any]:
    """16 prompts at once under the cap of `stream`, beside one."""
    with packed("mistral-7b", "int4-g64") as (files, num_bytes):
        cap, sizes = num_bytes // 4, {"ctx": 256, "prompt_tokens": 32, "gen_tokens": 32, "rounds": 2}
        one = run(files, "int4-g64", cap, **sizes)
        many = run(files, "int4-g64", cap, sequences=16, **sizes)
    return {
        "one_tok_s": spread(one["job_tok_s"]),
        "sixteen_tok_s": spread(many["job_tok_s"]),
        "ratio": median(many["job_tok_s"]) / median(one["job_tok_s"]),
        "sequences_at_once": many["plan"]["sequences"],
        "rss_over_cap": many["peak_rss_bytes"] / cap,
    }


@dataclass(frozen=True)
class Case:
    """share: of the model's bytes, that the cap leaves for the model. layers: of the shape; None: all."""

    shape: str
    weights: str
    share: float
    layers: int | None = None


CASES = [
    *(Case("tinyllama-1.1b", "int4-g64", share) for share in (0.6, 0.8, 2.0)),
    *(Case("tinyllama-1.1b", "bf16", share) for share in (0.3, 0.5, 0.8)),
    *(Case("llama-3.2-3b", "int4-g64", share) for share in (0.5, 0.75, 2.0)),
    *(Case("llama-3.2-3b", "int8", share) for share in (0.4, 0.7, 2.0)),
]
MIXTURE_CASES = [
    *(Case("olmoe-1b-7b", "int4-g64", share) for share in (0.4, 0.6, 2.0)),
    *(Case(MIXTURE, "int4-g64", share, layers=12) for share in (0.4, 0.6, 2.0)),
]
_PROGRAM_BYTES = 330 * MIB  # of a cap, which are not the model's
_STEADY = 1.12  # between the fastest and the slowest round, and between the rates before and after each
_ATTEMPTS = 5  # at a case, until the machine is steady; the last one counts, whatever it was


def predict(_rounds: int) -> dict[str, Any]:
    """Predicted and measured rates, the ledger and the peak, over shapes, formats and caps."""
    return _predictions(CASES)


def predict_experts(_rounds: int) -> dict[str, Any]:
    """The same of mixtures, each behind a run that taught how often its experts are in memory: a random router's are
    less often than a trained one's."""
    return _predictions(MIXTURE_CASES)


def _predictions(cases: list[Case]) -> dict[str, Any]:
    rows = []
    for case in cases:
        with packed(case.shape, case.weights, case.layers) as (files, num_bytes):
            cap, attempts = int(_PROGRAM_BYTES + case.share * num_bytes), 0
            if case in MIXTURE_CASES:
                run(files, case.weights, cap, ctx=1024, prompt_tokens=16, gen_tokens=200, rounds=1)
            result: dict[str, Any] | None = None
            while result is None or (not is_steady(result) and attempts < _ATTEMPTS):
                measure_machine(case, files, cap)
                result = run(files, case.weights, cap, ctx=1024, prompt_tokens=960, gen_tokens=48, rounds=3)
                attempts += 1
        rows.append({**asdict(case), "attempts": attempts, "cap_bytes": cap, **prediction(result)})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    by_rates_around = "prediction_error_by_rates_around"
    return {
        "rows": rows,
        "median_prediction_error": median(abs(row["prediction_error"]) for row in rows),
        f"median_{by_rates_around}": median(abs(row[by_rates_around]) for row in rows),
        "largest_prediction_error": max(abs(row["prediction_error"]) for row in rows),
        "largest_ledger_error": max(abs(row["ledger_error"]) for row in rows),
    }


def prediction(result: dict[str, Any]) -> dict[str, Any]:
    plan, measured = result["plan"], median(result["decode_tok_s"])
    around = harmonic_mean((plan["decode_tok_s"], *result["decode_tok_s_by_rates_between"]))
    return {
        "was_steady": is_steady(result),
        "streamed_bytes": result["streamed_bytes"],
        "disk_gbs": median(result["floor_gbs"]) if result["floor_gbs"] else None,
        "profile_disk_gbs": plan["disk_gbs"],
        "predicted_tok_s": plan["decode_tok_s"],
        "measured_tok_s": measured,
        "prediction_error": plan["decode_tok_s"] / measured - 1,
        "prediction_error_by_rates_around": around / measured - 1,
        "ledger_bytes": plan["ledger_bytes"],
        "peak_rss_bytes": result["peak_rss_bytes"],
        "ledger_error": plan["ledger_bytes"] / result["peak_rss_bytes"] - 1,
    }


def is_steady(result: dict[str, Any]) -> bool:
    """Return whether the machine stayed as it was when the plan was made, by rates measured after each answer.

    A shared machine goes up and down by 40 %, and a prediction is of the machine that was measured. How good the
    prediction was is not considered.
    """
    rates = (result["plan"]["decode_tok_s"], *result["decode_tok_s_by_rates_between"])
    return all(max(each) <= _STEADY * min(each) for each in (result["decode_tok_s"], rates))


def measure_machine(case: Case, files: ModelFiles, cap: int) -> None:
    """Anew, in a process of its own: what else runs on a machine changes from minute to minute."""
    (user_directories().cache / "profile.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", "localllm", "plan", str(files.directory), "--weights", case.weights]
    subprocess.run([*command, "--ram", f"{cap >> 20}MiB"], check=True, capture_output=True)


def accelerate(rounds: int) -> dict[str, Any]:
    """A 1.1B shape in bf16: both sides under a cap of half its size, and ours under what accelerate really takes."""
    with packed("tinyllama-1.1b", "bf16") as (files, num_bytes), tempfile.TemporaryDirectory() as directory:
        cap = num_bytes // 2
        theirs, peaks = _accelerate_sides(rounds, cap, Path(directory), shipped_shapes()["tinyllama-1.1b"])
        ours = {}
        for label, ram_bytes in (("the cap", cap), ("as much memory as accelerate takes", min(peaks.values()))):
            for is_cold in (True, False):
                sizes = {"ctx": 256, "prompt_tokens": 128, "gen_tokens": 16, "rounds": rounds}
                result = run(files, "bf16", ram_bytes, is_cold=is_cold, **sizes)
                name = f"localllm under {label}, page cache {'dropped' if is_cold else 'warm'}"
                figures = {key: result[key] for key in ("streamed_bytes", "peak_rss_bytes")}
                ours[name] = {"decode_tok_s": spread(result["decode_tok_s"]), **figures}
    return {"cap_bytes": cap, "accelerate": theirs, "accelerate_peak_rss_bytes": peaks, "localllm": ours}


def _accelerate_sides(
    rounds: int, cap: int, directory: Path, shape: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, int]]:
    """Tokens a second of each placement and variant, and the peak memory of each placement."""
    speeds: dict[str, list[float]] = {}
    with contextlib.closing(Match()) as match:
        sides = offload_accelerate.contenders(shape, 2, directory, cap)
        for side in sides:
            match.start(side)
        for _ in range(rounds + 1):
            for side in sides:
                for variant, options in side.variants.items():
                    with contextlib.suppress(UnavailableError):
                        took = match.call(side.name, "decode", tokens=side.gen_tokens, depth=128, **options)
                        speeds.setdefault(f"{side.name}, {variant}", []).append(side.gen_tokens / took)
        peaks = {name: peak_rss_bytes(worker.pid) for name, (_, worker) in match.running.items()}
    return {name: spread(values[1:]) for name, values in speeds.items()}, peaks


def peak_rss_bytes(pid: int) -> int:
    """The most that a process held since it began, mapped pages of files included."""
    found = re.search(r"^VmHWM:\s+(\d+)", Path("/proc", str(pid), "status").read_text(encoding="utf-8"), re.MULTILINE)
    assert found, "Linux has it of every process"
    return 1024 * int(found[1])


def per_layer(rounds: int) -> dict[str, Any]:
    """Gemma 4 E4B's shape with its embeddings of each layer on the disk beside the same in memory, and under a cap."""
    name, weights = "gemma-4-e4b", "int4-g64"
    with packed(name, weights) as (files, _):
        spec = PerLayerSpec(str(files.directory), weights, rounds=rounds)
        found = worker("benchmarks.offload_per_layer", asdict(spec))
        cap = found["total_bytes"] - found["table_bytes"] // 2
        under_cap = worker("benchmarks.offload_per_layer", asdict(replace(spec, ram_bytes=cap)))
    tok_s = found.pop("decode_tok_s")
    found["disk_to_memory"] = paired(tok_s["disk"], tok_s["memory"])
    found["decode_tok_s"] = {place: spread(values) for place, values in tok_s.items()}
    return found | {"under_cap": under_cap | {"decode_tok_s": spread(under_cap["decode_tok_s"])}}


PARTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "stream": stream,
    "job": job,
    "predict": predict,
    "accelerate": accelerate,
    "experts": experts,
    "predict-experts": predict_experts,
    "per-layer": per_layer,
}
LLAMA_PART = "experts-llama"  # which is told of an interpreter


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--part", action="append", choices=[*PARTS, LLAMA_PART], help="may be repeated; default: all"
    )
    arguments.add_argument("--llama-python", default=sys.executable, help="the interpreter that has llama_cpp and gguf")
    options = arguments.parse_args()
    results = known("offload") | {"machine": machine()}
    parts = PARTS | {LLAMA_PART: partial(experts_beside_llama, llama_python=options.llama_python)}
    for name in options.part or parts:
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            results[name] = parts[name](options.rounds)
        except UnavailableError as error:
            print(f"{name} did not run: {error.reason}. To mend it: {error.fix}", file=sys.stderr)
            continue
        print(json.dumps({name: results[name]}, indent=1, default=plain))
        save("offload", results)


if __name__ == "__main__":
    main()
