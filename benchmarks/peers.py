"""localllm beside llama.cpp and transformers, on models of the same shape with random weights.

    python -m benchmarks.peers [--model tinyllama-1.1b] [--rounds 5] [--llama-python PYTHON]

Each side is a process that lives through all rounds; in each round every side does each task in turn, after a read of
the memory that is its floor, and only one computes at a time. A side that cannot run is left out, and named with
what would mend it. Results go to benchmarks/results/peers.json and to the tables of docs/internals/peers.md.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from benchmarks.measure import DOCS, RESULTS, known, machine, markdown_table, paired, save, spread, write_section
from benchmarks.peers_protocol import UnavailableError, Worker
from localllm.models.block_layouts import block_layouts
from localllm.models.families import parse_config
from localllm.models.shapes import shipped_shapes

MODELS = (
    "tinyllama-1.1b",
    "mistral-7b",
    "llama-3.1-8b",
    "qwen3-30b-a3b",
    "qwen3.5-4b",
    "gpt-oss-20b",
    "glm-4.7-flash",
    "lfm2-1.2b",
    "granite-4.0-h-micro",
    "falcon-h1-0.5b",
    "rwkv7-1.5b",
)  # shapes that localllm and llama.cpp know
OURS, LLAMA, TRANSFORMERS = "localllm", "llama.cpp", "transformers"
DEPTHS = (128, 2048)
GIB = 1 << 30
BYTES_A_WEIGHT = {"fp32": 4.0, "bf16": 2.0, "int8": 1.1}  # of localllm's formats; the others have some 4.5 bits
SCHEMA_VERSION = 1
PAGE = DOCS / "internals" / "peers.md"
BEGIN, END = "<!-- tables: written by `python -m benchmarks.peers` -->", "<!-- end of the tables -->"
SPINNING_SHARE = 0.02  # of a core, by all waiting sides: above it one side disturbs another
_USABLE_SHARE = 0.95  # of what is free
GEN_TOKENS, FEW_TOKENS = 64, 16  # few: of the side that takes an eighth of a second for each


@dataclass(frozen=True)
class Task:
    what: Literal["prefill", "decode"]
    tokens: int = 0  # of a prompt; how many are decoded is the side's own
    depth: int = 0

    def __str__(self) -> str:
        return f"prefill of {self.tokens}" if self.what == "prefill" else f"decode at {self.depth}"


@dataclass(frozen=True)
class Figure:
    side: str
    variant: str  # "" where the side has one only
    task: Task
    timed_tokens: int


def summary(
    speeds: Mapping[Figure, list[float]],
    floors: Mapping[Task, list[float]],
    facts: Mapping[str, Mapping[str, Any]],
    kv_bytes: int,
) -> dict[str, Any]:
    """`dram_read_gbs` and one object for each figure; floor_fraction and localllm_ratio are taken within each round.

    speeds: tok/s.
    floors: GB/s just before each task.
    kv_bytes: of one position, in all layers.
    """
    own = {figure.task: values for figure, values in speeds.items() if figure.side == OURS}
    runs = []
    for figure, values in speeds.items():
        task = figure.task
        run: dict[str, Any] = {"side": figure.side, "variant": figure.variant, **asdict(task)}
        run |= {"timed_tokens": figure.timed_tokens, "tok_s": asdict(spread(values))}
        run["localllm_ratio"] = asdict(paired(own[task], values))
        if task.what == "decode":
            positions = task.depth + figure.timed_tokens // 2  # in the middle of what is timed
            moved_bytes = facts[figure.side]["weight_bytes_per_token"] + positions * kv_bytes
            moved_gbs = [speed * moved_bytes / 1e9 for speed in values]
            run |= {"bytes_per_token": moved_bytes, "floor_fraction": asdict(paired(moved_gbs, floors[task]))}
        runs.append(run)
    return {"dram_read_gbs": asdict(spread([gbs for values in floors.values() for gbs in values])), "runs": runs}


def best(runs: list[dict[str, Any]], side: str, task: Task) -> dict[str, Any]:
    """The fastest variant of a side at a task."""
    its = [run for run in runs if run["side"] == side and _task(run) == task]
    return max(its, key=lambda run: float(run["tok_s"]["median"]))


@dataclass(frozen=True)
class Contender:
    """One side: how its process starts, and in which variants it does each task; the best of them counts."""

    name: str
    title: str
    command: list[str]
    options: Mapping[str, Any]  # of its `load`
    needed_bytes: int  # of memory, beside those of the other sides
    gen_tokens: int = GEN_TOKENS
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})


def contenders(arguments: argparse.Namespace, shape: dict[str, Any], directory: Path) -> list[Contender]:
    weights, threads = num_weights(shape), arguments.threads
    common = {"shape": shape, "threads": threads}
    torch_side = [sys.executable, "-m", "benchmarks.peers_torch"]
    return [
        Contender(
            OURS,
            f"localllm {arguments.gguf or arguments.weights}",
            [*torch_side, "localllm"],
            {
                **common,
                "weights": arguments.weights,
                "context": shape["max_position_embeddings"],
                "file": str(directory / f"random-{arguments.gguf.lower()}.gguf") if arguments.gguf else "",
            },
            needed_bytes=int(BYTES_A_WEIGHT.get(arguments.weights, 0.65) * weights) + GIB,
        ),
        Contender(
            LLAMA,
            f"llama.cpp {arguments.gguf or 'Q4_0'}",
            [arguments.llama_python, "-m", "benchmarks.peers_llama"],
            {**common, "directory": str(directory), "head": arguments.llama_head, "mix": arguments.gguf or "Q4_0"},
            needed_bytes=int(1.2 * weights) + GIB,  # the file, and its copy in the order that the kernels read
            variants={"flash attention off": {"flash": False}, "flash attention on": {"flash": True}},
        ),
        Contender(
            TRANSFORMERS,
            "transformers bf16",
            [*torch_side, "transformers"],
            common,
            needed_bytes=2 * weights + 2 * GIB,
            gen_tokens=FEW_TOKENS,
        ),
    ]


def num_weights(shape: Mapping[str, Any]) -> int:
    return sum(layout.num_weights for layout in block_layouts(parse_config(shape, "the benchmark's shape")))


def cut_to(shape: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the shape of the first layers."""
    cut = {**shape, "num_hidden_layers": layers}
    if "layer_types" in shape:
        cut["layer_types"] = shape["layer_types"][:layers]
    if "full_attn_idxs" in shape:
        cut["full_attn_idxs"] = [number for number in shape["full_attn_idxs"] if number < layers]
    return cut


def fitting(arguments: argparse.Namespace, shape: Mapping[str, Any], free_bytes: int) -> dict[str, Any]:
    """Return the shape with as many of its layers as both localllm and llama.cpp have memory for beside each other."""
    for layers in range(shape["num_hidden_layers"], 0, -1):
        cut = cut_to(shape, layers)
        sides = contenders(arguments, cut, Path())
        if sum(side.needed_bytes for side in sides if side.name in (OURS, LLAMA)) <= free_bytes:
            return cut
    return dict(shape)


class Match:
    """The workers that run, why the others do not, and how idle a worker is while another computes."""

    def __init__(self) -> None:
        # Memory counts only once a side touches it, so its promise is counted, not what is free at each start.
        self.budget_bytes = int(psutil.virtual_memory().available)
        self.running: dict[str, tuple[Contender, Worker]] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self.skipped: dict[str, UnavailableError] = {}
        self._waiting_s = self._wall_s = 0.0

    def start(self, contender: Contender) -> None:
        """Start and load a side, or note why it does not run."""
        if contender.needed_bytes > self.budget_bytes:
            needed, rest = contender.needed_bytes / 1e9, self.budget_bytes / 1e9
            reason = f"it needs {needed:.1f} GB of memory beside the other sides, which leave {rest:.1f} GB"
            self.skipped[contender.name] = UnavailableError(reason)
            return
        self.budget_bytes -= contender.needed_bytes
        worker = Worker(contender.command)
        self.running[contender.name] = contender, worker
        try:
            self.facts[contender.name] = worker.call("load", **contender.options)
        except UnavailableError as error:
            self.drop(contender.name, error)

    def drop(self, name: str, error: UnavailableError) -> None:
        self.skipped[name] = error
        self.running.pop(name)[1].close()

    def call(self, name: str, command: str, **options: Any) -> float:
        worker = self.running[name][1]
        others = [psutil.Process(other.pid) for _, other in self.running.values() if other is not worker]
        busy, started = _cpu_s(others), time.perf_counter()
        answer = worker.call(command, **options)
        self._wall_s += time.perf_counter() - started
        self._waiting_s += _cpu_s(others) - busy
        return float(answer)

    @property
    def waiting_cpu_share(self) -> float:
        """The share of one core that the waiting sides took together: threads that spin show as 1 or more."""
        return self._waiting_s / max(self._wall_s, 1e-9)

    def close(self) -> None:
        for _, worker in self.running.values():
            worker.close()


def _cpu_s(processes: list[psutil.Process]) -> float:
    return float(sum(sum(process.cpu_times()[:2]) for process in processes))  # user and system


def play(match: Match, tasks: list[Task], rounds: int) -> tuple[dict[Figure, list[float]], dict[Task, list[float]]]:
    """Each task by each side in turn, once to warm up and then `rounds` times.

    Returns the tokens per second of each figure, and the GB/s of the memory just before each task. A side that fails
    is dropped with all its figures; localllm's own failure is raised.
    """
    speeds: dict[Figure, list[float]] = {}
    floors: dict[Task, list[float]] = {task: [] for task in tasks}
    for number in range(rounds + 1):
        for task in tasks:
            floors[task].append(match.call(OURS, "dram_read"))
            for figure, speed in _turns(match, task):
                speeds.setdefault(figure, []).append(speed)
                which, variant = f"round {number}" if number else "warm-up", figure.variant and f" ({figure.variant})"
                note(f"{which}: {figure.side}{variant}, {task}: {speed:.3g} tok/s")
    measured = {figure: values[1:] for figure, values in speeds.items() if figure.side in match.running}
    return measured, {task: values[1:] for task, values in floors.items()}


def _turns(match: Match, task: Task) -> Iterator[tuple[Figure, float]]:
    for name, (contender, _) in list(match.running.items()):
        tokens, where = (task.tokens, {}) if task.what == "prefill" else (contender.gen_tokens, {"depth": task.depth})
        for variant, options in contender.variants.items():
            try:
                seconds = match.call(name, task.what, tokens=tokens, **where, **options)
            except UnavailableError as error:
                if name == OURS:
                    raise
                match.drop(name, error)
                break
            yield Figure(name, variant, task, tokens), tokens / seconds


def compare(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    """Measure all sides on one shape; the object that the results keep of it. Raises UnavailableError: localllm's."""
    whole = shipped_shapes()[model]
    shape = fitting(arguments, whole, int(psutil.virtual_memory().available * _USABLE_SHARE))
    tasks = [
        Task("prefill", tokens=arguments.prompt_tokens),
        *(Task("decode", depth=depth) for depth in arguments.depth),
    ]
    # Room for the deepest decode: the positions that a shape was trained for are no matter of speed.
    shape["max_position_embeddings"] = max(arguments.prompt_tokens, *arguments.depth) + 2 * GEN_TOKENS
    match = Match()
    with _directory(arguments.keep) as directory, contextlib.closing(match):
        sides = contenders(arguments, shape, directory)
        if arguments.gguf:
            _write_gguf(arguments, shape, directory)
        for side in sides:
            if side.name in arguments.skip:
                match.skipped[side.name] = UnavailableError("left out with --skip")
            else:
                note(f"loading {side.title}")
                match.start(side)
        if OURS not in match.running:
            raise match.skipped[OURS]
        speeds, floors = play(match, tasks, arguments.rounds)
    return {
        "machine": {**machine(), "threads": arguments.threads},
        "rounds": arguments.rounds,
        "layers": [shape["num_hidden_layers"], whole["num_hidden_layers"]],
        "waiting_cpu_share": round(match.waiting_cpu_share, 4),
        "sides": {
            side.name: {"title": side.title, "gen_tokens": side.gen_tokens, **match.facts[side.name]}
            for side in sides
            if side.name in match.running
        },
        "skipped": {name: {"reason": error.reason, "fix": error.fix} for name, error in match.skipped.items()},
        **summary(speeds, floors, match.facts, kv_bytes(shape)),
    }


def kv_bytes(shape: Mapping[str, Any]) -> int:
    """Bytes of one position in all layers, with keys and values, or latents, of 16 bits, as all sides store them."""
    config = parse_config(shape, "the benchmark's shape")
    return sum(2 * each.num_heads * each.head_dim * (1 if each.latent_dim else 2) for each in config.kv_shapes)


def table(model: str, result: Mapping[str, Any]) -> str:
    """One model's figures in Markdown: a column for each side, its best variant named where it has several."""
    sides, runs, machine = result["sides"], result["runs"], result["machine"]
    rows: list[list[str]] = []
    for task in dict.fromkeys(map(_task, runs)):
        own = [best(runs, side, task) for side in sides]
        speeds = [_spread(run["tok_s"]) + (f", {run['variant']}" if run["variant"] else "") for run in own]
        rows.append([f"**{task}**, tok/s", *speeds])
        rows.append(["localllm's speed to it", "", *(_spread(run["localllm_ratio"]) for run in own[1:])])
        if task.what == "decode":
            rows.append(["of the DRAM read", *(_spread(run["floor_fraction"]) for run in own)])
            rows.append(["MB a token", *(f"{run['bytes_per_token'] / 1e6:.0f}" for run in own)])
    titles = [side["title"] for side in sides.values()]
    figures = markdown_table(["", *titles], rows, left=1 + len(titles)).replace("|  |", "| |", 1)
    about = f"{machine['cpu']}, {machine['threads']} threads, {result['rounds']} rounds; "
    layers, of_layers = result.get("layers", (0, 0))
    if layers < of_layers:
        about += f"{layers} of {of_layers} layers, as many as memory has room for on both sides; "
    text = f"### {model}\n\n{about}DRAM read {_spread(result['dram_read_gbs'])} GB/s.\n\n{figures}"
    for name, skipped in result["skipped"].items():
        fix = f" To have it: `{skipped['fix']}`" if skipped["fix"] else ""
        text += f"\n{name} did not run: {skipped['reason']}.{fix}\n"
    return text


def tables(models: Mapping[str, Mapping[str, Any]]) -> str:
    return "\n".join(table(*entry) for entry in models.items())


def _task(run: Mapping[str, Any]) -> Task:
    return Task(run["what"], run["tokens"], run["depth"])


def _spread(value: Mapping[str, float]) -> str:
    return f"{value['median']:.3g} ({value['min']:.3g} to {value['max']:.3g})"


def print_report(model: str, result: Mapping[str, Any]) -> None:
    """The table to stdout; to stderr what makes it doubtful."""
    print(table(model, result))
    if result["waiting_cpu_share"] > SPINNING_SHARE:
        share = result["waiting_cpu_share"]
        print(f"waiting sides took {share:.1%} of a core: the figures disturb each other", file=sys.stderr)


def update(model: str, result: Mapping[str, Any], results: Path = RESULTS, page: Path = PAGE) -> None:
    """Replace one model's figures in the results and on the page; the rest stays."""
    models = {**known("peers", results).get("models", {}), model: result}
    save("peers", {"schema_version": SCHEMA_VERSION, "models": models}, results)
    write_section(page, BEGIN, END, tables(models))


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _write_gguf(arguments: argparse.Namespace, shape: Mapping[str, Any], directory: Path) -> None:
    """Write the one file that both sides read."""
    from benchmarks.peers_gguf import write_random

    note(f"writing the model in {arguments.gguf}")
    write_random(directory / f"random-{arguments.gguf.lower()}.gguf", shape, arguments.llama_head, arguments.gguf)


@contextlib.contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    """The folder of llama.cpp's random model: the one that a person names, else one that is removed in the end."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
    else:
        with tempfile.TemporaryDirectory(prefix="localllm-peers-") as directory:
            yield Path(directory)


def parse_arguments(line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS, help="may be repeated; default: tinyllama-1.1b")
    parser.add_argument("--weights", default="int4", help="of localllm: any format it knows")
    parser.add_argument(
        "--gguf", choices=("Q4_0", "Q4_K_M", "MXFP4"), help="both read one GGUF file, of this mix of types"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--depth", type=int, nargs="+", default=list(DEPTHS), help="of decode, in tokens")
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False) or 1, help="of every side")
    parser.add_argument("--skip", action="append", default=[], choices=(LLAMA, TRANSFORMERS))
    parser.add_argument("--llama-python", default=sys.executable, help="the interpreter that has llama_cpp and gguf")
    parser.add_argument("--llama-head", default="Q6_K", choices=("Q6_K", "Q4_0"), help="Q6_K: as llama-quantize does")
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="write llama.cpp's model there and leave it")
    parser.add_argument("--no-save", action="store_true", help="print the table only")
    return parser.parse_args(line)


def main() -> None:
    arguments = parse_arguments()
    # Ended from outside it still takes its workers and its gigabytes of files with it.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))
    for model in arguments.model or [MODELS[0]]:
        try:
            result = compare(arguments, model)
        except UnavailableError as error:
            sys.exit(f"localllm itself did not run: {error.reason}")
        print_report(model, result)
        if not arguments.no_save:
            update(f"{model}, a file in {arguments.gguf}" if arguments.gguf else model, result)


if __name__ == "__main__":
    main()
