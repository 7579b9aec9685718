"""What was learnt of a packed model's blocks, kept beside it: which of them it can do without."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from localllm.engine.speculative.harm import Trial
from localllm.offload.profile import write_whole

NAME = "skip-trials.json"
_VERSION = 1
_MOST_BYTES = 4 << 20


def read_trials(directory: Path) -> list[Trial]:
    """[] where nothing was learnt yet, or what was kept cannot be read."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        path = directory / NAME
        if path.stat().st_size > _MOST_BYTES:
            return []
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["version"] == _VERSION:
            return [_trial(entry) for entry in found["trials"]]
    return []


def write_trials(directory: Path, trials: Sequence[Trial]) -> None:
    """A disk that takes nothing is done without."""
    entries = [{"skipped": sorted(trial.skipped), "same": trial.same, "count": trial.count} for trial in trials]
    with suppress(OSError):
        write_whole(directory / NAME, json.dumps({"version": _VERSION, "trials": entries}))


def _trial(entry: dict[str, object]) -> Trial:
    """Raises ValueError for what is none."""
    skipped, same, count = entry["skipped"], entry["same"], entry["count"]
    is_trial = isinstance(skipped, list) and isinstance(same, int) and isinstance(count, int) and 0 <= same <= count
    if not is_trial or not isinstance(skipped, list) or not all(isinstance(name, str) for name in skipped):
        raise ValueError(f"{entry} is no trial")
    return Trial(frozenset(skipped), int(str(same)), int(str(count)))
