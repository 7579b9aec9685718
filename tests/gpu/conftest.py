"""Every kernel here runs in Triton's interpreter, on tensors of the host."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime import interpreter


@pytest.fixture(autouse=True)
def language_patched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter makes Triton's language its own at every call of a device function, though it stays so until the
    launch ends: a fifth of the time that these tests would take."""
    patch: Callable[[Any], Any] = interpreter._patch_lang
    done: set[tuple[bool, bool]] = set()  # which modules of it, in this launch

    def patched(fn: Any) -> Any:
        known = fn.__globals__.values()
        modules = (any(value is tl for value in known), any(value is tl.core for value in known))
        if modules in done:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        if not done:  # the launch itself
            restore = scope.restore

            def ended() -> None:
                done.clear()
                restore()

            scope.restore = ended
        done.add(modules)
        return scope

    monkeypatch.setattr(interpreter, "_patch_lang", patched)


@pytest.fixture(autouse=True, scope="session")
def types_looked_up_once() -> Iterator[None]:
    """The interpreter makes its table of types anew whenever it looks one up: a tenth of the time."""
    known = cache(interpreter._get_np_dtype)

    def found(dtype: Any) -> Any:
        scalar = dtype.scalar
        return numpy.dtype(numpy.uint64) if isinstance(scalar, tl.pointer_type) else known(scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_get_np_dtype", found)
        yield


@pytest.fixture
def products_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of matrices in the interpreter: numpy's rows have other bits by where they stand, a card's have not."""
    monkeypatch.setattr(numpy, "matmul", lambda a, b, dtype: numpy.stack([row @ b for row in a]).astype(dtype))


@pytest.fixture(autouse=True)
def packed_models_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is packed here is in no list of what other tests have installed."""
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path / "cache"))
