"""The models of one server: which are loaded, what each may have of the memory, and which leaves when another is asked
for. All of it happens on the server's loop; what takes time is waited for elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from localllm import hub
from localllm.config import ResolvedSettings, format_bytes
from localllm.errors import (
    EngineClosedError,
    EngineGoneError,
    EngineStuckError,
    LocalLLMError,
    ModelChangedError,
    ModelNotFoundError,
)
from localllm.offload.planner.machine_memory import free_bytes
from localllm.runtime.engine_client import EngineClient
from localllm.runtime.engine_process import Caps, Foreseen, foresee, grant
from localllm.runtime.selection import Selection, locate, with_defaults
from localllm.runtime.warm_files import keep_warm
from localllm.server.errors import RequestError, busy
from localllm.server.grammar_checks import GrammarChecks
from localllm.server.metrics import Metrics
from localllm.server.served import Capacity, Served, own_name

if TYPE_CHECKING:
    from localllm.engine.engine_info import EngineFacts
    from localllm.engine.request import Pooling
    from localllm.hub import InstalledModel, ModelFiles
    from localllm.runtime.engine_handle import EngineHandle

T = TypeVar("T")

_PREPARING_THREADS = 2  # templates and tokenizers, while the loop goes on; as many again look at the disk
_SHARE = 0.9  # of the memory that is free when the server starts, as a model by itself would take
_AT_REST_S = 0.5  # for which files that were written are left alone, before they are read
_REST_WAIT_S = 10.0  # for which that is waited for
_LOOK_S = 0.2  # between two looks at a model that is to leave: programs that use it by its own socket may
_MOST_KEPT_S = 1e9  # thirty years: what is longer is for good, and may be more than a clock can tell
_ROOM_S = 600.0  # for which a model waits for those before it to be done
_NEAR = 0.7  # of 1: what is less alike is another model, not one that was misspelt
_MOST_NAMED = 8  # models, to who asked for one that there is not


class Launch(Protocol):
    def __call__(self, selection: Selection, caps: Caps, foreseen: Callable[[Foreseen], None]) -> EngineHandle:
        """Begins to load a model. foreseen: called on another thread; what is launched is an `EngineClient` then, and
        waits for an answer. One that does not call it loads at once."""
        ...


class Pool:
    """first: the model of who names none. also: others that are known by name; all that are on this disk can be had."""

    def __init__(
        self,
        first: Selection,
        resolved: ResolvedSettings,
        launch: Launch,
        capacity: Capacity,
        *,
        aliases: Sequence[str] = (),
        also: Sequence[Selection] = (),
        pooling: Pooling = "mean",
        idle_s: float | None = None,
        on_demand: bool = True,
        note: Callable[[str], None] = lambda _text: None,
    ) -> None:
        """resolved: the settings of others than the first, before a model's own defaults. aliases: more names of the
        first. idle_s: for which a model stays that nobody asks for; None: as long as its room is not needed. on_demand:
        others on this disk can be asked for. note: hears of what is loaded and unloaded."""
        self.capacity = capacity
        self.metrics = Metrics()
        self.trials = GrammarChecks(self.off_loop)
        self.pooling: Pooling = pooling
        self.started_at = time.time()
        self.idle_s = idle_s
        self._note = note
        self.models: list[Served] = []
        self.first = self._added(first, aliases)
        for each in also:
            self._added(each)
        self._ram_bytes = int(_SHARE * free_bytes())
        self._on_demand = on_demand
        self._resolved = resolved
        self._launch = launch
        self._turn = asyncio.Lock()  # of who loads, in the order in which they came
        self._loads: dict[Served, asyncio.Task[None]] = {}
        self._timers: dict[Served, asyncio.TimerHandle] = {}
        self._ending: set[asyncio.Task[None]] = set()  # of services that were unloaded
        self._left: list[tuple[Served, str]] = []  # for the one that is being loaded, and in which formats
        self._begun: set[asyncio.Task[None]] = set()
        self._is_closed = self._has_begun = False
        self._preparing = ThreadPoolExecutor(_PREPARING_THREADS, "localllm-prepare")
        self._looking = ThreadPoolExecutor(_PREPARING_THREADS, "localllm-look")

    # Which model

    async def find(self, name: str | None) -> Served:
        """None: the client leaves the choice to the server. Raises RequestError for a model that is not on this
        disk."""
        if name is None:
            return self.first
        bare = name.removesuffix(":latest")
        if (known := self.known(bare)) is not None:
            return known
        selection = await self.on_disk(lambda: self._installed(bare))
        if selection is None:
            raise await self.on_disk(lambda: self._not_found(name))
        if (known := self.known(bare)) is not None:  # somebody else has asked for it meanwhile
            return known
        return self._added(selection)

    def _added(self, selection: Selection, aliases: Sequence[str] = ()) -> Served:
        files = selection.files
        served = next((each for each in self.models if each.is_of(files)), None)
        if served is None:
            taken = {name.casefold() for each in self.models for name in each.names}
            served = Served(self, selection, aliases, taken)
            served.keep_s = self.idle_s
            self.models.append(served)
            if served.name != (own := own_name(selection)):
                self._note(f"{files.directory} is called {served.name} here: {own} is another model")
        return served

    async def model(self, name: str | None, keep_s: float | None = None) -> Served:
        """As `find`, when it is loaded. keep_s: for which it then stays without being asked for; None: as before.

        Raises as `find` and `Served.ready`.
        """
        served = await self.find(name)
        await self.make_ready(served, keep_s)
        return served

    async def make_ready(self, served: Served, keep_s: float | None = None) -> None:
        """As `model`, of one that was found."""
        if not self._on_demand and keep_s is not None:
            if keep_s == 0:
                why = "it is one of several replicas, which stay as long as the server runs"
                raise RequestError(400, "the model is not unloaded", why=why, param="keep_alive")
            keep_s = None
        await served.ready()
        if keep_s is not None:
            served.keep_s = keep_s if 0 <= keep_s <= _MOST_KEPT_S else None
            if not served.num_open:
                self.left_alone(served)

    async def find_own(self, word: str | None) -> Served:
        """As `find`, for this user's own programs: the word may be a folder, too. Raises ModelNotFoundError."""
        try:
            return await self.find(word)
        except RequestError:
            selection = await self.on_disk(lambda: with_defaults(self._resolved, locate(self._resolved, word)))
            return self._added(selection)

    async def find_files(self, word: str, directory: Path) -> Served | None:
        """The model of these files, for this user's own programs; None where the word leads to others here."""
        for each in self.models:
            if each.selection.files.directory.resolve() == directory:
                return each
        with contextlib.suppress(LocalLLMError):
            selection = await self.on_disk(lambda: with_defaults(self._resolved, locate(self._resolved, word)))
            if selection.files.directory.resolve() == directory:
                return self._added(selection)
        return None

    def known(self, name: str) -> Served | None:
        return next((each for each in self.models if each.has(name)), None)

    @property
    def is_starting(self) -> bool:
        """Whether the first model has not been loaded yet, or could not be. One whose process was ended on the way is
        loaded when it is asked for."""
        tried = self._loads.get(self.first)
        failure = tried.exception() if tried is not None and tried.done() and not tried.cancelled() else None
        return not self._has_begun and not isinstance(failure, EngineGoneError)

    @property
    def loaded(self) -> list[Served]:
        return [each for each in self.models if each.engine_if_loaded is not None]

    def others(self) -> list[InstalledModel]:
        """Whole models on this disk that nobody has asked for yet, and that can be asked for."""
        if not self._on_demand:
            return []
        known = {each.selection.files.directory for each in self.models}
        rows = [row for row in hub.list_models() if row.directory is not None and not row.partial_bytes]
        return [row for row in rows if row.directory not in known and self.known(row.name) is None]

    def _installed(self, name: str) -> Selection | None:
        """A client's word is no path to look at: names of models that are on this disk alone."""
        row = next((row for row in self.others() if row.is_called(name)), None)
        if row is None:
            return None
        with contextlib.suppress(ModelNotFoundError):
            return with_defaults(self._resolved, locate(self._resolved, row.name))
        return None

    def _not_found(self, name: str) -> RequestError:
        served = [name for each in self.models for name in each.names]
        names = {each.casefold(): each for each in (*served, *(row.name for row in self.others()))}
        near = difflib.get_close_matches(name[:200].casefold(), names, n=1, cutoff=_NEAR)
        first, more = ", ".join(list(names.values())[:_MOST_NAMED]), len(names) - _MOST_NAMED
        what, why = f"the model {name[:200]!r} is not served here", f"this server has {first}"
        why += f" and {more} more (GET /v1/models)" if more > 0 else ""
        fix = f"ask for {names[near[0]]!r}" if near else "ask for one of these, or start the server with --alias NAME"
        return RequestError(404, what, why=why, fix=fix, param="model", name="model_not_found")

    # Loading

    def adopt(self, service: EngineHandle) -> None:
        """The first model is loaded already, or on its way, and not by this."""
        self.first.service = service
        self._has_begun = True

    async def load(self, served: Served) -> None:
        """As `House` has it; it goes on where who asks for it has gone."""
        task = self._loads.get(served)
        if task is None or task.done():
            task = self._loads[served] = asyncio.create_task(self._in_turn(served))
            task.add_done_callback(_hear)
        await asyncio.shield(task)

    async def leave(self, served: Served) -> None:
        """As soon as nothing is asked of it."""
        served.keep_s = 0.0
        if not served.num_open:
            self._begin_to_expire(served)

    async def unload(self, served: Served) -> None:
        """At once; what is being answered ends with an error."""
        self._forget_timer(served)
        service, served.service = served.service, None
        if service is not None:
            served.keep_s = self.idle_s
            if not service.is_settled:
                service.stop()  # of a load nothing is waited for
            await asyncio.shield(self._end(service))
            self._note(f"{served.name} is unloaded")

    def _end(self, service: EngineHandle) -> asyncio.Task[None]:
        """Who loads waits for it: what the process has of the memory is counted until it has gone."""
        task = asyncio.create_task(asyncio.to_thread(service.close))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    async def _in_turn(self, served: Served) -> None:
        if await self.has_changed(served):
            await self._at_rest(served)
        async with self._turn:
            if self._is_closed:
                raise EngineClosedError("the server is shutting down")
            if served.engine_if_loaded is not None and await self.has_changed(served):
                await self._put_away(served)
            if served.is_leaving or served.engine_if_loaded is None:
                served.is_leaving = False
                await self._load(served)

    async def has_changed(self, served: Served) -> bool:
        """As `House` has it. Of a replica: no."""
        engine = served.engine_if_loaded
        if engine is None or not engine.contents or not self._on_demand:
            return False
        return await self._contents(served) != engine.contents

    async def _contents(self, served: Served) -> str:
        files = served.selection.files
        return await self.off_loop(lambda: hub.contents(hub.current(files).directory))

    async def _at_rest(self, served: Served) -> None:
        """Returns when the files of a model have been left alone. Raises ModelChangedError where they are not. Others
        are loaded meanwhile."""
        until, contents = time.monotonic() + _REST_WAIT_S, ""
        while contents != (contents := await self._contents(served)):
            if time.monotonic() > until:
                why = f"for {_REST_WAIT_S:.0f} s they have not been left alone"
                raise ModelChangedError(f"the files of {served.name} are being written", why=why, fix="ask again")
            await asyncio.sleep(_AT_REST_S)

    async def _put_away(self, served: Served) -> None:
        """Unloads what was loaded from files that are others now, as soon as nothing is asked of it. Raises
        RequestError where that takes too long."""
        served.is_leaving = True
        try:
            await self._until_idle(served, lambda: self._still_answers(served))
            self._note(f"the files of {served.name} have changed: it is loaded anew")
            keep_s = served.keep_s
            await self.unload(served)
            served.keep_s = keep_s
        finally:
            served.is_leaving = False

    async def _still_answers(self, served: Served) -> RequestError:
        return busy(
            f"{served.name} has changed on the disk", "answers of what it was are still being written", "loading"
        )

    async def _load(self, served: Served) -> None:
        while self._ending:
            await asyncio.wait(self._ending)
        if served.service is not None:  # it has ended, or was never loaded
            await asyncio.to_thread(served.service.close)
            served.service = None
        if self._on_demand:
            served.selection = await self.on_disk(lambda: self._selected(hub.current(served.selection.files)))
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[Foreseen]()

        def foreseen(what: Foreseen) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(arrived.put_nowait, what)

        service = self._launch(served.selection, await self._caps(), foreseen)
        served.service = service
        settled = asyncio.create_task(asyncio.to_thread(service.wait_loaded))
        try:
            await self._agree(served, service, arrived, settled)
            if await settled is None:
                raise self._stopped(served)
        except BaseException:
            served.service = None
            settled.add_done_callback(_hear)
            await asyncio.shield(asyncio.to_thread(service.close))
            raise
        self._has_begun |= served is self.first
        served.was = await self._facts(served)
        left, self._left = self._left, []
        for victim, weights in left:  # not before: the disk was the other's
            self._begin(self._keep_warm(victim, weights))
        self.left_alone(served)

    def _selected(self, files: ModelFiles) -> Selection:
        """With what the model's files recommend now. Raises CheckpointError."""
        return with_defaults(self._resolved, files)

    def _stopped(self, served: Served) -> Exception:
        """Why a load came to nothing that nobody else has ended."""
        if self._is_closed:
            return EngineClosedError("the server is shutting down")
        return busy(f"{served.name} was unloaded", "somebody stopped it while it was being loaded", "unloaded")

    async def _agree(
        self, served: Served, service: EngineHandle, arrived: asyncio.Queue[Foreseen], settled: asyncio.Task[Any]
    ) -> None:
        """Makes room until a model would be placed as if it were alone, or is, and lets it load. Raises what keeps it
        from that: under a cap that it would not fit into by itself, before any other leaves."""
        settings = self.first.selection.settings
        is_known = settings.ram is None
        while (what := await _first(arrived, settled)) is not None:
            assert isinstance(service, EngineClient)
            others = [each for each in self.models if each is not served and each.service is not None]
            if what.is_easy or not others:
                if what.error is not None:
                    raise what.error
                grant(service, await self._caps())
            elif not is_known:
                is_known = True
                foresee(service, Caps(settings.ram, settings.vram))
                alone = await _first(arrived, settled)
                if alone is not None and alone.error is not None:
                    raise alone.error
                foresee(service, await self._caps())
            else:
                await self._make_room(served, what, others)
                foresee(service, await self._caps())

    async def _make_room(self, served: Served, what: Foreseen, others: Sequence[Served]) -> None:
        """Unloads the one that nobody has asked for the longest, as soon as nothing is asked of it.

        Raises RequestError where that takes too long.
        """
        are_idle = {each: await self._is_idle(each) for each in others}  # which also finds out when they were used
        oldest = sorted(others, key=lambda each: each.last_used)
        victim = next((each for each in oldest if are_idle[each]), oldest[0])
        victim.is_leaving = True
        facts = await self._facts(victim)
        try:
            await self._until_idle(victim, lambda: self._no_room(served, what, others))
        except RequestError:
            victim.is_leaving = False
            raise
        held = format_bytes(facts.held_bytes("ram"), 2)
        self._note(f"{victim.name} makes room for {served.name}: {held} of memory")
        await self.unload(victim)
        victim.is_leaving = False
        self._left.append((victim, facts.weights))

    async def _until_idle(self, served: Served, refusal: Callable[[], Awaitable[RequestError]]) -> None:
        """Raises the refusal where that takes too long."""
        until = time.monotonic() + _ROOM_S
        while not await self._is_idle(served):
            if time.monotonic() > until:
                raise await refusal()
            await asyncio.sleep(_LOOK_S)

    async def _no_room(self, served: Served, what: Foreseen, others: Sequence[Served]) -> RequestError:
        return busy(f"there is no room for {served.name}", await self._shortage(what, others))

    async def _shortage(self, what: Foreseen, others: Sequence[Served]) -> str:
        """In numbers."""
        needs = ", ".join(f"{format_bytes(count, 2)} of {tier}" for tier, count in what.needs.items() if count)
        held = [f"{each.name} {format_bytes((await self._facts(each)).held_bytes('ram'), 2)}" for each in others]
        return f"it would take {needs or 'more than there is'}; {', '.join(held)} of memory are in use"

    async def _is_idle(self, served: Served) -> bool:
        """Also of what programs ask of it that use its own socket."""
        engine = served.engine_if_loaded
        if engine is None:  # it has gone, and who still waits for its answers waits for another
            return True
        if served.num_open:
            return False
        try:
            status = await asyncio.to_thread(engine.status)
        except EngineStuckError:  # it may be busy with what others ask; if it is not, it is ended, and gone
            return False
        except LocalLLMError:
            return True
        served.last_used = max(served.last_used, time.monotonic() - status.idle_s)
        return status.is_idle and not served.num_open  # somebody may have come meanwhile

    async def _facts(self, served: Served) -> EngineFacts:
        from localllm.engine.engine_info import EngineFacts

        engine = served.engine_if_loaded
        with contextlib.suppress(LocalLLMError):
            if engine is not None:
                return await asyncio.to_thread(engine.facts)
        return EngineFacts(0, "", "")

    async def _caps(self) -> Caps:
        """Of what the user lets this server have, or of what was free when it started, what the loaded models have not.
        None where neither is to be shared: the process then finds what is free."""
        settings = self.first.selection.settings
        facts = [await self._facts(each) for each in self.models if each.engine_if_loaded is not None]

        def left(cap: int | None, tier: str) -> int | None:
            return None if cap is None else max(1, cap - sum(each.held_bytes(tier) for each in facts))

        # What others have been promised they take as they need it: what is free now is not what is left.
        ram = settings.ram if settings.ram is not None or not facts else self._ram_bytes
        return Caps(left(ram, "ram"), left(settings.vram, "vram"))

    # Leaving

    def left_alone(self, served: Served) -> None:
        """As `House` has it: its time runs from now on."""
        served.last_used = time.monotonic()
        self._forget_timer(served)
        if served.keep_s is not None and served.service is not None and not self._is_closed:
            self._expire_in(served, served.keep_s)

    def _expire_in(self, served: Served, seconds: float) -> None:
        self._forget_timer(served)
        loop = asyncio.get_running_loop()
        self._timers[served] = loop.call_later(seconds, self._begin_to_expire, served)

    def _begin_to_expire(self, served: Served) -> None:
        self._begin(self._expire(served))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._begun.add(task)  # else nobody keeps it
        task.add_done_callback(self._begun.discard)
        task.add_done_callback(_hear)

    async def _keep_warm(self, served: Served, weights: str) -> None:
        if weights:  # else it had gone before it was known
            await self.on_disk(partial(keep_warm, served.selection.files, weights))

    def expires_at(self, served: Served) -> float | None:
        """In seconds of `time.time`; None: it stays, or is not loaded."""
        if served.keep_s is None or served.engine_if_loaded is None:
            return None
        return time.time() + max(0.0, served.last_used + served.keep_s - time.monotonic())

    async def _expire(self, served: Served) -> None:
        async with self._turn:
            if self._is_closed or served.service is None or served.keep_s is None:
                return
            is_idle = await self._is_idle(served)
            left_s = served.last_used + served.keep_s - time.monotonic()
            if is_idle and left_s <= 0:
                await self.unload(served)
            elif not served.num_open:  # it was asked for meanwhile, or a program uses it by its own socket
                self._expire_in(served, max(left_s, _LOOK_S))

    def _forget_timer(self, served: Served) -> None:
        if (timer := self._timers.pop(served, None)) is not None:
            timer.cancel()

    # The server's own

    @property
    def started_text(self) -> str:
        """When the server was started, as RFC 3339 has it."""
        return datetime.fromtimestamp(self.started_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    async def off_loop(self, work: Callable[[], T]) -> T:
        """What it gives, computed while the loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._preparing, work)

    async def on_disk(self, work: Callable[[], T]) -> T:
        """As `off_loop`, of what may wait for a disk: no prompt waits behind it."""
        return await asyncio.get_running_loop().run_in_executor(self._looking, work)

    def stop(self) -> None:
        """Ends what runs."""
        self._is_closed = True
        for each in self.models:
            if each.service is not None:
                each.service.stop()

    def close(self) -> None:
        """`stop`, and waits a moment for it. When the loop has ended."""
        self.stop()
        for pool in (self._preparing, self._looking):
            pool.shutdown(wait=False, cancel_futures=True)
        self.trials.close()
        for each in self.models:
            if each.service is not None:
                each.service.close(timeout_s=1.0)


async def _first(arrived: asyncio.Queue[Foreseen], settled: asyncio.Task[Any]) -> Foreseen | None:
    """What a model that is on its way says; None where it is settled."""
    said = asyncio.create_task(arrived.get())
    await asyncio.wait({said, settled}, return_when=asyncio.FIRST_COMPLETED)
    if said.done():
        return said.result()
    said.cancel()
    return None


def _hear(task: asyncio.Task[Any]) -> None:
    """Who waited for it was told what it raised, or has gone."""
    if not task.cancelled():
        task.exception()
