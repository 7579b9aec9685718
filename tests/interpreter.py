"""Triton's interpreter, without a third of what it does over and over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy
import pytest
import triton.language as tl
from triton.runtime import interpreter


@contextmanager
def language_patched_once() -> Iterator[None]:
    """The interpreter makes Triton's language its own at every call of a device function, though it stays so until the
    launch ends: a fifth of the time that a launch would take."""
    patch_language: Callable[[Any], Any] = interpreter._patch_lang
    done: set[tuple[bool, bool]] = set()  # which modules of it, in this launch

    def patched(fn: Any) -> Any:
        known = fn.__globals__.values()
        modules = (any(value is tl for value in known), any(value is tl.core for value in known))
        if modules in done:
            return interpreter._LangPatchScope()
        scope = patch_language(fn)
        if not done:  # the launch itself
            restore = scope.restore

            def ended() -> None:
                done.clear()
                restore()

            scope.restore = ended
        done.add(modules)
        return scope

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patched)
        yield


@contextmanager
def types_looked_up_once() -> Iterator[None]:
    """The interpreter makes its table of types anew whenever it looks one up: a tenth of the time."""
    known = cache(interpreter._get_np_dtype)

    def found(dtype: Any) -> Any:
        scalar = dtype.scalar
        return numpy.dtype(numpy.uint64) if isinstance(scalar, tl.pointer_type) else known(scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_get_np_dtype", found)
        yield
