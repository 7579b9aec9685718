"""The adapters of a model that are in memory: read when a request first names them, the least recently used given up.

An adapter that answers use stays. `check` says before anything runs what is wrong with one.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from localllm.config import format_bytes
from localllm.engine.request import AdapterRef
from localllm.errors import AdapterError, DoesNotFitError, Fix
from localllm.kernels.low_rank_record import LowRankRecord
from localllm.layers.delta_net import DeltaNet
from localllm.layers.linear import Linear
from localllm.layers.low_rank import EMBED, HEAD, Adapter, AdapterWeights, AppliedAdapter, LowRank
from localllm.layers.moe import MoE
from localllm.models.adapters.reader import read_adapter
from localllm.models.cpu_buffers import native_sites
from localllm.models.decoder import Decoder
from localllm.models.layout import EXPERTS
from localllm.offload.planner.plan import ADAPTERS, Plan
from localllm.offload.streaming.host_buffer import host_buffer

_WITHOUT_PLAN_BYTES = 1 << 30
_CHECKED = 1024  # versions of adapters of which it is kept that they are sound
_FILES = ("adapter_config.json", "adapter_model.safetensors")

Version = tuple[str, str]  # a path, and what tells the files there from others


@dataclass
class _Loaded:
    adapter: Adapter
    users: int = 0
    leaves: bool = False  # when no answer uses it any more


class AdapterCache:
    """budget_bytes: the most that all loaded adapters take."""

    def __init__(self, decoder: Callable[[], Decoder], is_native: Callable[[], bool], budget_bytes: int) -> None:
        """decoder: the model as it is placed now. is_native: whether the CPU's native steps compute it."""
        self._decoder, self._is_native, self.budget_bytes = decoder, is_native, budget_bytes
        self._lock = threading.RLock()  # requests are checked on other threads than the one that steps
        self._loaded: OrderedDict[Version, _Loaded] = OrderedDict()  # the least recently used first
        self._checked: OrderedDict[Version, int] = OrderedDict()  # their bytes

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return sum(each.adapter.num_bytes for each in self._loaded.values())

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
            if version not in self._checked:
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
            loaded = _Loaded(self._load(ref, version))
            if not self._make_room(loaded.adapter.num_bytes):
                self._require_budget(loaded.adapter.num_bytes)
                raise MemoryError("other answers use adapters that fill the memory for adapters")
            self._loaded[version] = loaded
        self._loaded.move_to_end(version)
        loaded.users, loaded.leaves = loaded.users + 1, False
        return loaded.adapter

    def give_back(self, applied: Sequence[AppliedAdapter]) -> None:
        with self._lock:
            for each in applied:
                version = next(at for at, loaded in self._loaded.items() if loaded.adapter is each.adapter)
                loaded = self._loaded[version]
                loaded.users -= 1
                if loaded.leaves and not loaded.users:
                    del self._loaded[version]

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
        decoder = self._decoder()
        weights = read_adapter(Path(ref.path), decoder.config, ref.name)
        if _version(ref) != version:
            what, why = f"the files of the adapter {ref.name or ref.path} have changed", "they were read meanwhile"
            raise AdapterError(what, why=why, fix="ask again")
        return new_adapter(weights, decoder, native_sites(decoder) if self._is_native() else ())

    def _make_room(self, num_bytes: int) -> bool:
        """Give up adapters that no answer uses until there is room for one more; return whether there is."""
        used = self.used_bytes
        for version in [version for version, loaded in self._loaded.items() if not loaded.users]:
            if used + num_bytes <= self.budget_bytes:
                break
            used -= self._loaded.pop(version).adapter.num_bytes
        return used + num_bytes <= self.budget_bytes

    def _require_budget(self, num_bytes: int) -> None:
        if num_bytes > self.budget_bytes:
            why = f"they take {format_bytes(num_bytes)}; {format_bytes(self.budget_bytes)} are set aside for adapters"
            fix = Fix.flag("--adapter-memory", f"{-(-num_bytes // (1 << 20))}MiB")
            raise DoesNotFitError("the adapters of a request are larger than the memory for adapters", why=why, fix=fix)


def new_adapter(weights: AdapterWeights, decoder: Decoder, native: Collection[str]) -> Adapter:
    """Return an adapter as this model computes with it. native: the layers to which the CPU's native steps add; where
    it changes others too, torch's operators compute all of it. Raises AdapterError."""
    widths = _out_features(decoder)
    layers = {site: parts for site, parts in weights.sites.items() if site not in (EMBED, HEAD)}
    for site in layers:
        if site.rpartition(".")[0].rpartition(".")[0].rpartition(".")[2] != EXPERTS and site not in widths:
            why = "these matrices are computed as they are"
            raise AdapterError(f"adapters of {site} are not supported ({weights.name})", why=why)
    records, native = {}, set(native)
    if layers.keys() <= native:
        records = _in_one_run({site: LowRankRecord.of(layers[site], widths[site]) for site in widths if site in layers})
    wide = {linear.name for linear in _small_layers(decoder)}
    parts = {
        site: tuple(_as(part, torch.float32 if site in wide else decoder.dtype) for part in each)
        for site, each in weights.sites.items()
        if site not in records
    }
    return Adapter(weights.name, weights.digest, parts, records)


def _in_one_run(records: Mapping[str, LowRankRecord]) -> dict[str, LowRankRecord]:
    """Return the records one behind the other in huge pages, as a step reads them: eight adapters in small ones made a
    step of a 1.1B shape 1.29 times as long, in huge ones 1.22."""
    memory, placed, begin = host_buffer(sum(each.room_bytes for each in records.values())), {}, 0
    for site, record in records.items():
        placed[site] = record.copied_to(memory[begin : begin + record.room_bytes])
        begin += record.room_bytes
    return placed


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


def _version(ref: AdapterRef) -> Version:
    """Raises AdapterError where there is no such file."""
    path = Path(ref.path)
    files = [path] if path.suffix.casefold() == ".gguf" else [path / name for name in _FILES]
    try:
        stats = [file.stat() for file in files]
    except OSError as error:
        why = f"{error.filename}: {error.strerror}"
        raise AdapterError(f"the adapter {ref.name or ref.path} cannot be read", why=why) from None
    return ref.path, ";".join(f"{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}:{stat.st_ino}" for stat in stats)


def _as(part: LowRank, dtype: torch.dtype) -> LowRank:
    return LowRank(part.a.to(dtype), part.b.to(dtype), part.first_row)


def _out_features(decoder: Decoder) -> dict[str, int]:
    """Return the width of every layer that adapters can change, but of experts."""
    found = [*_small_layers(decoder)]
    for block in decoder.blocks:
        found += block.linears
        found += [] if block.per_layer_inputs is None else [block.per_layer_inputs.projection]
        found += [] if block.altup is None else block.altup.linears
    return {linear.name: linear.out_features for linear in found}


def _small_layers(decoder: Decoder) -> Iterator[Linear]:
    """Yield the layers that are computed in fp32: routers and gates."""
    for block in decoder.blocks:
        body = block.body
        if isinstance(body, MoE):
            yield body.router
            if body.shared_gate is not None:
                yield body.shared_gate
        elif isinstance(body, DeltaNet):
            yield body.gates_proj
        if block.altup is not None:
            yield from block.altup.mixer.linears
