"""Pages of no model, and tiers that hold them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from localllm.cache.disk import DiskTier
from localllm.cache.page_file import HEADER_BYTES, PAGE_TOKENS, PageKey
from localllm.cache.page_folder import PageFile, name_of, scan
from tests.patience import PATIENCE_S

ROOT = bytes(range(32))
ABOUT = {"model": "org/model", "weights": "int4-g64"}
PAGE_BYTES = 3000  # no whole number of anything
FILE_BYTES = HEADER_BYTES + PAGE_BYTES


def page(parent: bytes, seed: int) -> PageKey:
    """One behind `parent` (a digest, or the root); another for another seed."""
    token_ids = tuple((seed * 1009 + index) % 32_000 for index in range(PAGE_TOKENS))
    return PageKey(hashlib.blake2b(parent + repr(token_ids).encode(), digest_size=32).digest(), parent, token_ids)


def chain(length: int, seed: int = 0, root: bytes = ROOT) -> list[PageKey]:
    keys: list[PageKey] = []
    for index in range(length):
        keys.append(page(keys[-1].digest if keys else root, seed * 1000 + index))
    return keys


def payload(key: PageKey, num_bytes: int = PAGE_BYTES) -> bytes:
    return hashlib.shake_128(key.digest).digest(num_bytes)


def path_of(directory: Path, key: PageKey, root: bytes = ROOT) -> Path:
    return directory / PageFile(name_of(root), name_of(key.digest), name_of(key.parent), 0, 0).path


@contextmanager
def opened(
    directory: Path,
    limit_bytes: int | None = 1 << 30,
    root: bytes = ROOT,
    *,
    warnings: list[str] | None = None,
    says: tuple[str, ...] = (),
) -> Iterator[DiskTier]:
    """warnings: takes what the tier says. Otherwise that is one sentence with the words in `says`, or nothing."""
    said: list[str] = []
    tier = DiskTier(directory, root, ABOUT, limit_bytes, (said if warnings is None else warnings).append)
    try:
        yield tier
    finally:
        tier.close(PATIENCE_S)
    assert len(said) == bool(says) and all(word in said[0] for word in says)


def put(tier: DiskTier, keys: Sequence[PageKey]) -> list[bool]:
    accepted = [tier.put(key, payload(key)) for key in keys]
    assert tier.flush(PATIENCE_S)
    return accepted


def stored(directory: Path, keys: list[PageKey]) -> list[PageKey]:
    """By a process that has ended."""
    with opened(directory) as tier:
        put(tier, keys)
    return keys


def read(tier: DiskTier, keys: Sequence[PageKey]) -> int:
    """How many came, each of which is right."""
    buffers = [memoryview(bytearray(PAGE_BYTES)) for _ in keys]
    count = tier.read(keys, buffers)
    assert all(buffer == payload(key) for key, buffer in zip(keys[:count], buffers, strict=False))
    return count


def orphans(directory: Path) -> list[PageFile]:
    files = list(scan(directory))
    there = {(file.root, file.page) for file in files}
    return [file for file in files if file.parent != file.root and (file.root, file.parent) not in there]


def held_bytes(directory: Path) -> int:
    return sum(file.num_bytes for file in scan(directory))


def temporaries(directory: Path) -> list[Path]:
    return list(directory.rglob(".*.tmp"))


def refusing(number: int) -> Callable[..., Any]:
    """What fails as the system does with this `errno`."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse
