"""The model as it is placed now, and what gives way when memory that was there at the start is taken away."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from localllm.cache.kv_eviction import Eviction
from localllm.cache.kv_format import KVFormat
from localllm.cache.kv_pages import KVPages
from localllm.cache.layer_group import Spill
from localllm.cache.paged_kv import PagedKV
from localllm.engine.events import ignore
from localllm.engine.memory import OtherPrograms, is_device_out_of_memory, is_out_of_memory
from localllm.engine.runner import ModelRunner
from localllm.engine.step_types import Chunk
from localllm.errors import DoesNotFitError
from localllm.kernels.cpu_gemv import MAX_ROWS
from localllm.models.decoder import Decoder
from localllm.models.offloaded_model import HOST, OffloadedModel
from localllm.offload.placement import GRAPH_ROOMS, NEVER, BlockPlacement, demoted
from localllm.offload.planner.plan import Plan
from localllm.offload.streaming.disk_stream import StreamClock
from localllm.offload.streaming.expert_uses import ExpertUses

_KEEP_USES_S = 300.0  # a file of 200 bytes, written and synchronized in about 10 ms


def new_pages(
    model: Decoder,
    kv_format: KVFormat,
    spill: Spill | None = None,
    chosen_pages: int | None = None,
    eviction: Eviction | None = None,
) -> KVPages:
    """Return a KV cache for this model, each layer's part where its attention is computed. spill, chosen_pages,
    eviction: as `KVPages` has them."""
    config = model.config
    return KVPages(
        kv_format,
        windows=config.windows,
        devices=model.kv_devices,
        shapes=config.kv_shapes,
        dtype=model.dtype,
        state_shapes=config.state_shapes,
        state_devices=model.state_devices,
        spill=spill,
        chosen_pages=chosen_pages,
        eviction=eviction,
    )


class Residency:
    """model, runner: as they are until the next call of `move`, `settle` or `give_way`. They are lost where one of
    those failed, until `restore` succeeds."""

    model: Decoder
    runner: ModelRunner

    def __init__(
        self,
        model: Decoder,
        kv_format: KVFormat,
        batch_rows: int,
        placed: OffloadedModel | None = None,
        replan: Callable[[], Plan] | None = None,
        plan: Plan | None = None,
        note: Callable[[str], None] = ignore,
        spill: Spill | None = None,
        chosen_pages: int | None = None,
        eviction: Eviction | None = None,
    ) -> None:
        """Place a model.

        placed: what can move the blocks; `model` is its `decode_model` then.
        replan: makes the best plan in the memory of now.
        plan: the plan that the model was loaded by.
        note: called with what is worth a line.
        spill: where keys and values rest that memory has no room for.
        chosen_pages: that a token of an answer attends to; None: all.
        eviction: what leaves of the keys and values of a long sequence.
        """
        self.is_lost = False  # where a move failed, until `restore` succeeds
        self._note = note
        self.config, self.device = model.config, model.device
        self.placed = placed
        self.plan = plan  # that the model is placed by; None once something was moved or given up beside it
        self._planned = plan  # last
        self._has_given_up = False  # something, since it was planned
        self._replan = replan
        self._others = self._look_at_others() if placed is not None and placed.has_device else None
        self._batch_rows = batch_rows
        self._has_kv_on_host = False
        self._on_states: Callable[[Sequence[Chunk], Tensor], None] | None = None
        self._use(model)
        self.kv_pages = new_pages(model, kv_format, spill, chosen_pages, eviction)

    @property
    def weights(self) -> str:
        """The name of the weights' recipe."""
        return self.model.weights

    @property
    def kv_devices(self) -> Sequence[torch.device]:
        """Where each layer's keys and values are."""
        return [HOST] * len(self.model.kv_devices) if self._has_kv_on_host else self.model.kv_devices

    @property
    def blocks(self) -> Sequence[BlockPlacement]:
        """Where each block is; none where the model was not planned."""
        if self.placed is not None:
            return self.placed.blocks
        return () if self._planned is None else self._planned.blocks

    @property
    def expert_uses(self) -> ExpertUses:
        """What single tokens have wanted of the experts of which some have slots."""
        return ExpertUses() if self.placed is None else self.placed.expert_uses

    @property
    def stream_clock(self) -> StreamClock:
        """Return what streaming has taken so far, of blocks and of pages."""
        ring, clock = self.kv_pages.ring, self.model.stream.clock
        return replace(clock) if ring is None else clock + ring.clock

    @property
    def kv_host_bytes(self) -> int:
        """Bytes of the host's memory that keys and values may have by now."""
        return self.kv_pages.host_bytes + (self.kv_pages.nbytes if self.kv_pages.is_on_host else 0)

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory that blocks, keys and values have by now."""
        if self.placed is not None:
            return self.placed.host_bytes + self.kv_host_bytes
        return sum(block.num_bytes for block in self.blocks if block.tier == "ram") + self.kv_host_bytes

    @property
    def graph_bytes(self) -> int:
        """Bytes of a GPU's memory that graphs have by now, as a plan counts them."""
        planned = 0 if self._planned is None else self._planned.ledger.get("vram", {}).get("graphs", 0)
        runner: ModelRunner | None = self.__dict__.get("runner")  # none where it was lost
        return 0 if runner is None else runner.graphs.num_rooms * planned // GRAPH_ROOMS

    @property
    def is_native(self) -> bool:
        """Whether the CPU's native steps compute the model; from any thread, also while blocks move."""
        runner: ModelRunner | None = self.__dict__.get("runner")
        if runner is not None:
            self._is_native = runner.cpu_program is not None
        return self._is_native

    def new_kv(self, capacity: int) -> PagedKV:
        return PagedKV(self.kv_pages, capacity)

    def watch_states(self, on_states: Callable[[Sequence[Chunk], Tensor], None] | None) -> None:
        """Have the hidden states of each forward's tokens handed over, as `ModelRunner` does, wherever the model is."""
        self._on_states = self.runner.on_states = on_states

    def warm_up(self, measuring: Callable[[str], None]) -> None:
        """Compile what a GPU launches, so that no prompt waits for it; `measuring` is called when that begins."""
        if self.runner.is_fused:
            measuring("preparing the kernels for this model")
        self.runner.warm_up(self.new_kv)
        if self._others is not None:
            self._others.forget_growth()

    def move(self, blocks: Sequence[BlockPlacement]) -> None:
        """Place the blocks elsewhere from the next step on, and keys and values with them.

        Where there is too little memory for that, more of them go further down. Raises DoesNotFitError where nothing is
        left to give up, CheckpointError where a block cannot be read; the model is gone then, see `restore`.
        """
        assert self.placed is not None, "nothing can be moved"
        self.plan, self.is_lost = None, True
        asked: Sequence[BlockPlacement] | None = blocks
        while asked is not None:
            self.__dict__.pop("model", None)  # the old decoders hold the memory that the new ones need
            self.__dict__.pop("runner", None)
            try:
                self.placed.place(asked, self.placed.many_rows)
                break
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                on_device = is_device_out_of_memory(error)
                _give_back(error)
            self._has_given_up = True
            asked = self._demoted(asked, on_device)
        else:
            raise DoesNotFitError("the memory ran out", why="no block has room any more", fix="close other programs")
        self._use(self.placed.decode_model)
        self.is_lost = False
        self._place_kv()

    def restore(self) -> None:
        """Bring a model back that a failed `move` left without a place. Raises as `move` does."""
        if self.placed is not None and self.is_lost:
            self.move(self.placed.blocks)

    def settle(self) -> Plan | None:
        """Between two answers: plan anew where much more of a GPU's memory is free than before, or much less. A CPU's
        is in motion always: there only where something was given up. A model that is lost is planned anew in any case,
        also because torch may take no more of a GPU than the last plan had. Returns what was planned, if anything was;
        raises as `move` does."""
        if self.placed is None or self._replan is None:
            return None
        if not (self.is_lost or (self._has_given_up if self._others is None else self._others.have_changed())):
            return None
        plan = None
        with suppress(DoesNotFitError, MemoryError):  # it goes on as it is
            plan = self._replan()
        if plan is not None:
            self.take(plan)
        if self._others is not None:
            self._others = self._look_at_others()
        return plan

    def end_answers(self) -> None:
        """Look at the memory when no answer is being written any more, and keep what was learnt of the experts."""
        if self._others is not None:
            self._others.forget_little()
        if self.placed is not None:
            self.placed.keep_uses(_KEEP_USES_S)

    def take(self, plan: Plan) -> None:
        """Go on by another plan; where nothing can be moved, one with the same blocks. Where they are the same, what
        runs the model stays, with the graphs that it has captured. Raises as `move` does."""
        self._has_given_up, self._planned = False, plan
        self._batch_rows, self._has_kv_on_host = plan.batch_rows, False
        if self.placed is not None:
            self.placed.many_rows = plan.many_rows
        if self.placed is None or (plan.blocks == self.placed.blocks and not self.is_lost):
            self.runner.resize(plan.batch_rows, NEVER if self.placed is None else plan.many_rows)
            self.runner.graphs.restore()
            self._place_kv()
        else:
            self.move(plan.blocks)
        is_as_planned = self.placed is None or plan.blocks == self.placed.blocks
        self.plan = plan if is_as_planned and not self._has_kv_on_host else None

    def give_up_graphs(self, error: BaseException) -> bool:
        """Return whether a GPU's memory ran out and captured graphs were given up for it: where there is room later
        they are captured again, fewer of them."""
        gives_up = "runner" in self.__dict__ and is_device_out_of_memory(error) and self.runner.graphs.give_up()
        if gives_up:
            _give_back(error)
        return gives_up

    def give_way(self, error: BaseException, rows: int) -> bool:
        """Give up memory for a forward of `rows` tokens that found too little: graphs, then fewer tokens at once, then
        keys and values on the host, then blocks one tier down. Return whether the forward is worth another try; raises
        as `move`."""
        if self.give_up_graphs(error):
            return True
        _give_back(error)
        self.plan, self._has_given_up = None, True
        if rows > MAX_ROWS and self._batch_rows > MAX_ROWS:
            self._batch_rows = max(MAX_ROWS, min(self._batch_rows, rows) // 2)
            self.runner.resize(self._batch_rows, self.runner.many_rows)
            return True
        on_device = is_device_out_of_memory(error)
        if on_device and not self._has_kv_on_host and any(device != HOST for device in self.kv_devices):
            self._has_kv_on_host = True
            self.kv_pages.move(self.kv_devices, self.model.state_devices)
            _give_back(error)
            return True
        blocks = None if self.placed is None else self._demoted(self.placed.blocks, on_device)
        if blocks is None:
            return False
        self.move(blocks)
        return True

    def _place_kv(self) -> None:
        """Move keys and values to where they belong, or to the host where a GPU has no room for them."""
        try:
            self.kv_pages.move(self.kv_devices, self.model.state_devices)
        except (MemoryError, RuntimeError) as error:
            if not is_device_out_of_memory(error):
                raise
            _give_back(error)
            self._has_kv_on_host = self._has_given_up = True
            self.kv_pages.move(self.kv_devices, self.model.state_devices)

    def _demoted(self, blocks: Sequence[BlockPlacement], on_device: bool) -> list[BlockPlacement] | None:
        return demoted(blocks, "vram" if on_device else "ram", self.config.is_tied)

    def _look_at_others(self) -> OtherPrograms:
        return OtherPrograms(self.device, lambda: self.graph_bytes)

    def _use(self, model: Decoder) -> None:
        many, rows = (model, NEVER) if self.placed is None else (self.placed.prefill_model, self.placed.many_rows)
        self.model = model
        self.runner = ModelRunner(model, self._batch_rows, many, rows, note=self._note)
        self.runner.on_states = self._on_states


def _give_back(error: BaseException) -> None:
    """Free what a failed forward still holds, in the frames of its error and in torch's caches."""
    traceback.clear_frames(error.__traceback__)
    torch.cuda.empty_cache()  # nothing where there is no GPU
