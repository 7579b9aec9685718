"""How long the quick commands take to start, beside a bare interpreter: `python -m benchmarks.startup`.

The last line of stdout is JSON. Budget: 0.3 s for each on an idle machine.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time

ROUNDS = 5
COMMANDS = {
    "bare python": ["-c", "pass"],
    "localllm --help": ["-m", "localllm", "--help"],
    "localllm run --help": ["-m", "localllm", "run", "--help"],
    "localllm list": ["-m", "localllm", "list"],
    "completion": ["-m", "localllm"],
}
COMPLETION = {"_LOCALLLM_COMPLETE": "complete_bash", "COMP_WORDS": "localllm run mis", "COMP_CWORD": "2"}


def main() -> None:
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS + 1):  # the first is the warm-up; the commands take turns
        for name in COMMANDS:
            seconds[name].append(_time(name))
    report = {}
    for name, values in seconds.items():
        median, low, high = statistics.median(values[1:]), min(values[1:]), max(values[1:])
        report[name] = {"median_s": round(median, 3), "min_s": round(low, 3), "max_s": round(high, 3)}
        print(f"{name:<20} {median:.3f} s  ({low:.3f} to {high:.3f})")
    print(json.dumps(report))


def _time(name: str) -> float:
    completing = COMPLETION if name == "completion" else {}
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, *COMMANDS[name]],
        env={**os.environ, **completing},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
