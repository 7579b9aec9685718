"""The memory that models share: which model makes room for another, and when an unused one leaves.

All of it happens on one event loop; what takes time is waited for elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import psutil

from localllm.config import format_bytes
from localllm.engine.engine_info import EngineFacts
from localllm.errors import BusyError, EngineStuckError, LocalLLMError
from localllm.hub.packed import is_whole, packed_directory
from localllm.offload.planner.machine_memory import free_bytes
from localllm.runtime.engine_client import EngineClient
from localllm.runtime.engine_handle import EngineHandle
from localllm.runtime.engine_process import Caps, Foreseen, foresee, grant
from localllm.runtime.served_model import ServedModel
from localllm.settings import Settings

if TYPE_CHECKING:
    from localllm.hub import ModelFiles

_SPARE_BYTES = 1 << 30  # that stay free beside files that are kept in memory
_SHARE = 0.9  # of the memory that is free at the start, as a model by itself would take
_LOOK_S = 0.2  # between two looks at a model that is to leave: programs that use it by its own socket may
_ROOM_S = 600.0  # for which a model waits for those before it to be done


class ResidentModels:
    """The models that are loaded, or may be."""

    def __init__(self, settings: Settings, idle_s: float | None, note: Callable[[str], None]) -> None:
        """
        settings: `ram` and `vram` are for all models together
        idle_s: for which an unused model stays; None: as long as its memory is not needed
        note: receives a line about what leaves, and why
        """
        self.models: list[ServedModel] = []
        self.turn = asyncio.Lock()  # held by the load under way; others follow in the order of arrival
        self.idle_s = idle_s
        self.is_closed = False
        self.evicted: list[tuple[ServedModel, str]] = []  # what made room since the last load; weights' formats
        self._settings = settings
        self._note = note
        self._ram_bytes = int(_SHARE * free_bytes())
        self._timers: dict[ServedModel, asyncio.TimerHandle] = {}
        self._ending: set[asyncio.Task[None]] = set()  # handles of models that were unloaded
        self._tasks: set[asyncio.Task[Any]] = set()

    # Leaving

    async def unload(self, model: ServedModel) -> None:
        """Unload at once; running answers end with an error."""
        self._forget_timer(model)
        handle, model.handle = model.handle, None
        if handle is not None:
            model.keep_s = self.idle_s
            if not handle.is_settled:
                handle.stop()  # nothing of a load is waited for
            task = asyncio.create_task(asyncio.to_thread(handle.close))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            await asyncio.shield(task)
            self._note(f"{model.name} is unloaded")

    async def wait_unloaded(self) -> None:
        """Wait until no process is ending: until then its memory counts as used."""
        while self._ending:
            await asyncio.wait(self._ending)

    async def leave(self, model: ServedModel) -> None:
        """Have a model leave as soon as it is idle."""
        model.keep_s = 0.0
        if not model.num_open:
            self._begin_to_expire(model)

    def touch(self, model: ServedModel) -> None:
        """Begin to count how long a model is not used: its last answer has ended."""
        model.last_used = time.monotonic()
        self._forget_timer(model)
        if model.keep_s is not None and model.handle is not None and not self.is_closed:
            self._expire_in(model, model.keep_s)

    def expires_at(self, model: ServedModel) -> float | None:
        """Return in seconds of `time.time` when the model leaves; None where it stays, or is not loaded."""
        if model.keep_s is None or model.engine_if_loaded is None:
            return None
        return time.time() + max(0.0, model.last_used + model.keep_s - time.monotonic())

    def begin(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do it in the background."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop alone would not keep it
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(consume_error)

    def _expire_in(self, model: ServedModel, seconds: float) -> None:
        self._forget_timer(model)
        loop = asyncio.get_running_loop()
        self._timers[model] = loop.call_later(seconds, self._begin_to_expire, model)

    def _begin_to_expire(self, model: ServedModel) -> None:
        self.begin(self._expire(model))

    async def _expire(self, model: ServedModel) -> None:
        async with self.turn:
            if self.is_closed or model.handle is None or model.keep_s is None:
                return
            is_idle = await self.is_idle(model)
            left_s = model.last_used + model.keep_s - time.monotonic()
            if is_idle and left_s <= 0:
                await self.unload(model)
            elif not model.num_open:  # it was used meanwhile, or a program uses it by its own socket
                self._expire_in(model, max(left_s, _LOOK_S))

    def _forget_timer(self, model: ServedModel) -> None:
        if (timer := self._timers.pop(model, None)) is not None:
            timer.cancel()

    async def is_idle(self, model: ServedModel) -> bool:
        """Return whether nothing uses the model, programs by its own socket included."""
        engine = model.engine_if_loaded
        if engine is None:  # it has gone: what waits for its answers waits for another engine
            return True
        if model.num_open:
            return False
        try:
            status = await asyncio.to_thread(engine.status)
        except EngineStuckError:  # it may be busy for others; if it is not, it is ended, and gone
            return False
        except LocalLLMError:
            return True
        model.last_used = max(model.last_used, time.monotonic() - status.idle_s)
        return status.is_idle and not model.num_open  # a request may have come meanwhile

    async def wait_idle(self, model: ServedModel) -> None:
        """Raises TimeoutError where that takes too long."""
        until = time.monotonic() + _ROOM_S
        while not await self.is_idle(model):
            if time.monotonic() > until:
                raise TimeoutError
            await asyncio.sleep(_LOOK_S)

    # Room for others

    async def caps(self) -> Caps:
        """Return the memory that the loaded models leave of what the user gives to all, or of what was free at the
        start. None where neither is to be shared: the process then finds what is free."""
        facts = [await self.facts(each) for each in self.models if each.engine_if_loaded is not None]

        def left(cap: int | None, tier: str) -> int | None:
            return None if cap is None else max(1, cap - sum(each.held_bytes(tier) for each in facts))

        # Models take what they were promised as they need it: what is free now is not what is left.
        ram = self._settings.ram if self._settings.ram is not None or not facts else self._ram_bytes
        return Caps(left(ram, "ram"), left(self._settings.vram, "vram"))

    async def agree(
        self, model: ServedModel, handle: EngineHandle, arrived: asyncio.Queue[Foreseen], settled: asyncio.Task[Any]
    ) -> None:
        """Make room until a model would be placed as if it were alone, or is, and let it load. The models that made
        room are added to `evicted`. Raises what keeps it from that: under a cap that it would not fit into by itself,
        before any other leaves."""
        settings = self._settings
        is_known = settings.ram is None
        while (what := await _first(arrived, settled)) is not None:
            assert isinstance(handle, EngineClient)
            others = [each for each in self.models if each is not model and each.handle is not None]
            if what.is_easy or not others:
                if what.error is not None:
                    raise what.error
                grant(handle, await self.caps())
            elif not is_known:
                is_known = True
                foresee(handle, Caps(settings.ram, settings.vram))
                alone = await _first(arrived, settled)
                if alone is not None and alone.error is not None:
                    raise alone.error
                foresee(handle, await self.caps())
            else:
                self.evicted.append(await self._make_room(model, what, others))
                foresee(handle, await self.caps())

    async def facts(self, model: ServedModel) -> EngineFacts:
        engine = model.engine_if_loaded
        with contextlib.suppress(LocalLLMError):
            if engine is not None:
                return await asyncio.to_thread(engine.facts)
        return EngineFacts(0, "", "")

    async def _make_room(
        self, model: ServedModel, what: Foreseen, others: Sequence[ServedModel]
    ) -> tuple[ServedModel, str]:
        """Unload the least recently used model, as soon as it is idle; return it, and its weights' format. Raises
        BusyError where that takes too long."""
        are_idle = {each: await self.is_idle(each) for each in others}  # which also finds out when they were used
        oldest = sorted(others, key=lambda each: each.last_used)
        victim = next((each for each in oldest if are_idle[each]), oldest[0])
        victim.is_leaving = True
        facts = await self.facts(victim)
        try:
            await self.wait_idle(victim)
        except TimeoutError:
            victim.is_leaving = False
            raise BusyError(f"there is no room for {model.name}", why=await self._shortage(what, others)) from None
        held = format_bytes(facts.held_bytes("ram"), 2)
        self._note(f"{victim.name} makes room for {model.name}: {held} of memory")
        await self.unload(victim)
        victim.is_leaving = False
        return victim, facts.weights

    async def _shortage(self, what: Foreseen, others: Sequence[ServedModel]) -> str:
        needs = ", ".join(f"{format_bytes(count, 2)} of {tier}" for tier, count in what.needs.items() if count)
        held = [f"{each.name} {format_bytes((await self.facts(each)).held_bytes('ram'), 2)}" for each in others]
        return f"it would take {needs or 'more than there is'}; {', '.join(held)} of memory are in use"


async def _first(arrived: asyncio.Queue[Foreseen], settled: asyncio.Task[Any]) -> Foreseen | None:
    """Return what a model foresees that is being loaded; None once it is settled."""
    getting = asyncio.create_task(arrived.get())
    await asyncio.wait({getting, settled}, return_when=asyncio.FIRST_COMPLETED)
    if getting.done():
        return getting.result()
    getting.cancel()
    return None


def consume_error(task: asyncio.Task[Any]) -> None:
    """Take a task's exception: what waited for the task was told, or has gone."""
    if not task.cancelled():
        task.exception()


def keep_warm(files: ModelFiles, weights: str) -> int:
    """Have the system read the files of a model in that format, where all have room in free memory: when it comes back,
    its disk is not waited for. Nobody's memory is taken for it: pages of the system's cache are given back at once.

    Return their bytes; 0 where they have no room, or nothing can be asked of this system.
    """
    if not hasattr(os, "posix_fadvise"):
        return 0
    packed = packed_directory(files, weights)
    folder = packed if is_whole(packed) else files.directory
    paths = [path for path in folder.glob("*.safetensors") if path.is_file()]
    with contextlib.suppress(OSError):
        num_bytes = sum(path.stat().st_size for path in paths)
        if num_bytes + _SPARE_BYTES > psutil.virtual_memory().available:
            return 0
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)
        return num_bytes
    return 0
