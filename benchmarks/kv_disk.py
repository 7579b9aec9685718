"""Pages of the KV cache from the disk and to it: `python -m benchmarks.kv_disk [--rounds 5] [--folder DIR]`.

Reading, cold (what the page cache holds of the pages is dropped) and warm, beside two O_DIRECT reads in turn: of the
very same files, and of one large file in its order. Writing beside plain files of the same bytes, both into the page
cache, from which the system writes in its own time. Results go to benchmarks/results/kv_disk.json.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import itertools
import json
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import interleaved, machine, paired, save, spread
from localllm.cache.disk import DiskTier
from localllm.cache.page_file import PageKey
from localllm.cache.page_folder import PAGE_TOKENS
from localllm.cache.page_readers import READERS
from localllm.config import user_directories
from localllm.offload.planner.disk_speed import disk_file, files_read_gbs

MIB, BLOCK_BYTES = 1 << 20, 4096
HUGE_BYTES = 2 << 20
ROOT = bytes(32)
ENOUGH_S = 60.0


@dataclass(frozen=True)
class Case:
    """page_bytes: of TinyLlama in INT8, of Mistral 7B in INT8, and of Mistral 7B in bf16 with scales."""

    page_bytes: int
    num_pages: int


CASES = (Case(11 << 16, 360), Case(4 * MIB, 64), Case(10 * MIB, 25))


def chain(length: int, seed: int) -> list[PageKey]:
    keys: list[PageKey] = []
    for index in range(length):
        parent = keys[-1].digest if keys else ROOT
        token_ids = tuple((seed + index + token) % 32_000 for token in range(PAGE_TOKENS))
        digest = hashlib.blake2b(parent + repr(token_ids).encode(), digest_size=32).digest()
        keys.append(PageKey(digest, parent, token_ids))
    return keys


def buffers(case: Case) -> list[memoryview]:
    """Of as many pages, next to one another in huge pages, as a tier in memory has them."""
    num_bytes = case.page_bytes * case.num_pages
    region = mmap.mmap(-1, num_bytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):
        region.madvise(mmap.MADV_HUGEPAGE)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(region)) % HUGE_BYTES
    whole = memoryview(region)[begin : begin + num_bytes]
    return [whole[at : at + case.page_bytes] for at in range(0, num_bytes, case.page_bytes)]


def drop(paths: Sequence[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def fresh_read_gbs(paths: Sequence[Path]) -> float:
    """These files past the page cache, into memory that nobody has used yet."""
    sizes = [path.stat().st_size // BLOCK_BYTES * BLOCK_BYTES for path in paths]
    (memory,) = buffers(Case(sum(sizes), 1))
    places = [memory[end - size : end] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]

    def read(path: Path, place: memoryview) -> int:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            return os.preadv(descriptor, [place], 0)
        finally:
            os.close(descriptor)

    started = time.perf_counter()
    with ThreadPoolExecutor(READERS) as pool:
        num_bytes = sum(pool.map(read, paths, places))
    return num_bytes / (time.perf_counter() - started) / 1e9


def read_gbs(tier: DiskTier, keys: list[PageKey], into: list[memoryview], prepare: Callable[[], object]) -> float:
    prepare()
    started = time.perf_counter()
    assert tier.read(keys, into) == len(keys)
    return sum(map(len, into)) / (time.perf_counter() - started) / 1e9


def put_gbs(tier: DiskTier, seeds: Iterator[int], pages: list[bytes]) -> float:
    keys = chain(len(pages), next(seeds))
    started = time.perf_counter()
    for key, content in zip(keys, pages, strict=True):
        while not tier.put(key, content):
            tier.flush(ENOUGH_S)
    assert tier.flush(ENOUGH_S)
    return sum(map(len, pages)) / (time.perf_counter() - started) / 1e9


def plain_write_gbs(folder: Path, seeds: Iterator[int], pages: list[bytes]) -> float:
    seed = next(seeds)
    started = time.perf_counter()
    for path in folder.glob("*"):
        path.unlink()
    for index, content in enumerate(pages):
        (folder / f"{seed}-{index}").write_bytes(content)
    return sum(map(len, pages)) / (time.perf_counter() - started) / 1e9


def reading(case: Case, folder: Path, pages: list[bytes], rounds: int) -> dict[str, Any]:
    into, keys = buffers(case), chain(case.num_pages, 0)
    num_bytes = case.page_bytes * case.num_pages
    tier = DiskTier(folder / "kv", ROOT, {}, 2 * num_bytes, print)
    put_gbs(tier, iter([0]), pages)
    paths = list(folder.rglob("*.page"))
    with disk_file(folder, 512 * MIB) as large:
        assert large is not None and large.bypasses_cache
        values = interleaved(
            {
                "cold_gbs": partial(read_gbs, tier, keys, into, partial(drop, paths)),
                "same_files_gbs": partial(files_read_gbs, paths, ENOUGH_S),
                "large_file_gbs": large.read_gbs,
                "warm_gbs": partial(read_gbs, tier, keys, into, lambda: [path.read_bytes() for path in paths]),
            },
            rounds,
        )
    tier.close(ENOUGH_S)
    shares = {
        "cold_of_same_files": paired(values["cold_gbs"], values["same_files_gbs"]),
        "cold_of_large_file": paired(values["cold_gbs"], values["large_file_gbs"]),
    }
    return {name: asdict(spread(each)) for name, each in values.items()} | {
        name: asdict(share) for name, share in shares.items()
    }


def writing(case: Case, folder: Path, pages: list[bytes], rounds: int) -> dict[str, Any]:
    """What is there goes as it is overwritten by what comes, on both sides."""
    num_bytes = case.page_bytes * case.num_pages
    (folder / "plain").mkdir()
    tier = DiskTier(folder / "written", ROOT, {}, num_bytes + num_bytes // 2, print)
    values = interleaved(
        {
            "put_gbs": partial(put_gbs, tier, iter(range(1000, 9000, 10)), pages),
            "plain_files_gbs": partial(plain_write_gbs, folder / "plain", iter(range(9000)), pages),
        },
        rounds,
    )
    tier.close(ENOUGH_S)
    return {name: asdict(spread(each)) for name, each in values.items()} | {
        "put_of_plain_files": asdict(paired(values["put_gbs"], values["plain_files_gbs"]))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=user_directories().cache)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for case in CASES:
        noise = os.urandom(case.page_bytes)
        pages = [index.to_bytes(8, "little") + noise[8:] for index in range(case.num_pages)]
        with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
            read, written = (part(case, Path(name), pages, arguments.rounds) for part in (reading, writing))
        rows.append({**asdict(case), **read, **written})
        print(json.dumps(rows[-1]), flush=True)
    save("kv_disk", {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
