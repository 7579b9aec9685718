"""What runs have learnt of a mixture's experts, in a small file beside the packed model. Nothing depends on its being
there, or whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from localllm.errors import CheckpointError
from localllm.models.packed_file import NewFile
from localllm.models.strict_json import JsonLimits, read_json_object
from localllm.offload.streaming.expert_uses import BINS

USES = "experts.json"
_KEY = "used_since"
_LIMITS = JsonLimits(size_bytes=1 << 16)
_MOST = 4_000_000  # wanted experts, from which on older ones count half: 10,000 tokens of 48 layers with 8 each


def kept_uses(directory: Path) -> list[int]:
    """Return the counts of all runs, as `ExpertUses` has them; zeros where none can be read."""
    found: object = None
    with suppress(CheckpointError):
        found = read_json_object(directory / USES, _LIMITS).get(_KEY)
    if not isinstance(found, list) or len(found) != BINS + 1:
        return [0] * (BINS + 1)
    return [count if type(count) is int and 0 <= count <= 2 * _MOST else 0 for count in found]


def keep_uses(directory: Path, counts: Sequence[int]) -> None:
    """Add the counts of a run, or of a part of one, to those that are kept. Nothing is kept where the disk refuses."""
    if not any(counts):
        return
    together = [kept + new for kept, new in zip(kept_uses(directory), counts, strict=True)]
    while sum(together) > _MOST:
        together = [count // 2 for count in together]
    with suppress(OSError), NewFile(directory / USES) as new:
        new.write(memoryview(json.dumps({_KEY: together}).encode()))
        new.publish()
