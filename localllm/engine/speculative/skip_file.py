"""What was learnt of a packed model's blocks, kept beside it: which of them it can do without."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from localllm.engine.speculative.layer_importance import Harm, Trial
from localllm.errors import LocalLLMError
from localllm.hub import ModelFiles
from localllm.hub.packed import packed_directory
from localllm.offload.planner.model_shape import ModelShape
from localllm.offload.planner.profile import write_whole

NAME = "skip-trials.json"
_VERSION = 1
_MOST_BYTES = 4 << 20
_TELLING = 32  # trials


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


def known_trials(files: ModelFiles | None, shape: ModelShape) -> list[Trial]:
    """files: where the model is on this disk, if it is."""
    if files is not None:
        with suppress(LocalLLMError):
            return read_trials(packed_directory(files, shape.weights))
    return []


def known_harm(files: ModelFiles | None, shape: ModelShape) -> dict[str, float]:
    """Of each of the model's blocks; {} before there are trials enough to place blocks by."""
    trials = known_trials(files, shape)
    return Harm([block.name for block in shape.blocks], trials).expected() if len(trials) >= _TELLING else {}


def _trial(entry: dict[str, object]) -> Trial:
    """Raises ValueError for what is none."""
    skipped, same, count = entry["skipped"], entry["same"], entry["count"]
    is_trial = isinstance(skipped, list) and isinstance(same, int) and isinstance(count, int) and 0 <= same <= count
    if not is_trial or not isinstance(skipped, list) or not all(isinstance(name, str) for name in skipped):
        raise ValueError(f"{entry} is no trial")
    return Trial(frozenset(skipped), int(str(same)), int(str(count)))
