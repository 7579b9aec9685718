"""The adapters of a model that are in memory: read when a request first names them, the least recently used given up.

An adapter that answers use stays. `check` says before anything runs what is wrong with one.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from localllm.config import format_bytes
from localllm.engine.adaptable_layers import AdaptableLayers
from localllm.engine.request import AdapterRef
from localllm.errors import AdapterError, DoesNotFitError, Fix
from localllm.layers.low_rank import Adapter, AppliedAdapter
from localllm.models.adapters.peft_config import CONFIG
from localllm.models.adapters.peft_folder import WEIGHTS
from localllm.models.adapters.reader import read_adapter
from localllm.offload.planner.plan import ADAPTERS, Plan

_WITHOUT_PLAN_BYTES = 1 << 30
_CHECKED = 1024  # versions of adapters of which it is kept that they are sound

Version = tuple[str, str]  # a path, and what tells the files there from others


@dataclass
class _Loaded:
    adapter: Adapter
    users: int = 0
    leaves: bool = False  # when no answer uses it any more


class AdapterCache:
    """budget_bytes: the most that all loaded adapters take."""

    def __init__(self, layers: AdaptableLayers, is_native: Callable[[], bool], budget_bytes: int) -> None:
        """layers: of the model. is_native: whether the CPU's native steps compute it."""
        self._layers, self._is_native, self.budget_bytes = layers, is_native, budget_bytes
        self._lock = threading.RLock()  # requests are checked on other threads than the one that steps
        self._loaded: OrderedDict[Version, _Loaded] = OrderedDict()  # the least recently used first
        self._checked: OrderedDict[Version, int] = OrderedDict()  # their bytes

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return sum(each.adapter.num_bytes for each in self._loaded.values())

    def limit(self, budget_bytes: int) -> None:
        """Change the budget. Adapters that answers use stay beyond it until these end."""
        with self._lock:
            self.budget_bytes = budget_bytes
            self._make_room(0)

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters in memory, the least recently used first."""
        with self._lock:
            return tuple(each.adapter.name for each in self._loaded.values())

    def check(self, refs: Sequence[AdapterRef]) -> tuple[Version, ...]:
        """Return the versions of the adapters that a request names. Raises what is wrong with one, AdapterError or
        CheckpointError, and DoesNotFitError where all of them are larger than the budget."""
        versions = tuple(map(_version, refs))
        for ref, version in zip(refs, versions, strict=True):
            if self._make_way(version):
                adapter = self._load(ref, version)  # without the lock, for which a step would wait
                with self._lock:
                    self._checked[version] = adapter.num_bytes
                    if version not in self._loaded and self._make_room(adapter.num_bytes):
                        self._loaded[version] = _Loaded(adapter)
        with self._lock:
            self._require_budget(sum(self._checked.get(version, 0) for version in {*versions}))
            while len(self._checked) > max(_CHECKED, len(refs)):
                self._checked.popitem(last=False)
        return versions

    def _make_way(self, version: Version) -> bool:
        """Make room for an adapter that is not in memory; return whether it is to be read: there is room, or nothing is
        known of it yet."""
        with self._lock:
            num_bytes = self._checked.get(version)
            return num_bytes is None or (version not in self._loaded and self._make_room(num_bytes))

    def identity(self, ref: AdapterRef) -> str:
        """Return what tells an adapter and its scale from others, for whoever keeps what was computed with them."""
        applied = self.take([ref])
        self.give_back(applied)
        return variant(applied).hex()

    def take(self, refs: Sequence[AdapterRef]) -> tuple[AppliedAdapter, ...]:
        """Return the adapters of a request, which stay in memory until `give_back`. Raises as `check`, and MemoryError
        where those that other answers use leave too little room."""
        with self._lock:
            taken: list[AppliedAdapter] = []
            try:
                for ref in refs:
                    taken.append(AppliedAdapter(self._taken(ref), ref.scale))
            except BaseException:
                self.give_back(taken)
                raise
            return tuple(taken)

    def _taken(self, ref: AdapterRef) -> Adapter:
        version = _version(ref)
        loaded = self._loaded.get(version)
        if loaded is None:
            self._require_room(self._checked.get(version, 0))  # who waits for room does not read its adapter each time
            loaded = _Loaded(self._load(ref, version))
            self._require_room(loaded.adapter.num_bytes)
            self._loaded[version] = loaded
        self._loaded.move_to_end(version)
        loaded.users, loaded.leaves = loaded.users + 1, False
        return loaded.adapter

    def share(self, applied: Sequence[AppliedAdapter]) -> None:
        """Have one more answer use adapters that are taken; their files may be others by now."""
        with self._lock:
            for each in applied:
                self._loaded[self._version_of(each.adapter)].users += 1

    def give_back(self, applied: Sequence[AppliedAdapter]) -> None:
        with self._lock:
            for each in applied:
                version = self._version_of(each.adapter)
                loaded = self._loaded[version]
                loaded.users -= 1
                if loaded.leaves and not loaded.users:
                    del self._loaded[version]

    def _version_of(self, adapter: Adapter) -> Version:
        return next(version for version, loaded in self._loaded.items() if loaded.adapter is adapter)

    def unload(self, path: str | None = None) -> int:
        """Give up the adapter at a path, or all; return how many. One that an answer uses stays until that ends, where
        it is named."""
        with self._lock:
            named = [version for version in self._loaded if path in (None, version[0])]
            gone = [version for version in named if not self._loaded[version].users]
            for version in gone:
                del self._loaded[version]
            for version in named if path is not None else ():
                if version in self._loaded:
                    self._loaded[version].leaves = True
            return len(gone)

    def _load(self, ref: AdapterRef, version: Version) -> Adapter:
        # INT8 takes a quarter of fp32, in which few are stored.
        self._require_budget(sum(stat.st_size for stat in _stats(ref)) // 4, "at least ")
        with _by_name(ref):
            weights = read_adapter(Path(ref.path), self._layers.config, ref.name)
        if _version(ref) != version:
            what, why = f"the files of the adapter {_called(ref)} have changed", "they were read meanwhile"
            raise AdapterError(what, why=why, fix="ask again")
        return self._layers.adapter(weights, is_native=self._is_native())

    def _make_room(self, num_bytes: int) -> bool:
        """Give up adapters that no answer uses until there is room for one more; return whether there is."""
        used = self.used_bytes
        for version in [version for version, loaded in self._loaded.items() if not loaded.users]:
            if used + num_bytes <= self.budget_bytes:
                break
            used -= self._loaded.pop(version).adapter.num_bytes
        return used + num_bytes <= self.budget_bytes

    def _require_room(self, num_bytes: int) -> None:
        """Raises DoesNotFitError for more than there ever is room for, MemoryError for more than there is now."""
        if not self._make_room(num_bytes):
            self._require_budget(num_bytes)
            raise MemoryError("other answers use adapters that fill the memory for adapters")

    def _require_budget(self, num_bytes: int, least: str = "") -> None:
        if num_bytes > self.budget_bytes:
            budget = format_bytes(self.budget_bytes)
            why = f"they take {least}{format_bytes(num_bytes)}; {budget} are set aside for adapters"
            fix = Fix.flag("--adapter-memory", f"{-(-num_bytes // (1 << 20))}MiB")
            raise DoesNotFitError("the adapters of a request are larger than the memory for adapters", why=why, fix=fix)


def adapter_bytes(plan: Plan | None) -> int:
    """Return the memory for adapters: what the plan sets aside, or else a quarter of what it leaves free."""
    if plan is None:
        return _WITHOUT_PLAN_BYTES
    return plan.ledger[plan.fast].get(ADAPTERS, 0) or max(0, plan.free_bytes) // 4


def variant(applied: Sequence[AppliedAdapter]) -> bytes:
    """Return what tells keys and values that are computed with these adapters from others; b"" without any."""
    if not applied:
        return b""
    named = b"".join(each.adapter.digest + struct.pack("<d", each.scale) for each in applied)
    return hashlib.blake2b(named, digest_size=16, person=b"localllm-lora").digest()


@contextmanager
def _by_name(ref: AdapterRef) -> Iterator[None]:
    """Errors call an adapter by its name: clients of a server are not told where it is."""
    try:
        yield
    except AdapterError as error:
        name = f"the adapter {_called(ref)}"
        what = re.sub(re.escape(ref.path) + r"(\S*): ", lambda found: f"in {name}{found[1]}, ", error.what)
        what, why = (text.replace(ref.path, name) for text in (what, error.why))
        raise AdapterError(what, why=why, fix=error.fixes) from None


def _called(ref: AdapterRef) -> str:
    return ref.name or Path(ref.path).name


def _version(ref: AdapterRef) -> Version:
    """Raises AdapterError where there is no such file."""
    stats = _stats(ref)
    return ref.path, ";".join(f"{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}:{stat.st_ino}" for stat in stats)


def _stats(ref: AdapterRef) -> list[os.stat_result]:
    """Return what the system says of the adapter's files. Raises AdapterError where one is not there."""
    path = Path(ref.path)
    files = [path] if path.suffix.casefold() == ".gguf" else [path / CONFIG, path / WEIGHTS]
    try:
        return [file.stat() for file in files]
    except OSError as error:
        why = f"{Path(error.filename).name}: {error.strerror}"
        raise AdapterError(f"the adapter {_called(ref)} cannot be read", why=why) from None
