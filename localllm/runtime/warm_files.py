"""Files of a model that was unloaded, kept in the system's page cache: when it comes back, its disk is not waited for.

Nobody's memory is taken for it: the system gives pages back as soon as somebody needs them.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

from localllm.hub.packed import is_whole, packed_directory

if TYPE_CHECKING:
    from localllm.hub import ModelFiles

_SPARE_BYTES = 1 << 30  # that stay free beside them


def keep_warm(files: ModelFiles, weights: str) -> int:
    """Has the system read the files by which a model in that format is loaded, where all of them have room in memory
    that is free. Returns their bytes; 0 where they have not, or nothing can be asked of this system."""
    if not hasattr(os, "posix_fadvise"):
        return 0
    packed = packed_directory(files, weights)
    folder = packed if is_whole(packed) else files.directory
    paths = [path for path in folder.glob("*.safetensors") if path.is_file()]
    with suppress(OSError):
        num_bytes = sum(path.stat().st_size for path in paths)
        if num_bytes + _SPARE_BYTES > psutil.virtual_memory().available:
            return 0
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)
        return num_bytes
    return 0
