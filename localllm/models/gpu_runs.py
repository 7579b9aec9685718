"""What a forward on a GPU computes in one go: one graph of launches each, where a graph can hold it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from localllm.models.decoder import Block
from localllm.models.gpu_slots import BlockPart
from localllm.models.layout import HEAD


@dataclass(frozen=True)
class Run:
    """Stages that are computed one after the other with nothing between them: EMBED, blocks or parts of them, HEAD.

    is_ours: by our kernels, so that a graph can hold it. is_streamed: one block, which has to be brought first."""

    stages: tuple[Block | BlockPart | str, ...]
    is_ours: bool
    is_streamed: bool

    @property
    def parts(self) -> Iterator[BlockPart]:
        return (stage for stage in self.stages if isinstance(stage, BlockPart))

    @property
    def ends_on_host(self) -> bool:
        """Whether the host has something to do before what follows."""
        last = self.stages[-1]
        return isinstance(last, BlockPart) and last.name != "end"


def joined_runs(runs: Iterable[Run]) -> list[Run]:
    """Join neighbours that are ours and not streamed, and between which the host has nothing to do."""
    joined: list[Run] = []
    for run in runs:
        last = joined[-1] if joined else run
        is_free = last.is_ours and run.is_ours and not last.is_streamed and not run.is_streamed
        if joined and is_free and not last.ends_on_host:
            joined[-1] = Run((*last.stages, *run.stages), True, False)
        else:
            joined.append(run)
    return joined


def without_head(runs: Sequence[Run]) -> list[Run]:
    stages = [tuple(stage for stage in run.stages if stage != HEAD) for run in runs]
    return [replace(run, stages=some) for run, some in zip(runs, stages, strict=True) if some]


def ended_by(stage: Block | BlockPart | str) -> Block | None:
    """Return the block that is done with this stage."""
    if isinstance(stage, BlockPart):
        return stage.block if stage.name == "end" else None
    return stage if isinstance(stage, Block) else None
