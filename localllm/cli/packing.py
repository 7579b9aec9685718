"""Tells of a model that is being packed: how far it is, who else is at it, and what an interruption leaves behind."""

from __future__ import annotations

from localllm.cli.context import CliContext
from localllm.cli.output import ProgressLine
from localllm.config import format_bytes


class Packing:
    """The progress of a conversion, if there is one: nothing is said before it begins. Threads may share it."""

    def __init__(self, front: CliContext, label: str, *, again: str, is_first_use: bool) -> None:
        """label: "packing tiny to int4". again: what goes on after an interruption. is_first_use: it was not asked for
        by name, so that its place and size are told."""
        self._front = front
        self._label = label
        self._farewell = f"interrupted; what was packed is kept. To go on: {again}"
        self._is_first_use = is_first_use
        self._line: ProgressLine | None = None
        self._process = ""
        self._left = False

    def begin(self) -> None:
        """It is about to begin, as far as is known."""
        self._begun().show(f"{self._label} ...")

    def update(self, done: int, total: int) -> None:
        """`done` of `total` packed bytes are there."""
        is_first = self._line is None
        line = self._begun()
        if is_first and self._is_first_use:
            from localllm.hub.packed import packed_root

            line.interject(f"{self._label}, once: {format_bytes(total)} in {packed_root()}")
        line.update(done, total)

    def wait(self, process: str) -> None:
        """Another process packs the same model."""
        if process != self._process:
            self._process = process
            self._begun().interject(f"process {process} is packing it; waiting for that")

    def leave(self) -> None:
        """Nothing more is shown: the command is being left."""
        self._left = True
        if self._line is not None:
            self._line.clear()

    def end(self) -> None:
        """It is packed, or cannot be: what follows is something else."""
        if self._line is not None:
            self._line.clear()
            self._front.interrupts.farewell = ""

    def _begun(self) -> ProgressLine:
        if self._line is None:
            self._line = self._front.output.progress(self._label, plain_lines=not self._is_first_use)
            self._front.interrupts.farewell = self._farewell
            if self._left:
                self._line.clear()
        return self._line
