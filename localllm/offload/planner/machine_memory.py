"""The limits on this process's memory: control groups, version 1 and 2, and the address space.

A process belongs to a group, the group to its parent, up to the root. Each may have a limit, and the smallest rules.
The machine's own free memory is not looked at here, but by the caller.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from localllm.errors import DoesNotFitError

# torch and its libraries map 700 MiB; a thread reserves 8 MiB of stack and up to 64 of heap, used or not.
LEAST_ADDRESS_SPACE_BYTES = 1536 << 20
_THREADS_BYTES = 512 << 20
HEADROOM = 0.9  # of what is free; the rest is activations, the allocator's slack and the other programs
ROOT = Path("/sys/fs/cgroup")
SELF_CGROUP = Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 62  # version 1 writes the largest number of whole pages for none


@dataclass(frozen=True)
class MemoryLimit:
    """One group's limit. reclaimable: its file cache, which the kernel gives back before it refuses memory."""

    file: Path  # which the limit was read from
    limit_bytes: int
    used_bytes: int
    reclaimable_bytes: int

    @property
    def free_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes + self.reclaimable_bytes)


def cgroup_limit_bytes(root: Path = ROOT, self_cgroup: Path = SELF_CGROUP) -> int | None:
    """Return the smallest limit of this process's group and its ancestors; None if none has one."""
    return min((limit.limit_bytes for limit in memory_limits(root, self_cgroup)), default=None)


def cgroup_free_bytes(root: Path = ROOT, self_cgroup: Path = SELF_CGROUP) -> int | None:
    """Return the smallest free memory under the limits of the same groups; None if none has one.

    A group may be nearly full while a smaller one inside it is not, so this need not belong to the smallest limit.
    """
    return min((limit.free_bytes for limit in memory_limits(root, self_cgroup)), default=None)


def address_space_free_bytes() -> int | None:
    """Return what RLIMIT_AS (`ulimit -v`) leaves after libraries and threads; None without a limit."""
    limit = address_space_limit_bytes()
    if limit is None:
        return None
    import psutil

    return max(0, limit - _THREADS_BYTES - int(psutil.Process().memory_info().vms))


def free_bytes() -> int:
    """Return the free host memory: the least of the machine's, the control groups' and the address space's."""
    import psutil

    limits = (int(psutil.virtual_memory().available), cgroup_free_bytes(), address_space_free_bytes())
    return min(limit for limit in limits if limit is not None)


def address_space_limit_bytes() -> int | None:
    try:
        from resource import RLIM_INFINITY, RLIMIT_AS, getrlimit
    except ImportError:  # not a Unix
        return None
    limit = getrlimit(RLIMIT_AS)[0]
    return None if limit == RLIM_INFINITY else limit


def require_address_space() -> None:
    """Raises DoesNotFitError if not even the libraries have room: their own messages do not say that."""
    limit = address_space_limit_bytes()
    if limit is not None and limit < LEAST_ADDRESS_SPACE_BYTES:
        raise DoesNotFitError(
            f"the address space is limited to {limit >> 20} MiB",
            why=f"libraries and threads alone need {LEAST_ADDRESS_SPACE_BYTES >> 20} MiB; `ulimit -v` shows the limit",
            fix="ulimit -v unlimited",
        )


def memory_limits(root: Path = ROOT, self_cgroup: Path = SELF_CGROUP) -> tuple[MemoryLimit, ...]:
    """Return every limit from the process's own group up to the root. Never raises: a limit that cannot be read is
    none."""
    found = []
    for hierarchy, group in _memberships(self_cgroup):
        if hierarchy == "memory":
            found += [_version_1(folder) for folder in _folders(root / "memory", group)]
        else:
            found += [_version_2(folder) for folder in _folders(root, group)]
    return tuple(limit for limit in found if limit is not None)


def _memberships(self_cgroup: Path) -> list[tuple[str, str]]:
    """("", path) for version 2 and ("memory", path) for the memory controller of version 1: a machine may run both."""
    lines: list[str] = []
    with suppress(OSError, UnicodeDecodeError):
        lines = self_cgroup.read_text(encoding="utf-8").splitlines()
    fields = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    known = [("", path) for number, controllers, path in fields if number == "0" and not controllers]
    known += [("memory", path) for _, controllers, path in fields if "memory" in controllers.split(",")]
    return known or [("", "/"), ("memory", "/")]


def _folders(mount: Path, group: str) -> list[Path]:
    """Return the folders of the group and its ancestors, the mount itself last.

    In a container the path may be the host's and not visible; the mount is then the group's own.
    """
    parts = PurePosixPath(group).parts[1:]
    if ".." in parts:  # a group outside this process's namespace
        parts = ()
    return [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _version_2(folder: Path) -> MemoryLimit | None:
    """memory.max is where memory is refused, memory.high where the kernel slows the group down until it shrinks."""
    limits = [(_number(folder / name), folder / name) for name in ("memory.max", "memory.high")]
    return _limit(limits, _number(folder / "memory.current"), folder, ("inactive_file", "active_file"))


def _version_1(folder: Path) -> MemoryLimit | None:
    file = folder / "memory.limit_in_bytes"
    used = _number(folder / "memory.usage_in_bytes")
    return _limit([(_number(file), file)], used, folder, ("total_inactive_file", "total_active_file"))


def _limit(
    limits: list[tuple[int | None, Path]], used: int | None, folder: Path, cache: tuple[str, str]
) -> MemoryLimit | None:
    set_limits = [(limit, file) for limit, file in limits if limit is not None and limit < _NO_LIMIT]
    if not set_limits:
        return None
    limit, file = min(set_limits)
    if used is None:
        return MemoryLimit(file, limit, 0, 0)
    return MemoryLimit(file, limit, used, min(used, _file_cache(folder / "memory.stat", cache)))


def _number(file: Path) -> int | None:
    with suppress(OSError, ValueError):  # "max" is not a number either
        return int(file.read_text(encoding="ascii"))
    return None


def _file_cache(statistics: Path, names: tuple[str, str]) -> int:
    with suppress(OSError, ValueError):
        rows = dict(line.split() for line in statistics.read_text(encoding="ascii").splitlines())
        return sum(int(rows.get(name, 0)) for name in names)
    return 0
