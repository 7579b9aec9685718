"""A packed model whose blocks rest in a device's memory, in the host's or on the disk, and are computed where a plan
says; what rests elsewhere tomorrow is moved, not loaded anew.

Two decoders share the bytes. `decode_model` is for steps of a few tokens: there the host computes blocks that it reads
faster than they could be copied. `prefill_model` is for prompts: the device computes everything, and what it does not
hold passes through its ring once for all tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from localllm.layers.linear import RowLookup
from localllm.models.block_layouts import block_layouts
from localllm.models.decoder import ALL_RESIDENT, AllResident, BlockStream, Decoder
from localllm.models.disk_embedding import DiskEmbedding
from localllm.models.expert_records import new_linear
from localllm.models.kept_uses import keep_uses
from localllm.models.layout import EMBED, EXPERTS, HEAD, BlockLayout
from localllm.models.load import BlockTensors, DecoderParts, Progress
from localllm.models.packed import PackedModel
from localllm.models.split_mlp import split_block, split_features
from localllm.offload.placement import BlockPlacement
from localllm.offload.streaming.card_slots import CardSlots
from localllm.offload.streaming.device_stream import DeviceStream, HostRun, Lane
from localllm.offload.streaming.disk_stream import DiskStream
from localllm.offload.streaming.expert_pool import ExpertPool
from localllm.offload.streaming.expert_uses import ExpertUses
from localllm.offload.streaming.host_buffer import host_buffer
from localllm.offload.streaming.pinned import Pinning
from localllm.offload.streaming.ring import ALIGN_BYTES, Ring

HOST = torch.device("cpu")


class _Rings(NamedTuple):
    """The rings through which blocks are streamed: places in the host's memory, and in the device's for either
    decoder."""

    host: dict[str, Tensor]
    decode: dict[str, Tensor]
    prefill: dict[str, Tensor]


class OffloadedModel:
    """The packed model must stay open as long as this is used. One forward at a time, of either decoder."""

    decode_model: Decoder
    prefill_model: Decoder
    many_rows: int  # of a forward, from which on `prefill_model` is faster

    def __init__(self, packed: PackedModel, parts: DecoderParts, accelerator: torch.device | None) -> None:
        """accelerator: the device beside the host, if there is one; blocks computed on the "gpu" are there."""
        self._packed = packed
        self._parts = parts
        self._device = accelerator or HOST
        self.has_device = accelerator is not None
        self._layouts = {layout.name: layout for layout in block_layouts(parts.config)}
        self._runs: dict[str, Tensor] = {}  # the content of each block that does not rest on the disk
        self._split: dict[str, tuple[int, BlockTensors]] = {}  # in two parts, with the features of the first
        self._embedding: DiskEmbedding | None = None  # the embedding, where its rows are read from the disk
        self._head_rows: DiskEmbedding | None = None  # the same of the head's
        self._disk: DiskStream | None = None
        self._from_disk: Tensor | None = None  # the host's memory that it reads into
        self._pool: ExpertPool | None = None  # of experts, where they rest on the disk
        self.expert_uses = ExpertUses()  # since the model was loaded; nothing while no experts have slots
        self._kept_uses = list(self.expert_uses.counts)
        self._kept_at = time.monotonic()
        self._slots: CardSlots | None = None  # of experts, where they rest in the host's memory
        self._shared: dict[str, dict[str, Tensor]] = {}  # of blocks with either, what all tokens share
        self._pinning = Pinning(self._device)
        self._lane = Lane(self._device)
        self.blocks: tuple[BlockPlacement, ...] = ()

    @property
    def directory(self) -> Path:
        """The folder of the packed model."""
        return self._packed.directory

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory that the blocks have, and the ring for those from the disk."""
        blocks = sum(block.num_bytes for block in self.blocks if block.tier == "ram")
        split = sum(block.num_bytes - block.device_bytes for block in self.blocks if block.exec == "split")
        held = sum(block.held_bytes for block in self.blocks)
        return blocks + split + held + (0 if self._from_disk is None else self._from_disk.nbytes)

    def __enter__(self) -> OffloadedModel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def place(
        self, blocks: Sequence[BlockPlacement], many_rows: int, progress: Progress = lambda _done, _total: None
    ) -> None:
        """Bring every block where it shall rest, and make the decoders anew: whoever has the old ones lets go before.

        Raises CheckpointError, and what an allocation raises where there is no room; may be called with less then.
        """
        self.release()
        self._pinning.set_aside(Ring.of([block.num_bytes for block in _from_disk(blocks)]).num_bytes)
        self._move(blocks, progress)
        self.blocks, self.many_rows = tuple(blocks), many_rows
        self._open_pool([block for block in blocks if block.held_bytes])
        rings, streams = self._streamed(blocks)
        self._make_slots([block for block in blocks if block.is_slotted])
        if blocks[0].tier == "disk" and self._embedding is None:
            self._embedding = self._packed.disk_embedding(self._layouts[EMBED])
        lookups = self._embedding if blocks[0].tier == "disk" else None, self._in_head(blocks[-1])
        self.decode_model = self._parts.assembled(
            [self._decode_tensors(block, rings) for block in blocks], streams[0], *lookups
        )
        self.prefill_model = self.decode_model
        if any(self._passes(block) and not _passes_in_steps(block) for block in blocks):
            self.prefill_model = self._parts.assembled(
                [self._prefill_tensors(block, rings) for block in blocks], streams[1], *lookups
            )

    def _in_head(self, head: BlockPlacement) -> RowLookup | None:
        """Return the token embedding where it is the head's matrix and the first block has another: where the head
        rests."""
        if self._parts.config.per_layer is None:
            return None
        layout = self._layouts[HEAD]
        (matrix,) = layout.matrices
        if head.tier != "disk":
            views = self._packed.views(layout, self._runs[HEAD])
            return new_linear(matrix, views, self._parts.recipe, self._parts.dtype, HEAD)
        if self._head_rows is None:
            self._head_rows = self._packed.disk_embedding(layout)
        return self._head_rows

    def release(self) -> None:
        """Let the decoders and the rings go; the blocks stay where they are."""
        for name in ("decode_model", "prefill_model"):
            self.__dict__.pop(name, None)
        self._lane.drain()
        if self._disk is not None:
            self._disk.close()
            self._disk = None
        self._slots = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self._from_disk is not None:
            self._pinning.remove(self._from_disk)
            self._from_disk = None

    def keep_uses(self, every_s: float = 0.0) -> None:
        """Keep what was learnt of the experts since the last time, unless that was less than `every_s` ago."""
        if time.monotonic() - self._kept_at < every_s:
            return
        counts, before = list(self.expert_uses.counts), self._kept_uses
        self._kept_uses, self._kept_at = counts, time.monotonic()
        keep_uses(self.directory, [count - kept for count, kept in zip(counts, before, strict=True)])

    def wait_until_pinned(self) -> int:
        """Wait until what is copied is registered with the driver, as far as it can be; return the number of runs."""
        return self._pinning.wait()

    def close(self) -> None:
        self.release()
        self.keep_uses()
        self._pinning.close()
        for lookup in (self._embedding, self._head_rows):
            if lookup is not None:
                lookup.close()
        self._embedding = self._head_rows = None

    # Bytes.

    def _move(self, blocks: Sequence[BlockPlacement], progress: Progress) -> None:
        """Move blocks: what is given up goes first, so that there is room for what comes."""
        for block in blocks:
            if block.exec != "split":
                self._split.pop(block.name, None)
            if not (block.held_bytes or block.is_slotted):
                self._shared.pop(block.name, None)
            if block.tier == "disk" and block.name in self._runs:
                self._pinning.remove(self._runs.pop(block.name))
        missing = [block.name for block in blocks if block.tier != "disk" and block.name not in self._runs]
        self._packed.read_ahead_only(missing)
        total, done = sum(block.num_bytes for block in blocks), 0
        for block in sorted(blocks, key=lambda block: block.tier == "vram"):
            if block.name in self._runs:
                self._bring(block)
        for block in blocks:
            if block.name in missing:
                self._bring(block)
            done += block.num_bytes
            progress(done, total)

    def _bring(self, block: BlockPlacement) -> None:
        """Bring a block to where it rests, which is not the disk."""
        home = self._device if block.tier == "vram" else HOST
        run = self._runs.get(block.name)
        if run is None:
            run = self._packed.content(self._layouts[block.name])
            if self._is_read_by_device(block):
                self._pinning.add(run)
        if run.device != home:
            moved = host_buffer(run.nbytes) if home == HOST else torch.empty_like(run, device=home)
            moved.copy_(run)
            if self._is_read_by_device(block):
                self._pinning.add(moved)
            self._pinning.remove(run)
            run = moved
        self._runs[block.name] = run
        if block.exec != "split":
            return
        layout = self._layouts[block.name]
        features = split_features(layout, self._parts.recipe, block.device_bytes / block.num_bytes)
        if self._split.get(block.name, (0,))[0] != features:
            views = self._packed.views(layout, run)
            cut = split_block(layout, views, self._parts.recipe, features, self._device)
            self._split[block.name] = features, cut

    # Streams.

    def _open_pool(self, blocks: Sequence[BlockPlacement]) -> None:
        """Make slots for the experts of these blocks, and bring what all tokens share of them."""
        for block in blocks:
            if block.name not in self._shared:
                self._shared[block.name] = self._packed.shared_tensors(self._layouts[block.name])
        slots = [(block.experts.slots, block.experts.num_bytes) for block in blocks if block.experts is not None]
        if not slots:
            return
        (record_bytes,) = {num_bytes for _, num_bytes in slots}
        count = sum(number for number, _ in slots)
        memory = host_buffer(count * record_bytes).view(count, record_bytes)
        self._pool = ExpertPool(
            [self._packed.expert_file(self._layouts[block.name]) for block in blocks], memory, self.expert_uses
        )

    def _make_slots(self, blocks: Sequence[BlockPlacement]) -> None:
        """Make slots on the device for the experts of these blocks, and bring what all tokens share of them."""
        homes = {}
        for block in blocks:
            views = dict(self._packed.views(self._layouts[block.name], self._runs[block.name]))
            homes[block.name] = views.pop(EXPERTS)
            if block.name not in self._shared:
                self._shared[block.name] = {name: tensor.to(self._device) for name, tensor in views.items()}
        if homes:
            count = sum(block.experts.slots for block in blocks if block.experts is not None)
            (record_bytes,) = {home.shape[1] for home in homes.values()}
            memory = torch.empty((count, record_bytes), dtype=torch.uint8, device=self._device)
            mixtures = {name: self._layouts[name].experts for name in homes}
            active = {name: experts.top_k for name, experts in mixtures.items() if experts is not None}
            self._slots = CardSlots(homes, memory, self._lane, active, self.expert_uses)

    def _passes(self, block: BlockPlacement) -> bool:
        """Return whether a block is copied to the device for a forward of many rows. An embedding's rows are looked
        up where it is, and only a few tokens of a prompt have logits: a head that the host computes is always
        computed there."""
        stays = block.name == EMBED or (block.name == HEAD and block.exec == "cpu")
        return self.has_device and block.tier != "vram" and not stays

    def _is_read_by_device(self, block: BlockPlacement) -> bool:
        """Return whether the device reads the block where it rests on the host: a kernel looks an embedding's rows
        up there by itself, but not those for each layer."""
        is_looked_up = block.name == EMBED and block.tier == "ram" and self._parts.config.per_layer is None
        return self._passes(block) or (is_looked_up and self.has_device)

    def _streamed(self, blocks: Sequence[BlockPlacement]) -> tuple[_Rings, tuple[BlockStream, BlockStream]]:
        from_disk = _from_disk(blocks)
        host: dict[str, Tensor] = {}
        if from_disk:
            files = [self._packed.streamed_file(self._layouts[block.name]) for block in from_disk]
            ring = Ring.of([file.num_bytes for file in files], 1 if self.has_device else ALIGN_BYTES)
            memory = self._from_disk = host_buffer(ring.num_bytes)
            self._pinning.add(memory, is_set_aside=True)
            host = _places(from_disk, ring, memory)
            self._disk = DiskStream(files, ring, memory, maps=not self.has_device)
        passing = [block for block in blocks if self._passes(block)]
        in_decode = [block for block in passing if _passes_in_steps(block)]
        if not passing:
            stream = self._disk or (ALL_RESIDENT if self._pool is None else AllResident(self._pool.clock))
            return _Rings(host, {}, {}), (stream, stream)
        rings = [Ring.of([block.num_bytes for block in some]) for some in (in_decode, passing)]
        memory = torch.empty(max(ring.num_bytes for ring in rings), dtype=torch.uint8, device=self._device)
        runs = {
            block.name: HostRun(block.name, host[block.name], from_disk=True)
            if block.tier == "disk"
            else HostRun(block.name, self._runs[block.name])
            for block in passing
        }
        decode, prefill = (
            DeviceStream([runs[block.name] for block in some], ring, memory, self._lane, self._disk)
            for some, ring in zip((in_decode, passing), rings, strict=True)
        )
        return _Rings(host, _places(in_decode, rings[0], memory), _places(passing, rings[1], memory)), (decode, prefill)

    # Tensors.

    def _decode_tensors(self, block: BlockPlacement, rings: _Rings) -> BlockTensors:
        layout = self._layouts[block.name]
        if block.name == EMBED and block.tier == "disk":
            return BlockTensors(layout, {})
        if block.exec == "split":
            return self._split[block.name][1]
        if block.held_bytes:
            return BlockTensors(layout, self._shared[block.name], pool=self._pool)
        if block.is_slotted:
            records = self._packed.views(layout, self._runs[block.name])[EXPERTS]
            return BlockTensors(layout, self._shared[block.name] | {EXPERTS: records}, slots=self._slots)
        if block.name in rings.decode:
            return self._passing(layout, rings.decode[block.name])
        if block.tier == "disk":
            return self._passing(layout, rings.host[block.name])
        return BlockTensors(layout, self._packed.views(layout, self._runs[block.name]))

    def _prefill_tensors(self, block: BlockPlacement, rings: _Rings) -> BlockTensors:
        place = rings.prefill.get(block.name)
        return self._decode_tensors(block, rings) if place is None else self._passing(self._layouts[block.name], place)

    def _passing(self, layout: BlockLayout, place: Tensor) -> BlockTensors:
        """Return a block's tensors: the matrices where they pass, the norms and biases where they stay."""
        run = self._runs.get(layout.name)
        if run is None:
            small = self._packed.small_tensors(layout)
        else:
            views = self._packed.views(layout, run)
            small = {name: views[name] for name in layout.small_tensors()}
        staying = {name: tensor.to(place.device) for name, tensor in small.items()}
        return BlockTensors(layout, self._packed.views(layout, place) | staying)


def _passes_in_steps(block: BlockPlacement) -> bool:
    """Return whether a block that passes does so in steps of a few tokens, too."""
    return block.exec == "gpu" and not block.is_slotted


def _from_disk(blocks: Sequence[BlockPlacement]) -> list[BlockPlacement]:
    """Return the blocks that pass through the host's ring: rows of the embedding are looked up one by one, and experts
    are read into slots."""
    return [block for block in blocks[1:] if block.tier == "disk" and not block.held_bytes]


def _places(blocks: Sequence[BlockPlacement], ring: Ring, memory: Tensor) -> dict[str, Tensor]:
    return {
        block.name: memory[begin : begin + block.num_bytes] for block, begin in zip(blocks, ring.offsets, strict=True)
    }
