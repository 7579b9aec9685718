"""A packed model of which some blocks stay in memory and the others pass through a ring at every forward."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from localllm.models.config import ModelConfig
from localllm.models.layout import BlockLayout, block_layouts
from localllm.models.packed import PackedModel
from localllm.offload.disk_stream import DiskStream
from localllm.offload.host_buffer import host_buffer
from localllm.offload.ring import Ring


class StreamedBlocks:
    """A BlockSource over a packed model, which must stay open as long as `stream` is used."""

    def __init__(self, packed: PackedModel, config: ModelConfig, names: Collection[str]) -> None:
        """names: of the blocks that are streamed. Raises CheckpointError, MemoryError where the ring has no room."""
        self._packed = packed
        packed.read_ahead_only(layout.name for layout in block_layouts(config) if layout.name not in names)
        files = [packed.streamed_file(layout) for layout in block_layouts(config) if layout.name in names]
        places = Ring.of([file.num_bytes for file in files])
        memory = host_buffer(places.num_bytes)
        self._places = {
            file.name: memory[begin : begin + file.num_bytes] for file, begin in zip(files, places.offsets, strict=True)
        }
        self.stream = DiskStream(files, places, memory)

    def tensors(self, layout: BlockLayout) -> dict[str, Tensor]:
        place = self._places.get(layout.name)
        return self._packed.tensors(layout) if place is None else self._packed.streamed_tensors(layout, place)

    def finish(self) -> None:
        self._packed.finish()
