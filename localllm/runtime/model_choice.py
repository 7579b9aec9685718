"""Which model to choose: what each takes to download and to run, how fast it would be here, and the best first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from localllm.config import ResolvedSettings, format_bytes, format_figure
from localllm.registry import BUILT_IN
from localllm.runtime.fit_check import Verdict, judge
from localllm.runtime.model_catalog import ModelRow, licence_text, row_fields

# Tokens a second from which an answer is written faster than most people read it: 250 words a minute are 6.
COMFORTABLE_TOK_S = 8.0
CHOICE_TITLES = ("  NAME", "DOWNLOAD", "MEMORY", "TOK/S", "CONTEXT", "LICENCE")
CHOICE_NUMBERS = CHOICE_TITLES[1:5]
_IN_ORDER = {"fits": 1, "offloads": 2, "unknown": 3, "too large": 4}


@dataclass(frozen=True)
class ModelChoice:
    """A model, and how it would run here; verdict: None where that is not known yet."""

    row: ModelRow
    verdict: Verdict | None

    @property
    def is_comfortable(self) -> bool:
        """Return whether all of it stays in memory and an answer is written faster than it is read."""
        verdict = self.verdict
        return verdict is not None and verdict.kind == "fits" and (verdict.tok_s or 0.0) >= COMFORTABLE_TOK_S

    @property
    def disk_bytes(self) -> int:
        """What has still to be fetched, and then packed beside it; 0 where the model is here."""
        memory_bytes = self.verdict.memory_bytes or 0 if self.verdict is not None else 0
        left_bytes = max(0, (self.row.download_bytes or 0) - self.row.partial_bytes)
        return 0 if self.row.is_here else left_bytes + memory_bytes

    @property
    def rank(self) -> tuple[int, float]:
        """Lower is better: what is comfortable, the largest first; then what fits, what is offloaded, what is not
        known and what does not fit, the fastest first."""
        if self.is_comfortable:
            return 0, -(self.row.parameters or 0.0)
        if self.verdict is None:
            return _IN_ORDER["unknown"], 0.0
        return _IN_ORDER[self.verdict.kind], -(self.verdict.tok_s or 0.0)

    @property
    def download_text(self) -> str:
        """Return what a pull has to fetch: "here", "3.1 GiB left", "14.5 GiB"."""
        if self.row.is_here:
            return "here"
        wanted = self.row.download_bytes
        if wanted is not None and self.row.partial_bytes:
            return f"{_size(max(0, wanted - self.row.partial_bytes))} left"
        return "" if wanted is None else _size(wanted)

    @property
    def memory_text(self) -> str:
        return _size(self.verdict.memory_bytes) if self.verdict and self.verdict.memory_bytes else ""

    @property
    def speed_text(self) -> str:
        """Return tokens a second: "12"; "no" where it does not fit, "?" where nobody can say."""
        if self.verdict is None:
            return ""
        if self.verdict.tok_s is None:
            return "no" if self.verdict.kind == "too large" else "?"
        return format_figure(self.verdict.tok_s, 2)

    @property
    def context_text(self) -> str:
        tokens = self.row.context or 0
        return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens or "")


def _size(num_bytes: int) -> str:
    """Return an amount in at most eight characters: 14.5 GiB, 961 MiB."""
    return format_bytes(num_bytes) if num_bytes >= 1 << 30 else f"{num_bytes >> 20} MiB"


def model_choices(
    rows: Sequence[ModelRow], resolved: ResolvedSettings, say: Callable[[str], None]
) -> list[ModelChoice]:
    """Return the models, the best first. Takes 40 ms a model, and seconds where the machine has to be measured, of
    which `say` hears before."""
    return in_order(ModelChoice(row, judge(row.name, resolved, say)) for row in rows)


def in_order(choices: Iterable[ModelChoice]) -> list[ModelChoice]:
    """Return the models, the best first; of equally good ones in the order in which they came."""
    return sorted(choices, key=lambda choice: choice.rank)


def best_of(choices: Iterable[ModelChoice]) -> ModelChoice | None:
    """Return the one to try first: the largest that is comfortable, whose licence need not be accepted on a web page,
    and that the disk has room for. None where there is no such model: the built-in one only shows how a model runs."""
    from localllm.hub.repo_cache import free_bytes
    from localllm.hub.settings import HubSettings

    room_bytes = free_bytes(HubSettings.from_environment().cache_dir)
    real = (choice for choice in choices if choice.row.name != BUILT_IN)
    open_to_all = (choice for choice in real if choice.row.is_here or not choice.row.gated)
    fitting = (choice for choice in open_to_all if choice.is_comfortable and choice.disk_bytes <= room_bytes)
    return min(fitting, key=lambda choice: choice.rank, default=None)


def choice_cells(choice: ModelChoice, *, is_best: bool) -> tuple[str, ...]:
    """Return a line of a table under CHOICE_TITLES."""
    name = f"{'*' if is_best else ' '} {choice.row.name}"
    figures = choice.download_text, choice.memory_text, choice.speed_text, choice.context_text
    return name, *figures, licence_text(choice.row.licence, gated=choice.row.gated)


def choice_fields(choice: ModelChoice) -> dict[str, Any]:
    """Return the fields of a model in the JSON forms."""
    here = None if choice.verdict is None else asdict(choice.verdict)
    return {**row_fields(choice.row), "download_bytes": choice.row.download_bytes, "here": here}
