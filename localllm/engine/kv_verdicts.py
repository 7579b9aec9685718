"""What was found of a KV format on this machine, of which model and weights: kept, so that each is probed once."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from localllm.cache.kv_format import WIDER
from localllm.config import format_figure, user_directories
from localllm.engine.prefix_config import Computed
from localllm.offload.planner.profile import write_whole
from localllm.quant.dense import Dense

_VERSION = 1  # of what is kept, and of what coded pages hold
_MOST_KEPT = 500


@dataclass(frozen=True)
class Verdict:
    """kv: the narrowest format that changes little, of what was asked for and all wider ones. nats: by how much
    the one that was asked for changes what the model says."""

    kv: str
    nats: float


@dataclass(frozen=True)
class Asked:
    """What a verdict is of. kv: the format that was asked for, by its name."""

    computed: Computed
    dtype: torch.dtype
    kv: str

    @property
    def key(self) -> str:
        return " ".join((self.computed.source, self.computed.weights, str(self.dtype).removeprefix("torch."), self.kv))

    def verdict(self) -> Verdict | None:
        """What was found before; None where nothing was, or what was kept is unreadable."""
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            return _parsed(self.kv, _kept()[self.key])
        return None

    def keep(self, verdict: Verdict) -> None:
        """For later starts. A cache that cannot be written is done without."""
        if not self.computed.source:
            return
        kept: dict[str, Any] = {}
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            kept = {key: found for key, found in _kept().items() if key != self.key}
        last = dict(list(kept.items())[1 - _MOST_KEPT :])
        content = {"version": _VERSION, "verdicts": {**last, self.key: asdict(verdict)}}
        with suppress(OSError):
            write_whole(_path(), json.dumps(content, indent=1))

    def finding(self, verdict: Verdict) -> str:
        nats = format_figure(verdict.nats, 2) if math.isfinite(verdict.nats) else "more than 100"
        return f"{self.kv} keys and values change what this model says: KL {nats} nats"

    def shown(self, kv: str) -> str:
        """A format's name; dense pages are of what the model computes in."""
        return Dense(self.dtype).name if kv == "bf16" else kv


def _path() -> Path:
    return user_directories().cache / "kv_probes.json"


def _kept() -> Mapping[str, Any]:
    """Raises what a damaged file does."""
    found = json.loads(_path().read_text(encoding="utf-8"))
    if found["version"] != _VERSION:
        return {}
    verdicts: Mapping[str, Any] = dict(found["verdicts"])
    return verdicts


def _parsed(asked: str, found: Mapping[str, Any]) -> Verdict:
    """Raises ValueError for what is no verdict on this format."""
    kv, nats = found["kv"], float(found["nats"])
    if kv not in formats_from(asked) or math.isnan(nats):
        raise ValueError(f"{found} is no verdict on {asked}")
    return Verdict(kv, nats)


def formats_from(kv: str) -> list[str]:
    """The format and all that are wider, in order."""
    names = [kv]
    while names[-1] in WIDER:
        names.append(WIDER[names[-1]])
    return names
