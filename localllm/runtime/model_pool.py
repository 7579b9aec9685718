"""The models of one server: which there are, by which names, and how one is loaded that is asked for.

All of it happens on one event loop; what takes time is waited for elsewhere. `resident_models` knows which
model leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from localllm import hub
from localllm.config import ResolvedSettings
from localllm.errors import (
    BugError,
    BusyError,
    EngineClosedError,
    EngineGoneError,
    Fix,
    LocalLLMError,
    ModelChangedError,
    ModelNotFoundError,
    ModelUnusableError,
    SettingsError,
)
from localllm.hub.names import NAME_LIMIT
from localllm.registry import load_registry
from localllm.runtime.engine_handle import EngineHandle
from localllm.runtime.engine_process import Caps, Foreseen
from localllm.runtime.presets import Preset, find_preset, preset_names
from localllm.runtime.resident_models import ResidentModels, consume_error, keep_warm
from localllm.runtime.selection import Selection, renewed, selected, told_of, with_defaults, within_context
from localllm.runtime.served_adapters import GivenAdapter, ServedAdapters
from localllm.runtime.served_model import AskedModel, ServedModel, own_name
from localllm.settings import MAX_ADAPTER_SCALE

if TYPE_CHECKING:
    from localllm.engine.engine_info import LoadedEngine
    from localllm.hub import InstalledModel
    from localllm.hub.adapter_files import AdapterFiles

T = TypeVar("T")

LOAD_WAIT_S = 120.0  # for which a request waits for its model; libraries give up after 60 to 600 s of silence
_PREPARING_THREADS = 2  # templates and tokenizers, while the loop goes on; as many again look at the disk
_AT_REST_S = 0.5  # for which files that were written are left alone, before they are read
_REST_WAIT_S = 10.0  # for which that is waited for
_MOST_KEPT_S = 1e9  # thirty years: what is longer is for good, and may be more than a clock can tell
_NEAR = 0.7  # of 1: a name that is less alike is another model's, not a misspelt one
_MOST_NAMED = 8  # models, in the error about an unknown one


# Begins to load a model. What it is given is called on another thread with what the model foresees; the handle is an
# `EngineClient` then, and waits for an answer. A handle that foresees nothing loads at once.
LaunchEngine = Callable[[Selection, Caps, Callable[[Foreseen], None]], EngineHandle]


class ModelPool:
    """The models of one server. first: the model of requests that name none."""

    def __init__(
        self,
        first: Selection,
        resolved: ResolvedSettings,
        launch: LaunchEngine,
        *,
        preset: str | None = None,
        aliases: Sequence[str] = (),
        also: Sequence[Selection] = (),
        adapters: Sequence[tuple[AdapterFiles, float]] = (),
        idle_s: float | None = None,
        on_demand: bool = True,
        note: Callable[[str], None] = lambda _text: None,
    ) -> None:
        """
        resolved: the settings of other models than the first, before a model's own defaults
        preset: of the first model, which requests that name no model ask for
        aliases: more names of the first
        also: others that are known by name
        adapters: of the first, and what multiplies each
        idle_s: as `ResidentModels` has it
        on_demand: all models of this disk can be asked for
        note: receives a line about what is loaded and unloaded
        """
        self.residents = ResidentModels(first.settings, idle_s, note)
        self.models = self.residents.models
        self.adapters = ServedAdapters()
        self.started_at = time.time()
        self.on_demand = on_demand
        self.preset = preset
        self._note = note
        self.first = self._added(first, aliases)
        for each in also:
            self._added(each)
        for files, scale in adapters:
            self.adapters.add(GivenAdapter(files, scale, self.first))
        self._resolved = resolved
        self._launch = launch
        self._loads: dict[ServedModel, asyncio.Task[None]] = {}
        self._has_begun = False
        self._preparing = ThreadPoolExecutor(_PREPARING_THREADS, "localllm-prepare")
        self._looking = ThreadPoolExecutor(_PREPARING_THREADS, "localllm-look")

    # Which model

    async def asked(self, name: str | None) -> AskedModel:
        """Return the model of that name, or of the preset of that name, perhaps with an adapter behind it; None: what
        the server was started with. Raises ModelNotFoundError for one that is not on this disk, and as `preset_of`."""
        if name is None or ":" not in name or self.known(name.removesuffix(":latest")) is not None:
            return await self._asked(name)
        for is_told in (True, False):
            for adapted in await self.on_disk(partial(self.adapters.splits, name, is_told=is_told)):
                with contextlib.suppress(ModelNotFoundError):
                    asked = await self._asked(adapted.base)
                    setting = self.adapters.setting(asked.served, adapted)
                    if setting is not None:
                        return asked.with_adapter(adapted.written, setting)
        try:
            return await self._asked(name)
        except ModelNotFoundError as error:
            raise await self.on_disk(lambda: self._no_adapter(name)) or error from None

    def _no_adapter(self, name: str) -> ModelNotFoundError | None:
        """Return the error of a served model's name with what is no adapter behind it; None for any other name."""
        base, model = name[:NAME_LIMIT], None
        while model is None:
            base, colon, _ = base.rpartition(":")
            if not colon:
                return None
            model = self.known(base.removesuffix(":latest"))
        wanted, names = name[len(base) + 1 :], self.adapters.of(model)
        near = difflib.get_close_matches(wanted[:200].casefold(), names, n=1, cutoff=_NEAR)
        what, why = f"{base} has no adapter {wanted[:200]!r} here", f"it has {', '.join(names) or 'none'}"
        if wanted.rpartition(":")[0] in names:
            why += f"; a scale is a number from -{MAX_ADAPTER_SCALE:g} to {MAX_ADAPTER_SCALE:g}"
        fix = f"ask for {f'{base}:{near[0]}'!r}" if near else "GET /v1/models lists what can be asked for"
        return ModelNotFoundError(what, why=why, fix=fix)

    async def _asked(self, name: str | None) -> AskedModel:
        name = self.preset if name is None else name
        known = self.first if name is None else self.known(name.removesuffix(":latest"))
        if name is None or known is not None or not self.on_demand:
            served = known or await self._found(name or "")
            return AskedModel(served, served.selection)
        preset = await self.on_disk(lambda: self.preset_of(name))
        if preset is None:
            served = await self._found(name)
            return AskedModel(served, served.selection)
        served = self.known(preset.model) or await self.find_own(preset.model)
        files = served.selection.files
        chosen = await self.on_disk(lambda: with_defaults(preset.over(self._resolved), files))
        return AskedModel(served, replace(chosen, preset=preset))

    async def find(self, name: str | None) -> ServedModel:
        """Return the model that is asked for. Raises as `asked`."""
        return (await self.asked(name)).served

    async def _found(self, name: str) -> ServedModel:
        """Return the model of that name, which is not known yet."""
        bare = name.removesuffix(":latest")
        selection = await self.on_disk(lambda: self._installed(bare))
        if selection is None:
            raise await self.on_disk(lambda: self._not_found(name))
        if (known := self.known(bare)) is not None:  # another request has asked for it meanwhile
            return known
        return self._added(selection)

    def _added(self, selection: Selection, aliases: Sequence[str] = ()) -> ServedModel:
        files = selection.files
        model = next((each for each in self.models if each.is_of(files)), None)
        if model is None:
            taken = {name.casefold() for each in self.models for name in each.names}
            model = ServedModel(selection, aliases, taken)
            model.keep_s = self.residents.idle_s
            self.models.append(model)
            if model.name != (own := own_name(selection)):
                self._note(f"{files.directory} is called {model.name} here: {own} is another model")
        return model

    async def find_own(self, word: str | None) -> ServedModel:
        """As `find`, for this user's own programs: the word may be a folder, too."""
        try:
            return await self.find(word)
        except ModelNotFoundError:
            selection = await self.on_disk(lambda: selected(self._resolved, word))
            return self._added(selection)

    async def find_files(self, word: str, directory: Path) -> ServedModel | None:
        """Return the model of these files, for this user's own programs; None where the word leads to others here."""
        for each in self.models:
            if each.selection.files.directory.resolve() == directory:
                return each
        with contextlib.suppress(LocalLLMError):
            selection = await self.on_disk(lambda: selected(self._resolved, word))
            if selection.files.directory.resolve() == directory:
                return self._added(selection)
        return None

    def known(self, name: str) -> ServedModel | None:
        return next((each for each in self.models if each.has(name)), None)

    @property
    def is_starting(self) -> bool:
        """Whether the first model has not been loaded yet, or could not be. One whose process was ended on the way is
        loaded when it is asked for."""
        tried = self._loads.get(self.first)
        failure = tried.exception() if tried is not None and tried.done() and not tried.cancelled() else None
        return not self._has_begun and not isinstance(failure, EngineGoneError)

    @property
    def loaded(self) -> list[ServedModel]:
        return [each for each in self.models if each.engine_if_loaded is not None]

    def others(self) -> list[InstalledModel]:
        """Return whole models on this disk that can be asked for, and have not been yet."""
        if not self.on_demand:
            return []
        known = {each.selection.files.directory for each in self.models}
        rows = [row for row in hub.list_models() if row.directory is not None and not row.partial_bytes]
        return [row for row in rows if row.directory not in known and self.known(row.name) is None]

    def preset_of(self, name: str) -> Preset | None:
        """Return the preset of that name; None where there is none, or a model is called so. Reads the disk. Raises
        ModelUnusableError for one that cannot be understood: where its file is, clients are not told."""
        if not self.on_demand or self.known(name.removesuffix(":latest")) is not None:
            return None
        try:
            return find_preset(name)
        except SettingsError as error:
            what, why = f"the preset {name[:80]} cannot be used", "its file cannot be understood"
            raise ModelUnusableError(what, why=why, fix=Fix.command("preset", "show", name), code=error.code) from None

    def presets(self) -> list[Preset]:
        """Return the presets that can be asked for; those that cannot be understood are left out."""
        found = []
        for name in preset_names():
            with contextlib.suppress(LocalLLMError):
                found.append(self.preset_of(name))
        return [preset for preset in found if preset is not None]

    def _installed(self, name: str) -> Selection | None:
        """Find an installed model by its name alone: a client's word is not a path to look at."""
        row = next((row for row in self.others() if row.is_called(name)), None)
        if row is None:
            return None
        with contextlib.suppress(ModelNotFoundError):
            return within_context(selected(self._resolved, row.name), self._note)  # which was not said of it
        return None

    def _not_found(self, name: str) -> ModelNotFoundError:
        served = [name for each in self.models for name in each.names]
        presets = preset_names() if self.on_demand else []
        names = {each.casefold(): each for each in (*served, *presets, *(row.name for row in self.others()))}
        near = difflib.get_close_matches(name[:200].casefold(), names, n=1, cutoff=_NEAR)
        first, more = ", ".join(list(names.values())[:_MOST_NAMED]), len(names) - _MOST_NAMED
        what, why = f"the model {name[:200]!r} is not served here", f"this server has {first}"
        why += f" and {more} more (GET /v1/models)" if more > 0 else ""
        known = load_registry().find(name) if self.on_demand else None
        if near:
            fix = f"ask for {names[near[0]]!r}"
        elif known is not None:
            fix = f"localllm pull {known.name}, then ask again"
        else:
            fix = "ask for one of these, or start the server with --alias NAME"
        return ModelNotFoundError(what, why=why, fix=fix)

    # Loading

    def adopt(self, handle: EngineHandle) -> None:
        """Take over the first model's handle, which the caller has begun to load."""
        self.first.handle = handle
        self._has_begun = True

    async def ready(self, model: ServedModel, keep_s: float | None = None) -> LoadedEngine:
        """Return the engine, when the model is loaded from its files as they are now.

        keep_s: for which the model then stays unused; None: as before
        Raises BusyError where the load takes very long, and ModelUnusableError or another LocalLLMError where it fails.
        """
        model.last_used = time.monotonic()
        try:
            async with asyncio.timeout(LOAD_WAIT_S):
                while not await self._is_current(model):  # an earlier request may have unloaded it again
                    await self.load(model)
        except TimeoutError:
            why = f"it has taken {LOAD_WAIT_S:.0f} s so far"
            raise BusyError(f"{model.name} is being loaded", why=why, reason="loading") from None
        except (BusyError, EngineClosedError, EngineGoneError, ModelChangedError, ModelNotFoundError):
            raise
        except Exception as error:
            told = told_of(error, model.selection.files, model.selection.resolved)
            is_bug = isinstance(told, BugError)  # of which nothing more is said
            why, fix = ("a bug in localllm", "") if is_bug else (f"{told.what}; {told.why}", told.fixes)
            raise ModelUnusableError(f"{model.name} cannot be used", why=why, fix=fix, code=told.code) from error
        if keep_s is not None:
            model.keep_s = keep_s if 0 <= keep_s <= _MOST_KEPT_S else None
            if not model.num_open:
                self.residents.touch(model)
        return model.engine()

    async def _is_current(self, model: ServedModel) -> bool:
        """Return whether it is loaded from the files as they are now: it may leave while they are looked at."""
        if model.is_leaving or model.engine_if_loaded is None or await self.has_changed(model):
            return False
        return not model.is_leaving and model.engine_if_loaded is not None

    async def load(self, model: ServedModel) -> None:
        """Load a model, however long it takes; it goes on where the caller has gone. Raises what keeps it from that."""
        try:
            await self._load_once(model)
        except EngineGoneError:  # its process was killed meanwhile, which does not mean that it will be killed again
            await self._load_once(model)

    async def _load_once(self, model: ServedModel) -> None:
        task = self._loads.get(model)
        if task is None or task.done():
            task = self._loads[model] = asyncio.create_task(self._load_in_turn(model))
            task.add_done_callback(consume_error)
        await asyncio.shield(task)

    async def _load_in_turn(self, model: ServedModel) -> None:
        if await self.has_changed(model):
            await self._wait_at_rest(model)
        async with self.residents.turn:
            if self.residents.is_closed:
                raise EngineClosedError("the server is shutting down")
            if model.engine_if_loaded is not None and await self.has_changed(model):
                await self._unload_changed(model)
            if model.is_leaving or model.engine_if_loaded is None:
                model.is_leaving = False
                await self._load(model)

    async def has_changed(self, model: ServedModel) -> bool:
        """Return whether the files are others than those that the engine was loaded from; of a replica, no. Raises
        ModelNotFoundError."""
        engine = model.engine_if_loaded
        if engine is None or not engine.contents or not self.on_demand:
            return False
        return await self._contents(model) != engine.contents

    async def _contents(self, model: ServedModel) -> str:
        files = model.selection.files
        return await self.off_loop(lambda: hub.contents(hub.current(files).directory))

    async def _wait_at_rest(self, model: ServedModel) -> None:
        """Wait until the files of a model have been left alone; other models are loaded meanwhile. Raises
        ModelChangedError where they are not."""
        until, contents = time.monotonic() + _REST_WAIT_S, ""
        while contents != (contents := await self._contents(model)):
            if time.monotonic() > until:
                why = f"for {_REST_WAIT_S:.0f} s they have not been left alone"
                raise ModelChangedError(f"the files of {model.name} are being written", why=why, fix="ask again")
            await asyncio.sleep(_AT_REST_S)

    async def _unload_changed(self, model: ServedModel) -> None:
        """Unload what was loaded from files that are others now, as soon as it is idle. Raises BusyError where that
        takes too long."""
        model.is_leaving = True
        try:
            await self.residents.wait_idle(model)
            self._note(f"the files of {model.name} have changed: it is loaded anew")
            keep_s = model.keep_s
            await self.residents.unload(model)
            model.keep_s = keep_s
        except TimeoutError:
            what, why = f"{model.name} has changed on the disk", "answers of what it was are still being written"
            raise BusyError(what, why=why, reason="loading") from None
        finally:
            model.is_leaving = False

    async def _load(self, model: ServedModel) -> None:
        await self.residents.wait_unloaded()
        if model.handle is not None:  # it has ended, or was never loaded
            await asyncio.to_thread(model.handle.close)
            model.handle = None
        if self.on_demand:
            before = model.selection  # with what its files recommend now
            model.selection = await self.on_disk(lambda: renewed(before, hub.current(before.files)))
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[Foreseen]()

        def foreseen(what: Foreseen) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(arrived.put_nowait, what)

        handle = model.handle = self._launch(model.selection, await self.residents.caps(), foreseen)
        settled = asyncio.create_task(asyncio.to_thread(handle.wait_loaded))
        try:
            await self.residents.agree(model, handle, arrived, settled)
            if await settled is None:  # it came to nothing and did not fail
                why = "somebody stopped it while it was being loaded"
                stopped = BusyError(f"{model.name} was unloaded", why=why, reason="unloaded")
                raise EngineClosedError("the server is shutting down") if self.residents.is_closed else stopped
        except BaseException:
            model.handle = None
            settled.add_done_callback(consume_error)
            await asyncio.shield(asyncio.to_thread(handle.close))
            raise
        self._has_begun |= model is self.first
        model.last_facts = await self.residents.facts(model)
        evicted, self.residents.evicted = self.residents.evicted, []
        for other, weights in evicted:  # not before: the disk was this model's
            if weights:  # else it had gone before they were known
                self.residents.begin(self.on_disk(partial(keep_warm, other.selection.files, weights)))
        self.residents.touch(model)

    # Work beside the loop, and the end

    @property
    def started_text(self) -> str:
        """When the server was started, as RFC 3339 has it."""
        return datetime.fromtimestamp(self.started_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Return what the work does, computed while the loop goes on: templates and tokenizers take milliseconds."""
        return await asyncio.get_running_loop().run_in_executor(self._preparing, work)

    async def on_disk(self, work: Callable[[], T]) -> T:
        """As `off_loop`, for work that may wait for a disk: no prompt waits behind it."""
        return await asyncio.get_running_loop().run_in_executor(self._looking, work)

    def stop(self) -> None:
        """End what runs."""
        self.residents.is_closed = True
        for each in self.models:
            if each.handle is not None:
                each.handle.stop()

    def close(self) -> None:
        """`stop`, and wait a moment for it, when the loop has ended."""
        self.stop()
        for threads in (self._preparing, self._looking):
            threads.shutdown(wait=False, cancel_futures=True)
        for each in self.models:
            if each.handle is not None:
                each.handle.close(timeout_s=1.0)
