"""How keys and values are cached for later prompts, and the identity of all that decides what they mean."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import torch

from localllm.cache.disk import QUEUE_BYTES, DiskTier
from localllm.cache.moved_pages import COMPUTED_SHARE, PageMover
from localllm.cache.page_file import LAYOUT_VERSION
from localllm.cache.prefix import PrefixCache
from localllm.engine.events import ignore
from localllm.engine.residency import Residency
from localllm.layers.config import KeyValue
from localllm.offload.planner.plan import KEPT_PAGES, SNAPSHOTS, Plan

_LEAST_QUEUE_BYTES = 16 << 20  # a few pages, under the tightest cap too: without them nothing reaches the disk
_PAGES_VERSION = 3  # of the pages' bytes and of what is computed into them


@dataclass(frozen=True)
class KVReuse:
    """What is cached of prompts, and where."""

    is_on: bool = True  # a prompt takes the pages of earlier ones
    ram_bytes: int | None = None  # for pages that left the pools; None: what the plan has for them
    directory: Path | None = None  # of pages on the disk; None: none go there
    snapshot_bytes: int | None = None  # of RAM, for recurrent states; None: what the plan has for them
    disk_bytes: int | None = None  # the most that all may take there; None: the usual
    moves: bool = False  # where requests say nothing, documents are taken from any position
    computed_share: float = COMPUTED_SHARE  # of such a document's tokens, those that are computed at least
    warn: Callable[[str], None] = ignore  # called once, from any thread, with what is wrong with the disk


# Takes no memory beside what running requests have had, but for snapshots of recurrent states.
IN_POOLS = KVReuse(ram_bytes=0, snapshot_bytes=1 << 28)
NO_REUSE = KVReuse(is_on=False)


@dataclass(frozen=True)
class Computed:
    """What computed the pages."""

    source: str  # the checkpoint as it is; "" for one that no other process knows
    weights: str  # the recipe's name
    name: str = ""  # of the model, for people


UNKNOWN_SOURCE = Computed("", "")


def prefix_cache(reuse: KVReuse, computed: Computed, residency: Residency, plan: Plan | None) -> PrefixCache | None:
    """Return the cache that memory is shared out for; None where nothing can be reused: dynamic RoPE rotates all keys
    with every token differently."""
    config = residency.config
    if not reuse.is_on or any(rope.kind == "dynamic" for rope in config.ropes):
        return None
    ram_bytes = kept_bytes(reuse, plan)
    queue_bytes = QUEUE_BYTES if plan is None else max(_LEAST_QUEUE_BYTES, min(QUEUE_BYTES, _planned_bytes(plan) // 2))
    # A queue that one snapshot fills would take none.
    queue_bytes = max(queue_bytes, 2 * residency.kv_pages.snapshot_bytes)
    snapshots, about = snapshot_bytes(reuse, plan), _about(computed, residency)
    root = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=32, person=b"localllm-root").digest()
    if not computed.source:
        return PrefixCache(secrets.token_bytes(32), residency.kv_pages, ram_bytes, None, snapshots)
    disk = None
    if reuse.directory is not None and reuse.disk_bytes != 0:
        shown = {"model": computed.name or computed.source}  # of a folder of pages, to a person
        shown |= {name: str(about[name]) for name in ("weights", "kv", "dtype")}
        disk = DiskTier(reuse.directory, root, shown, reuse.disk_bytes, reuse.warn, queue_bytes=queue_bytes)
    return PrefixCache(root, residency.kv_pages, ram_bytes, disk, snapshots)


def page_mover(prefix: PrefixCache, residency: Residency, share: float) -> PageMover:
    """Return what fills pages of a model whose keys can be turned."""
    config, rotaries = residency.config, residency.model.rotaries
    frequencies = [
        rotaries[config.rotations.index((each.rope, each.rotary_dim))].frequencies(())[0] if each.rotary_dim else None
        for each in config.keepers
    ]
    return PageMover(prefix, residency.kv_pages, frequencies, share)


def kept_bytes(reuse: KVReuse, plan: Plan | None) -> int:
    """Return the RAM for pages that left the pools: half of what the plan has for pages, the other half is for those
    that wait to be written."""
    if reuse.ram_bytes is not None:
        return reuse.ram_bytes
    return 0 if plan is None else _planned_bytes(plan) // 2


def snapshot_bytes(reuse: KVReuse, plan: Plan | None) -> int:
    """Return the RAM for snapshots of recurrent states: what the plan has for them, or a few where there is none."""
    if reuse.snapshot_bytes is not None:
        return reuse.snapshot_bytes
    return 0 if plan is None else plan.ledger["ram"].get(SNAPSHOTS, 0)


def _planned_bytes(plan: Plan) -> int:
    return plan.ledger["ram"].get(KEPT_PAGES, 0)


def _about(computed: Computed, residency: Residency) -> Mapping[str, object]:
    """Return all that decides what pages mean. Who computes is part of it: other kernels' sums differ in their last
    bits."""
    config, kv_format = residency.config, residency.kv_pages.format
    dtype = "fp32" if residency.model.dtype is torch.float32 else "bf16"
    return {
        "layout": [_PAGES_VERSION, LAYOUT_VERSION],
        "source": computed.source,
        "weights": computed.weights,
        "kv": dtype if kv_format.keys == "dense" else kv_format.name,
        "dtype": dtype,
        "device": residency.device.type,
        "is_native": residency.runner.cpu_program is not None or residency.runner.gpu_program is not None,
        "ropes": [asdict(each.mixer.rope) for each in config.layers if isinstance(each.mixer, KeyValue)],
        "shape": [[*astuple(shape)] for shape in config.kv_shapes],
        "windows": list(config.windows),
    } | ({"states": [asdict(each) for each in config.recurrents]} if config.recurrents else {})
