"""One NVIDIA GPU by our kernels, and under caps of its memory by offloading: in 8 minutes, nothing fetched.

    python -m benchmarks.gpu [--out DIR] [--seconds 450] [--parts products model ...] [--caps 8 12 24]
    python -m benchmarks.gpu --device cpu --small

products: the matrices of four models beside a copy of their bytes, torch's INT4 operator and bf16. model: llama-3.1-8b
in INT4, all on the card, beside a plain loop in torch. speculation: drafts that are right as often as is asked for, and
drafts that are all wrong. texts: whether every placement of blocks writes the same. caps: for each a model of 1.5 times
its size, of random weights and made in memory, in bf16 and in INT4: blocks copied in every step beside the plain pinned
copy, the plan beside copying alone and the CPU alone and beside accelerate, the peak of the card's memory beside the
cap and the ledger, predictions beside what was measured. experts: for each cap Qwen3-30B-A3B in INT4, as many of its
experts on the card as have room, beside the CPU alone.

The sides are processes that take turns. A part that fails or has no time left is one line, and the rest goes on.
With --device cpu a CPU stands in for the card: its figures mean nothing. Results go to benchmarks/results/gpu.json, or
to gpu.json in another folder; those of a CPU only where a folder is named.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_table
from benchmarks.gpu_table import Row
from benchmarks.gpu_turns import Cap, CapTurns, ModelTurns, Run, product_turns
from benchmarks.measure import RESULTS, machine, save
from benchmarks.peers_protocol import Worker

GB = 10**9
FORMATS = {"bf16": "llama-3.1-8b", "int4-g64": "llama-3.3-70b"}  # of caps, and whose layers the model has
SHARE_OF_CAP = 1.5
_CAPS_GB = (8, 12, 24)
_SMALL_CAP_BYTES = 40 * 10**6
_TEXT_TOKENS = {False: (48, 200), True: (12, 32)}  # of each placement, and of the one that is written twice
# Shares of the time; that of a cap, and of each GB of it.
_SHARES = {"machine": 4.0, "products": 5.0, "model": 8.0, "long": 2.0, "speculation": 3.0, "texts": 1.0}
_SIDES = ("placed", "host")  # of a mixture
_CAP, _CAP_GB = 1.5, 1 / 16
_EXPERTS, _EXPERTS_TOKENS = 4.0, {False: 64, True: 4}  # a share for each cap, of 17 GB to be made; tokens of a turn
PARTS = (*_SHARES, "caps", "experts")


@dataclass
class Report:
    """The rows and figures so far. folder: None where nothing is saved."""

    folder: Path | None
    device: str
    machine: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    caps: list[dict[str, Any]] = field(default_factory=list)
    found: dict[str, dict[str, Any]] = field(default_factory=dict)  # by the part
    rows: list[Row] = field(default_factory=list)

    def add(self, rows: Sequence[Row]) -> None:
        """Saved at once: whoever ends the run has what came before."""
        self.rows += rows
        for row in rows:
            print(row.line(), file=sys.stderr, flush=True)
        content = {"machine": self.machine, "texts": self.texts, "caps": self.caps, **self.found}
        if self.folder is not None:
            save("gpu", {"device": self.device, **content, "rows": [asdict(row) for row in self.rows]}, self.folder)


class Budget:
    """The seconds of a run; each part has its share of what those before it left."""

    def __init__(self, seconds: float, shares: Sequence[float]) -> None:
        self._end = time.monotonic() + seconds
        self._left = sum(shares)

    def part(self, share: float) -> float:
        seconds = (self._end - time.monotonic()) * share / self._left
        self._left -= share
        return seconds


@contextlib.contextmanager
def processes(seconds: float, *sides: str, interprets: bool = False) -> Iterator[list[Worker]]:
    """Sides ("gpu_worker cap"), which are ended when the time is over. interprets: kernels, on the host."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"} if interprets else None
    workers = [Worker([sys.executable, "-m", *f"benchmarks.{side}".split()], environment) for side in sides]

    def end() -> None:
        for worker in workers:
            worker.kill()

    timer = threading.Timer(max(1.0, seconds), end)
    timer.start()
    try:
        yield workers
    finally:
        timer.cancel()
        end()  # at once: tens of GB are given back, and nothing is to be saved
        for worker in workers:
            worker.close()


class Parts:
    """Each part measures within its seconds, and reports its rows."""

    def __init__(self, report: Report, rounds: int) -> None:
        self._report, self._rounds = report, rounds
        self._device, self._is_small = report.device, report.device == "cpu"

    def machine(self, seconds: float) -> None:
        with processes(seconds, "gpu_worker cap") as (worker,):
            self._report.machine |= worker.call("machine", device=self._device, weights=list(FORMATS))
        print("\n".join(gpu_table.machine_lines(self._report.machine)), flush=True)

    def products(self, seconds: float) -> None:
        with processes(seconds, "gpu_kernels", interprets=self._is_small) as (worker,):
            product_turns(worker, self._run(seconds), self._report.found.setdefault("products", {}))

    def model(self, seconds: float) -> None:
        with processes(seconds + 5, "gpu_worker model", "gpu_peers loop", interprets=self._is_small) as (ours, theirs):
            ModelTurns(ours, theirs, self._run(seconds), self._report.found.setdefault("model", {})).measure()

    def long(self, seconds: float) -> None:
        options = {"seconds": 0.8 * seconds, "rounds": self._rounds, "small": self._is_small}
        with processes(seconds + 10, "gpu_worker long", interprets=self._is_small) as (worker,):
            found = worker.call("rows", device=self._device, **options)
        self._found("long", found, gpu_table.long_rows(found["depth"], found["tok_s"]))

    def speculation(self, seconds: float) -> None:
        options = {"seconds": 0.8 * seconds, "rounds": self._rounds, "small": self._is_small}
        with processes(seconds + 10, "gpu_worker speculation", interprets=self._is_small) as (worker,):
            found = worker.call("rows", device=self._device, **options)
        self._found("speculation", found, gpu_table.speculation_rows(found["rows"]))

    def texts(self, seconds: float) -> None:
        tokens, many_tokens = _TEXT_TOKENS[self._is_small]
        with processes(seconds, "gpu_worker texts") as (worker,):
            found = worker.call("compare", device=self._device, tokens=tokens, many_tokens=many_tokens)
        self._report.texts |= found
        self._report.add(gpu_table.text_rows(found))

    def cap(self, cap: Cap, seconds: float) -> None:
        beside, run = ["gpu_peers accelerate"] if cap.weights == "bf16" else [], self._run(seconds)
        with processes(seconds + 5, "gpu_worker cap", *beside) as (ours, *others):
            found = CapTurns(ours, others[0] if others else None, run).measure(cap)
        self._report.caps.append(found)
        self._report.add(gpu_table.cap_rows(cap.name, cap.weights, cap.num_bytes, found))

    def experts(self, name: str, cap_bytes: int, seconds: float) -> None:
        tokens, until = _EXPERTS_TOKENS[self._is_small], time.monotonic() + 0.9 * seconds
        options = {"weights": "int4-g64", "cap_bytes": cap_bytes, "small": self._is_small}
        with processes(seconds + 5, "gpu_worker experts") as (worker,):
            found = {"facts": worker.call("load", device=self._device, **options), "turns": []}
            found["peak"] = worker.call("peak")
            for seed in range(self._rounds + 1):  # the first one fills the slots
                if seed < 2 or time.monotonic() < until:
                    turn = {side: worker.call("decode", side=side, tokens=tokens, seed=seed) for side in _SIDES}
                    found["turns"].append(turn)
        found["turns"] = found["turns"][1:]
        self._report.found.setdefault("experts", {})[name] = found
        self._report.add(gpu_table.expert_rows(name, found))

    def _run(self, seconds: float) -> Run:
        return Run(self._device, time.monotonic() + seconds, self._rounds, self._report.add)

    def _found(self, part: str, found: dict[str, Any], rows: Sequence[Row]) -> None:
        self._report.found[part] = found
        self._report.add(rows)


def caps(arguments: argparse.Namespace) -> list[Cap]:
    """bf16 first: there the link's share does not depend on a kernel."""
    if arguments.small:
        return [Cap(_SMALL_CAP_BYTES, weights, "small", SHARE_OF_CAP, stretch_s=0.1) for weights in FORMATS]
    sizes = [int(cap * GB) for cap in arguments.caps or _CAPS_GB]
    return [
        Cap(size, weights, shape, SHARE_OF_CAP, stretch_s=1.0) for weights, shape in FORMATS.items() for size in sizes
    ]


def chosen_parts(arguments: argparse.Namespace, report: Report) -> list[tuple[str, float, Callable[[float], None]]]:
    """Names and shares of the time of the parts, and what they do with their seconds."""
    parts = Parts(report, arguments.rounds)
    chosen = [(name, share, getattr(parts, name)) for name, share in _SHARES.items() if name in arguments.parts]
    for cap in caps(arguments) if "caps" in arguments.parts else []:
        chosen.append((cap.name, _CAP + _CAP_GB * cap.num_bytes / GB, partial(parts.cap, cap)))
    sizes = sorted({cap.num_bytes for cap in caps(arguments)}) if "experts" in arguments.parts else []
    for size in sizes:
        name = f"experts, {size / GB:g} GB"
        chosen.append((name, _EXPERTS, partial(parts.experts, name, size)))
    return chosen


def run(arguments: argparse.Namespace, report: Report) -> None:
    parts = chosen_parts(arguments, report)
    budget = Budget(arguments.seconds, [share for _, share, _ in parts])
    for name, share, part in parts:
        started, seconds = time.monotonic(), budget.part(share)
        try:
            part(seconds)
        except Exception as error:  # of whatever kind: the other parts go on
            report.add([Row(name, "not measured", note=f"{type(error).__name__}: {error} (it had {seconds:.0f} s)")])
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def folder_of_results(name: str) -> Path:
    """Return the folder. Whether it can be written is found out before anything is measured."""
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(f"nothing can be written to {name!r}: {error.strerror}") from None
    return folder


def number(least: float, kind: type[int] | type[float] = float) -> Callable[[str], float]:
    def parsed(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least:g} on")
        return value

    return parsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="one cap of a few megabytes: whether it all works")
    parser.add_argument(
        "--caps",
        type=number(0.1),
        nargs="+",
        help="GB (1e9 bytes) of the card's memory, 8 12 24 where none is named; --small has one of its own",
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=" ".join(PARTS))
    parser.add_argument("--rounds", type=number(1, int), default=5)
    parser.add_argument(
        "--seconds", type=number(10), default=450, help="of measuring; beginning and ending take half a minute more"
    )
    parser.add_argument(
        "--out",
        type=folder_of_results,
        help=f"the folder of gpu.json, which is written anew; {RESULTS.name} of a card, none of a CPU",
    )
    arguments = parser.parse_args()
    if arguments.device == "cpu" and not arguments.small:
        parser.error("a CPU stands in for a card only with --small")
    if arguments.small and arguments.caps:
        parser.error("argument --caps: --small has a cap of its own")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "there is no GPU here that torch can use; localllm doctor says why, "
            "and a CPU stands in for it with --device cpu --small"
        )
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    folder = arguments.out or (RESULTS if arguments.device == "cuda" else None)
    report = Report(folder, arguments.device, {"system": machine()})
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"TMPDIR": home, "LOCALLLM_HOME": home, "LOCALLLM_CACHE": str(Path(home) / "cache")}
        try:
            run(arguments, report)
        except KeyboardInterrupt:
            print("interrupted" + ("; what was measured so far:" if report.rows else ""), file=sys.stderr)
            sys.exit(130)
        finally:
            if report.rows:
                print("\n".join(gpu_table.table(report.rows)))
                print(f"in {folder}/gpu.json" if folder else "not saved: --out names a folder", file=sys.stderr)


if __name__ == "__main__":
    main()
