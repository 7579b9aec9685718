"""What a process holds of memory and has read from disks, as Linux counts it: the same for every side of a comparison.

Asked from outside, so that a side need not know that it is watched.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessMemory:
    """Mapped pages of files are the page cache's: they count as resident, and the kernel may take them back."""

    peak_bytes: int  # of both kinds together, since the process began
    anonymous_bytes: int
    mapped_file_bytes: int
    disk_read_bytes: int  # since the process began: what the page cache already held is not among them


def process_memory(pid: int) -> ProcessMemory:
    process = Path("/proc", str(pid))
    status = (process / "status").read_text(encoding="utf-8")
    return ProcessMemory(
        peak_bytes=1024 * _number(status, "VmHWM"),
        anonymous_bytes=1024 * _number(status, "RssAnon"),
        mapped_file_bytes=1024 * _number(status, "RssFile"),
        disk_read_bytes=_number((process / "io").read_text(encoding="utf-8"), "read_bytes"),
    )


def _number(text: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE)
    assert found, f"Linux tells {name} of every process"
    return int(found[1])
