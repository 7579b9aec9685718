"""The bytes that a deletion would free, before anything is deleted."""

from __future__ import annotations

from contextlib import suppress

from localllm.errors import LocalLLMError
from localllm.runtime.model_catalog import ModelRow


class _OnlyAskedError(Exception):
    """Nothing is to be deleted yet."""


def freed_by(row: ModelRow) -> tuple[int, int]:
    """Bytes of the model's files, 0 where they are not to be deleted, and of what is packed of it. Reads the disk.

    Raises what `hub.remove` does where nothing of it can be deleted.
    """
    try:
        return _asked(row.name, packed_only=False)
    except LocalLLMError:
        if not row.packed:
            raise
        return _asked(row.name, packed_only=True)


def _asked(name: str, *, packed_only: bool) -> tuple[int, int]:
    from localllm import hub

    sizes: list[tuple[int, int]] = []

    def hear(checkpoint_bytes: int, packed_bytes: int) -> None:
        sizes.append((checkpoint_bytes, packed_bytes))
        raise _OnlyAskedError

    with suppress(_OnlyAskedError):
        hub.remove(name, packed_only=packed_only, confirm=hear)
    return sizes[0]
