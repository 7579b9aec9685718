"""A checkpoint becomes a packed model: block by block, resumed where an earlier run stopped, whole or not there.

A block's file gets its name when it is whole and on the disk, the index when every block is. What an earlier run left
is kept if it is exactly what this one would write, as its own header and checksum tell.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Protocol

from torch import Tensor

from localllm.config import format_bytes
from localllm.errors import CheckpointError, DoesNotFitError, Fix, LocalLLMError
from localllm.hub.locks import exclusive
from localllm.hub.packed import PACKED_INDEX
from localllm.hub.repo_cache import free_bytes, sync_directory
from localllm.models.block_layouts import block_layouts, model_bytes
from localllm.models.block_source import CheckpointBlocks
from localllm.models.checkpoints.checkpoint import Checkpoint
from localllm.models.families import load_config
from localllm.models.layout import BlockLayout
from localllm.models.load import Progress
from localllm.models.packed import PackedPlan
from localllm.models.packed_file import TEMPORARY, NewFile, PackedFile, read_index, write_block
from localllm.models.stored_matrices import blocks_at_once
from localllm.offload.streaming.host_buffer import give_back_freed
from localllm.quant.recipe import Recipe

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SLACK_BYTES = 1 << 20  # the index, and what a file system needs for itself


def convert(
    source_directory: Path,
    target: Path,
    recipe: Recipe,
    source: str,
    progress: Progress = lambda _done, _total: None,
    waiting: Callable[[str], None] = lambda _process: None,
    require_memory: Callable[[int], None] = lambda _bytes: None,
    *,
    model: str = "MODEL",
) -> None:
    """Make, finish or mend the packed model in `target`. source: identifies the checkpoint in `source_directory`.

    progress(done_bytes, total_bytes), in packed bytes, hears of every matrix. waiting(process id) is called again and
    again while another process converts into `target`. require_memory(bytes) hears, before anything is written, of the
    most that will be held at once beside the program, and may raise. model: the name in commands.

    Raises CheckpointError for a checkpoint that is not whole or holds a NaN, of which nothing is kept; DoesNotFitError
    where the disk is too small, LocalLLMError where it fails: then the blocks that were finished serve the next call.
    """
    config = load_config(source_directory)
    with Checkpoint.open(source_directory, config.stored) as checkpoint:
        blocks = CheckpointBlocks(checkpoint, config, recipe)
        blocks.check()
        pack(blocks, PackedPlan(blocks.config, recipe, source, model), target, progress, waiting, require_memory)


class BlockParts(Protocol):
    def parts(self, layout: BlockLayout) -> Iterator[dict[str, Tensor]]:
        """Yield the block's tensors as BlockSource has them, in a few pieces and in the order of the layout."""

    def held_bytes(self, layout: BlockLayout) -> int:
        """Return the most bytes that are held at once while the parts are read."""


def pack(
    blocks: BlockParts,
    plan: PackedPlan,
    target: Path,
    progress: Progress = lambda _done, _total: None,
    waiting: Callable[[str], None] = lambda _process: None,
    require_memory: Callable[[int], None] = lambda _bytes: None,
) -> None:
    """Do as `convert`, from blocks of any origin."""
    conversion = _Conversion(blocks, plan, target, progress, require_memory)

    def report(process: str) -> None:
        waiting(process)
        conversion.report_present()

    try:
        with exclusive(target, report):
            conversion.run()
    except OSError as error:
        raise _disk_error(error, target, plan.model, conversion.missing_bytes) from error


class _EndedError(Exception):
    """Another block has failed, or the user has interrupted."""


class _Conversion:
    """One process's work in a folder that it holds. Raises OSError for what the disk refuses."""

    def __init__(
        self,
        blocks: BlockParts,
        plan: PackedPlan,
        target: Path,
        progress: Progress,
        require_memory: Callable[[int], None],
    ) -> None:
        self._blocks = blocks
        self._plan = plan
        self._target = target
        self._progress = progress
        self._require_memory = require_memory
        self._layouts = block_layouts(plan.config)
        self._done_bytes, self._total_bytes = 0, model_bytes(plan.config, plan.recipe)
        self._lock = Lock()
        self._is_ending = False
        # That are still to be written, the index among them.
        self.missing_bytes = sum(file.file_bytes for file in plan.files.values()) + _SLACK_BYTES

    def report_present(self) -> None:
        """Report the progress of another process, by the blocks that have their names."""
        present = (layout for layout in self._layouts if self._path(layout).exists())
        self._progress(sum(layout.nbytes(self._plan.recipe) for layout in present), self._total_bytes)

    def run(self) -> None:
        for path in self._target.iterdir():  # only who holds the folder writes any: these are of processes that died
            if TEMPORARY.fullmatch(path.name):
                path.unlink()
        checksums = {}  # of blocks that are there, whole and undamaged
        for layout in self._layouts:
            checksum = self._file(layout).checksum_of(self._path(layout))
            if checksum is not None:
                checksums[layout.name] = checksum
                self.missing_bytes -= self._file(layout).file_bytes
                self._advance(layout.nbytes(self._plan.recipe))
        missing = [layout for layout in self._layouts if layout.name not in checksums]
        with suppress(CheckpointError):
            if not missing and read_index(self._target) == self._plan.index(checksums):
                return
        held_bytes = max((self._blocks.held_bytes(layout) for layout in missing), default=0)
        self._require_memory(blocks_at_once(self._plan.recipe) * held_bytes)
        self._discard(missing)
        if self.missing_bytes > free_bytes(self._target):
            raise _no_space(self._target, self.missing_bytes)
        try:
            checksums |= self._write(missing)
        except CheckpointError:
            # What was made of it before may be wrong as well, and files that are fetched anew are of the same revision.
            self._discard(self._layouts)
            raise
        with NewFile(self._target / PACKED_INDEX) as new:
            new.write(memoryview(json.dumps(self._plan.index(checksums), indent=1).encode()))
            new.publish()

    def _write(self, missing: Sequence[BlockLayout]) -> dict[str, str]:
        """Write these blocks; return their checksums by their names. Ends within a part where it is interrupted."""
        with ThreadPoolExecutor(blocks_at_once(self._plan.recipe), thread_name_prefix="pack") as writers:
            futures = {layout.name: writers.submit(self._write_block, layout) for layout in missing}
            try:
                wait(futures.values(), return_when=FIRST_EXCEPTION)
            finally:
                self._is_ending = True
                writers.shutdown(cancel_futures=True)
        errors = [error for future in futures.values() if not future.cancelled() and (error := future.exception())]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, _EndedError))
        return {name: future.result() for name, future in futures.items()}

    def _write_block(self, layout: BlockLayout) -> str:
        file = self._file(layout)
        try:
            checksum = write_block(file, self._target, self._parts(layout), self._advance)
        except BaseException:
            self._is_ending = True  # before this thread begins the next block
            raise
        with self._lock:
            self.missing_bytes -= file.file_bytes
        return checksum

    def _parts(self, layout: BlockLayout) -> Iterator[dict[str, Tensor]]:
        for part in self._blocks.parts(layout):
            if self._is_ending:
                raise _EndedError
            yield part

    def _discard(self, layouts: Iterable[BlockLayout]) -> None:
        (self._target / PACKED_INDEX).unlink(missing_ok=True)
        for layout in layouts:
            self._path(layout).unlink(missing_ok=True)
        sync_directory(self._target)

    def _advance(self, num_bytes: int) -> None:
        give_back_freed()  # of the slabs of a matrix, the C library would keep up to 100 MB beside the next one
        with self._lock:
            self._done_bytes += num_bytes
            self._progress(self._done_bytes, self._total_bytes)

    def _file(self, layout: BlockLayout) -> PackedFile:
        return self._plan.files[layout.name]

    def _path(self, layout: BlockLayout) -> Path:
        return self._target / self._file(layout).file_name


def _disk_error(error: OSError, target: Path, model: str, missing_bytes: int) -> LocalLLMError:
    if error.errno in _NO_SPACE:
        return _no_space(target, missing_bytes, f"{error.strerror}: ")
    why = f"{error.strerror or error}; what was finished is kept"
    is_in_the_way = isinstance(error, IsADirectoryError)  # of a block's name
    fix = Fix.command("rm", "--packed", model) if is_in_the_way else Fix.command("doctor")
    return LocalLLMError(f"{error.filename or target} cannot be written", why=why, fix=fix)


def _no_space(target: Path, missing_bytes: int, reason: str = "") -> DoesNotFitError:
    sizes = f"{format_bytes(missing_bytes, 2)} more are needed, {format_bytes(free_bytes(target), 2)} are free"
    return DoesNotFitError(
        f"the packed model does not fit on the disk of {target}",
        why=f"{reason}{sizes}; what was finished is kept",
        fix="free space there (`localllm list` shows what takes it), or set LOCALLLM_CACHE=/a/larger/disk",
    )
