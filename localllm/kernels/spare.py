"""Memory that libraries take without being asked. Where they find none they end the process, LLVM and oneDNN alike.

Sees the limits of the address space and of overcommit; what a cgroup or the machine runs out of, no request shows.
"""

from __future__ import annotations

import mmap

_SPARE_BYTES = 32 << 20  # ten times what the largest of our kernels takes while it is compiled


def require_spare_memory() -> None:
    """Raises MemoryError where there is too little for them. Takes 5 us: nothing of it is touched."""
    try:
        mmap.mmap(-1, _SPARE_BYTES).close()
    except OSError as error:
        raise MemoryError(f"{_SPARE_BYTES >> 20} MiB must be free for what is compiled while it computes") from error
